"""Laws that hold for every legal configuration, one property each. The simple version of some is in `test_loss.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
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

from hf_grpo_ext.loss import METRIC_REDUCTIONS

worst_differences = pytest.fixture(scope="module", autouse=True)(report_worst)
law = settings(BASE, max_examples=50)
REDUCE = {"sum": sum, "min": min, "max": max}


def take(case: Case, rows: Any, tokens: Any = slice(None)) -> Case:
    """Some rows, and of them some positions, with the counts of the whole."""

    def cut(x: np.ndarray) -> np.ndarray:
        x = x[rows]
        return x[:, tokens] if x.ndim == 2 and x.shape[1] == case.logprobs.shape[1] else x

    return Case(cut(case.logprobs), {key: cut(x) for key, x in case.batch.items()}, case.toks, case.seqs)


def change(case: Case, **batch: np.ndarray | None) -> Case:
    """The case with other tensors; None takes one out."""
    batch = {**case.batch, **batch}
    return dataclasses.replace(case, batch={key: x for key, x in batch.items() if x is not None})


def assert_same(law_: str, one: tuple, two: tuple, scale: float = 0.0, bound: float = 1e-11) -> None:
    """Loss and gradient of two calls, relative to the largest gradient."""
    scale = max(scale, abs(one[0]), np.abs(one[1]).max(initial=0.0), 1e-300)
    close(law_, [one[0], *one[1].ravel()], [two[0], *two[1].ravel()], scale, bound)


# --------------------------------------------------------------------------------------------------------------------
# Masks, order, parts
# --------------------------------------------------------------------------------------------------------------------


@law
@given(loss_knobs(), cases())
def test_masked_equals_removed(knobs: dict[str, Any], case: Case) -> None:
    """Each row with nothing but its counted positions: their losses add up, their gradients are the same."""
    loss, grad, _ = package_loss(knobs, case)
    total = 0.0
    for i in np.flatnonzero(case.valid.any(1)):
        alone, alone_grad, _ = package_loss(knobs, take(case, [i], case.valid[i]))
        total += alone
        assert_same("masked", (0.0, grad[i : i + 1, case.valid[i]]), (0.0, alone_grad))
    close("masked", loss, total, np.abs(grad).max(initial=abs(loss)), 1e-11)
    assert (grad[~case.valid] == 0).all()


@law
@given(loss_knobs(), cases(), seeds)
def test_the_order_of_rows_does_not_matter(knobs: dict[str, Any], case: Case, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(case.logprobs))
    loss, grad, metrics = package_loss(knobs, case)
    other, other_grad, other_metrics = package_loss(knobs, take(case, order))
    assert_same("order of rows", (loss, grad[order]), (other, other_grad))
    for name, value in metrics.items():
        close("order of rows, metrics", other_metrics[name], value, 1.0, 1e-12, name)


@law
@given(loss_knobs(), cases(), seeds)
def test_any_split_into_micro_batches_adds_up(knobs: dict[str, Any], case: Case, seed: int) -> None:
    """Loss and gradient, and every metric with its declared reduction."""
    part_of = np.random.default_rng(seed).integers(0, 3, len(case.logprobs))
    loss, grad, metrics = package_loss(knobs, case)
    parts = {p: package_loss(knobs, take(case, part_of == p)) for p in set(part_of.tolist())}
    joined = np.zeros_like(grad)
    for p, (_, part_grad, _) in parts.items():
        joined[part_of == p] = part_grad
    assert_same("micro-batches", (loss, grad), (sum(part[0] for part in parts.values()), joined))
    for name, value in metrics.items():
        together = REDUCE[METRIC_REDUCTIONS[name]]([part[2][name] for part in parts.values()])
        close("micro-batches, metrics", together, value, 1.0, 1e-12, name)


# --------------------------------------------------------------------------------------------------------------------
# A special case equals the general one
# --------------------------------------------------------------------------------------------------------------------


@law
@given(loss_knobs("ppo"), cases())
def test_dual_clip_far_away_is_none(knobs: dict[str, Any], case: Case) -> None:
    for c in (1e30, math.inf):
        assert package_loss(knobs | {"ratio_clip_c": c}, case)[0] == package_loss(knobs, case)[0]
        assert (package_loss(knobs | {"ratio_clip_c": c}, case)[1] == package_loss(knobs, case)[1]).all()


@law
@given(loss_knobs("cispo", ratio_clip_min=1.0, ratio_clip_max=1e6), cases())
def test_cispo_inside_the_range_has_the_gradient_of_the_unclipped_ratio(knobs: dict[str, Any], case: Case) -> None:
    _, cispo, _ = package_loss(knobs, case)
    _, ppo, _ = package_loss(knobs | {"use_cispo": False}, case)
    assert_same("CISPO in range", (0.0, cispo), (0.0, ppo))


@law
@given(loss_knobs("gspo"), cases(tokens=(1, 1)))
def test_gspo_of_single_tokens_is_the_sequence_level_loss(knobs: dict[str, Any], case: Case) -> None:
    one = package_loss(knobs, case)
    two = package_loss(knobs | {"sequence_level_importance_ratios": False}, case)
    assert_same("GSPO, T = 1", one[:2], two[:2])


@law
@given(loss_knobs("reinforce"), cases(), st.sampled_from(["ppo", "dual_clip", "on_policy", "cispo"]))
def test_on_policy_every_gradient_is_that_of_reinforce(knobs: dict[str, Any], case: Case, method: str) -> None:
    case = change(case, prev_logprobs=case.logprobs.copy())
    other = {
        "ppo": {},
        "dual_clip": {"ratio_clip_c": 1.5},
        "on_policy": {"force_on_policy_ratio": True},
        "cispo": {"use_cispo": True, "token_level_loss": True},
    }[method]
    knobs = knobs | {"token_level_loss": True} if method == "cispo" else knobs
    reinforce = package_loss(knobs, case)[1]
    assert_same(
        "on-policy", (0.0, package_loss(knobs | {"disable_ppo_ratio": False} | other, case)[1]), (0.0, reinforce)
    )


@law
@given(loss_knobs("on_policy"), cases())
def test_a_forced_ratio_is_that_of_absent_prev(knobs: dict[str, Any], case: Case) -> None:
    one = package_loss(knobs, case)
    two = package_loss(knobs | {"force_on_policy_ratio": False}, change(case, prev_logprobs=None))
    assert_same("forced ratio", one[:2], two[:2])


@law
@given(
    loss_knobs("reinforce", reference_policy_kl_penalty=0.0, use_importance_sampling_correction=False),
    cases(),
    floats(-3, 3),
)
def test_reinforce_with_one_advantage_is_a_likelihood(knobs: dict[str, Any], case: Case, advantage: float) -> None:
    """-A log-likelihood, a mean over tokens or over sequences."""
    case = change(case, advantages=np.full_like(case.logprobs, advantage), policy_weights=None)
    lp, counts = np.where(case.valid, case.logprobs, 0.0), case.valid.sum(1)
    if knobs["token_level_loss"]:
        want = -advantage * lp.sum() / max(case.toks, 1)
    else:
        want = -advantage * (lp.sum(1) / np.maximum(counts, 1)).sum() / max(case.seqs, 1)
    close("REINFORCE", package_loss(knobs, case)[0], want, 1.0, 1e-12)


@law
@given(loss_knobs(use_importance_sampling_correction=True), cases(), st.sampled_from(["tis", "icepop", "seq-mask-tis"]))
def test_truncation_without_bounds_is_the_plain_correction(knobs: dict[str, Any], case: Case, kind: str) -> None:
    plain = {key: value for key, value in knobs.items() if not key.startswith("truncated")}
    wide = {"ratio": math.inf, "ratio_min": 0.0, "type": kind}
    wide = {f"truncated_importance_sampling_{key}": value for key, value in wide.items()}
    assert_same("wide truncation", package_loss(plain | wide, case)[:2], package_loss(plain, case)[:2])


@law
@given(loss_knobs(use_importance_sampling_correction=True), cases())
def test_an_engine_that_agrees_needs_no_correction(knobs: dict[str, Any], case: Case) -> None:
    low = knobs.get("truncated_importance_sampling_ratio_min") or 0.0
    assume(low <= 1 <= knobs.get("truncated_importance_sampling_ratio", 1))
    prev = None if knobs.get("force_on_policy_ratio") else case.batch.get("prev_logprobs")
    case = change(case, generation_logprobs=(case.logprobs if prev is None else prev).copy())
    plain = {key: value for key, value in knobs.items() if not key.startswith("truncated")}
    plain["use_importance_sampling_correction"] = False
    assert_same("engine agrees", package_loss(knobs, case)[:2], package_loss(plain, case)[:2])


@law
@given(loss_knobs(use_kl_in_reward=False), cases())
def test_the_kl_term_is_beta_times_its_metric(knobs: dict[str, Any], case: Case) -> None:
    without = package_loss(knobs | {"reference_policy_kl_penalty": 0.0}, change(case, reference_policy_logprobs=None))
    in_reward = package_loss(knobs | {"use_kl_in_reward": True}, change(case, reference_policy_logprobs=None))
    assert without[0] == in_reward[0]
    loss, _, metrics = package_loss(knobs, case)
    kl = knobs["reference_policy_kl_penalty"] * metrics["kl_penalty"]
    close("beta KL", loss, without[0] + kl, abs(without[0]) + abs(kl), 1e-12)


@law
@given(loss_knobs(reference_policy_kl_penalty=0.0), cases(), floats(0.1, 10))
def test_the_policy_term_scales_with_its_advantages_and_weights(
    knobs: dict[str, Any], case: Case, factor: float
) -> None:
    loss, grad, _ = package_loss(knobs, case)
    larger = change(case, advantages=factor * case.batch["advantages"])
    assert_same("advantages scaled", package_loss(knobs, larger)[:2], (factor * loss, factor * grad))
    weights = case.batch.get("policy_weights", np.ones((len(case.logprobs), 1)))
    heavier = change(case, policy_weights=factor * weights)
    assert_same("weights scaled", package_loss(knobs, heavier)[:2], (factor * loss, factor * grad))


# --------------------------------------------------------------------------------------------------------------------
# Precision and extremes
# --------------------------------------------------------------------------------------------------------------------


@law
@given(loss_knobs(), cases(), st.sampled_from([(torch.float32, 2e-5), (torch.bfloat16, 1e-2)]))
def test_lower_precision_stays_near_float64(
    knobs: dict[str, Any], case: Case, precision: tuple[torch.dtype, float]
) -> None:
    """Of the same numbers; the loss of half precision is computed in float32, only its gradient is rounded."""
    dtype, bound = precision
    assume(knobs.get("truncated_importance_sampling_type") in (None, "tis"))  # the others jump at their bounds

    def rounded(x: np.ndarray) -> np.ndarray:
        return torch.tensor(x).to(dtype).double().numpy()

    coarse = Case(rounded(case.logprobs), {k: rounded(x) for k, x in case.batch.items()}, case.toks, case.seqs)
    exact = reference_loss(knobs, coarse.logprobs, coarse.batch, coarse.toks, coarse.seqs)
    assume(exact.margin > 1e-4)
    loss, grad, _ = package_loss(knobs, coarse, dtype)
    close(f"{dtype} loss", loss, exact.loss, exact.loss_scale, 2e-5)
    close(f"{dtype} gradient", grad, exact.grad, exact.grad_scale, bound)


@law
@given(
    loss_knobs(kl_input_clamp_value=20.0, kl_output_clamp_value=10.0),
    extreme_cases(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_extremes_are_finite(knobs: dict[str, Any], case: Case, dtype: torch.dtype) -> None:
    loss, grad, _ = package_loss(knobs, case, dtype)
    assert math.isfinite(loss)
    assert np.isfinite(grad).all()


@law
@given(loss_knobs(), cases(masks=("nothing",)))
def test_nothing_valid_is_zero(knobs: dict[str, Any], case: Case) -> None:
    for counts in ((0.0, 0.0), (case.toks, case.seqs)):
        loss, grad, metrics = package_loss(knobs, dataclasses.replace(case, toks=counts[0], seqs=counts[1]))
        assert loss == 0
        assert (grad == 0).all()
        assert not any(math.isnan(value) for value in metrics.values())


# --------------------------------------------------------------------------------------------------------------------
# Estimators
# --------------------------------------------------------------------------------------------------------------------


def pick(rewards: Rewards, rows: Any) -> Rewards:
    return dataclasses.replace(
        rewards,
        groups=[rewards.groups[i] for i in rows],
        table={name: column[rows] for name, column in rewards.table.items()},
        mask=rewards.mask[rows],
        policy=rewards.policy[rows],
        reference=rewards.reference[rows],
    )


@law
@given(estimator_knobs(), reward_tables())
def test_rows_that_do_not_count_equal_removed_rows(knobs: dict[str, Any], rewards: Rewards) -> None:
    absent = np.isnan(np.stack(list(rewards.table.values()))).all(0) | (rewards.mask == 0).all(1)
    kept = np.flatnonzero(~absent)
    assume(len(kept) > 0)
    with_them, without = package_advantages(knobs, rewards), package_advantages(knobs, pick(rewards, kept))
    inside = np.ones_like(without, dtype=bool) if without.ndim == 1 else rewards.mask[kept] != 0
    close("rows removed", with_them[kept][inside], without[inside], 1.0, 1e-11)
    low, high = knobs.get("advantage_clip_low", 0.0), knobs.get("advantage_clip_high", 0.0)
    assert low <= 0 <= high
    assert (with_them[absent] == 0).all()


@law
@given(estimator_knobs(), reward_tables(), seeds)
def test_rows_and_groups_may_be_permuted_and_renamed(knobs: dict[str, Any], rewards: Rewards, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order, names = rng.permutation(len(rewards.groups)), rng.permutation(20)
    other = pick(rewards, order)
    other.groups = [int(names[g]) for g in other.groups]
    got, want = package_advantages(knobs, other), package_advantages(knobs, rewards)[order]
    inside = np.ones_like(want, dtype=bool) if want.ndim == 1 else other.mask != 0
    close("order of rows", got[inside], want[inside], 1.0, 1e-11)


@law
@given(estimator_knobs(), reward_tables(holes=False), seeds)
def test_a_constant_added_to_a_component_of_a_group_changes_nothing(
    knobs: dict[str, Any], rewards: Rewards, seed: int
) -> None:
    assume(knobs.get("minus_baseline", True))
    shift = np.random.default_rng(seed).integers(-64, 64, size=(20, len(rewards.table))) / 8
    table = {name: column + shift[rewards.groups, k] for k, (name, column) in enumerate(rewards.table.items())}
    got, want = package_advantages(knobs, dataclasses.replace(rewards, table=table)), package_advantages(knobs, rewards)
    inside = np.ones_like(want, dtype=bool) if want.ndim == 1 else rewards.mask != 0
    close("constant added", got[inside], want[inside], 1.0, 1e-10)


@law
@given(estimator_knobs("gdpo", normalize_rewards=True), reward_tables(), st.sampled_from("ab"), floats(0.01, 100))
def test_scaling_one_component_under_gdpo_changes_nothing(
    knobs: dict[str, Any], rewards: Rewards, name: str, factor: float
) -> None:
    """Where every std is > 0 or every value of the group is the same: an undivided value keeps its scale, by design."""
    knobs = knobs | {"use_leave_one_out_baseline": False}
    # Rewards in the millions, so that the epsilon beside the std is out of sight.
    large = {key: 1e6 * column for key, column in rewards.table.items()}
    scaled = large | {name: factor * large[name]}
    got = package_advantages(knobs, dataclasses.replace(rewards, table=scaled))
    close("component scaled", got, package_advantages(knobs, dataclasses.replace(rewards, table=large)), 1.0, 1e-6)


@law
@given(estimator_knobs(), reward_tables(), floats(0.1, 10))
def test_weights_scaled_together_change_nothing(knobs: dict[str, Any], rewards: Rewards, factor: float) -> None:
    """Under an estimator that whitens the batch."""
    assume(knobs["name"] != "grpo")
    scaled = dataclasses.replace(rewards, weights={name: factor * w for name, w in rewards.weights.items()})
    got, want = package_advantages(knobs, scaled), package_advantages(knobs, rewards)
    inside = np.ones_like(want, dtype=bool) if want.ndim == 1 else rewards.mask != 0
    close("weights scaled", got[inside], want[inside], 1.0, 1e-10)


@law
@given(estimator_knobs(clip=False), reward_tables(), st.sampled_from([torch.float32, torch.float64]), seeds)
def test_a_group_of_equal_rewards_is_exactly_zero(
    knobs: dict[str, Any], rewards: Rewards, dtype: torch.dtype, seed: int
) -> None:
    """Beside any others under grpo; under an estimator that moves the mean, where all groups are like that."""
    constant = np.random.default_rng(seed).uniform(-1, 1, size=(20, len(rewards.table)))
    degenerate = np.array(rewards.groups) == rewards.groups[0]
    if knobs["name"] != "grpo":
        degenerate[:] = True
        constant = constant if knobs.get("minus_baseline", True) else constant[:1].repeat(20, axis=0)
    table = {
        name: np.where(degenerate, constant[rewards.groups, k], column)
        for k, (name, column) in enumerate(rewards.table.items())
    }
    assert (package_advantages(knobs, dataclasses.replace(rewards, table=table), dtype=dtype)[degenerate] == 0).all()


@law
@given(reward_tables())
def test_leave_one_out_is_the_plain_baseline_times_n_over_n_minus_1(rewards: Rewards) -> None:
    knobs = {"name": "grpo", "normalize_rewards": False}
    plain = package_advantages(knobs | {"use_leave_one_out_baseline": False}, rewards)
    counted = ~np.isnan(np.stack(list(rewards.table.values()))).all(0) & (rewards.mask != 0).any(1)
    groups = np.array(rewards.groups)
    n = np.array([(counted & (groups == g)).sum() for g in groups])
    close("leave-one-out", package_advantages(knobs, rewards), plain * n / np.maximum(n - 1, 1), 1.0, 1e-12)


@law
@given(estimator_knobs("grpo", clip=False), reward_tables(holes=False, components=(1, 1)))
def test_gdpo_with_a_component_that_says_nothing_is_grpo_whitened(knobs: dict[str, Any], rewards: Rewards) -> None:
    rewards = dataclasses.replace(rewards, weights={"a": 1.0})
    a = package_advantages(knobs, rewards)
    two = dataclasses.replace(rewards, table=rewards.table | {"b": np.full(len(a), 0.3)})
    want = (a - a.mean()) / a.std(ddof=1) if np.ptp(a) > 1e-12 else np.zeros_like(a)
    close("gdpo of one", package_advantages(knobs | {"name": "gdpo"}, two), want, 1.0, 1e-11)


@law
@given(estimator_knobs(), reward_tables())
def test_advantages_in_float32_stay_near_float64(knobs: dict[str, Any], rewards: Rewards) -> None:
    got, want = package_advantages(knobs, rewards, dtype=torch.float32), package_advantages(knobs, rewards)
    inside = np.ones_like(want, dtype=bool) if want.ndim == 1 else rewards.mask != 0
    close("float32 advantages", got[inside], want[inside], 1.0, 2e-4)


@law
@given(estimator_knobs(clip=False), reward_tables(), st.sampled_from([torch.float32, torch.float64]))
def test_large_rewards_give_finite_advantages(knobs: dict[str, Any], rewards: Rewards, dtype: torch.dtype) -> None:
    """A million in one component, and the others beside it."""
    large = dataclasses.replace(rewards, table=rewards.table | {"a": 1e6 * rewards.table["a"]})
    assert np.isfinite(package_advantages(knobs, large, dtype=dtype)).all()
