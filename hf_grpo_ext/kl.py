"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens, in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KL_TYPES = ("k1", "k2", "k3")


def kl_estimate(log_ratio: Tensor, kl_type: str) -> Tensor:
    """The estimator `k(x)` of KL(policy || reference) at a token drawn from the policy, `x = log ref - log policy`.

        k1 = -x            unbiased, high variance, may be negative
        k2 = x^2 / 2       biased, low variance
        k3 = e^x - 1 - x   unbiased, low variance, never negative

    Args:
        log_ratio: `x`, any shape, in nats.
        kl_type: "k1", "k2" or "k3".

    Returns:
        `k(x)`, the shape and dtype of `log_ratio`.

    Raises:
        ValueError: for another `kl_type`.

    Source:
        Schulman, Approximating KL Divergence (2020).

    Example:
        >>> kl_estimate(torch.tensor([0.0, 1.0]), "k2").tolist()
        [0.0, 0.5]
    """
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    if kl_type == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"KL type {kl_type!r} is not known: it must be one of {', '.join(KL_TYPES)}.")


def js_estimate(log_ratio: Tensor, excess: Tensor) -> Tensor:
    """Per-token estimate of the Jensen-Shannon divergence of two policies from `x = log p - log q`, in nats.

        js = ( k3(log m - log p) + k3(log m - log q) ) / 2,   m = (p + q) / 2
           = log cosh(x / 2) = log(1 + (e^|x| - 1)^2 / (4 e^|x|)) / 2

    The two k3 terms add up to the second line, which keeps its digits for a small `x`.

    Args:
        log_ratio: `x`, any shape, in nats.
        excess: `expm1(|x|)`.

    Example:
        >>> x = torch.tensor([1.0])
        >>> round(js_estimate(x, torch.expm1(x)).item(), 4)
        0.1201
    """
    # Beyond, log cosh grows by half of the ratio, and the square would overflow.
    largest = largest_exponent(log_ratio.dtype)
    small = excess.clamp(max=math.expm1(largest))
    return (torch.log1p(small * (small / (1 + small)) / 4) + (log_ratio.abs() - largest).clamp(min=0)) / 2


def largest_exponent(dtype: torch.dtype) -> float:
    """Half the largest exponent of a dtype (44 in float32): what an `exp` may be given so that products stay finite."""
    return math.log(torch.finfo(dtype).max) / 2


def symmetric_clamp(values: Tensor, limit: float | None) -> Tensor:
    """`values` clamped to `[-limit, limit]`; unchanged for `None`."""
    return values if limit is None else values.clamp(-limit, limit)


def kl_penalty(
    log_ratio: Tensor,
    kl_type: str,
    *,
    input_clamp: float | None,
    output_clamp: float | None,
    weight: Tensor | None = None,
    score_function: bool = False,
) -> Tensor:
    """Per-token KL penalty, `clamp( v * k(clamp(x)) )`, in nats.

    The weight `v` is what makes the gradient right. The gradient of `k(x)` alone misses the score-function term
    `k(x) * grad log policy` (that of k1 alone does not depend on the reference at all); `v = exp(lp - sg(lp))` has the
    value 1 and adds just that term, `v = exp(lp - gen)` also corrects for tokens that another engine drew. Where the
    input clamp bites, `v` carries no gradient, since `k` is then a constant that says nothing about the policy.

    Args:
        log_ratio: `x = ref - lp`, `[B, T]`, with masked positions already set to 0.
        kl_type: "k1", "k2" or "k3".
        input_clamp: `x` is clamped to `[-input_clamp, input_clamp]`; `None` for no clamp.
        output_clamp: likewise for the product; `None` for no clamp.
        weight: `v`, `[B, T]`, finite; `None` is the plain `k(x)`.
        score_function: `v = exp(lp - sg(lp))`, instead of a `weight`.

    Returns:
        `[B, T]`, the dtype of `log_ratio`.

    Source:
        Score-function term: Schulman (2020); Tang and Munos, arXiv:2506.09477.

    Example:
        >>> kl_penalty(torch.tensor([[30.0]]), "k1", input_clamp=20.0, output_clamp=10.0).item()
        -10.0
    """
    # Without an input clamp too, `exp` must not overflow: the output clamp would hide the value, not the gradient.
    largest = largest_exponent(log_ratio.dtype)
    if input_clamp is None:
        x = log_ratio.clamp(max=largest)
    else:
        x = log_ratio.clamp(-input_clamp, min(input_clamp, largest))
    estimate = kl_estimate(x, kl_type)
    if score_function:
        # To first order, and with the clamp in it: lp - sg(lp) = sg(x) - x where the clamp does not bite.
        estimate = (1 + (x.detach() - x)) * estimate
    elif weight is not None:
        if input_clamp is not None:
            weight = torch.where(log_ratio.abs() > input_clamp, weight.detach(), weight)
        estimate = weight * estimate
    return symmetric_clamp(estimate, output_clamp)
