"""Rewards relative to their group, and whitening over the rows or the tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouping import group_baseline_and_std
from .reductions import divisor, masked_mean

NORMALIZE_EPSILON = 1e-6
WHITEN_VARIANCE_FLOOR = 1e-8


def normalized_advantage(
    rewards: Tensor, group_ids: Tensor, *, leave_one_out: bool, normalize: bool, resolution: Tensor | None = None
) -> Tensor:
    """Group-relative advantage of one reward.

        A_i = r_i - b_i,   divided by (std_i + 1e-6) where std_i > 0

    Args:
        rewards: `[N]`, NaN where there is none.
        group_ids: `[N]`.
        leave_one_out: whether a row is left out of its own `b_i` and `std_i`.
        normalize: whether to divide.
        resolution: `[N]`, how far rounding alone can have moved each reward; `None` for 0.

    Returns:
        `[N]`; exactly 0 for a row without a reward, without company, or in a group of equal rewards.

    Source:
        GRPO, arXiv:2402.03300.

    Example:
        >>> rewards, one_group = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4)
        >>> normalized_advantage(rewards, one_group, leave_one_out=False, normalize=False).tolist()
        [0.75, -0.25, -0.25, -0.25]
    """
    baseline, std = group_baseline_and_std(rewards, group_ids, leave_one_out=leave_one_out, resolution=resolution)
    advantage = rewards - baseline
    if resolution is not None:
        advantage = torch.where(advantage.abs() <= resolution, 0, advantage)
    if normalize:
        advantage = torch.where(std > 0, advantage / (std + NORMALIZE_EPSILON), advantage)
    return advantage.nan_to_num(0.0)


def each_component(table: Tensor, group_ids: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """`normalized_advantage` of each column of the table on its own, `[N, K]`.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
        >>> each_component(table, torch.zeros(2), leave_one_out=False, normalize=False).tolist()
        [[0.5, -2.0], [-0.5, 2.0]]
    """
    columns = [
        normalized_advantage(column, group_ids, leave_one_out=leave_one_out, normalize=normalize)
        for column in table.unbind(-1)
    ]
    return torch.stack(columns, dim=-1)


def whiten_rows(values: Tensor, valid: Tensor, resolution: Tensor | float) -> Tensor:
    """Whitening over rows, `(x - mean) / std` with the unbiased std, over the valid rows; 0 elsewhere.

    What rounding alone can have left is taken as 0: a mean, or a spread of all values, within `resolution`. Two
    components that cancel leave 1e-8 of noise, which a division by its own std would turn into advantages of 1.

    Args:
        values: `[N]`.
        valid: `[N]` bool.
        resolution: scalar, the rounding error of `values`.

    Returns:
        `[N]`.

    Example:
        >>> x, valid = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> whiten_rows(x, valid, torch.tensor(0.0)).tolist()
        [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    count = valid.sum()
    mean = masked_mean(values, valid, count)
    mean = torch.where(mean.abs() <= resolution, torch.zeros_like(mean), mean)
    centered = torch.where(valid, values - mean, torch.zeros_like(values))
    spread = values.masked_fill(~valid, -torch.inf).amax() - values.masked_fill(~valid, torch.inf).amin()
    std = (centered.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return torch.where(spread > resolution, centered / std, torch.zeros_like(centered))


def whiten_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Whitening over tokens, `(x - mean) * rsqrt(max(var, 1e-8))` with the biased variance; zeros if no token is valid.

    Args:
        values: `[N, T]`, or `[N, 1]` for one value that all tokens of a row have.
        mask: `[N, T]` bool.

    Returns:
        The shape of `values`; masked positions are scaled by the same mean and variance, and are of no meaning.

    Source:
        REINFORCE++, arXiv:2501.03262.

    Example:
        >>> whiten_tokens(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]])).tolist()
        [[-1.0, 1.0]]
        >>> whiten_tokens(torch.tensor([[1.0], [4.0]]), torch.tensor([[True, True], [True, False]])).tolist()
        [[-0.7071067690849304], [1.4142135381698608]]
    """
    tokens = mask if values.shape == mask.shape else mask.sum(-1, keepdim=True)  # how many have the value
    valid = tokens > 0
    # Masked positions take a value that counts, so that the extremes are those of the valid ones.
    some = values.flatten()[valid.flatten().long().argmax()]
    filled = torch.where(valid, values, some)
    low, high = torch.aminmax(filled)
    count = divisor(tokens.sum(), values)
    mean = (filled * tokens).sum() / count
    variance = ((filled - mean).square() * tokens).sum() / count
    whitened = (values - mean) * variance.clamp(min=WHITEN_VARIANCE_FLOOR).rsqrt()
    return torch.where(valid.any() & (low < high), whitened, 0)
