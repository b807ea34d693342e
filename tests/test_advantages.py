"""One battery of laws over all estimators, so that a new one inherits every test; then what is special to each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import advantages
from torch import Tensor

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, get_advantage_estimator
from hf_grpo_ext.advantages import ADVANTAGE_ESTIMATORS
from hf_grpo_ext.grouping import _Layout, group_baseline_and_std, group_has_signal, group_rows
from hf_grpo_ext.normalization import whiten_rows, whiten_tokens

TOKENS = 5
# Groups of different size in mixed order.
GROUPS = [0, 0, 2, 0, 1, 1, 2, 1, 0, 2, 1, 1]
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo_plain": {"name": "grpo", "use_leave_one_out_baseline": False},
    "rloo": {"name": "grpo", "normalize_rewards": False},
    "gdpo": {"name": "gdpo"},
    "gdpo_plain": {"name": "gdpo", "use_leave_one_out_baseline": False},
    "gdpo_undivided": {"name": "gdpo", "normalize_rewards": False},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus"},
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def rewards(seed: int = 0) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    return {
        "correctness": random.integers(0, 2, len(GROUPS)).astype(float).tolist(),
        "length": random.normal(size=len(GROUPS)).tolist(),
    }


def mask() -> Tensor:
    lengths = torch.tensor([1, 5, 3, 2, 4, 5, 1, 2, 3, 4, 5, 2])
    return (torch.arange(TOKENS) < lengths[:, None]).float()


def compute(config: dict[str, Any], table: dict[str, list[Any]], groups: list[int] = GROUPS, **extra: Any) -> Tensor:
    return advantages(rewards=table, group_ids=groups, mask=extra.pop("mask", mask()), **config, **extra)


def test_every_estimator_is_in_the_battery() -> None:
    assert {config["name"] for config in VARIANTS.values()} == set(ADVANTAGE_ESTIMATORS)


@every_variant
def test_order_of_rows_does_not_matter(config: dict[str, Any]) -> None:
    order = np.random.default_rng(1).permutation(len(GROUPS))
    shuffled = {name: [column[i] for i in order] for name, column in rewards().items()}
    a = compute(config, shuffled, [GROUPS[i] for i in order], mask=mask()[order])
    torch.testing.assert_close(a, compute(config, rewards())[order], rtol=1e-12, atol=1e-12)


@every_variant
def test_names_of_groups_do_not_matter(config: dict[str, Any]) -> None:
    renamed = [{0: 70, 1: -3, 2: 12}[group] for group in GROUPS]
    torch.testing.assert_close(compute(config, rewards(), renamed), compute(config, rewards()), rtol=1e-12, atol=1e-12)


@every_variant
def test_a_constant_added_to_a_group_changes_nothing(config: dict[str, Any]) -> None:
    table = rewards()
    table["length"] = [x + 3.5 * (group == 1) for x, group in zip(table["length"], GROUPS, strict=True)]
    torch.testing.assert_close(compute(config, table), compute(config, rewards()), rtol=1e-9, atol=1e-9)


@every_variant
def test_equal_rewards_everywhere_are_exactly_zero(config: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64):
        table = {"a": [0.7] * len(GROUPS), "b": [0.1 * group for group in GROUPS]}
        assert compute(config, table, dtype=dtype).abs().max() == 0


@every_variant
@pytest.mark.parametrize("hole", ["masked", "unscored"])
def test_a_row_that_does_not_count_neither_votes_nor_learns(config: dict[str, Any], hole: str) -> None:
    table, row_mask = rewards(), mask()
    if hole == "masked":
        row_mask[3] = 0
        table["length"][3] = 1e6
    else:
        table = {name: [None if i == 3 else x for i, x in enumerate(column)] for name, column in table.items()}
    a = compute(config, table, mask=row_mask)
    others = [i for i in range(len(GROUPS)) if i != 3]
    removed = {name: [column[i] for i in others] for name, column in rewards().items()}
    without = compute(config, removed, [GROUPS[i] for i in others], mask=mask()[others])
    torch.testing.assert_close(a[others], without, rtol=1e-12, atol=1e-12)
    assert a[3].abs().max() == 0


@every_variant
def test_the_clamp_comes_last(config: dict[str, Any]) -> None:
    a = compute(config, rewards())
    clamped = compute(config | {"advantage_clip_low": -0.5, "advantage_clip_high": 0.25}, rewards())
    assert a.min() < -0.5
    assert a.max() > 0.25
    torch.testing.assert_close(clamped, a.clamp(-0.5, 0.25), rtol=0, atol=0)
    low_only = compute(config | {"advantage_clip_low": -0.5}, rewards())
    torch.testing.assert_close(low_only, a.clamp(min=-0.5), rtol=0, atol=0)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_near_float64(config: dict[str, Any], dtype: torch.dtype) -> None:
    coarse = {name: torch.tensor(column).to(dtype).double().tolist() for name, column in rewards(3).items()}
    a = compute(config, coarse, dtype=dtype)
    assert a.dtype == torch.float32
    torch.testing.assert_close(a.double(), compute(config, coarse), rtol=1e-4, atol=2e-5)


@every_variant
def test_large_rewards_stay_finite(config: dict[str, Any]) -> None:
    table = {"a": [1e6 * (i % 2) for i in range(len(GROUPS))], "b": rewards()["length"]}
    for dtype in (torch.float32, torch.float64):
        a = compute(config, table, dtype=dtype)
        assert a.isfinite().all()
        assert a.abs().max() > 0.1


@every_variant
def test_extreme_batches(config: dict[str, Any]) -> None:
    table = {"a": [1.0, 0.0], "b": [0.0, 1.0]}
    assert compute(config, table, [0, 1], mask=torch.zeros(2, 3)).abs().max() == 0  # all masked
    nothing = compute(config, {"a": [None, None], "b": [None, None]}, [0, 0], mask=torch.ones(2, 3))
    assert nothing.abs().max() == 0
    estimator = get_advantage_estimator(AdvEstimatorConfig(**config))
    empty = {"a": torch.zeros(0), "b": torch.zeros(0)}
    shape = estimator.compute_advantage(torch.zeros(0, dtype=torch.long), empty, torch.zeros(0, 3)).shape
    assert shape == ((0, 3) if estimator.token_level else (0,))


def reference(values: np.ndarray, groups: list[int], leave_one_out: bool, normalize: bool) -> np.ndarray:
    """The formulas of group-relative advantages, written as loops over rows."""
    out = np.zeros(len(values))
    for i, value in enumerate(values):
        peers = [values[j] for j in range(len(values)) if groups[j] == groups[i] and not (leave_one_out and i == j)]
        peers = [peer for peer in peers if not np.isnan(peer)]
        if np.isnan(value) or not peers:
            continue
        out[i] = value - np.mean(peers)
        if normalize and len(peers) > 1 and max(peers) > min(peers):
            out[i] /= np.std(peers, ddof=1) + 1e-6
        elif max(peers) == min(peers):
            out[i] = value - peers[0]
    return out


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_against_loops(seed: int, leave_one_out: bool, normalize: bool) -> None:
    random = np.random.default_rng(seed)
    groups = random.integers(0, 4, 17).tolist()
    columns = {name: random.choice([0.0, 1.0, 0.3, np.nan], 17) for name in "xyz"}
    weights = {"x": 0.5, "y": 2.0, "z": -1.0}
    knobs = {"use_leave_one_out_baseline": leave_one_out, "normalize_rewards": normalize}
    extras = {"reward_weights": weights}
    table = {name: column.tolist() for name, column in columns.items()}
    unscored = np.isnan(np.stack(list(columns.values()))).all(0)

    total = sum(weights[name] * np.nan_to_num(column) for name, column in columns.items())
    total[unscored] = np.nan
    grpo = advantages("grpo", table, groups, extras=extras, **knobs)
    np.testing.assert_allclose(grpo.numpy(), reference(total, groups, leave_one_out, normalize), rtol=1e-12, atol=1e-12)

    summed = sum(weights[n] * reference(c, groups, leave_one_out, normalize) for n, c in columns.items())
    valid = summed[~unscored]
    summed = np.where(unscored, 0, (summed - valid.mean()) / valid.std(ddof=1))
    gdpo = advantages("gdpo", table, groups, extras=extras, **knobs)
    np.testing.assert_allclose(gdpo.numpy(), summed, rtol=1e-9, atol=1e-9)


def test_scaling_one_component_changes_nothing_under_gdpo() -> None:
    scaled = dict(rewards(), length=[1000 * x for x in rewards()["length"]])
    # The epsilon beside the std is what is left of the scale.
    torch.testing.assert_close(
        compute(VARIANTS["gdpo"], scaled), compute(VARIANTS["gdpo"], rewards()), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(compute(VARIANTS["grpo"], scaled), compute(VARIANTS["grpo"], rewards()), atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_that_cancel_are_not_whitened_into_noise(dtype: torch.dtype) -> None:
    for scale in (1.0, 1e3):
        x = [scale * value for value in (1.0, 0.0, 0.0, 0.3, 0.7, 0.1, 0.9, 0.2)]
        a = advantages("gdpo", {"x": x, "y": [scale - value for value in x]}, dtype=dtype, normalize_rewards=False)
        assert a.abs().max() == 0


def test_a_group_without_signal_stays_at_zero_beside_one_with_signal() -> None:
    table = {"x": [1, 0, 0, 0, 0.3, 0.3, 0.3], "y": [0, 0, 1, 0, 0.1, 0.1, 0.1]}
    for knobs in ({"use_leave_one_out_baseline": False}, {"normalize_rewards": False}):
        a = advantages("gdpo", table, [0] * 4 + [1] * 3, dtype=torch.float32, **knobs)
        assert a[4:].tolist() == [0.0] * 3
        assert a[:4].abs().min() > 0.01


def test_whitening_makes_unit_variance() -> None:
    a = compute(VARIANTS["gdpo"], rewards())
    assert a.mean().item() == pytest.approx(0, abs=1e-12)
    assert a.std().item() == pytest.approx(1, abs=1e-12)
    tokens = compute(VARIANTS["reinforce_plus_plus"], rewards())[mask().bool()]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std(unbiased=False).item() == pytest.approx(1, abs=1e-12)


def test_kl_in_the_reward_of_grpo_is_the_sum_over_tokens() -> None:
    policy, ref = -torch.rand(len(GROUPS), TOKENS).double(), -torch.rand(len(GROUPS), TOKENS).double()
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"}
    a = compute(VARIANTS["rloo"], rewards(), loss=loss, extras={"logprobs_policy": policy, "logprobs_reference": ref})
    kl = ((policy - ref) * mask()).sum(-1)
    table = rewards()
    table["length"] = (torch.tensor(table["length"], dtype=torch.float64) - 0.3 * kl).tolist()
    torch.testing.assert_close(a, compute(VARIANTS["rloo"], table), rtol=1e-9, atol=1e-9)


def test_kl_in_the_reward_needs_log_probabilities_and_one_reward() -> None:
    with pytest.raises(ValueError, match="needs logprobs_policy and logprobs_reference"):
        advantages("grpo", [1, 0], loss={"use_kl_in_reward": True})
    with pytest.raises(ValueError, match="which component would carry the KL is not defined"):
        get_advantage_estimator(AdvEstimatorConfig(name="gdpo"), ClippedPGLossConfig(use_kl_in_reward=True))
    wrong = {"logprobs_policy": torch.zeros(2, 3), "logprobs_reference": torch.zeros(2, 1)}
    with pytest.raises(ValueError, match=r"logprobs_policy has shape \[2, 3\]"):
        advantages("grpo", [1, 0], loss={"use_kl_in_reward": True}, extras=wrong)


def test_errors_of_the_estimators() -> None:
    with pytest.raises(
        ValueError, match=r"at least two reward components, but saw 1: \['only'\].*adv_estimator=\"grpo\""
    ):
        advantages("gdpo", {"only": [1, 0]})
    with pytest.raises(ValueError, match=r"names 'c', which is no reward component. The components are: a, b"):
        advantages("gdpo", {"a": [1, 0], "b": [0, 1]}, extras={"reward_weights": {"c": 1.0}})
    with pytest.raises(ValueError, match="did you mean 'gdpo'"):
        AdvEstimatorConfig(name="gdpoo")
    with pytest.raises(ValueError, match="minus_baseline=False with name='grpo'"):
        AdvEstimatorConfig(minus_baseline=False)
    with pytest.raises(ValueError, match="advantage_clip_low=1 is above advantage_clip_high=0"):
        AdvEstimatorConfig(advantage_clip_low=1, advantage_clip_high=0)
    with pytest.raises(ValueError, match="advantage_clip_low=0.5: the range must hold 0"):
        AdvEstimatorConfig(advantage_clip_low=0.5)
    with pytest.raises(ValueError, match="advantage_clip_high=-0.5: the range must hold 0"):
        AdvEstimatorConfig(advantage_clip_high=-0.5)
    with pytest.raises(TypeError, match="normalize_rewards='yes' is a str"):
        AdvEstimatorConfig(normalize_rewards="yes")  # type: ignore[arg-type]
    estimator = get_advantage_estimator(AdvEstimatorConfig())
    ids = torch.zeros(3, dtype=torch.long)
    with pytest.raises(TypeError, match="it must map component names"):
        estimator.compute_advantage(ids, torch.zeros(3), torch.ones(3, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="component 'x' is a list"):
        estimator.compute_advantage(ids, {"x": [0.0] * 3}, torch.ones(3, 1))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="rewards holds no component"):
        estimator.compute_advantage(ids, {}, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"component 'x' has shape \[2\]"):
        estimator.compute_advantage(ids, {"x": torch.zeros(2)}, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"mask \[2, 1\]"):
        estimator.compute_advantage(ids, {"x": torch.zeros(3)}, torch.ones(2, 1))


def test_grouping_of_uneven_groups() -> None:
    ids = torch.tensor([4, 9, 4, 4, 9, 1])
    assert group_rows(ids).tolist() == [[5, -1, -1], [0, 2, 3], [1, 4, -1]]
    values = torch.tensor([1.0, 2.0, 5.0, float("nan"), 2.0, 7.0])
    baseline, std = group_baseline_and_std(values, ids, leave_one_out=False)
    assert baseline.tolist()[:3] == [3.0, 2.0, 3.0]
    assert std.tolist()[:2] == [pytest.approx(8**0.5), 0.0]
    assert group_has_signal(values, ids).tolist() == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("ids", "view"),
    [
        ([0, 0, 1, 1], True),
        ([3, 3, 7, 7], True),
        ([1, 1, 0, 0], False),
        ([0, 1], False),
        ([0, 0, 1], False),
        ([], True),
    ],
)
def test_groups_in_blocks_are_a_view(ids: list[int], view: bool) -> None:
    """Of a trainer's groups no table of rows is made."""
    layout = _Layout(torch.tensor(ids, dtype=torch.long))
    assert (layout.rows is None) == view
    if layout.rows is not None:
        assert layout.rows.shape[1] == max(2, *(ids.count(i) for i in ids))
    assert layout.take(torch.zeros(len(ids))).shape[1] == 2


