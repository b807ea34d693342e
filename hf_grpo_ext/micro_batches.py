"""The micro-batches of an optimizer step: what their loss is divided by, and which rows go where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .packing import prompt_ids_of

PROMPT_KEYS = ("prompt_ids", "prompt_mask")


def loss_token_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that the model generated and that count: `[B, T]` bool; no padding, no output of a tool.

    Args:
        batch: `completion_mask` `[B, T]`, and `tool_mask` `[B, T]` where tools were used.
    """
    mask = batch["completion_mask"].bool()
    tool_mask = batch.get("tool_mask")
    return mask if tool_mask is None else mask & tool_mask.bool()


def counted_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens of `loss_token_mask` in the rows of `sample_mask`: `[B, T]` bool."""
    return loss_token_mask(batch) & batch["sample_mask"].bool()[:, None]


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
        counts.append(torch.stack([counted_tokens(batch).sum(), batch["sample_mask"].bool().sum()]))
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


def has_signal(batch: Mapping[str, Tensor]) -> Tensor:
    """Rows that move the policy: `[B]` bool, with a token that counts and an advantage that is not exactly 0.

    Args:
        batch: `completion_mask`, `tool_mask` (optional), `sample_mask` `[B]`, `advantages` `[B]` or `[B, T]`.

    Example:
        >>> batch = {"completion_mask": torch.ones(3, 2), "sample_mask": torch.tensor([True, True, False])}
        >>> has_signal({**batch, "advantages": torch.tensor([0.5, 0.0, 0.5])}).tolist()
        [True, False, False]
    """
    mask = counted_tokens(batch)
    advantages = batch["advantages"]
    return (mask & (advantages if advantages.dim() == 2 else advantages[:, None]).ne(0)).any(-1)


def plan_micro_batches(
    batches: Sequence[Mapping[str, Any]],
    *,
    skip_silent_rows: bool,
    share_prompts: bool,
    trim: bool = True,
    multiple_of: int | None = None,
) -> list[dict[str, Any]]:
    """Distributes the rows of an optimizer step anew, so that nothing is computed that the gradient does not need.

    Rows without signal are left out, unless a micro-batch would have no row; it then takes one that does not count.
    With `share_prompts` the rows of one prompt go together and the tokens are spread evenly; otherwise the rows are
    ordered by length. Each micro-batch is then trimmed to its own longest prompt and completion. Their number stays, so
    that every process runs as many forwards as the others, and none gets more rows than the largest had.

    Args:
        batches: micro-batches of rows: `prompt_ids` and `prompt_mask` `[B, P]`, padded on the left; `completion_ids`,
            `completion_mask` `[B, T]`, padded on the right; `sample_mask` `[B]`; `advantages`. Any other tensor of `B`
            rows moves along, one of `T` columns is trimmed with the completions.
        skip_silent_rows: leave out rows without signal. Right where the loss has nothing but the policy term.
        share_prompts: whether a prompt that stands once in a micro-batch is computed once.
        trim: whether the width of a row may change, which is so where padding changes no log-probability.
        multiple_of: widths are rounded up to a multiple of this.

    Returns:
        As many micro-batches.
    """
    rows = concatenate_rows(batches)
    signal, number, prompts, lengths = _on_host(rows)
    kept = [row for row, keep in enumerate(signal) if keep or not skip_silent_rows]
    # A micro-batch needs a row: the shortest of those that were left out.
    spare = sorted(set(range(len(signal))) - set(kept), key=lambda row: (prompts[row] + lengths[row], row))
    kept += spare[: max(0, len(batches) - len(kept))]
    if skip_silent_rows:  # such a row is computed for company, and counts as little as those that are not
        rows["sample_mask"] = has_signal(rows)

    if share_prompts:
        groups: dict[int, list[int]] = {}
        for row in kept:
            groups.setdefault(number[row], []).append(row)
        capacity = max(len(batch["completion_ids"]) for batch in batches)
        plan = _spread_groups(list(groups.values()), lengths, prompts, len(batches), capacity)
    else:
        kept.sort(key=lambda row: (lengths[row], prompts[row], row))
        bounds = [len(kept) * part // len(batches) for part in range(len(batches) + 1)]
        plan = [kept[a:b] for a, b in pairwise(bounds)]

    if not trim:
        return [take_rows(rows, members) for members in plan]
    step = multiple_of or 1

    def width(used: list[int], members: list[int]) -> int:
        return -(-max(1, *(used[row] for row in members)) // step) * step

    return [take_rows(rows, members, width(prompts, members), width(lengths, members)) for members in plan]


def _on_host(rows: Mapping[str, Tensor]) -> list[list[int]]:
    """Of each row, in one read: whether it has signal, which prompt, the columns its prompt and completion use."""
    prompt, completion = rows["prompt_mask"].bool(), rows["completion_mask"].bool()
    used_of_prompt = prompt.cumsum(-1).gt(0).sum(-1)
    used_of_completion = completion.flip(-1).cumsum(-1).gt(0).sum(-1)
    number = prompt_ids_of(rows["prompt_ids"], prompt)
    table: list[list[int]] = torch.stack([has_signal(rows).long(), number, used_of_prompt, used_of_completion]).tolist()
    return table


def _spread_groups(
    groups: list[list[int]], lengths: list[int], prompt_lengths: list[int], parts: int, capacity: int
) -> list[list[int]]:
    """The longest group first, into the part with the fewest tokens that has room; a part without any takes a half."""

    def cost(group: list[int]) -> int:
        return prompt_lengths[group[0]] + sum(lengths[row] for row in group)

    plan: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for group in sorted(groups, key=cost, reverse=True):
        rest = list(group)
        while rest:
            room = [capacity - len(part) for part in plan]
            # Whole if it fits anywhere, since a prompt that is split is computed twice.
            fitting = [part for part in range(parts) if room[part] >= min(len(rest), max(room))]
            part = min(fitting, key=lambda p: loads[p])
            taken, rest = rest[: room[part]], rest[room[part] :]
            plan[part] += taken
            loads[part] += cost(taken)
    for empty in (members for members in plan if not members):
        fullest = max(plan, key=len)
        half = (len(fullest) + 1) // 2
        empty += fullest[half:]
        del fullest[half:]
    return plan


def concatenate_rows(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch of all rows, padded to one width."""
    prompt_width = max(batch["prompt_ids"].shape[1] for batch in batches)
    width = max(batch["completion_ids"].shape[1] for batch in batches)
    rows: dict[str, Any] = {}
    for key, first in batches[0].items():
        if not isinstance(first, Tensor) or first.dim() == 0:
            rows[key] = first
            continue
        parts = [batch[key] for batch in batches]
        if key in PROMPT_KEYS:
            parts = [pad(part, (prompt_width - part.shape[1], 0)) for part in parts]
        elif any(_per_token(part, batch) for part, batch in zip(parts, batches, strict=True)):
            parts = [pad(part, (0, width - part.shape[1])) for part in parts]
        rows[key] = torch.cat(parts)
    return rows


def _per_token(values: Tensor, batch: Mapping[str, Any]) -> bool:
    return values.dim() == 2 and values.shape[1] == batch["completion_ids"].shape[1] > 1


def take_rows(
    rows: Mapping[str, Any], members: list[int], prompt_width: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """Some of the rows, trimmed to these widths of the prompts and the completions."""
    prompt_width = prompt_width or rows["prompt_ids"].shape[1]
    index = torch.tensor(members, device=rows["completion_ids"].device)
    batch = {}
    for key, value in rows.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            batch[key] = value
        elif key in PROMPT_KEYS:
            batch[key] = value[index, -prompt_width:]
        else:
            batch[key] = value[index, :width] if _per_token(value, rows) else value[index]
    return batch
