"""The asynchronous trainer in two processes: the weights of one, and one end when the worker fails."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_backends import largest_difference, run_worker
from tiny import save_tiny_model
from tiny_async import moved_policy

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "async_train.py"
BACKENDS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDP"),
    "zero2": ("DEEPSPEED", "DeepSpeedEngine"),
}

# Three groups of four a micro-batch, so that one process has two of them.
SIX = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
GDPO = {"adv_estimator": "gdpo", "learning_rate": 0.002, **SIX}
KL = {"reference_policy_kl_penalty": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "gdpo, full, KL": {**GDPO, "loss_fn": {"name": "dapo", **KL}},
    "gdpo, LoRA, KL": {**GDPO, "loss_fn": {"name": "dapo", **KL}, "lora": {}, "learning_rate": 0.01},
    "LoRA and the whole head": {**GDPO, "lora": {"modules_to_save": ["lm_head"]}, "loss_fn": {"name": "dapo", **KL}},
    "reinforce_plus_plus, full": {**GDPO, "adv_estimator": "reinforce_plus_plus", "loss_fn": "reinforce_plus_plus"},
    "grpo, GSPO, clip of samples": {
        **GDPO,
        "adv_estimator": "grpo",
        "loss_fn": {
            "name": "gspo",
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio_min": 0.1,
            "truncated_importance_sampling_ratio": 1.5,
        },
    },
}
OTHER_CASES: dict[str, dict[str, Any]] = {
    "bf16, full": {**CASES["gdpo, full, KL"], "bf16": True},
    # The first forward is the reference's, which has the adapter off.
    "bf16, LoRA": {**CASES["gdpo, LoRA, KL"], "bf16": True},
    # Enough for two steps.
    "the worker fails": {**GDPO, "loss_fn": "dapo", "groups": 12, "save_strategy": "steps", "save_steps": 100},
    "the worker fails at once": {**GDPO, "loss_fn": "dapo", "groups": 0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The policy, and one from which it has moved away, that samples."""
    folder = tmp_path_factory.mktemp("models")
    policy = save_tiny_model(folder / "policy")
    moved_policy(policy, 0.95).save_pretrained(folder / "stale")
    return policy, str(folder / "stale")


def launch(folder: Path, models: tuple[str, str], backend: str | None, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process saw."""
    run_worker(folder, backend, WORKER, *models, str(folder / "out"), json.dumps(cases))
    return [torch.load(folder / f"out.rank{rank}", weights_only=False) for rank in range(1 if backend is None else 2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, models: tuple[str, str]) -> dict[str, Any]:
    """Every case in one process, with the samples of both."""
    cases = {name: fields | {"per_device_train_batch_size": 12} for name, fields in CASES.items()}
    return launch(tmp_path_factory.mktemp("one"), models, None, cases)[0]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "zero2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'hf_grpo_ext[distributed]'")
    return name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, models: tuple[str, str], backend: str) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("two"), models, backend, CASES | OTHER_CASES)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_the_weights_of_one(
    models: tuple[str, str], one: dict[str, Any], two: list[dict[str, Any]], case: str
) -> None:
    want = one[case]
    assert want["moved"] > 1e-3
    for got in two:
        assert got[case]["steps"] == want["steps"] == 3
        assert largest_difference(want["weights"], got[case]["weights"]) <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_the_backend_is_the_one_that_was_asked_for(two: list[dict[str, Any]], backend: str, case: str) -> None:
    for got in (result[case] for result in two):
        assert got["processes"] == 2
        distributed_type, wrapper = BACKENDS[backend]
        assert got["distributed_type"] == distributed_type
        assert got["wrapper"].startswith(wrapper)
        assert got["share_held"] == pytest.approx(0.5 if backend == "fsdp2" else 1.0, abs=0.02)


@pytest.mark.parametrize("case", CASES)
def test_the_samples_were_split(one: dict[str, Any], two: list[dict[str, Any]], case: str) -> None:
    """Each micro-batch has the samples of one process, of several lengths, unequally many on the two."""
    micro_batches = zip(one[case]["tokens"], two[0][case]["tokens"], two[1][case]["tokens"], strict=True)
    for whole, first, second in micro_batches:
        assert sorted(first + second) == sorted(whole)
        assert sorted(map(len, (first, second))) == [4, 8]
        assert len(set(first)) > 1


@pytest.mark.parametrize("case", CASES)
def test_the_log_is_that_of_one_process(one: dict[str, Any], two: list[dict[str, Any]], case: str) -> None:
    compared = ("reward", "rewards/fine", "num_valid_samples", "sampling_importance_ratio", "token_mult_prob_error")
    compared += ("entropy", "kl") if "kl" in one[case]["log"][0] else ("entropy",)
    for want, got in zip(one[case]["log"][:3], two[0][case]["log"][:3], strict=True):
        for name in compared:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def test_log_probabilities_are_not_rounded(two: list[dict[str, Any]]) -> None:
    for case in (*CASES, "bf16, full", "bf16, LoRA"):
        for got in (result[case] for result in two):
            assert (got["types"], got["steps"], got["failure"]) == ({"torch.float32"}, 3, None)


def test_a_worker_that_fails_ends_both_processes(two: list[dict[str, Any]], models: tuple[str, str]) -> None:
    first, second = (result["the worker fails"] for result in two)
    assert first["failure"] == second["failure"]
    assert first["failure"].startswith("The rollout worker has failed, and training ends. Step 2 is saved in ")
    assert first["failure"].endswith("checkpoint-2. There are no more rollouts.")
    assert first["steps"] == second["steps"] == 2
    saved = load_file(Path(re.findall(r"saved in (\S+)\.", first["failure"])[0]) / "model.safetensors")
    assert largest_difference(saved, first["weights"]) == 0


def test_a_worker_that_fails_at_once_ends_both_processes(two: list[dict[str, Any]]) -> None:
    for result in two:
        got = result["the worker fails at once"]
        assert got["failure"] == "The rollout worker has failed, and training ends. There are no more rollouts."
        assert got["steps"] == 0
