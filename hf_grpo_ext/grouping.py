"""Baseline and standard deviation inside a group of rollouts, for groups of any size, with NaN as "not scored"."""

from __future__ import annotations

import torch
from torch import Tensor


def group_rows(group_ids: Tensor) -> Tensor:
    """Index of the rows of each group, padded with -1: `[N] -> [P, G]` for P groups of at most G rows.

    Example:
        >>> group_rows(torch.tensor([7, 3, 7])).tolist()
        [[1, -1], [0, 2]]
    """
    ids, sizes = torch.unique_consecutive(group_ids, return_counts=True)
    if len(ids) and bool((sizes == sizes[0]).all()) and len(torch.unique(ids)) == len(ids):
        return torch.arange(len(group_ids), device=group_ids.device).view(len(ids), -1)  # in blocks of one size
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    rank = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[group[order]]
    rows = torch.full((len(sizes), int(sizes.max()) if len(sizes) else 0), -1, device=order.device, dtype=torch.long)
    rows[group[order], rank] = order
    return rows


def _members(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(rows, values of the rows, whether each votes)`, each `[P, G]`, G >= 2; padding and NaN do not vote."""
    rows = group_rows(group_ids)
    if rows.shape[1] < 2:  # so that there is a second largest
        rows = torch.nn.functional.pad(rows, (0, 2 - rows.shape[1]), value=-1)
    members = values[rows]
    return rows, members, (rows >= 0) & ~members.isnan()


def _by_row(grouped: Tensor, rows: Tensor, count: int) -> Tensor:
    """From the layout of the groups back to the rows: `[P, G] -> [N]`."""
    out = grouped.new_empty(count + 1)
    out[rows] = grouped  # the padding, -1, goes to the end
    return out[:count]


def group_baseline_and_std(
    values: Tensor, group_ids: Tensor, *, leave_one_out: bool, resolution: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of the values that vote for each row of a group.

    With `leave_one_out` the voters of row i are the other rows of its group, so that neither statistic depends on
    `r_i` and the policy gradient stays unbiased; without it they are all rows of the group:

        b_i = mean_{j in V(i)} r_j
        std_i = sqrt( sum_{j in V(i)} (r_j - b_i)^2 / (|V(i)| - 1) )

    Both are sums of deviations from a value in the middle of the group, and values that are all identical are
    recognised by `max == min`: their mean is that value and their standard deviation is 0, both exactly.
    (`E[x^2] - E[x]^2` in float32 leaves a residue on groups such as [1, .15, .15, .15], and a division by its root
    turns an advantage of 0.85 into thousands.)

    Args:
        values: `[N]` rewards, floating point; NaN marks a row that does not vote.
        group_ids: `[N]` integers, equal for the rollouts of one group.
        leave_one_out: whether a row is left out of its own statistics.
        resolution: `[N]`, how far rounding alone can have moved each value; voters within it of each other count as
            identical. `None` for values that were not computed.

    Returns:
        `(baseline, std)`, each `[N]` in the dtype of `values`. Where nobody votes the baseline is NaN; where fewer
        than two vote the std is 0. What a row without a value gets is of no meaning.

    Source:
        Kool et al., Buy 4 REINFORCE Samples, Get a Baseline for Free! (2019); Ahmadian et al., arXiv:2402.14740.

    Example:
        >>> b, s = group_baseline_and_std(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([5, 5, 5]), leave_one_out=True)
        >>> b.tolist(), s[0].item()
        ([0.0, 0.5, 0.5], 0.0)
    """
    rows, members, votes = _members(values, group_ids)
    ordered = members.masked_fill(~votes, torch.inf).sort(-1).values
    voters = votes.sum(-1, keepdim=True)
    places = torch.cat([(voters - 1) // 2, voters - 2, voters - 1], dim=-1).clamp(min=0)
    middle, second, highest = ordered.gather(-1, places).T.unsqueeze(-1)
    lowest, second_lowest = ordered[:, :1], ordered[:, 1:2]

    # Deviations from a value in the middle of the voters: their sums lose no digits, not even of the voters beside one
    # that is far away, which a sum over all of them less that one would.
    deviation = torch.where(votes, members - middle, 0)
    if leave_one_out:
        count = voters - votes.long()
        highest = torch.where(members == highest, second, highest)
        lowest = torch.where(members == lowest, second_lowest, lowest)
        others = 1 - torch.eye(rows.shape[1], dtype=values.dtype, device=values.device)
        total = (deviation[:, None, :] * others).sum(-1)
        squares = (deviation.square()[:, None, :] * others).sum(-1)
    else:
        count = voters
        total, squares = deviation.sum(-1, keepdim=True), deviation.square().sum(-1, keepdim=True)

    shift = total / count
    varies = highest - lowest > _group_resolution(values, rows, votes, resolution)[:, None]
    baseline = torch.where(varies | (count == 0), middle + shift, highest)
    variance = (squares - total * shift).clamp(min=0) / (count - 1).clamp(min=1)
    std = torch.where(varies, variance.sqrt(), 0)
    return _by_row(baseline.expand_as(members), rows, len(values)), _by_row(std.expand_as(members), rows, len(values))


def _group_resolution(values: Tensor, rows: Tensor, votes: Tensor, resolution: Tensor | None) -> Tensor:
    """The largest resolution among the voters of each group, `[P]`."""
    if resolution is None:
        return values.new_zeros(rows.shape[0])
    return resolution[rows].masked_fill(~votes, 0).amax(-1)


def group_has_signal(values: Tensor, group_ids: Tensor, resolution: Tensor | None = None) -> Tensor:
    """Whether the values of a row's group differ by more than their resolution: `[N]` bool, NaN ignored.

    Example:
        >>> group_has_signal(torch.tensor([0.45, 0.45, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [False, False, True, True]
    """
    rows, members, votes = _members(values, group_ids)
    spread = members.masked_fill(~votes, -torch.inf).amax(-1) - members.masked_fill(~votes, torch.inf).amin(-1)
    varies = spread > _group_resolution(values, rows, votes, resolution)
    return _by_row(varies[:, None].expand_as(rows), rows, len(values))
