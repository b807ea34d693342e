"""Completions of one prompt behind a single copy of it: the layout of a forward that computes each token once.

A batch of rows `prompt | completion`, padded to a rectangle, becomes one sequence without padding:

    prompt a (less its last token) | prompt b (less its last token) | ...
    last token of a, completion 1 (less its last token) | last token of a, completion 2 ... | last token of b, ...

Every position of the second line predicts one token of a completion, so no position is wasted: the last token of a
prompt is repeated before each of its completions, since what follows it differs, and the last token of a completion
predicts nothing. A completion attends to its prompt and to itself, never to another completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class AttentionBlock:
    """Segments of the sequence that attend alike, as rows of a padded batch.

    Args:
        queries: `[R, L]`, position in the sequence of each query; 0 for a padded one, whose output is not read.
        keys: `[R, C + L]`, position of each key: `C` of the prompt, then those of the queries.
        mask: `[R, 1, L, C + L]` bool, which key a query sees; `None` for a causal block without a prompt.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class PackedRows:
    """A batch as one sequence of `S` tokens, of which `M` predict a token of a completion.

    Args:
        input_ids: `[1, S]`.
        position_ids: `[1, S]`, the place of each token in its own row.
        scored: `[M]`, positions of the sequence that predict a token of a completion.
        labels: `[1, M]`, the tokens that they predict.
        targets: `[M]`, where they belong in the flattened `[B, T]` of the batch.
        shape: `(B, T)`.
        blocks: who attends to whom.
        places: `[S]`, where each position's output is among the flattened queries of all blocks.
        segments: the same as `blocks` without padding, for kernels that take sequences of different lengths: `(keys,
            bounds of the queries, bounds of the keys, longest query, longest key)`.
    """

    input_ids: Tensor
    position_ids: Tensor
    scored: Tensor
    labels: Tensor
    targets: Tensor
    shape: tuple[int, int]
    blocks: tuple[AttentionBlock, ...]
    places: Tensor
    segments: tuple[Tensor, Tensor, Tensor, int, int]

    def unpack(self, values: Tensor) -> Tensor:
        """Brings values of the scored positions, `[1, M]`, into the `[B, T]` of the batch; 0 where masked."""
        rows, tokens = self.shape
        flat = values.new_zeros(rows * tokens).index_put((self.targets,), values.flatten())
        return flat.view(rows, tokens)


