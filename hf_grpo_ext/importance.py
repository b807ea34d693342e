"""Importance ratios: of the current policy to the one that was scored, and of that to the engine that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from .kl import largest_exponent
from .reductions import masked_sum, token_mean

TRUNCATION_TYPES = ("tis", "icepop", "seq-mask-tis")


def finite_exp(log_weight: Tensor) -> Tensor:
    """`exp(log_weight)`, and 0 with zero gradient where that is not finite (an infinite ratio, a NaN log-probability).

    Example:
        >>> finite_exp(torch.tensor([0.0, 1000.0, float("nan")])).tolist()
        [1.0, 0.0, 0.0]
    """
    weight = torch.exp(log_weight)
    if not log_weight.requires_grad:
        return weight.nan_to_num(0.0, posinf=0.0)
    # The inner `where` keeps the infinity out of the backward pass, where 0 * inf is NaN.
    finite = weight.isfinite()
    return torch.where(finite, torch.exp(torch.where(finite, log_weight, 0)), 0)


def policy_log_ratio(logprobs: Tensor, prev_logprobs: Tensor, mask: Tensor, *, sequence_level: bool) -> Tensor:
    """Logarithm of the policy ratio of each token.

        token level:     log rho_it = lp_it - prev_it
        sequence level:  log rho_i  = (1 / |m_i|) sum_t m_it (lp_it - prev_it), for every t

    It is cut off at half the largest exponent of the dtype (44 in float32), where the ratio has long been clipped, so
    that the gradient behind the clip is 0 and not `0 * inf`.

    Args:
        logprobs: `lp`, `[B, T]`, nats, 0 where masked: a padded log-ratio of 200 must not reach an `exp`.
        prev_logprobs: `prev`, `[B, T]`, nats, 0 where masked.
        mask: `[B, T]`, 0/1 or bool.
        sequence_level: one ratio a row (GSPO).

    Returns:
        `[B, T]`.

    Source:
        PPO, arXiv:1707.06347; GSPO, arXiv:2507.18071.
    """
    log_ratio = logprobs - prev_logprobs
    if sequence_level:
        log_ratio = token_mean(log_ratio, mask).expand_as(log_ratio)
    return log_ratio.clamp(max=largest_exponent(log_ratio.dtype))


def actor_weights(log_ratio: Tensor, mask: Tensor, *, sequence_level: bool) -> Tensor:
    """Weight of the training policy over the sampling engine: `exp(prev - gen)`, or one a row, `exp(sum_t prev - gen)`.

    Args:
        log_ratio: `prev - gen`, `[B, T]`, nats, 0 where masked.
        mask: `[B, T]`.
        sequence_level: one weight a row, over the sum of its tokens.

    Returns:
        `[B, T]`, or `[B, 1]` at sequence level. A weight that is not finite is 0.
    """
    if sequence_level:
        log_ratio = masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1)
    return finite_exp(log_ratio)


def truncate_weights(
    weights: Tensor, log_ratio: Tensor, mask: Tensor, *, kind: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: bound the actor weights.

        tis:           w <- clamp(w, low, high)
        icepop:        w <- w if low <= w <= high else 0
        seq-mask-tis:  w_i. <- w_i. if low <= exp(mean_t log w_it) <= high else 0

    Args:
        weights: `[B, T]` or `[B, 1]`, from `actor_weights`.
        log_ratio: `prev - gen`, `[B, T]`, nats, 0 where masked.
        mask: `[B, T]`.
        kind: "tis", "icepop" or "seq-mask-tis".
        low: the lower bound, on the ratio (not on its logarithm).
        high: the upper bound, likewise.

    Returns:
        `(weights, out_of_bounds)`: the second is bool, `[B, T]` or `[B, 1]` (one decision a row).

    Raises:
        ValueError: for another `kind`.

    Source:
        TIS: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025);
        IcePop: Ling Team, arXiv:2510.18855.
    """
    judged = torch.exp(token_mean(log_ratio, mask)) if kind == "seq-mask-tis" else weights
    # Not `< low or > high`: a NaN, from a token that the engine could not score, is in no bounds.
    out_of_bounds = ~((judged >= low) & (judged <= high))
    if kind == "tis":
        return weights.clamp(low, high), out_of_bounds
    if kind in ("icepop", "seq-mask-tis"):
        return torch.where(out_of_bounds, 0, weights), out_of_bounds
    raise ValueError(
        f"Truncated importance sampling type {kind!r} is not known: it must be one of {', '.join(TRUNCATION_TYPES)}."
    )
