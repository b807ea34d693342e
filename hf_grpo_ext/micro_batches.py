"""What the micro-batches of an optimizer step share: the tokens and rows that its loss is divided by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def loss_token_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that the model generated and that count: `[B, T]` bool; no padding, no output of a tool.

    Args:
        batch: `completion_mask` `[B, T]`, and `tool_mask` `[B, T]` where tools were used.
    """
    mask = batch["completion_mask"].bool()
    tool_mask = batch.get("tool_mask")
    return mask if tool_mask is None else mask & tool_mask.bool()


def valid_counts(batches: Iterable[Mapping[str, Tensor]], *, tokens_per_row: int | None = None) -> Tensor:
    """Valid tokens and valid rows of the micro-batches of an optimizer step, `[2]`, float.

    The counts are the denominators of the loss. Summed over all processes once a step they make the gradient
    independent of how the rows are split.

    Args:
        batches: micro-batches with `completion_mask`, `tool_mask` (optional) and `sample_mask`.
        tokens_per_row: count this many tokens for each valid row instead of the valid ones: the constant denominator
            of Dr. GRPO (arXiv:2503.20783).

    Example:
        >>> batch = {"completion_mask": torch.tensor([[1, 1], [1, 0]]), "sample_mask": torch.tensor([True, False])}
        >>> valid_counts([batch]).tolist(), valid_counts([batch], tokens_per_row=8).tolist()
        ([2.0, 1.0], [8.0, 1.0])
    """
    counts = []
    for batch in batches:
        sample_mask = batch["sample_mask"].bool()
        rows = sample_mask.sum()
        tokens = rows * tokens_per_row if tokens_per_row else (loss_token_mask(batch) & sample_mask[:, None]).sum()
        counts.append(torch.stack([tokens, rows]))
    return torch.stack(counts).sum(0).float()
