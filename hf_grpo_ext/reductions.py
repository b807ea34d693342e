"""Masked sums and means. Every denominator is an argument: nothing here guesses what to divide by."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is 1.

    `sum_t m_t x_t`, with the masked positions replaced before the sum: a NaN or an infinity under the mask does not
    reach the result (`0 * nan` would).

    Args:
        values: `[...]`, floating point.
        mask: broadcastable to `values`, 0/1 or bool.
        dim: the dimension to sum over; `None` sums over all.

    Returns:
        The sum, in the dtype of `values`.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1, 1, 0])).item()
        3.0
    """
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, denominator: Tensor | float, dim: int | None = None) -> Tensor:
    """Masked sum divided by `denominator`; 0 where the denominator is 0.

    Args:
        values: `[...]`, floating point.
        mask: broadcastable to `values`, 0/1 or bool.
        denominator: what to divide by, often a count that spans more than this tensor (all micro-batches and
            processes of an optimizer step).
        dim: the dimension to sum over; `None` sums over all.

    Returns:
        The mean, in the dtype of `values`.

    Example:
        >>> masked_mean(torch.tensor([3.0, 5.0, 9.0]), torch.tensor([1, 1, 0]), denominator=4).item()
        2.0
    """
    total = masked_sum(values, mask, dim)
    count = torch.as_tensor(denominator, dtype=values.dtype, device=values.device)
    # A count of 0 means that the sum is empty, and the mean of nothing adds nothing.
    return total / torch.where(count == 0, torch.ones_like(count), count)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid tokens of each row, kept broadcastable: `[B, T] -> [B, 1]`; 0 for a row without any.

    Example:
        >>> token_mean(torch.tensor([[2.0, 4.0], [1.0, 1.0]]), torch.tensor([[1, 1], [0, 0]])).tolist()
        [[3.0], [0.0]]
    """
    return masked_mean(values, mask, denominator=mask.sum(-1), dim=-1).unsqueeze(-1)
