"""Metrics combine exactly over micro-batches and processes."""

from __future__ import annotations

import math

import pytest
import torch

from hf_grpo_ext.diagnostics import MetricWindow
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
