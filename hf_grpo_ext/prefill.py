"""Prefill once: the prompts of a generation batch go through the model a single time, not once a completion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .packing import prompt_ids_of

# What a prefill of text alone is made of. Any other tensor may belong to a row in a way that is not known here.
PREFILL_INPUTS = ("input_ids", "attention_mask", "position_ids")
# Its name among the inputs, in the versions of transformers.
CACHE_NAMES = ("cache", "past_key_values")


@contextmanager
def prefill_once(model: nn.Module) -> Iterator[None]:
    """While it is open, a forward of equal prompts into an empty cache computes each of them once.

    `generate` draws every token as before, from the same distribution: the cache and the logits of a prompt are
    repeated for each of its rows. Where that cannot be (an input besides the tokens, a cache that is not a
    `DynamicCache` of full attention, no two prompts alike) the forward stays as it was.

    Args:
        model: the model whose `generate` runs, without wrappers.
    """
    pending: list[Tensor] = []  # for each row of the batch, its place among the prompts that are computed

    def shrink(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        pending.clear()  # what a forward that failed has left
        row_of = None if args else _places(kwargs)
        if row_of is None:
            return None
        pending.append(row_of)
        first = row_of.new_empty(int(row_of.max()) + 1).index_copy(0, row_of, torch.arange(len(row_of)).to(row_of))
        return args, {
            key: value[first] if isinstance(value, Tensor) and len(value) == len(row_of) else value
            for key, value in kwargs.items()
        }

    def repeat(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if pending:
            row_of = pending.pop()
            _cache(kwargs).batch_select_indices(row_of)
            output.logits = output.logits[row_of]
        return output

    before = model.register_forward_pre_hook(shrink, with_kwargs=True)
    after = model.register_forward_hook(repeat, with_kwargs=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _cache(inputs: dict[str, Any]) -> Any:
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


def _places(inputs: dict[str, Any]) -> Tensor | None:
    """Where each row's prompt stands among the different ones, `[B]`, or `None` where nothing can be shared."""
    input_ids, mask, cache = inputs.get("input_ids"), inputs.get("attention_mask"), _cache(inputs)
    if input_ids is None or input_ids.shape[1] < 2:
        return None
    mask = torch.ones_like(input_ids) if mask is None else mask  # `generate` leaves out a mask of ones
    # A cache that is compiled comes with masks by the type of layer.
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        return None
    if any(isinstance(value, Tensor) and key not in PREFILL_INPUTS for key, value in inputs.items()):
        return None
    if inputs.get("output_attentions") or inputs.get("output_hidden_states"):
        return None
    # Another cache, or a layer that keeps a window or a state, is not repeated as a whole.
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    if type(cache).__name__ != "DynamicCache" or kinds - {"DynamicLayer"} or cache.get_seq_length():
        return None
    row_of = prompt_ids_of(input_ids, mask)
    return None if int(row_of.max()) + 1 == len(row_of) else row_of
