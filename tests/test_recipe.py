"""`recipes/gdpo_math.py` end to end on a tiny model: what it writes, and that plain libraries load it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gdpo_math
import pytest
import torch
from page import Page
from tiny import save_tiny_model
from tiny_env import quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_grpo_ext import GRPOExtConfig

RECIPE = Path(__file__).parent.parent / "recipes" / "gdpo_math.py"
COMPONENTS = {"reward/correctness", "reward/format", "reward/length"}
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "per_device_eval_batch_size": 8,
    "num_generations_eval": 2,
    "eval_prompts": 4,
    "max_completion_length": 4,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
}


def run(folder: Path, *more: str, **options: object) -> dict:
    arguments = [f"--{name}={value}" for name, value in ({**SMALL, "output_dir": folder} | options).items()]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    done = subprocess.run(
        [sys.executable, *launch, str(RECIPE), *arguments, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Held-out prompts" in done.stdout
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_full_fine_tuning(tmp_path: Path) -> None:
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "out"
    # A random model earns no reward, and without signal the weights rightly stay: the entropy bonus moves them.
    summary = run(out, model_name_or_path=model, seed=3, entropy_coef=0.1)
    assert summary["model"] == model
    assert (summary["steps"], summary["seed"]) == (2, 3)
    assert summary["seconds"] > 0
    for when in ("before", "after"):
        assert set(summary["eval"][when]) == COMPONENTS | {"n"}
        assert summary["eval"][when]["n"] == 8
        assert all(0 <= summary["eval"][when][name] <= 1 for name in COMPONENTS)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    trained = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert Page(out / "report.html").tables[0][1][0] in COMPONENTS
    assert "### Objective" in (out / "README.md").read_text()


@pytest.mark.slow
def test_an_adapter_on_a_local_data_set_from_a_yaml_file(tmp_path: Path) -> None:
    from peft import PeftModel

    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "out"
    rows = [{"Question": f"what is {i} + 1", "Answer": f"so #### {i + 1}"} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\n"
        f"dataset_name: {tmp_path}/data.jsonl\n"
        "use_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\nbeta: 0.05\n"
        "adv_estimator: {name: gdpo, normalize_rewards: false}\nloss_fn: {ratio_clip_max: 0.28}\n"
        "reward_weights: {correctness: 2.0}\n"
    )
    run(out, "--config", str(tmp_path / "run.yaml"))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out)
    assert adapted.peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adv_estimtor", "grpo"], r"There is no option --adv_estimtor\. Did you mean --adv_estimator\?"),
        (["--max_step", "2"], r"There is no option --max_step\. Did you mean --max_steps\?"),  # no abbreviation
        (["gdpo"], r"There is no option gdpo\.$"),
    ],
)
def test_an_option_that_is_not_there_is_refused_with_the_nearest(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gdpo_math.parse_arguments(gdpo_math.ScriptArguments, gdpo_math.DEFAULTS, words)


@quiet
def test_how_many_problems_are_held_out() -> None:
    args = GRPOExtConfig(use_cpu=True, bf16=False, per_device_eval_batch_size=56, num_generations_eval=4)
    assert [gdpo_math.whole_eval_batches(prompts, args) for prompts in (1, 14, 15)] == [14, 14, 28]
    with pytest.raises(ValueError, match="--eval_prompts got 0, but the table before and after needs at least 1"):
        gdpo_math.whole_eval_batches(0, args)
    with pytest.raises(ValueError, match=r"Cannot hold out 14 of 8 problems\. --eval_prompts is rounded up to whole"):
        gdpo_math.hold_out(gdpo_math.arithmetic_problems(1)[:8], 14, seed=0)


def test_the_held_out_problems_share_no_pair_with_the_others_and_depend_on_the_seed() -> None:
    problems = gdpo_math.arithmetic_problems(9)
    splits = [gdpo_math.hold_out(problems, 56, seed) for seed in (1, 2)]
    for train, held_out in splits:
        assert len(held_out) == 56
        pairs = [{tuple(sorted(re.findall(r"\d+", p["question"]))) for p in part} for part in (train, held_out)]
        assert not pairs[0] & pairs[1]
    assert splits[0][1] != splits[1][1]
    assert gdpo_math.hold_out(problems, 56, 1) == splits[0]


def test_a_correlation_is_no_component() -> None:
    logs = {"rewards/mean/mean": 0.5, "rewards/mean/std": 0.1, "rewards/correlation/a/mean": 0.25}
    assert gdpo_math.component_means(logs, "rewards/") == {"mean": 0.5}


@pytest.mark.parametrize(
    ("given", "resumed"),
    [("True", True), ("true", True), ("False", None), ("out/checkpoint-6", "out/checkpoint-6"), (None, None)],
)
def test_resume_from_the_latest_checkpoint_by_a_flag(given: str | None, resumed: object) -> None:
    class Resumed(Exception):
        pass

    class Trainer:
        args = SimpleNamespace(resume_from_checkpoint=given)

        def train(self, resume_from_checkpoint: object) -> None:
            raise Resumed(resume_from_checkpoint)

    with pytest.raises(Resumed) as seen:
        gdpo_math.train_and_report(Trainer(), "tiny", 0.0)
    assert seen.value.args == (resumed,)
