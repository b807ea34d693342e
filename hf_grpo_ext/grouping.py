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
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    rank = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[group[order]]
    rows = torch.full((len(sizes), int(sizes.max()) if len(sizes) else 0), -1, device=order.device, dtype=torch.long)
    rows[group[order], rank] = order
    return rows


def _members(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(rows, values of the rows, whether each votes)`, each `[P, G]`; padding and NaN do not vote."""
    rows = group_rows(group_ids)
    members = values[rows.clamp(min=0)]
    return rows, members, (rows >= 0) & ~members.isnan()


def _by_row(grouped: Tensor, rows: Tensor) -> Tensor:
    """From the layout of the groups back to the rows: `[P, G] -> [N]`."""
    inside = rows >= 0
    out = grouped.new_empty(int(inside.sum()))
    out[rows[inside]] = grouped[inside]
    return out


def group_baseline_and_std(
    values: Tensor, group_ids: Tensor, *, leave_one_out: bool, resolution: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of the values that vote for each row of a group.

    With `leave_one_out` the voters of row i are the other rows of its group, so that neither statistic depends on
    `r_i` and the policy gradient stays unbiased; without it they are all rows of the group:

        b_i = mean_{j in V(i)} r_j
        std_i = sqrt( sum_{j in V(i)} (r_j - b_i)^2 / (|V(i)| - 1) )

    The variance takes two passes, and values that are all identical are recognised by `max == min`: their mean is that
    value and their standard deviation is 0, both exactly. (`E[x^2] - E[x]^2` in float32 leaves a residue on groups
    such as [1, .15, .15, .15], and a division by its root turns an advantage of 0.85 into thousands.)

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
    size = rows.shape[1]
    # voters[p, i, j]: does row j of group p vote for row i?
    voters = votes[:, None, :].expand(-1, size, -1)
    if leave_one_out:
        voters = voters & ~torch.eye(size, dtype=torch.bool, device=values.device)
    ballots = members[:, None, :].expand(-1, size, -1)
    count = voters.sum(-1)

    highest = ballots.masked_fill(~voters, -torch.inf).amax(-1)
    lowest = ballots.masked_fill(~voters, torch.inf).amin(-1)
    varies = highest - lowest > _group_resolution(values, rows, votes, resolution)[:, None]
    mean = ballots.masked_fill(~voters, 0).sum(-1) / count
    baseline = torch.where(varies | (count == 0), mean, highest)

    deviation = (ballots - baseline[..., None]).masked_fill(~voters, 0)
    variance = deviation.square().sum(-1) / (count - 1).clamp(min=1)
    std = torch.where(varies, variance.sqrt(), torch.zeros_like(variance))

    return _by_row(baseline, rows), _by_row(std, rows)


def _group_resolution(values: Tensor, rows: Tensor, votes: Tensor, resolution: Tensor | None) -> Tensor:
    """The largest resolution among the voters of each group, `[P]`."""
    if resolution is None:
        return values.new_zeros(rows.shape[0])
    return resolution[rows.clamp(min=0)].masked_fill(~votes, 0).amax(-1)


def group_has_signal(values: Tensor, group_ids: Tensor, resolution: Tensor | None = None) -> Tensor:
    """Whether the values of a row's group differ by more than their resolution: `[N]` bool, NaN ignored.

    Example:
        >>> group_has_signal(torch.tensor([0.45, 0.45, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [False, False, True, True]
    """
    rows, members, votes = _members(values, group_ids)
    spread = members.masked_fill(~votes, -torch.inf).amax(-1) - members.masked_fill(~votes, torch.inf).amin(-1)
    varies = spread > _group_resolution(values, rows, votes, resolution)
    return _by_row(varies[:, None].expand_as(rows), rows)
