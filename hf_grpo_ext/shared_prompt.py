"""A transformers model over packed rows: the attention, the positions that are scored, and which models can do it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .packing import PackedRows, attend_in_blocks, attend_in_segments, pack_rows

# A rotary embedding depends on the distance of two tokens alone, so that padding may be left out. The types that are
# missing here scale it by the length of the batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def prepare_model(model: PreTrainedModel) -> None:
    """Lets a model take `packed=PackedRows` in its forward; without it nothing changes.

    The attention implementation of the model is wrapped where transformers looks it up, and its backbone drops the
    positions that predict nothing before the head, which is a large part of the work with a large vocabulary.
    """
    name = str(model.config._attn_implementation)
    attention = ALL_ATTENTION_FUNCTIONS[name]
    if not hasattr(attention, "takes_packed_rows"):
        AttentionInterface.register(name, _with_packed_rows(attention, segments=name.startswith("flash")))
    backbone: Any = model.base_model
    if not hasattr(backbone, "_keeps_scored_positions"):
        backbone.register_forward_hook(_keep_scored_positions, with_kwargs=True)
        backbone._keeps_scored_positions = True


def _with_packed_rows(attention: Any, *, segments: bool) -> Any:
    attend: Any = attend_in_segments if segments else attend_in_blocks

    @functools.wraps(attention)
    def wrapped(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed: PackedRows | None = None,
        **kwargs: Any,
    ) -> Any:
        if packed is None:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        return attend(attention, module, query, key, value, packed, **kwargs)

    wrapped.__dict__["takes_packed_rows"] = True
    return wrapped


def _keep_scored_positions(backbone: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    packed = kwargs.get("packed")
    if packed is not None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, packed.scored)
    return output


def packed_log_probs(model: nn.Module, packed: PackedRows) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies, `[B, T]`, from a model that `prepare_model` and TRL's fused head prepared.

    The entropies are `None` where the head was made without them.
    """
    output = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        # Four dimensions: transformers takes it as it is, and the attention has its own.
        attention_mask=packed.input_ids.new_ones(1, 1, 1, 1),
        shift_labels=packed.labels,
        packed=packed,
        fused_lm_head=True,
    )
    return packed.unpack(output.log_probs), None if output.entropy is None else packed.unpack(output.entropy)


def positions_are_relative(model: PreTrainedModel) -> bool:
    """Whether padding on the left changes no log-probability, so that a row may be padded to another width.

    A rotary embedding of a fixed scale depends on the distance of two tokens alone. Learned positions count from the
    first column, and a scale that depends on the length of the batch depends on its padding.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    of_layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return bool(rope) and all(part.get("rope_type", "default") in ROPE_TYPES for part in of_layers)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why the model cannot compute packed rows, or `None` if it can.

    What can be read off the config is read here; `GRPOExtTrainer` also compares the two layouts once, on a few rows.
    """
    name = type(model).__name__
    config: Any = model.config
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or []) - {"full_attention"}
    attention = getattr(config, "_attn_implementation", None)
    if text is not config:
        return f"{name} takes images"
    if config.is_encoder_decoder or not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take an attention function"
    if layers or (not hasattr(text, "layer_types") and getattr(text, "sliding_window", None)):
        return f"{name} has layers that are not full attention ({', '.join(sorted(layers)) or 'sliding window'})"
    if attention != "sdpa" and not str(attention).startswith("flash_attention"):
        return f"attn_implementation is {attention!r}, not 'sdpa' or a flash_attention"
    if not positions_are_relative(model):
        return f"{name} has no rotary embedding of a fixed scale"
    if "position_ids" not in inspect.signature(type(model.base_model).forward).parameters:
        return f"{name} takes no position_ids"
    return None


def draws_dropout(model: nn.Module) -> bool:
    """Whether the model draws random masks while it trains: then no two copies of a prompt are computed alike."""
    config = getattr(model, "config", None)
    rates = vars(config).items() if config is not None else ()
    # Those of heads that a causal LM does not have are in its config all the same.
    rates = [(key, rate) for key, rate in rates if not key.startswith(("classifier_", "summary_"))]
    functional = any(isinstance(rate, float) and rate > 0 for key, rate in rates if key.endswith(("dropout", "pdrop")))
    return functional or any(m.p > 0 for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))


def same_in_both_layouts(model: nn.Module, *, tolerance: float, device: torch.device) -> bool:
    """Whether the model gives two short rows the same log-probabilities, packed and padded: the last check of support.

    What an architecture does with a position, a mask or an argument that it does not know cannot be read off its
    config. The mean difference may be `tolerance` nats, the rounding of the precision it runs in.
    """
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 5, 3, 0]], device=device)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]], device=device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    packed = pack_rows(ids, mask, 3)
    if packed is None:  # there are tokens
        return False
    try:
        shared = packed_log_probs(model, packed)[0]
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return False
    alone = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -3:]
    return bool((shared - alone).abs().mean() <= tolerance)
