"""The package against the slow reference in `reference/`: every value, gradient, metric and advantage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import advantages as by_loops
from reference.compare import close, package_advantages, package_loss, report_worst
from reference.loss import reference_loss
from strategies import (
    BASE,
    Case,
    Rewards,
    cases,
    estimator_knobs,
    extreme_cases,
    floats,
    loss_knobs,
    reward_tables,
    seeds,
)

worst_differences = pytest.fixture(scope="module", autouse=True)(report_worst)


def compare_loss(knobs: dict[str, Any], case: Case, bound: float = 1e-12, kind: str = "") -> None:
    want = reference_loss(knobs, case.logprobs, case.batch, case.toks, case.seqs)
    loss, grad, metrics = package_loss(knobs, case)
    close(f"{kind}loss", loss, want.loss, want.loss_scale, bound)
    close(f"{kind}gradient", grad, want.grad, want.grad_scale, bound)
    assert set(metrics) - {"is_oob_ratio"} == set(want.metrics) - {"is_oob_ratio"}
    for name, value in want.metrics.items():
        close(f"{kind}metrics", metrics[name], value, want.metric_scales[name], bound, name)
    assert (grad[~case.valid] == 0).all()


@settings(BASE, max_examples=400)
@given(loss_knobs(), cases())
def test_loss_gradient_and_metrics(knobs: dict[str, Any], case: Case) -> None:
    compare_loss(knobs, case)


@settings(BASE, max_examples=50)
@given(loss_knobs(use_importance_sampling_correction=False, use_on_policy_kl_approximation=False), cases())
def test_tensors_that_are_absent(knobs: dict[str, Any], case: Case) -> None:
    """prev stands in for gen; without a KL term nobody asks for ref."""
    del case.batch["generation_logprobs"]
    if knobs["use_kl_in_reward"]:
        del case.batch["reference_policy_logprobs"]
    compare_loss(knobs, case)


@pytest.mark.slow
@settings(BASE, max_examples=10_000)
@given(loss_knobs(), cases())
def test_loss_gradient_and_metrics_at_length(knobs: dict[str, Any], case: Case) -> None:
    compare_loss(knobs, case)


@settings(BASE, max_examples=150)
@given(loss_knobs(), cases(), seeds)
def test_tokens_that_the_engine_could_not_score(knobs: dict[str, Any], case: Case, seed: int) -> None:
    """Under seq-mask-tis they are a test of their own, below."""
    assume(knobs.get("truncated_importance_sampling_type") != "seq-mask-tis")
    rng = np.random.default_rng(seed)
    gen = case.batch["generation_logprobs"]
    case.batch["generation_logprobs"] = np.where(
        rng.uniform(size=gen.shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf], size=gen.shape), gen
    )
    compare_loss(knobs, case)


@settings(BASE, max_examples=150)
@given(loss_knobs(kl_input_clamp_value=20.0, kl_output_clamp_value=10.0), extreme_cases())
def test_extreme_log_probabilities(knobs: dict[str, Any], case: Case) -> None:
    """A log-ratio of 700 has 13 digits after the point, so its exponential has 13 less 3 at most."""
    compare_loss(knobs, case, bound=1e-9, kind="extreme ")


@settings(BASE, max_examples=100)
@given(loss_knobs(), cases(rows=(1, 3), tokens=(1, 4)))
def test_gradient_by_hand_against_finite_differences(knobs: dict[str, Any], case: Case) -> None:
    """Of the loss whose stop-gradients are frozen; with the tests above this holds for the package too."""
    arguments = (case.batch, case.toks, case.seqs)
    exact = reference_loss(knobs, case.logprobs, *arguments)
    assume(exact.margin > 2e-3)
    step = 1e-5
    grad = np.zeros_like(case.logprobs)
    for i, t in zip(*np.nonzero(case.valid), strict=True):
        values = []
        for sign in (1, -1):
            moved = case.logprobs.copy()
            moved[i, t] += sign * step
            values.append(reference_loss(knobs, moved, *arguments, frozen=case.logprobs).loss)
        grad[i, t] = (values[0] - values[1]) / (2 * step)
    close("finite differences", grad, exact.grad, exact.grad_scale.max(), 1e-6)


# --------------------------------------------------------------------------------------------------------------------
# Estimators
# --------------------------------------------------------------------------------------------------------------------


def reference_advantages(knobs: dict[str, Any], rewards: Rewards, loss: dict[str, Any] | None = None) -> np.ndarray:
    names = {
        "use_leave_one_out_baseline": "leave_one_out",
        "normalize_rewards": "normalize",
        "minus_baseline": "minus_baseline",
        "advantage_clip_low": "low",
        "advantage_clip_high": "high",
    }
    arguments: dict[str, Any] = {names[key]: value for key, value in knobs.items() if key != "name"}
    if loss:
        clamps = (loss["kl_input_clamp_value"], loss["kl_output_clamp_value"])
        arguments["beta"] = loss["reference_policy_kl_penalty"]
        arguments["kl"] = [
            [by_loops.token_kl(p, q, loss["reference_policy_kl_type"], *clamps) for p, q in zip(*rows, strict=True)]
            for rows in zip(rewards.policy, rewards.reference, strict=True)
        ]
    estimator = getattr(by_loops, knobs["name"])
    return estimator(rewards.groups, rewards.table, rewards.mask, rewards.weights, **arguments)


def compare_advantages(knobs: dict[str, Any], rewards: Rewards, loss: dict[str, Any] | None = None) -> None:
    got, want = package_advantages(knobs, rewards, loss), reference_advantages(knobs, rewards, loss)
    has_value = ~np.isnan(want)
    close(f"advantages {knobs['name']}", got[has_value], want[has_value], 1.0, 1e-12)


kl_in_reward = st.fixed_dictionaries(
    {
        "use_kl_in_reward": st.just(True),
        "reference_policy_kl_penalty": floats(0.01, 1),
        "reference_policy_kl_type": st.sampled_from(["k1", "k2", "k3"]),
        "kl_input_clamp_value": st.sampled_from([None, 20.0, 0.2]),
        "kl_output_clamp_value": st.sampled_from([None, 10.0, 0.05]),
    }
)


@settings(BASE, max_examples=300)
@given(estimator_knobs(), reward_tables())
def test_advantages(knobs: dict[str, Any], rewards: Rewards) -> None:
    compare_advantages(knobs, rewards)


@settings(BASE, max_examples=100)
@given(estimator_knobs(), reward_tables(), kl_in_reward)
def test_advantages_with_the_kl_in_the_reward(knobs: dict[str, Any], rewards: Rewards, loss: dict[str, Any]) -> None:
    assume(knobs["name"] != "gdpo")
    compare_advantages(knobs, rewards, loss)


@pytest.mark.slow
@settings(BASE, max_examples=10_000)
@given(estimator_knobs(), reward_tables())
def test_advantages_at_length(knobs: dict[str, Any], rewards: Rewards) -> None:
    compare_advantages(knobs, rewards)


# --------------------------------------------------------------------------------------------------------------------
# Where the package is not yet what the design asks for; each mark goes with its fault
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "x", "y"), [(torch.float64, 0.1, 0.2), (torch.float32, 0.3, 0.4)])
def test_totals_that_are_equal_but_for_rounding_have_no_spread(dtype: torch.dtype, x: float, y: float) -> None:
    """Totals [1, x + y, x + y], the sum of two components in one row and one number in the other.

    The first row is the odd one of a leave-one-out group: undivided, as in case 1 of the recorded faults. The residue
    of the sum as a std makes it 7e5 in float64 (0.1 + 0.2 beside 0.3) and 2.8e5 in float32 (0.3 + 0.4 beside 0.7).
    """
    total = round(x + y, 1)
    table = {"a": np.array([1.0, x, total]), "b": np.array([0.0, y, 0.0])}
    rewards = Rewards([0, 0, 0], table, {"a": 1.0, "b": 1.0}, np.ones((3, 1)), np.zeros((3, 1)), np.zeros((3, 1)))
    assert package_advantages({"name": "grpo"}, rewards, dtype=dtype)[0] == pytest.approx(1 - total, rel=1e-5)


def test_seq_mask_tis_judges_a_row_with_a_token_that_the_engine_could_not_score() -> None:
    """Two tokens with a ratio of e^5 are outside [0.5, 2], whatever is unknown beside them."""
    knobs = {
        "reference_policy_kl_penalty": 0.0,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": 0.5,
    }
    prev = np.full((1, 3), -1.0)
    batch = {"prev_logprobs": prev, "generation_logprobs": np.array([[np.nan, -6.0, -6.0]])}
    batch |= {"advantages": np.ones((1, 1)), "token_mask": np.ones((1, 3)), "sample_mask": np.ones(1)}
    assert (package_loss(knobs, Case(prev, batch, 3.0, 1.0))[1] == 0).all()
