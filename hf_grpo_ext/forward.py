"""Log-probabilities of a batch, each prompt computed once for its completions where the model can."""

from __future__ import annotations

from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOTrainer

from .adapters import under_adapter
from .packing import PackedRows, pack_rows
from .prefill import prefill_once
from .shared_prompt import packed_log_probs, prepare_model, same_in_both_layouts, why_not_packed

logger = logging.get_logger(__name__)

# What the model needs of a batch besides the tokens.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

# Packing takes a few gathers a layer; it pays where it leaves out at least one token in twenty.
WORTH_PACKING = 0.95


class SharedPromptForward(GRPOTrainer):
    """The part of the trainer that calls the model."""

    _packs: dict[int, bool]  # of each model, by identity: whether its forward takes packed rows

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with prefill_once(self._base_model(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **model_inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def of_parent(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            result: tuple[Tensor, Tensor | None, Tensor | None]
            result = super(SharedPromptForward, self)._get_per_token_logps_and_entropies(
                model, ids, mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **model_inputs
            )
            return result

        has_images = any(value is not None for value in model_inputs.values())
        if has_images or compute_aux_loss or not self._can_pack(model):
            return of_parent(input_ids, attention_mask)
        size = batch_size or len(input_ids)
        logps: list[Tensor] = []
        entropies: list[Any] = []
        for ids, mask in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True):
            packed = self._layout(ids, mask, logits_to_keep)
            if packed is None:
                values, entropy, _ = of_parent(ids, mask)
            else:
                with self.accelerator.autocast():
                    values, entropy = packed_log_probs(model, packed)
            logps.append(values)
            entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _layout(self, ids: Tensor, mask: Tensor, completion_length: int) -> PackedRows | None:
        packed = pack_rows(ids, mask, completion_length)
        if packed is None or self.args.shared_prompt_forward is True:
            return packed
        # The attention of a packed row looks at fewer pairs as well, so the tokens decide.
        return packed if packed.input_ids.numel() <= WORTH_PACKING * ids.numel() else None

    def _can_pack(self, model: nn.Module) -> bool:
        """Whether the forward of this model takes packed rows; checked once, by all processes together."""
        if self.args.shared_prompt_forward is False:
            return False
        if self._draws_dropout and self.model.training:
            self._say_that_rows_are_alone("the model has dropout")
            return False
        base = self._base_model(model)
        if id(base) not in self._packs:
            reason = self._why_not_packed(base)
            if reason is None:
                prepare_model(base)
                half = self.accelerator.mixed_precision != "no" or base.dtype.itemsize < 4
                with torch.no_grad(), self.accelerator.autocast():
                    same = same_in_both_layouts(model, tolerance=0.25 if half else 1e-3, device=self.accelerator.device)
                if not all(gather_object([same])):
                    reason = f"{type(base).__name__} computes other log-probabilities when the prompt is shared"
            if reason is not None:
                if self.args.shared_prompt_forward is True:
                    raise cannot_share(reason)
                self._say_that_rows_are_alone(reason)
            self._packs[id(base)] = reason is None
        return self._packs[id(base)]

    def _say_that_rows_are_alone(self, reason: str) -> None:
        if reason not in self._reasons_said:
            self._reasons_said.add(reason)
            logger.info("Every row is computed on its own, since %s.", reason)

    def _base_model(self, model: nn.Module) -> Any:
        if model not in self._bases:  # kept, since Accelerate reads the metadata of packages every time
            self._bases[model] = under_adapter(self.accelerator.unwrap_model(model))
        return self._bases[model]

    def _why_not_packed(self, base: nn.Module) -> str | None:
        if self.pad_to_multiple_of is not None:
            return f"pad_to_multiple_of is {self.pad_to_multiple_of}"
        if self.args.torch_compile:
            return "torch_compile is on"
        if self._draws_dropout and self.args.shared_prompt_forward is True:
            return (
                "the model has dropout (disable_dropout=True removes that of its modules, attention_dropout=0 in its "
                "config that of its attention)"
            )
        if self.aux_loss_enabled:
            return "the model has a router loss, which counts every token of every row"
        adapters = getattr(self.model, "peft_config", {}).values()
        if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
            return "the adapter adds tokens to the prompt"
        return why_not_packed(base)

    def _forward(
        self, model: nn.Module, batch: dict[str, Any], batch_size: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies of the completion tokens, `[B, T]`, and the router loss of a MoE model."""
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=batch_size,
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: batch[name] for name in MODEL_INPUTS if name in batch},
        )
        return logprobs, cast(Tensor, entropies), aux_loss


def cannot_share(reason: str) -> ValueError:
    """The error of `shared_prompt_forward=True` where it cannot be."""
    return ValueError(
        f"shared_prompt_forward=True, but {reason}: a prompt cannot be computed once for all its completions. Use "
        "shared_prompt_forward='auto', which computes every row on its own where it must."
    )
