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
    kept = torch.where(mask.bool(), values, 0)
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
    return total / divisor(denominator, total)


def divisor(count: Tensor | float, like: Tensor) -> Tensor:
    """`count` as a divisor, in the dtype of `like`; 1 where it is 0: the mean of nothing adds nothing.

    Example:
        >>> (torch.tensor([3.0, 0.0]) / divisor(torch.tensor([2, 0]), torch.zeros(()))).tolist()
        [1.5, 0.0]
    """
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return torch.where(count == 0, 1, count)


def clean_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` is 1, by one product: for values that are finite everywhere.

    Args:
        values: `[...]`, floating point, finite where the mask is 0.
        mask: the shape and dtype of `values`, 0 or 1.

    Returns:
        Scalar.

    Example:
        >>> clean_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 0.0])).item()
        3.0
    """
    return torch.dot(values.flatten(), mask.flatten())


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid tokens of each row, kept broadcastable: `[B, T] -> [B, 1]`; 0 for a row without any.

    Example:
        >>> token_mean(torch.tensor([[2.0, 4.0], [1.0, 1.0]]), torch.tensor([[1, 1], [0, 0]])).tolist()
        [[3.0], [0.0]]
    """
    return masked_mean(values, mask, denominator=mask.sum(-1), dim=-1).unsqueeze(-1)
