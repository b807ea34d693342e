"""The recorded results of NeMo-RL (commit 7ea279ab, float64), case by case. See tests/golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, ClippedPGLossFn, get_advantage_estimator

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = {"rtol": 2e-6, "atol": 1e-9}  # the recorded means add 1e-8 to their denominators
KL_KNOBS = ("use_kl_in_reward", "reference_policy_kl_penalty", "reference_policy_kl_type")


def cases(file: str) -> list[Any]:
    recorded = json.loads((GOLDEN / file).read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in recorded]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", cases("loss_cases.json"))
def test_loss_case(case: dict[str, Any]) -> None:
    counts = {key: case["inputs"][key] for key in ("global_valid_toks", "global_valid_seqs")}
    inputs = {key: tensor(value) for key, value in case["inputs"].items() if key not in counts}
    logprobs = inputs.pop("logprobs").requires_grad_()
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**case["config"]))(logprobs, inputs, **counts)
    loss.backward()
    expected = case["expected"]
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **TOLERANCE)
    torch.testing.assert_close(logprobs.grad, tensor(expected["grad"]), **TOLERANCE)
    for name, value in expected["metrics"].items():
        torch.testing.assert_close(metrics[name], tensor(value), **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("case", cases("estimator_cases.json"))
def test_estimator_case(case: dict[str, Any]) -> None:
    estimator = get_advantage_estimator(
        AdvEstimatorConfig(name=case["estimator"], **case["config"]),
        ClippedPGLossConfig(**{knob: case[knob] for knob in KL_KNOBS if knob in case}),
    )
    components = case.get("reward_components") or {"reward": case["rewards"]}
    advantages = estimator.compute_advantage(
        torch.tensor(case["prompt_ids"]),
        {name: tensor(values) for name, values in components.items()},
        tensor(case["mask"]),
        reward_weights=case.get("reward_weights"),
        **{key: tensor(case[key]) for key in ("logprobs_policy", "logprobs_reference") if key in case},
    )
    torch.testing.assert_close(advantages, tensor(case["expected"]), **TOLERANCE)


def test_all_cases_are_here() -> None:
    assert len(cases("loss_cases.json")) == 80
    assert len(cases("estimator_cases.json")) == 48