@dataclass(frozen=True)
class SegmentRows:
    """A flat sequence of the tokens of several rows, one row after the other, as the padded batch `[S, T]`.

    Attributes:
        row: `[M]`, the row of each token.
        column: `[M]`, its place in the row.
        shape: `(S, T)`.

    Example:
        >>> rows = SegmentRows.of(torch.tensor([0, 0, 1]))
        >>> rows.pad(torch.tensor([5.0, 6.0, 7.0])).tolist(), rows.mask.tolist()
        ([[5.0, 6.0], [7.0, 0.0]], [[True, True], [True, False]])
    """

    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, segment_id: Tensor) -> SegmentRows:
        """From the number of the row of each token, `[M]`, ascending from 0 without a gap."""
        lengths = torch.bincount(segment_id)
        first = lengths.cumsum(0) - lengths
        column = torch.arange(len(segment_id), device=segment_id.device) - first[segment_id]
        return cls(segment_id, column, (len(lengths), int(lengths.max()) if len(lengths) else 0))

    def pad(self, values: Tensor) -> Tensor:
        """`[M]` to `[S, T]`, 0 where there is no token."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)

    @property
    def mask(self) -> Tensor:
        """`[S, T]` bool, where there is a token."""
        return self.pad(torch.ones_like(self.row, dtype=torch.bool))


def prompt_ids_of(prompts: Tensor, mask: Tensor) -> Tensor:
    """Numbers the different prompts of a batch: `[B]`, equal where the tokens that are not masked are equal.

    Args:
        prompts: `[B, P]`, tokens.
        mask: `[B, P]`, 0 on padding.

    Example:
        >>> prompts = torch.tensor([[0, 5], [0, 7], [9, 5]])
        >>> prompt_ids_of(prompts, torch.tensor([[0, 1], [0, 1], [0, 1]])).tolist()
        [0, 1, 0]
    """
    tokens = torch.where(mask.bool(), prompts, torch.full_like(prompts, -1))
    number: Tensor = torch.unique(tokens, dim=0, return_inverse=True)[1]
    return number


def pack_rows(input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> PackedRows | None:
    """Lays out a batch with each prompt once and without padding.

    Args:
        input_ids: `[B, P + T]`, prompts (padded on the left) and completions (padded on the right).
        attention_mask: `[B, P + T]`, 0 on padding.
        completion_length: `T`.

    Returns:
        The layout, on the device of `input_ids`, or `None` where there is nothing to pack: no completion has a token,
        or a prompt has none.
    """
    device = input_ids.device
    ids, mask = input_ids.cpu(), attention_mask.cpu().bool()  # one copy, instead of a sync for each length
    width = ids.shape[1] - completion_length
    number = prompt_ids_of(ids[:, :width], mask[:, :width])
    lengths = mask[:, width:].sum(-1)
    if not lengths.any() or not mask[:, :width].any(-1).all():
        return None

    # Cells are indices into the flattened [B, P + T].
    cells = torch.arange(ids.numel()).view_as(ids)
    first_of = {n: row for row, n in reversed(list(enumerate(number.tolist())))}
    rows = [row for row, length in enumerate(lengths.tolist()) if length]
    prompt_cells = {n: cells[row, :width][mask[row, :width]] for n, row in first_of.items()}
    completion_cells = [cells[row, width:][mask[row, width:]] for row in rows]
    prompts = {n: c[:-1] for n, c in prompt_cells.items() if len(c) > 1}
    tails = [
        torch.cat([prompt_cells[n][-1:], c[:-1]]) for n, c in zip(number[rows].tolist(), completion_cells, strict=True)
    ]

    segments = [*prompts.values(), *tails]
    bounds = _bounds([len(s) for s in segments])
    ranges = [torch.arange(a, b) for a, b in pairwise(bounds.tolist())]
    shared = dict(zip(prompts, ranges, strict=False))
    own = ranges[len(prompts) :]
    contexts = [shared.get(n, own[0][:0]) for n in number[rows].tolist()]

    source = torch.cat(segments)
    # The place of a token in its row, counted from the first token that is not padding.
    positions = (torch.arange(ids.shape[1]) - mask.int().argmax(-1, keepdim=True)).flatten()
    blocks = ([_causal_block(list(shared.values()))] if shared else []) + [_completion_block(own, contexts)]
    places = torch.cat([real.flatten() for _, real in blocks]).nonzero().flatten()
    labels = torch.cat(completion_cells)
    keys = [*shared.values(), *(torch.cat(pair) for pair in zip(contexts, own, strict=True))]
    key_bounds = _bounds([len(k) for k in keys])

    def there(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    return PackedRows(
        input_ids=there(ids.flatten()[source][None]),
        position_ids=there(positions[source][None]),
        scored=there(torch.cat(own)),
        labels=there(ids.flatten()[labels][None]),
        targets=there(labels // ids.shape[1] * completion_length + labels % ids.shape[1] - width),
        shape=(len(ids), completion_length),
        blocks=tuple(
            AttentionBlock(there(b.queries), there(b.keys), None if b.mask is None else there(b.mask))
            for b, _ in blocks
        ),
        places=there(places),
        segments=(
            there(torch.cat(keys)),
            there(bounds.int()),
            there(key_bounds.int()),
            int(bounds.diff().max()),
            int(key_bounds.diff().max()),
        ),
    )


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _causal_block(ranges: list[Tensor]) -> tuple[AttentionBlock, Tensor]:
    """The block, and which of its queries are real."""
    index = pad_sequence(ranges, batch_first=True, padding_value=-1)
    return AttentionBlock(queries=index.clamp(min=0), keys=index.clamp(min=0), mask=None), index >= 0


def _completion_block(own: list[Tensor], contexts: list[Tensor]) -> tuple[AttentionBlock, Tensor]:
    index = pad_sequence(own, batch_first=True, padding_value=-1)
    before = pad_sequence(contexts, batch_first=True, padding_value=-1)
    rows, length = index.shape
    sees_prompt = (before >= 0)[:, None, :].expand(-1, length, -1)
    sees_own = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, -1, -1)
    block = AttentionBlock(
        queries=index.clamp(min=0),
        keys=torch.cat([before, index], dim=1).clamp(min=0),
        mask=torch.cat([sees_prompt, sees_own], dim=2)[:, None],
    )
    return block, index >= 0


def attend_in_blocks(
    attention: Callable[..., tuple[Tensor, Any]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed sequence, by an attention over padded batches.

    Args:
        attention: `(module, query, key, value, mask, **options) -> ([R, L, H, D], ...)`; causal without a mask.
        module: handed to `attention`.
        query: `[1, H, S, D]`.
        key: `[1, H', S, D]`.
        value: `[1, H', S, D']`.
        packed: the layout.
        **options: handed to `attention`.

    Returns:
        `([1, S, H, D'], None)`.
    """
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for block in packed.blocks:
        inputs = ((query, block.queries), (key, block.keys), (value, block.keys))
        taken = [
            x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2) for x, index in inputs
        ]
        outputs.append(attention(module, *taken, block.mask, **options)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.places)[None], None


def attend_in_segments(
    attention: Callable[..., tuple[Tensor, Any]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed sequence, by a kernel that takes sequences of different lengths (FlashAttention).

    Args: as `attend_in_blocks`; `attention` takes `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, and
        aligns a shorter query with the end of its keys.
    """
    keys, query_bounds, key_bounds, longest_query, longest_key = packed.segments
    options |= {
        "cu_seq_lens_q": query_bounds,
        "cu_seq_lens_k": key_bounds,
        "max_length_q": longest_query,
        "max_length_k": longest_key,
    }
    key, value = (x.index_select(2, keys) for x in (key, value))
    return attention(module, query, key, value, None, **options)[0], None
