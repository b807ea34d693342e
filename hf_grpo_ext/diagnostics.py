"""What is logged: metrics that combine exactly over micro-batches and processes, and what the rewards say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from .grouping import group_has_signal
from .reductions import masked_mean

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


class MetricWindow:
    """Collects the metrics of an optimizer step on the device and brings them to the host once.

    A metric is added with a declared reduction, "sum", "min" or "max". A mean is added as a share, already divided by
    the count of the whole step, so that the sum over micro-batches and processes is the mean: 3 of 12 and 3 of 4
    together are .375, not the mean of .25 and .75.

    Example:
        >>> window = MetricWindow()
        >>> for clipped in (3.0, 3.0):
        ...     window.add({"clip_fraction": torch.tensor(clipped / 16)}, {"clip_fraction": "sum"})
        >>> window.flush(gather=lambda values: values)
        {'clip_fraction': 0.375}
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._reductions: dict[str, str] = {}

    def add(self, metrics: Mapping[str, Tensor], reductions: Mapping[str, str]) -> None:
        """Adds the metrics of one micro-batch: detached scalars on one device. Does not wait for the device."""
        for name, value in metrics.items():
            if reductions[name] not in REDUCTIONS:
                raise ValueError(
                    f"Metric {name!r} has the reduction {reductions[name]!r}: use one of {list(REDUCTIONS)}."
                )
            value = value.detach().float()
            if name in self._values:
                value = REDUCTIONS[reductions[name]](torch.stack([self._values[name], value]))
            self._values[name] = value
            self._reductions[name] = reductions[name]

    def flush(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Reduces over all processes, empties the window and returns the values; NaN for an extreme of nothing.

        Args:
            gather: takes `[1, M]` and returns `[P, M]`, the rows of P processes that hold the same metrics.
        """
        if not self._values:
            return {}
        names = list(self._values)
        rows = gather(torch.stack([self._values[name] for name in names])[None])
        reduced = torch.stack([REDUCTIONS[self._reductions[name]](rows[:, i]) for i, name in enumerate(names)])
        extremes = torch.tensor([self._reductions[name] != "sum" for name in names], device=reduced.device)
        reduced = torch.where(extremes & reduced.isinf(), torch.nan, reduced)
        self._values.clear()
        self._reductions.clear()
        return dict(zip(names, reduced.tolist(), strict=True))


def frac_groups_without_signal(values: Tensor, group_ids: Tensor) -> Tensor:
    """Share of the groups in which no value differs from another, of the groups that have a value at all.

    A component that applies to some prompts only is judged by those. NaN if no group has a value.

    Args:
        values: `[N]` rewards, NaN where a row has none or does not count.
        group_ids: `[N]`.

    Returns:
        A scalar in `[0, 1]`, or NaN.

    Example:
        >>> values = torch.tensor([1.0, 0.0, 0.5, 0.5, float("nan"), float("nan")])
        >>> frac_groups_without_signal(values, torch.tensor([0, 0, 1, 1, 2, 2])).item()
        0.5
    """
    scored, signal = ~values.isnan(), group_has_signal(values, group_ids)
    groups, silent = len(torch.unique(group_ids[scored])), len(torch.unique(group_ids[scored & ~signal]))
    return torch.tensor(silent / groups if groups else torch.nan)


def advantage_shares(component_advantages: Tensor) -> Tensor:
    """How much of the variance of the summed advantage each component makes up.

        share_k = cov(D_k, S) / var(S),   S = sum_k D_k,   so that   sum_k share_k = 1

    Below 0 where a component works against the others, above 1 where the others work against it.

    Args:
        component_advantages: `D`, `[N, K]`, from `AdvantageEstimator.component_advantages`; a row with NaN does not
            count.

    Returns:
        `[K]`, float64 on the CPU; NaN if the sum varies by no more than rounding.

    Example:
        >>> advantage_shares(torch.tensor([[3.0, 1.0], [-3.0, -1.0]])).tolist()
        [0.75, 0.25]
    """
    terms = _rows_that_count(component_advantages)
    undefined = terms.new_full((terms.shape[-1],), torch.nan)
    if not len(terms):
        return undefined
    total = terms.sum(-1)
    # The sum of K terms, each from a few rounded operations: two components that cancel leave noise, no signal.
    noise = 16 * terms.shape[-1] * torch.finfo(component_advantages.dtype).eps * terms.abs().amax()
    if total.amax() - total.amin() <= noise:
        return undefined
    centred = total - total.mean()
    return centred @ terms / centred.square().sum()


def advantage_correlations(component_advantages: Tensor) -> Tensor:
    """Pearson correlation of the advantages of each pair of components; below 0 where they ask for the opposite.

        corr_kl = cov(D_k, D_l) / sqrt(var(D_k) var(D_l))

    Args:
        component_advantages: `D`, `[N, K]`, as in `advantage_shares`.

    Returns:
        `[K, K]`, float64 on the CPU; NaN for a component that does not vary.

    Example:
        >>> correlations = advantage_correlations(torch.tensor([[1.0, -2.0, 0.0], [-1.0, 2.0, 0.0]]))
        >>> correlations[0].tolist()
        [1.0, -1.0, nan]
    """
    terms = _rows_that_count(component_advantages)
    if not len(terms):
        return terms.new_full((terms.shape[-1],) * 2, torch.nan)
    constant = terms.amax(0) == terms.amin(0)
    centred = (terms - terms.mean(0)).masked_fill(constant, torch.nan)
    products = centred.T @ centred
    squares = products.diagonal()
    return (products / (squares[:, None] * squares).sqrt()).clamp(-1, 1)


def _rows_that_count(component_advantages: Tensor) -> Tensor:
    # On the CPU in float64: one transfer, and no square of a float32 vanishes.
    terms = component_advantages.detach().cpu().double()
    return terms[~terms.isnan().any(-1)]


def reward_metrics(columns: Mapping[str, Tensor], group_ids: Tensor, component_advantages: Tensor) -> dict[str, float]:
    """What the components of a generation batch say about its signal; what is not defined is left out.

        rewards/<name>/frac_groups_without_signal      each component
        rewards/<name>/advantage_share                 two components or more
        rewards/correlation/<a>/<b>                    each pair, names in alphabetical order

    Args:
        columns: component name -> `[N]` rewards of all processes, NaN where a component is absent.
        group_ids: `[N]`.
        component_advantages: `[N, K]`, components in the order of `columns`, NaN in rows that do not count.

    Returns:
        Metric name -> value.

    Example:
        >>> columns = {"b": torch.tensor([1.0, 0.0]), "a": torch.tensor([0.0, 1.0])}
        >>> reward_metrics(columns, torch.zeros(2), torch.tensor([[1.0, -0.5], [-1.0, 0.5]]))
        {'rewards/b/frac_groups_without_signal': 0.0, 'rewards/a/frac_groups_without_signal': 0.0,
         'rewards/b/advantage_share': 2.0, 'rewards/a/advantage_share': -1.0, 'rewards/correlation/a/b': -1.0}
    """
    silent_rows = component_advantages.isnan().any(-1)
    values = {
        f"rewards/{name}/frac_groups_without_signal": frac_groups_without_signal(
            column.masked_fill(silent_rows, torch.nan), group_ids
        )
        for name, column in columns.items()
    }
    if len(columns) > 1:
        shares = advantage_shares(component_advantages)
        values |= {f"rewards/{name}/advantage_share": shares[index] for index, name in enumerate(columns)}
        place = {name: index for index, name in enumerate(columns)}
        correlations = advantage_correlations(component_advantages)
        values |= {
            f"rewards/correlation/{a}/{b}": correlations[place[a], place[b]]
            for a, b in combinations(sorted(columns), 2)
        }
    return {name: value.item() for name, value in values.items() if not value.isnan()}


def sequence_logprob_error(prev: Tensor, generation: Tensor, mask: Tensor) -> Tensor:
    """How far two engines disagree on a row: the mean over its tokens of `exp|gen - prev|`, a factor, at least 1.

    Unlike a geometric mean of the ratios, errors of opposite sign do not cancel: +0.5 and -0.5 nats give 1.65.

    Args:
        prev: log-probabilities by the engine that trains, `[B, T]`, nats.
        generation: those by the engine that sampled; NaN where it has none, which is no evidence.
        mask: `[B, T]`.

    Returns:
        `[B]`; 1 for a row without tokens.

    Example:
        >>> prev, gen = torch.zeros(1, 2), torch.tensor([[0.5, -0.5]])
        >>> round(sequence_logprob_error(prev, gen, torch.ones(1, 2)).item(), 2)
        1.65
    """
    known = mask.bool() & generation.isfinite() & prev.isfinite()
    error = torch.where(known, (generation - prev).abs(), 0).exp()
    count = known.sum(-1)
    mean = masked_mean(error, known, count, dim=-1)
    return torch.where(count > 0, mean, 1.0)


def mismatch_metrics(error: Tensor, counts: Tensor, agree: Tensor) -> dict[str, float]:
    """What is logged of `seq_logprob_error_threshold`: the error before and after, and how many rows it left out.

    Args:
        error: `[N]`, from `sequence_logprob_error`, of all processes.
        counts: `[N]` bool, rows that count before.
        agree: `[N]` bool, rows that count after.
    """
    metrics = {"seq_logprob_error/masked_rows": float((counts & ~agree).sum())}
    for when, rows in (("before", counts), ("after", agree)):
        values = error[rows]
        if len(values):
            metrics |= {
                f"seq_logprob_error/{when}_{name}": float(getattr(values, name)()) for name in ("max", "mean", "min")
            }
    return metrics


def combine_rounds(name: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    """One value of a metric that each round of a batch has logged: its extreme, its sum, or its mean over the rows.

    Args:
        name: of the metric; its last part says what it is.
        values: of the last rounds, in their order; NaN where a round has nothing to say.
        sizes: rows of all rounds.

    Example:
        >>> combine_rounds("reward", [1.0, 2.0], [30, 10])
        1.25
        >>> combine_rounds("completions/max_length", [7.0, 9.0], [30, 10])
        9.0
    """
    last = name.split("/")[-1]
    pairs = [(v, size) for v, size in zip(values, sizes[-len(values) :], strict=True) if not math.isnan(v)]
    known = [value for value, _ in pairs]
    if not known:
        return math.nan
    if last.endswith("_rows"):
        return sum(known)
    for extreme in (min, max):
        if extreme.__name__ in last.split("_"):
            return extreme(known)
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs)