def test_a_table_of_no_rows() -> None:
    assert group_rows(torch.zeros(0, dtype=torch.long)).shape == (0, 0)


def test_nobody_votes_for_a_row_that_is_alone() -> None:
    baseline, std = group_baseline_and_std(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), leave_one_out=True)
    assert baseline[0].isnan()
    assert baseline[1:].tolist() == [2.0, 1.0]
    assert std.tolist() == [0.0, 0.0, 0.0]


def test_signal_of_two_groups_of_three() -> None:
    ids = torch.tensor([0, 1, 0, 0, 1, 1])
    assert group_has_signal(torch.tensor([3.0, 5.0, 3.0, 3.0, 6.0, 5.0]), ids).tolist() == [
        False, True, False, False, True, True,
    ]  # fmt: skip
    # Only row 0 differs.
    assert group_has_signal(torch.tensor([9.0, 5.0, 3.0, 3.0, 5.0, 5.0]), ids).tolist() == [
        True, False, True, True, False, False,
    ]  # fmt: skip


def test_values_within_their_resolution_are_equal() -> None:
    values, ids = torch.tensor([1.0, 1.25, 1.0, 0.0]), torch.tensor([0, 0, 0, 0])
    resolution = torch.tensor([0.0, 0.5, 0.0, 0.0])  # the coarsest voter decides for its group
    baseline, std = group_baseline_and_std(values, ids, leave_one_out=True, resolution=resolution)
    assert std[3] == 0
    assert baseline[3] == 1.25
    assert std[0] > 0, "the last row is further away than any rounding"
    assert group_has_signal(values, ids, resolution).all()
    close_by = torch.tensor([1.0, 1.25, 1.0, 1.5])
    assert not group_has_signal(close_by, ids, resolution).any()
    assert group_has_signal(close_by, ids).all()
    # A row without a value has no say in the resolution.
    silent = torch.tensor([1.0, float("nan"), 1.0, 1.5])
    assert group_has_signal(silent, ids, resolution).tolist()[0] is True


