"""Metrics combine exactly over micro-batches and processes, and say what the rewards hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import NAN

from hf_grpo_ext.diagnostics import (
    MetricWindow,
    advantage_correlations,
    advantage_shares,
    frac_groups_without_signal,
    reward_metrics,
)
from hf_grpo_ext.entropy import adapted_entropy_coef
from hf_grpo_ext.micro_batches import loss_token_mask, valid_counts

HOW = {"share": "sum", "low": "min", "high": "max"}


def metrics(share: float, low: float, high: float) -> dict[str, torch.Tensor]:
    return {"share": torch.tensor(share), "low": torch.tensor(low), "high": torch.tensor(high)}


def test_two_micro_batches_on_two_processes() -> None:
    calls = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        calls.append(values)
        return torch.cat([values, torch.tensor([[0.25, -3.0, 1.0]])])  # what the other process has

    window = MetricWindow()
    window.add(metrics(0.25, -1.0, 5.0), HOW)
    window.add(metrics(0.125, -2.0, 4.0), HOW)
    assert window.flush(gather) == {"share": 0.625, "low": -3.0, "high": 5.0}
    assert len(calls) == 1, "one collective"
    assert window.flush(gather) == {}, "the window is empty after a flush"


def test_an_extreme_of_nothing_is_a_gap() -> None:
    window = MetricWindow()
    window.add(metrics(0.0, math.inf, -math.inf), HOW)
    values = window.flush(lambda rows: rows)
    assert values["share"] == 0.0
    assert math.isnan(values["low"])
    assert math.isnan(values["high"])


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="Metric 'x' has the reduction 'mean'"):
        MetricWindow().add({"x": torch.tensor(1.0)}, {"x": "mean"})


def test_adding_does_not_wait_for_the_device() -> None:
    window = MetricWindow()
    window.add({"x": torch.zeros((), device="meta")}, {"x": "sum"})
    window.add({"x": torch.zeros((), device="meta")}, {"x": "sum"})


def test_counts_leave_out_padding_tools_and_rows_that_do_not_count() -> None:
    batch = {
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        "sample_mask": torch.tensor([True, True, False]),
    }
    assert loss_token_mask(batch).int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert valid_counts([batch, batch]).tolist() == [8.0, 4.0]


@pytest.mark.parametrize(("entropy", "expected"), [(0.1, 0.35), (0.2, 0.35), (0.3, 0.25)])
def test_the_entropy_coefficient_moves_towards_its_target(entropy: float, expected: float) -> None:
    rule = {"target": 0.2, "step": 0.05, "lowest": 0.0, "highest": 1.0}
    assert adapted_entropy_coef(0.3, entropy, **rule) == pytest.approx(expected)
    assert adapted_entropy_coef(1.0, 0.1, **rule) == 1.0
    assert adapted_entropy_coef(0.0, 0.3, **rule) == 0.0


# What the rewards say


def test_shares_of_two_components_that_do_not_know_of_each_other() -> None:
    # var(D_1) = 4/3, var(D_2) = 1/3, no covariance: 4/5 and 1/5.
    parts = torch.tensor([[1.0, 0.5], [-1.0, 0.5], [1.0, -0.5], [-1.0, -0.5]])
    assert advantage_shares(parts).tolist() == pytest.approx([0.8, 0.2])
    assert advantage_correlations(parts)[0, 1] == 0


def test_a_component_that_works_against_the_other_has_a_negative_share() -> None:
    # S = [1, -1]: cov(D_1, S) = 2 var(S) and cov(D_2, S) = -var(S).
    parts = torch.tensor([[2.0, -1.0], [-2.0, 1.0]])
    assert advantage_shares(parts).tolist() == pytest.approx([2.0, -1.0])
    assert advantage_correlations(parts)[0, 1] == pytest.approx(-1)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e15])
def test_shares_and_correlations_are_those_of_numpy(scale: float) -> None:
    random = np.random.default_rng(0)
    parts = random.normal(size=(50, 3)) @ random.normal(size=(3, 3)) + [5.0, 0.0, -1.0]
    covariance = np.cov(parts.T)
    tensor = torch.tensor(parts * scale, dtype=torch.float32)
    shares = advantage_shares(tensor)
    np.testing.assert_allclose(shares, covariance.sum(1) / covariance.sum(), rtol=1e-4)
    assert shares.sum().item() == pytest.approx(1)
    np.testing.assert_allclose(advantage_correlations(tensor), np.corrcoef(parts.T), rtol=1e-4, atol=1e-5)


def test_a_component_of_another_scale_has_its_correlation() -> None:
    parts = torch.tensor([[1.0, 1e-25], [-1.0, -1e-25]])
    assert advantage_correlations(parts)[0, 1] == pytest.approx(1)


def test_what_does_not_vary_is_not_defined() -> None:
    constant = torch.tensor([[1.0, 0.7], [-1.0, 0.7]])
    assert advantage_shares(constant).tolist() == pytest.approx([1.0, 0.0])
    assert advantage_correlations(constant)[0, 1].isnan()
    # Components that cancel: .3 + .6 - .9 leaves 6e-8 of rounding, and no signal.
    cancel = torch.tensor([[0.1, 0.7, -0.8], [0.3, 0.6, -0.9]])
    assert cancel.sum(-1)[0] != cancel.sum(-1)[1]
    assert advantage_shares(cancel).isnan().all()
    nothing = torch.full((2, 2), NAN)
    assert advantage_shares(nothing).isnan().all()
    assert advantage_correlations(nothing).isnan().all()


def test_a_row_with_nan_does_not_count() -> None:
    parts = torch.tensor([[1.0, 0.5], [-1.0, 0.5], [NAN, 9.0], [1.0, -0.5], [-1.0, -0.5]])
    assert advantage_shares(parts).tolist() == pytest.approx([0.8, 0.2])
    assert advantage_correlations(parts)[0, 1] == 0


def test_groups_without_signal_are_counted_among_those_that_have_the_component() -> None:
    values = torch.tensor([1.0, 0.0, 0.5, 0.5, NAN, 2.0, NAN, NAN])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    # Group 0 varies; 1 does not; 2 has one value, which differs from none; 3 has none.
    assert frac_groups_without_signal(values, groups).item() == pytest.approx(2 / 3)
    assert frac_groups_without_signal(values[6:], groups[6:]).isnan()


def test_reward_metrics_leave_out_what_is_not_defined() -> None:
    columns = {
        "right": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "constant": torch.tensor([0.3, 0.3, 0.3, 0.3]),
        "absent": torch.full((4,), NAN),
    }
    parts = torch.tensor([[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert reward_metrics(columns, torch.tensor([0, 0, 1, 1]), parts) == {
        "rewards/right/frac_groups_without_signal": 0.5,
        "rewards/constant/frac_groups_without_signal": 1.0,
        "rewards/right/advantage_share": 1.0,
        "rewards/constant/advantage_share": 0.0,
        "rewards/absent/advantage_share": 0.0,
    }


def test_one_component_has_neither_share_nor_correlation() -> None:
    columns = {"right": torch.tensor([1.0, 0.0])}
    metrics = reward_metrics(columns, torch.tensor([0, 0]), torch.tensor([[0.5], [-0.5]]))
    assert metrics == {"rewards/right/frac_groups_without_signal": 0.0}


def test_a_row_that_does_not_count_gives_no_group_signal() -> None:
    columns = {"right": torch.tensor([1.0, 0.0, 0.0])}
    parts = torch.tensor([[NAN], [0.0], [0.0]])
    metrics = reward_metrics(columns, torch.tensor([0, 0, 0]), parts)
    assert metrics == {"rewards/right/frac_groups_without_signal": 1.0}
