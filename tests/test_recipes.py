"""The recipes beside `gdpo_math.py`, the files of the methods, and the list of what runs where."""

from __future__ import annotations

import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import _cpu
import gdpo_gsm8k
import gdpo_math
import pytest
import tool_use
import torch
from safetensors.torch import load_file
from tiny import save_tiny_model
from tiny_env import CENTRED, GivenRollouts, logged, quiet, tool_tokenizer, trained
from trl import TrlParser

from hf_grpo_ext import GRPOExtConfig
from hf_grpo_ext.explain import explain

ROOT = Path(__file__).parent.parent

# Each method: its loss preset, its advantage estimator, and lines of `explain` with the numbers of its paper.
METHODS = {
    "grpo": ("grpo", "grpo", ["clip(rho, 0.8, 1.2)", "+ 0.04 * (e^x - 1 - x)", "num_generations 64"]),
    "dr_grpo": ("dr_grpo", "grpo", ["rows x max_completion_length", "A = r - mean over the rollouts of the group"]),
    "dapo": ("dapo", "grpo", ["clip(rho, 0.8, 1.28)", "dynamic sampling", "truncated completions are left out"]),
    "gspo": ("gspo", "grpo", ["rho = exp(mean_t(lp - prev))", "clip(rho, 0.9997, 1.0004)"]),
    "cispo": ("cispo", "grpo", ["L = -sg(clip(rho, 0, 5)) A lp", "dynamic sampling"]),
    "rloo": ("rloo", "grpo", ["L = -A lp", "A = r - mean over the other rollouts", "of 0.03 * k1(prev, ref)"]),
    "reinforce_plus_plus": ("reinforce_plus_plus", "reinforce_plus_plus", ["+ 0.01 * x^2/2"]),
    "dual_clip": ("dual_clip", "grpo", ["clip(rho, 0.8, 1.2)", "L <- min(L, -3 A) where A < 0"]),
    "gdpo": ("dapo", "gdpo", ["A = whiten(sum_k w_k A_k)", "clip(rho, 0.8, 1.28)", "+ 0.0005 *"]),
}
UPDATES_A_ROLLOUT_BATCH = {"dapo": 16, "gspo": 4, "cispo": 16, "rloo": 2, "dual_clip": 4, "gdpo": 8}

BACKENDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")

# What runs each file, so that none is left behind. `_*.py` are parts of recipes.
RUN_BY = {
    "recipes/gdpo_math.py": "tests/test_recipe.py",
    "recipes/gdpo_gsm8k.py": "tests/test_recipes.py",
    "recipes/study_gdpo_vs_grpo.py": "tests/test_study.py",
    "recipes/tool_use.py": "tests/test_recipes.py",
    **{f"recipes/methods/{name}.yaml": "tests/test_recipes.py" for name in METHODS},
    **{f"recipes/accelerate/{name}.yaml": "tests/test_backends.py" for name in BACKENDS},
    **{f"notebooks/{name}.ipynb": "make notebooks" for name in ("01_advantages", "02_loss", "03_finetune")},
}


def test_every_recipe_method_and_notebook_runs_somewhere() -> None:
    files = [file for folder in ("recipes", "notebooks") for file in (ROOT / folder).rglob("*.*") if file.is_file()]
    found = {str(file.relative_to(ROOT)) for file in files if file.suffix in (".py", ".yaml", ".ipynb")}
    assert {name for name in found if not Path(name).name.startswith("_")} == set(RUN_BY)
    for name, runner in RUN_BY.items():
        print(f"{name:45} {runner}")  # pytest -s shows the list
        if runner != "make notebooks":
            assert Path(name).stem in (ROOT / runner).read_text()
    assert "notebooks/*.ipynb" in (ROOT / "Makefile").read_text()
    assert "make notebooks" in (ROOT / ".ci" / "run").read_text()


# Methods


