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


def valid_counts(batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Valid tokens and valid rows of the micro-batches of an optimizer step, `[2]`, float.

    The counts are the denominators of the loss. Summed over all processes once a step they make the gradient
    independent of how the rows are split.

    Args:
        batches: micro-batches with `completion_mask`, `tool_mask` (optional) and `sample_mask`.

    Example:
        >>> batch = {"completion_mask": torch.tensor([[1, 1], [1, 0]]), "sample_mask": torch.tensor([True, False])}
        >>> valid_counts([batch]).tolist()
        [2.0, 1.0]
    """
    counts = []
    for batch in batches:
        sample_mask = batch["sample_mask"].bool()
        tokens = loss_token_mask(batch) & sample_mask[:, None]
        counts.append(torch.stack([tokens.sum(), sample_mask.sum()]))
    return torch.stack(counts).sum(0).float()


def constant_length_scale(toks: Tensor, seqs: Tensor, longest: int) -> Tensor:
    """What turns a mean over valid tokens into Dr. GRPO's: the sum over tokens, divided by `rows * longest`.

    Args:
        toks: valid tokens of the optimizer step, scalar.
        seqs: valid rows of the optimizer step, scalar.
        longest: the constant length of a row, in tokens.

    Source:
        Understanding R1-Zero-Like Training, arXiv:2503.20783.

    Example:
        >>> constant_length_scale(torch.tensor(6.0), torch.tensor(2.0), longest=4).item()
        0.75
    """
    return toks / (seqs * longest).clamp(min=1)