def test_leave_one_out_statistics_do_not_depend_on_the_row() -> None:
    values = torch.tensor([1.0, 0.3, 0.6, 0.2])
    ids = torch.zeros(4, dtype=torch.long)
    baseline, std = group_baseline_and_std(values, ids, leave_one_out=True)
    values[0] = 100.0
    other_baseline, other_std = group_baseline_and_std(values, ids, leave_one_out=True)
    assert baseline[0] == other_baseline[0]
    assert std[0] == other_std[0]


def test_whitening_of_one_row_or_of_none_is_zero() -> None:
    assert whiten_rows(torch.tensor([5.0]), torch.tensor([True]), torch.tensor(0.0)).tolist() == [0.0]
    assert whiten_rows(torch.tensor([5.0, 6.0]), torch.tensor([False] * 2), torch.tensor(0.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30, 1e17])
@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_rewards_whose_variance_does_not_fit_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="component 'a', times its weight, reaches .* scale it down"):
        advantages(name, {"a": [value, 1, 2, 3], "b": [0, 1, 0, 1]}, dtype=torch.float32)
    assert advantages(name, {"a": [1e15, 1, 2, 3], "b": [0] * 4}, dtype=torch.float32).isfinite().all()
    weights = {"reward_weights": {"b": 1e30}}
    with pytest.raises(ValueError, match="component 'b', times its weight"):
        advantages(name, {"a": [0, 1, 2, 3], "b": [0, 1, 0, 1]}, dtype=torch.float32, extras=weights)


