"""Metrics that combine exactly over micro-batches and processes, with one collective an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
