"""The KL penalty and the importance weights called directly: masks, bounds, the exact edges of the clamps."""

from __future__ import annotations

import math

import pytest
import torch

from hf_grpo_ext.importance import actor_weights, finite_exp, policy_log_ratio, truncate_weights
from hf_grpo_ext.kl import kl_estimate, kl_penalty

NO_CLAMP = {"input_clamp": None, "output_clamp": None}


def penalty_and_gradient(x: float, kind: str, **clamps: float | None) -> tuple[float, float]:
    """Value and gradient in lp of the penalty at `ref - lp = x`, with the score-function weight."""
    lp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    value = kl_penalty(x - lp, kind, weight=torch.exp(lp - lp.detach()), **clamps)
    value.backward()
    return value.item(), lp.grad.item()


@pytest.mark.parametrize(("kind", "value"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_the_estimators(kind: str, value: float) -> None:
    assert kl_estimate(torch.tensor(0.5, dtype=torch.float64), kind).item() == pytest.approx(value, abs=1e-15)
    assert kl_penalty(torch.tensor([[0.5]]).double(), kind, **NO_CLAMP).item() == pytest.approx(value, abs=1e-15)


def test_an_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="KL type 'k4' is not known: it must be one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), "k4")


def test_the_weight_is_detached_only_beyond_the_input_clamp() -> None:
    # k2 = x^2/2. Inside: gradient k - x. At the edge the clamp does not bite yet. Beyond it k is a constant.
    assert penalty_and_gradient(0.5, "k2", input_clamp=1.0, output_clamp=None) == (0.125, 0.125 - 0.5)
    assert penalty_and_gradient(1.0, "k2", input_clamp=1.0, output_clamp=None) == (0.5, 0.5 - 1.0)
    assert penalty_and_gradient(1.5, "k2", input_clamp=1.0, output_clamp=None) == (0.5, 0.0)
    assert penalty_and_gradient(-1.5, "k1", input_clamp=1.0, output_clamp=None) == (1.0, 0.0)


def test_the_output_clamp_stops_the_gradient() -> None:
    assert penalty_and_gradient(3.0, "k2", input_clamp=None, output_clamp=1.0) == (1.0, 0.0)
    assert penalty_and_gradient(3.0, "k1", input_clamp=None, output_clamp=1.0) == (-1.0, 0.0)


def test_ratios_of_masked_tokens_are_one() -> None:
    lp, prev = torch.tensor([[0.5, 0.0]]), torch.tensor([[0.0, 0.0]])
    mask = torch.tensor([[1, 0]])
    assert policy_log_ratio(lp, prev, mask, sequence_level=False).tolist() == [[0.5, 0.0]]
    assert policy_log_ratio(lp, prev, mask, sequence_level=True).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_are_cut_off_at_half_the_largest_exponent(dtype: torch.dtype) -> None:
    limit = math.log(torch.finfo(dtype).max) / 2
    lp = torch.tensor([[limit - 1, limit + 1]], dtype=dtype, requires_grad=True)
    log_ratio = policy_log_ratio(lp, torch.zeros_like(lp), torch.ones_like(lp), sequence_level=False)
    assert log_ratio.tolist() == [[pytest.approx(limit - 1), pytest.approx(limit)]]
    log_ratio.sum().backward()
    assert lp.grad.tolist() == [[1.0, 0.0]]


def test_weights_of_a_row_are_over_the_sum_of_its_tokens() -> None:
    log_ratio, mask = torch.tensor([[0.5, 0.25, 9.0], [-1.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    weights = actor_weights(log_ratio, mask, sequence_level=True)
    torch.testing.assert_close(weights, torch.tensor([[0.75], [-1.0]]).exp())
    torch.testing.assert_close(actor_weights(log_ratio, mask, sequence_level=False), log_ratio.exp())


def test_weights_that_are_not_finite_are_zero_with_zero_gradient() -> None:
    log_weight = torch.tensor([0.0, 1000.0, float("nan"), float("-inf")], requires_grad=True)
    weights = finite_exp(log_weight)
    weights.sum().backward()
    assert weights.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert log_weight.grad.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("kind", "kept"), [("tis", [0.5, 0.5, 1.0, 2.0, 2.0]), ("icepop", [0.0, 0.5, 1.0, 2.0, 0.0])])
def test_the_bounds_belong_to_the_range(kind: str, kept: list[float]) -> None:
    weights = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]])
    truncated, out = truncate_weights(weights, weights.log(), torch.ones(1, 5), kind=kind, low=0.5, high=2.0)
    assert truncated.tolist() == [kept]
    assert out.tolist() == [[True, False, False, False, True]]


def test_seq_mask_tis_keeps_or_drops_whole_rows() -> None:
    log_ratio = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.0, float("nan")]])
    weights = finite_exp(log_ratio)
    kept, out = truncate_weights(weights, log_ratio, torch.ones(3, 2), kind="seq-mask-tis", low=0.5, high=2.0)
    assert out.tolist() == [[False], [True], [True]]
    assert kept.tolist() == [weights[0].tolist(), [0.0, 0.0], [0.0, 0.0]]


def test_an_unknown_truncation() -> None:
    with pytest.raises(ValueError, match="type 'mis' is not known: it must be one of tis, icepop, seq-mask-tis"):
        truncate_weights(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kind="mis", low=0.5, high=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_an_input_clamp_the_exponential_stays_finite(dtype: torch.dtype) -> None:
    lp = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    weight = torch.exp(lp - lp.detach())
    value = kl_penalty(1e4 - lp, "k3", weight=weight, input_clamp=None, output_clamp=10.0)
    value.backward()
    assert value.item() == 10.0
    assert lp.grad.item() == 0.0


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_weight_that_is_not_finite_is_0_with_a_gradient_and_without(requires_grad: bool) -> None:
    log_weight = torch.tensor([math.nan, math.inf, -math.inf, 0.0], requires_grad=requires_grad)
    weight = finite_exp(log_weight)
    assert weight.tolist() == [0, 0, 0, 1]
    if requires_grad:
        weight.sum().backward()
        assert log_weight.grad.tolist() == [0, 0, 0, 1]


def test_without_a_weight_the_estimate_alone_is_differentiated() -> None:
    x = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(kl_penalty(x, "k3", **NO_CLAMP).sum(), x)
    torch.testing.assert_close(plain, x.detach().exp() - 1)
    (with_term,) = torch.autograd.grad(kl_penalty(x, "k3", score_function=True, **NO_CLAMP).sum(), x)
    assert not torch.allclose(with_term, plain)