def test_the_largest_reward_is_a_thousandth_of_what_fits() -> None:
    limit = torch.finfo(torch.float64).max ** 0.5 / 1e3
    assert advantages("grpo", [limit, 0.0], dtype=torch.float64).isfinite().all()
    with pytest.raises(ValueError, match="scale it down"):
        advantages("grpo", [limit * (1 + 1e-15), 0.0], dtype=torch.float64)


@every_variant
@pytest.mark.parametrize("hole", ["none", "masked", "unscored", "one component absent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_group_first_and_the_batch_later_is_the_same(config: dict[str, Any], hole: str, dtype: torch.dtype) -> None:
    """What the asynchronous trainer does, whose worker sees a group and whose optimizer step sees the batch."""
    table = {name: torch.tensor(column, dtype=dtype) for name, column in rewards().items()}
    tokens, estimator = mask(), get_advantage_estimator(AdvEstimatorConfig(**config, advantage_clip_high=1.2))
    if hole == "unscored":
        table = {name: column.index_fill(0, torch.tensor([3]), torch.nan) for name, column in table.items()}
    if hole == "one component absent":
        table["length"] = table["length"].index_fill(0, torch.tensor([3]), torch.nan)
    ids = torch.tensor(GROUPS)
    want = estimator.compute_advantage(ids, table, tokens)
    of_groups = torch.empty(len(ids), dtype=torch.float64)
    for group in set(GROUPS):
        rows = (ids == group).nonzero().flatten()
        mine = {name: column[rows].double() for name, column in table.items()}
        of_groups[rows] = estimator.group_advantages(torch.zeros(len(rows)), mine)
    counts = tokens.sum(-1).long()
    if hole == "masked":  # after the group has voted, as a sample that is dropped on its way
        counts[4] = 0
        want = None
    got = estimator.over_batch(of_groups.to(dtype), counts)
    if want is None:
        assert got[4] == 0
        assert got.abs().max() > 0
        return
    want = want if want.dim() == 1 else want[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_that_cancel_in_their_groups_are_no_noise_for_the_batch(dtype: torch.dtype) -> None:
    estimator = get_advantage_estimator(AdvEstimatorConfig(name="gdpo", normalize_rewards=False))
    parts = []
    for x in ([1.0, 0.0, 0.0, 0.3], [0.7, 0.1, 0.9, 0.2]):
        column = torch.tensor(x, dtype=torch.float64)
        parts.append(estimator.group_advantages(torch.zeros(4), {"x": column, "y": 1 - column}))
        assert parts[-1].abs().max() == 0
    assert estimator.over_batch(torch.cat(parts).to(dtype), torch.ones(8)).abs().max() == 0
    for scale in (1.0, 1e3):
        nearly_equal = torch.tensor([0.7, 0.7 * (1 + torch.finfo(dtype).eps), 0.7, torch.nan], dtype=dtype) * scale
        assert estimator.over_batch(nearly_equal, torch.ones(4)).abs().max() == 0


@every_variant
def test_no_samples_have_no_advantages(config: dict[str, Any]) -> None:
    estimator = get_advantage_estimator(AdvEstimatorConfig(**config))
    none = torch.zeros(0)
    assert estimator.group_advantages(none, {"a": none, "b": none}).shape == (0,)


def test_tokens_that_are_all_equal_are_whitened_to_exactly_zero() -> None:
    # The mean of many float32 copies of 0.7 is not 0.7, and 1e-8 times rsqrt(1e-8) would be 1e-4.
    for count in (3, 7, 60, 1000):
        values = torch.full((count, 5), 0.7)
        assert whiten_tokens(values, torch.ones(count, 5, dtype=torch.bool)).abs().max() == 0
    a = compute(
        {"name": "reinforce_plus_plus", "minus_baseline": False}, {"a": [0.7] * len(GROUPS)}, dtype=torch.float32
    )
    assert a.abs().max() == 0


def parts_of(config: dict[str, Any], table: dict[str, list[Any]], row_mask: Tensor, **extra: Any) -> Tensor:
    columns = {name: torch.tensor([np.nan if x is None else x for x in column]) for name, column in table.items()}
    estimator = get_advantage_estimator(AdvEstimatorConfig(**config))
    return estimator.component_advantages(torch.tensor(GROUPS), columns, row_mask, **extra)


@every_variant
def test_component_advantages_sum_to_what_the_estimator_normalises(config: dict[str, Any]) -> None:
    table, row_mask, weights = rewards(), mask(), {"length": 2.0, "correctness": -1.5}
    table["length"][0] = table["correctness"][5] = None
    table["length"][7] = table["correctness"][7] = None  # nothing scores row 7
    row_mask[3] = 0
    parts = parts_of(config, table, row_mask, reward_weights=weights)
    counts = ~parts.isnan().any(-1)
    assert counts.tolist() == [row not in (3, 7) for row in range(len(GROUPS))]
    total = parts.nan_to_num().sum(-1)

    expected = compute(
        config if config["name"] == "gdpo" else config | {"normalize_rewards": False},
        table,
        mask=row_mask,
        extras={"reward_weights": weights},
    )
    if config["name"] == "gdpo":
        found = whiten_rows(total, counts, torch.tensor(0.0))
    elif config["name"] == "reinforce_plus_plus":
        valid = row_mask.bool() & counts[:, None]
        found, expected = whiten_tokens(total[:, None].expand_as(valid), valid)[valid], expected[valid]
    else:
        found = total
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


def test_component_advantages_without_a_baseline_are_the_rewards() -> None:
    config = {"name": "reinforce_plus_plus", "minus_baseline": False}
    table = {"a": [0.5] * 11 + [None], "b": [1.0] * 12}
    parts = parts_of(config, table, mask(), reward_weights={"a": 2.0})
    assert parts.tolist() == [[1.0, 1.0]] * 11 + [[0.0, 1.0]]


@every_variant
def test_component_advantages_of_no_rollouts(config: dict[str, Any]) -> None:
    estimator, none = get_advantage_estimator(AdvEstimatorConfig(**config)), torch.zeros(0)
    columns = {"a": none, "b": none}
    assert estimator.component_advantages(none.long(), columns, torch.zeros(0, TOKENS)).shape == (0, 2)


@every_variant
def test_advantages_carry_no_gradient(config: dict[str, Any]) -> None:
    columns = {name: torch.tensor(column, requires_grad=True) for name, column in rewards().items()}
    estimator = get_advantage_estimator(AdvEstimatorConfig(**config))
    assert not estimator.compute_advantage(torch.tensor(GROUPS), columns, mask()).requires_grad


@pytest.mark.parametrize("given", ["logprobs_policy", "logprobs_reference"])
def test_kl_in_the_reward_needs_both_log_probabilities(given: str) -> None:
    with pytest.raises(ValueError, match="needs logprobs_policy and logprobs_reference"):
        advantages("grpo", [1, 0], loss={"use_kl_in_reward": True}, extras={given: torch.zeros(2, 1)})


def test_no_rollouts_give_advantages_of_the_right_shape() -> None:
    """A process can be without rows; a token-level estimator keeps the token dimension."""
    none, mask = torch.zeros(0), torch.zeros(0, TOKENS)
    for config in VARIANTS.values():
        estimator = get_advantage_estimator(AdvEstimatorConfig(**config))
        found = estimator.compute_advantage(torch.zeros(0, dtype=torch.long), {"a": none, "b": none}, mask)
        assert found.shape == ((0, TOKENS) if config["name"] == "reinforce_plus_plus" else (0,))


def test_equal_tokens_whiten_to_zero_beside_masked_ones() -> None:
    """The mean of seven times 0.1 is not 0.1 in float32, and 1e-8 over the floor of the std would be 1e-4."""
    values = torch.full((1, 9), 0.1)
    mask = torch.tensor([[True] * 7 + [False] * 2])
    assert whiten_tokens(values, mask)[mask].abs().max() == 0


def test_the_config_of_an_estimator_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AdvEstimatorConfig().name = "gdpo"  # type: ignore[misc]
