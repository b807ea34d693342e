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


class _Layout:
    """From rows to groups and back: `[N] <-> [P, G]`, G >= 2, padded where groups differ in size.

    Groups that follow one another in blocks of one size and by number, as a trainer has them, are a view.
    """

    def __init__(self, group_ids: Tensor) -> None:
        self.count = len(group_ids)
        ids, sizes = torch.unique_consecutive(group_ids, return_counts=True)
        in_blocks = bool((sizes > 1).all() & (sizes == sizes[:1]).all() & (ids[1:] > ids[:-1]).all())
        self.size = self.count // len(ids) if self.count else 2
        self.rows: Tensor | None = None
        if not in_blocks:
            rows = group_rows(group_ids)  # at least two wide, so that there is a second largest
            self.rows = torch.nn.functional.pad(rows, (0, max(0, 2 - rows.shape[1])), value=-1)

    def take(self, values: Tensor) -> Tensor:
        """`[P, G]`, of any value where padded."""
        return values.reshape(-1, self.size) if self.rows is None else values[self.rows]

    def votes(self, members: Tensor) -> Tensor:
        """Which members vote: neither padding nor NaN does."""
        return ~members.isnan() if self.rows is None else (self.rows >= 0) & ~members.isnan()

    def put(self, grouped: Tensor) -> Tensor:
        """`[P, G]`, or what expands to it, to `[N]`."""
        if self.rows is None:
            return grouped.expand(-1, self.size).reshape(-1)
        out = grouped.new_empty(self.count + 1)
        out[self.rows] = grouped.expand_as(self.rows)  # the padding, -1, goes to the end
        return out[: self.count]


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
    layout = _Layout(group_ids)
    members = layout.take(values)
    votes = layout.votes(members)
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
        total, squares = _sums_of_others(deviation), _sums_of_others(deviation.square())
    else:
        count = voters
        total, squares = deviation.sum(-1, keepdim=True), deviation.square().sum(-1, keepdim=True)

    shift = total / count
    varies = highest - lowest > _group_resolution(layout, votes, resolution)
    baseline = torch.where(varies | (count == 0), middle + shift, highest)
    variance = (squares - total * shift).clamp(min=0) / (count - 1).clamp(min=1)
    std = torch.where(varies, variance.sqrt(), 0)
    return layout.put(baseline), layout.put(std)


def _sums_of_others(members: Tensor) -> Tensor:
    """For each member of a group the sum of all others, `[P, G]`, added up without it."""
    # Not a matrix product, which a setting can make coarse (TF32).
    others = 1 - torch.eye(members.shape[1], dtype=members.dtype, device=members.device)
    return (members[:, None, :] * others).sum(-1)


def _group_resolution(layout: _Layout, votes: Tensor, resolution: Tensor | None) -> Tensor | float:
    """The largest resolution among the voters of each group, `[P, 1]`."""
    if resolution is None:
        return 0.0
    return layout.take(resolution).masked_fill(~votes, 0).amax(-1, keepdim=True)


def group_has_signal(values: Tensor, group_ids: Tensor, resolution: Tensor | None = None) -> Tensor:
    """Whether the values of a row's group differ by more than their resolution: `[N]` bool, NaN ignored.

    Example:
        >>> group_has_signal(torch.tensor([0.45, 0.45, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [False, False, True, True]
    """
    layout = _Layout(group_ids)
    members = layout.take(values)
    votes = layout.votes(members)
    highest = members.masked_fill(~votes, -torch.inf).amax(-1, keepdim=True)
    lowest = members.masked_fill(~votes, torch.inf).amin(-1, keepdim=True)
    return layout.put(highest - lowest > _group_resolution(layout, votes, resolution))