@pytest.mark.parametrize("name", METHODS)
def test_a_method_file_is_the_method_with_the_numbers_of_its_paper(name: str) -> None:
    file = ROOT / "recipes" / "methods" / f"{name}.yaml"
    preset, estimator, lines = METHODS[name]
    parser = TrlParser(GRPOExtConfig)
    parser.set_defaults_with_config(use_cpu=True, bf16=False)
    (args,) = parser.parse_args_and_config(["--config", str(file)])
    text = explain(args) + f"\nnum_generations {args.num_generations}"
    for line in (f"(preset {preset!r})", f"Advantage: {estimator}", *lines):
        assert line in text
    assert args.steps_per_generation // args.gradient_accumulation_steps == UPDATES_A_ROLLOUT_BATCH.get(name, 1)
    # The paper is that of the method table in the README.
    row = re.search(rf'^\| `"{name}"` .*$', (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert row is not None
    assert f"arXiv:{re.findall(r'arxiv.org/abs/([0-9.]+)', row[0])[0]}" in file.read_text()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a recipe in this process, for two steps on a tiny model, and returns its summary."""

    def run_recipe(recipe: ModuleType, *arguments: str, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
        model = save_tiny_model(tmp_path / "model", vocab_size=64)
        if tokenizer is not None:
            tokenizer.save_pretrained(model)
        small = {
            "model_name_or_path": model,
            "output_dir": tmp_path / "out",
            "max_steps": 2,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 1,
            "num_generations": 4,
            "per_device_eval_batch_size": 8,
            "num_generations_eval": 2,
            "eval_prompts": 4,
            "max_completion_length": 4,
            "dynamic_sampling_max_gen_batches": 2,
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        shown = [f"--{name}={value}" for name, value in (small | options).items()]
        monkeypatch.setattr(sys, "argv", [str(recipe.__file__), *arguments, *shown])
        monkeypatch.setattr(_cpu, "use_all_cores", lambda: None)  # the threads are those of the whole test run
        recipe.main()
        summary: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (summary["steps"], summary["eval"]["after"]["n"]) == (2, 8)
        return summary

    return run_recipe


def varied(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
    """Components that a random model earns: its answers have no tags, and without signal nothing would train."""
    return {"even": [sum(ids) % 2 for ids in completion_ids], "first": [ids[0] / 64 for ids in completion_ids]}


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_file_trains(run: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gdpo_math, "make_reward", lambda *_: varied)
    config = str(ROOT / "recipes" / "methods" / f"{name}.yaml")
    # A random model seldom ends an answer, so that all would be masked.
    small = {"steps_per_generation": min(2, UPDATES_A_ROLLOUT_BATCH.get(name, 1)), "mask_truncated_completions": False}
    summary = run(gdpo_math, "--config", config, **small)
    assert set(summary["eval"]["after"]) == {"reward/even", "reward/first", "n"}
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    assert any(not torch.equal(before[key], after[key]) for key in before)


# GSM8K


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("<think>9 x 2 = 18</think><answer>18</answer>", (1, 1, 1)),
        ("\n<think>\n9 x 2 = 18\n</think>\n<answer> 18 </answer>\n", (1, 1, 1)),
        ("<think>9 x 2 = 19</think><answer>19</answer>", (1, 0, 1)),
        ("<think>9 x 2 = 18</think><answer>$18.00</answer>", (1, 1, 0)),
        ("<think>9 x 2 = 18</think><answer>9 x 2</answer>", (1, 0, 0)),  # the sum is not the result
        ("9 x 2 = 18 <answer>18</answer>", (0, 1, 1)),
        ("<answer>18</answer>", (0, 1, 1)),
        ("<think>18</think><answer>19</answer> or <answer>18</answer>", (0, 1, 1)),  # the last counts
        ("So 9 x 2 makes 18.", (0, 1, 0)),
        ("18, that is 9 x 2", (0, 0, 0)),  # the last number counts
        ("no idea", (0, 0, 0)),
        ("", (0, 0, 0)),
        ("<think>" * 3000 + "1" * 30000, (0, 0, 0)),
    ],
)
def test_the_three_rewards_of_gsm8k(text: str, scores: tuple[int, int, int]) -> None:
    rewards = gdpo_gsm8k.gsm8k_reward([[{"role": "assistant", "content": text}]], ["18"])
    assert rewards == {name: [score] for name, score in zip(("format", "correctness", "integer"), scores, strict=True)}


def test_the_last_number_is_read_with_its_commas() -> None:
    said = [[{"role": "assistant", "content": "That makes $1,234 in all."}]]
    assert gdpo_gsm8k.gsm8k_reward(said, ["1,234"])["correctness"] == [1]


@quiet
@pytest.mark.slow
def test_gsm8k_from_a_local_file(run: Any, tmp_path: Path) -> None:
    rows = [{"question": f"{i} apples and 1 more?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(20)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = run(gdpo_gsm8k, dataset_name=tmp_path / "gsm8k.jsonl")
    assert set(summary["eval"]["after"]) == {"reward/format", "reward/correctness", "reward/integer", "n"}


# Tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        (" (4831 - 27) * 956 ", 4592624),
        ("-3 - -2", -1),
        ("1 / 3", Fraction(1, 3)),
        ("0.1 + 0.2", Fraction(3, 10)),
    ],
)
def test_the_calculator_is_exact(expression: str, value: Any) -> None:
    assert tool_use.evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("2 +", "no arithmetic expression"),
        ("two", "only numbers"),
        ("2 ** 3", "only numbers"),
        ("True + 1", "only numbers"),
        ("'1' + 1", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1" * 201, "longer than 200"),
        ("1e999", "Invalid literal"),
    ],
)
def test_the_calculator_runs_no_code(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool_use.evaluate(expression)


def played(*calls: tuple[str, str]) -> dict[str, float]:
    """The rewards of a rollout that makes these calls where 6 is right; a call that raises goes on, as in TRL."""
    rollout = tool_use.Calculator()
    rollout.reset(answer="6")
    for tool, argument in calls:
        try:
            getattr(rollout, tool)(argument)
        except ArithmeticError:
            pass
        except ValueError:
            pass
    return rollout.get_reward()


@pytest.mark.parametrize(
    ("calls", "scores"),
    [
        ([], (0, 0, 0)),
        ([("calculate", "2*3")], (0, 1, 0)),
        ([("calculate", "2*3"), ("submit", "6")], (1, 1, 1)),
        ([("submit", "6")], (1, 0, 1)),
        ([("calculate", "2*"), ("calculate", "1/0"), ("calculate", "2*3"), ("submit", "6.0")], (1, 1 / 3, 1 / 3)),
        ([("submit", "6"), ("submit", "7")], (0, 0, 0)),
        ([("submit", "six")], (0, 0, 0)),
    ],
)
def test_the_environment_counts_what_the_rollout_did(calls: Any, scores: Any) -> None:
    assert tuple(played(*calls).values()) == scores


def test_a_rollout_does_not_see_the_one_before() -> None:
    rollout = tool_use.Calculator()
    for works in (True, False, True):
        rollout.reset(answer="6")
        if works:
            rollout.calculate("2 * 3")
            rollout.submit("6")
        assert set(rollout.get_reward().values()) == {float(works)}


def test_sums_are_all_different_and_their_answers_right() -> None:
    rows = tool_use.problems(50, seed=0)
    questions = [prompt[-1]["content"] for prompt in rows["prompt"]]
    assert len(set(questions)) == 50
    for question, answer in zip(questions, rows["answer"], strict=True):
        assert eval(question.removeprefix("What is ").removesuffix("?")) == int(answer)
    assert tool_use.problems(50, seed=0).to_list() == rows.to_list()
    assert tool_use.problems(50, seed=1).to_list() != rows.to_list()


def call(tool: str, **arguments: str) -> list[str]:
    said = json.dumps({"name": tool, "arguments": arguments}, separators=(",", ":"))
    return ["<tool_call>", said, "</tool_call>", "<eos>"]


TURNS = [call("calculate", expression="2*3"), call("submit", result="6"), ["a", "<eos>"]]


class Calculates(GivenRollouts):
    """The first rollout of each group calculates and submits, the others answer at once."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        first, *later = (self.processing_class.convert_tokens_to_ids(turn) for turn in TURNS)
        if len(prompt_ids) == 8:
            self.turn = 0
            return [first if row % 4 == 0 else later[-1] for row in range(8)], None
        self.turn += 1
        return [later[self.turn - 1] for _ in prompt_ids], None


@quiet
def test_the_calculator_runs_in_the_rollouts(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer()
    tokenizer.add_tokens([said for _, said, *_ in TURNS[:2]])
    sums = tool_use.problems(4, seed=0).remove_columns("answer").add_column("answer", ["6"] * 4)
    trainer = trained(
        save_tiny_model(tmp_path / "model", vocab_size=64),
        tmp_path,
        None,
        mixin=Calculates,
        dataset=sums,
        trainer={"environment_factory": tool_use.Calculator, "processing_class": tokenizer},
        adv_estimator=CENTRED,
        max_completion_length=64,
    )
    for component in ("correctness", "valid_calls", "economy"):
        assert trainer.scored[0][f"reward/{component}"].tolist() == [1, 0, 0, 0] * 2
        assert logged(trainer, f"rewards/{component}/mean") == [0.25]
    assert logged(trainer, "tools/failure_frequency") == [0]


@quiet
@pytest.mark.slow
def test_tool_use_runs(run: Any) -> None:
    summary = run(tool_use, tokenizer=tool_tokenizer(), train_prompts=8)
    assert set(summary["eval"]["after"]) == {"reward/correctness", "reward/valid_calls", "reward/economy", "n"}
