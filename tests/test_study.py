"""`recipes/study_gdpo_vs_grpo.py`: what it compares, how it counts, and the results that the site shows."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import _cpu
import _tiny_model
import pytest
import study_gdpo_vs_grpo as study
import torch
from gdpo_math import arithmetic_problems, make_trainer
from tiny_env import quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_grpo_ext import AdvEstimatorConfig

ROOT = Path(__file__).parent.parent
RECORDED = json.loads((ROOT / "benchmarks" / "study_gdpo_vs_grpo.json").read_text())


def one_run(method: str, unit: str, seed: int, correctness: list[float], **components: list[float]) -> dict[str, Any]:
    kept = {"format": [0.5, 1.0], "length": [0.25, 0.75]} | components
    return {"method": method, "length_unit": unit, "seed": seed, "steps": [0, 10], "correctness": correctness} | kept


# What it compares


def test_only_the_length_reward_changes_with_its_unit_and_a_wrong_answer_earns_it() -> None:
    said = ["<answer>13</answer>", "....<answer>9</answer>", "13"]
    given = {
        "completions": [[{"role": "assistant", "content": text}] for text in said],
        "completion_ids": [[0] * tokens for tokens in (5, 15, 24)],
        "answer": ["13"] * 3,
    }
    for unit in (1, 18):
        scores = study.make_study_reward(length_budget=6, max_length=24, unit=unit)(**given)
        assert scores["correctness"] == [1, 0, 0]
        assert scores["format"] == [1, 1, 0]
        assert scores["length"] == pytest.approx([unit, 0.5 * unit, 0])


def test_the_careless_answers_are_as_they_are_described() -> None:
    rng = random.Random(0)
    answers = [_tiny_model.answer_to({"answer": "13"}, careless=True, rng=rng) for _ in range(4000)]
    thought = [text for text in answers if text.startswith(".")]
    at_once = [text for text in answers if not text.startswith(".")]
    right = [sum("<answer>13</answer>" in text for text in texts) / len(texts) for texts in (thought, at_once)]
    assert len(thought) / 4000 == pytest.approx(0.5, abs=0.03)
    assert right == pytest.approx([0.8, 0.1], abs=0.03)
    assert sum(text.endswith(".<eos>") for text in answers) / 4000 == pytest.approx(1 / 3, abs=0.03)


def test_the_tiny_model_learns_to_answer_in_tags(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        folder = _tiny_model.make_tiny_model(tmp_path, arithmetic_problems(2), steps=60, batch_size=16)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Answer."}, {"role": "user", "content": "2 - 1"}], return_tensors="pt"
    )["input_ids"]
    assert tokenizer.decode(ids[0]) == "2-1"
    said = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
    assert "<answer>" in tokenizer.decode(said)
    assert tokenizer.decode(tokenizer("-12<answer>", add_special_tokens=False)["input_ids"]) == "-12<answer>"


def test_the_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        _tiny_model.make_tiny_model(folder, arithmetic_problems(2), steps=3, batch_size=4)
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()


def test_the_methods_are_those_of_the_papers() -> None:
    assert {name: method["name"] for name, method in study.METHODS.items()} == {name: name for name in study.METHODS}
    assert not any(study.METHODS[name]["use_leave_one_out_baseline"] for name in ("grpo", "gdpo"))


def test_what_is_named_twice_counts_once() -> None:
    given = study.StudyArguments(seeds=[1, 1, 2], methods=["gdpo", "gdpo"], length_units=["share", "share"])
    assert (given.seeds, given.methods, given.length_units) == ([1, 2], ["gdpo"], ["share"])


# How it counts


def test_the_table_has_means_intervals_and_differences_at_equal_seeds() -> None:
    """By hand: 0.5, 0.7, 0.9 have mean 0.7, standard error 0.2 / sqrt(3), and t(0.975, 2) = 4.3027: 0.497.

    The differences 0.2, 0.3, 0.4 have mean 0.3 and 0.248 around it; without the pairs of seeds it would be wider.
    """
    finals = {"grpo": [0.3, 0.4, 0.5], "gdpo": [0.5, 0.7, 0.9]}
    runs = [
        one_run(method, "tokens", seed, [0.1, final])
        for method, ends in finals.items()
        for seed, final in enumerate(ends, start=1)
    ]
    lines = study.table({"runs": runs, "seeds": [1, 2, 3], "methods": list(finals), "length_units": ["tokens"]})
    assert lines.splitlines()[2:] == [
        "| tokens | before | 0.100 | 0.500 | 0.250 | |",
        "| tokens | `grpo` | 0.400 ± 0.248 | 1.000 ± 0.000 | 0.750 ± 0.000 | 0.250 ± 0.124 |",
        "| tokens | `gdpo` | 0.700 ± 0.497 | 1.000 ± 0.000 | 0.750 ± 0.000 | 0.400 ± 0.248 |",
        "| tokens | `gdpo` minus `grpo` | **+0.300 ± 0.248** | +0.000 ± 0.000 | +0.000 ± 0.000 | **+0.150 ± 0.124** |",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "grpo", "ppo"], r"--methods got \['grpo', 'ppo'\], but takes some of \['grpo', 'gdpo', 'rein"),
        (["--length_units", "words"], r"--length_units got \['words'\], but takes some of \['share', 'tokens'\]"),
        (["--seeds", "7", "7"], r"--seeds got \[7\], but a confidence interval needs two different seeds"),
        (["--seed", "3"], "The study sets the seed and the estimator: use --seeds and --methods"),
        (["--adv_estimator", "gdpo"], "The study sets the seed and the estimator: use --seeds and --methods"),
        (["--resume_from_checkpoint", "True"], "goes on by itself after the last run that has finished"),
        (["--length_budget", "24"], "--length_budget 24 must be below --max_completion_length 24"),
        (["--dataset_name", "mine.jsonl"], "--dataset_name needs --model_name_or_path"),
    ],
)
@quiet
def test_what_cannot_be_compared_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", "--output_dir", str(tmp_path), "--use_cpu", *options])
    monkeypatch.setattr(_cpu, "use_all_cores", lambda: None)
    with pytest.raises(ValueError, match=message):
        study.main()


@quiet
@pytest.mark.slow
def test_a_study_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = _tiny_model.make_tiny_model

    def hardly_trained(folder: Path, problems: list[dict[str, Any]]) -> str:
        return made(folder, problems, steps=40, batch_size=16)

    def start(*options: str) -> dict[str, Any]:
        small = "--max_steps=2 --eval_steps=1 --per_device_train_batch_size=16 --eval_prompts=4 --use_cpu --bf16=False"
        small += " --per_device_eval_batch_size=16 --num_generations_eval=4"
        monkeypatch.setattr(sys, "argv", ["study", "--output_dir", str(tmp_path), *small.split(), *options])
        study.main()
        result: dict[str, Any] = json.loads((tmp_path / "study.json").read_text())
        return result

    trainers = []

    def kept_trainer(*parts: Any) -> Any:
        trainers.append(make_trainer(*parts))
        return trainers[-1]

    monkeypatch.setattr(study, "make_trainer", kept_trainer)
    monkeypatch.setattr(study, "make_tiny_model", hardly_trained)
    monkeypatch.setattr(_cpu, "use_all_cores", lambda: None)
    first = start("--seeds", "1", "2", "--length_units", "tokens", "--methods", "gdpo")
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    second = start("--seeds", "1", "2", "--length_units", "tokens", "--methods", "gdpo", "reinforce_plus_plus")
    assert set(kept) == {"tokens-gdpo-1.json", "tokens-gdpo-2.json"}
    assert all((tmp_path / "runs" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert [run for run in second["runs"] if run["method"] == "gdpo"] == first["runs"]
    assert {(run["method"], run["seed"]) for run in second["runs"]} == {
        (method, seed) for method in ("gdpo", "reinforce_plus_plus") for seed in (1, 2)
    }
    assert [trainer.state.global_step for trainer in trainers] == [2] * 4
    trained_with = [(trainer.args.seed, trainer.args.adv_estimator) for trainer in trainers]
    gdpo = AdvEstimatorConfig(name="gdpo", use_leave_one_out_baseline=False)
    plus_plus = AdvEstimatorConfig(name="reinforce_plus_plus")
    assert trained_with == [(1, gdpo), (2, gdpo), (1, plus_plus), (2, plus_plus)]
    held_out = [trainer.eval_dataset["prompt"][:] for trainer in trainers]
    assert held_out[0] == held_out[2] != held_out[1] == held_out[3]  # the data of a seed are those of every method
    for run in second["runs"]:
        assert run["steps"] == [0, 1, 2]
        assert all(0 <= value <= 1 for name in study.COMPONENTS for value in run[name])
    # Before any training the methods have the same answers: one model, one seed.
    assert len({run["format"][0] for run in second["runs"] if run["seed"] == 1}) == 1
    assert "learning_rate" in second["settings"]
    assert (tmp_path / "study.md").read_text() == study.table(second)
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"was made with other settings \(max_operand\): use another --output_dir"):
        start("--seeds", "1", "2", "--length_units", "tokens", "--methods", "gdpo", "--max_operand", "3")


# The results that the site shows


def test_the_site_shows_the_table_of_the_recorded_runs() -> None:
    page = (ROOT / "docs" / "estimators.md").read_text()
    assert study.table(RECORDED) in page
    assert RECORDED["command"] in page
    assert "(study.png)" in page
    assert len(RECORDED["seeds"]) >= 5
    runs = {(run["method"], run["length_unit"], run["seed"]) for run in RECORDED["runs"]}
    assert len(runs) == len(RECORDED["methods"]) * len(RECORDED["length_units"]) * len(RECORDED["seeds"])
    assert set(RECORDED["methods"]) == set(study.METHODS)


def test_the_recorded_runs_have_the_settings_of_the_recipe() -> None:
    for name in ("learning_rate", "max_steps", "per_device_train_batch_size", "max_completion_length"):
        assert RECORDED["settings"][name] == str(study.DEFAULTS[name]), name
