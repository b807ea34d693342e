"""Dynamic sampling: which groups to keep, how many more to draw, and where their prompts come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grouping import group_has_signal
from .rewards import weighted_sum


def groups_with_signal(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_size: int, *, per_component: bool
) -> Tensor:
    """Groups whose raw rewards differ, so that some of their rollouts are better than others: `[P]` bool.

    Args:
        rewards: component name -> `[P * G]`, the groups one after the other; NaN where there is none.
        weights: component name -> weight.
        group_size: `G`.
        per_component: whether one component that differs is enough (gdpo), although the weighted sums are equal.

    Example:
        >>> rewards = {"a": torch.tensor([1.0, 0.0, 1.0, 1.0]), "b": torch.tensor([0.0, 1.0, 1.0, 1.0])}
        >>> groups_with_signal(rewards, {"a": 1.0, "b": 1.0}, 2, per_component=False).tolist()
        [False, False]
        >>> groups_with_signal(rewards, {"a": 1.0, "b": 1.0}, 2, per_component=True).tolist()
        [True, False]
    """
    table = torch.stack(list(rewards.values()), dim=-1)
    ids = torch.arange(len(table), device=table.device) // group_size
    if per_component:
        signal = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        for name, column in rewards.items():
            if weights[name] != 0:
                signal = signal | group_has_signal(column, ids)
    else:
        weight = torch.tensor([weights[name] for name in rewards], dtype=table.dtype, device=table.device)
        totals, resolution = weighted_sum(table, weight)
        signal = group_has_signal(totals, ids, resolution)
    return signal.view(-1, group_size)[:, 0]


@dataclass
class Rounds:
    """The rounds of one generation batch: what was drawn, what is kept, what is still missing.

    Every process makes the same one from the same gathered rewards.

    Args:
        needed: number of groups of a full batch.
        max_rounds: at most so many rounds.
        multiplier: how many times more groups than are needed a round draws.
        whole: a round draws a multiple of so many groups, so that its rows divide among the processes.
    """

    needed: int
    max_rounds: int
    multiplier: float = 1.0
    whole: int = 1
    kept: list[int] = field(default_factory=list)  # groups with signal, numbered in the order drawn
    silent: list[int] = field(default_factory=list)
    count: int = 0  # rounds so far
    pool: list[int] = field(default_factory=list)  # the groups chosen so far, and then those of the last round

    def record(self, signal: Tensor) -> None:
        """Takes note of a round: `[P]` bool, from `groups_with_signal`."""
        first = self.drawn
        for group, keep in enumerate(signal.tolist(), start=first):
            (self.kept if keep else self.silent).append(group)
        self.pool += range(first, self.drawn)
        self.count += 1

    def take(self) -> list[int]:
        """The chosen groups, by their place among those chosen before and the last round, one after the other.

        What is not chosen now never will be: groups with signal come first, in the order drawn.
        """
        chosen = self.chosen()
        places = [self.pool.index(group) for group in chosen]
        self.pool = chosen
        return places

    def chosen(self) -> list[int]:
        """The groups of the batch: those with signal, filled up with others, in the order drawn."""
        return (self.kept + self.silent)[: self.needed]

    @property
    def drawn(self) -> int:
        """Groups so far."""
        return len(self.kept) + len(self.silent)

    @property
    def missing(self) -> int:
        """Groups with signal that the batch still needs."""
        return max(0, self.needed - len(self.kept))

    @property
    def goes_on(self) -> bool:
        """Whether there is another round."""
        return self.count == 0 or (self.missing > 0 and self.count < self.max_rounds)

    def next_size(self) -> int:
        """Groups of the next round: what is missing, over the share of groups that had signal so far.

        At most `multiplier` times the full batch, which is also what the first round draws.
        """
        most = self.multiplier * self.needed
        expected = self.multiplier * self.missing * self.drawn / len(self.kept) if self.kept else most
        return math.ceil(min(most, expected) / self.whole) * self.whole

    def metrics(self) -> dict[str, float]:
        """What is logged: groups, and the share of the rows of the batch that have signal."""
        trained = min(self.needed, len(self.kept))
        return {
            "dynamic_sampling/rounds": float(self.count),
            "dynamic_sampling/kept": float(trained),
            "dynamic_sampling/dropped_without_signal": float(len(self.silent) - (self.needed - trained)),
            "dynamic_sampling/dropped_surplus": float(len(self.kept) - trained),
            "dynamic_sampling/frac_rows_with_signal": trained / self.needed,
        }


def joined_columns(before: dict[str, Tensor], new: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """Some rows of two reward tables, one below the other; NaN where a component is missing in one of them.

    Example:
        >>> a, b = {"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0]), "y": torch.tensor([3.0])}
        >>> {name: column.tolist() for name, column in joined_columns(a, b, [1, 0]).items()}
        {'x': [2.0, 1.0], 'y': [3.0, nan]}
    """
    some = next(iter(new.values()))
    heights = (len(next(iter(before.values()))) if before else 0, len(some))
    return {
        name: torch.cat(
            [
                table.get(name, some.new_full((height,), torch.nan))
                for table, height in zip((before, new), heights, strict=True)
            ]
        )[rows]
        for name in {**before, **new}
    }


class PromptStream:
    """Endless prompts besides those of the data loader: one permutation of the data set after the other.

    Where it stands is one number, so that a resumed run goes on with the next prompt.

    Args:
        size: number of prompts in the data set.
        seed: of the permutations.
        drawn: how many prompts were taken before.

    Example:
        >>> whole = PromptStream(size=3, seed=0).take(6)
        >>> sorted(whole[:3]), PromptStream(size=3, seed=0, drawn=2).take(4) == whole[2:]
        ([0, 1, 2], True)
    """

    def __init__(self, size: int, seed: int, drawn: int = 0) -> None:
        self.size, self.seed, self.drawn = size, seed, drawn

    def take(self, count: int) -> list[int]:
        """Indices of the next prompts."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, start = divmod(self.drawn, self.size)
            # A generator of its own, which draws the same whatever else is random, and not what the data loader draws.
            generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
            part = order[start : start + count - len(taken)]
            taken += part
            self.drawn += len(part)
        return taken
