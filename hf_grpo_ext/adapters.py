"""The reference of an adapter that does not start as the base model: a frozen copy of it, beside it in the model."""

from __future__ import annotations

import copy
import functools
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

REFERENCE_ADAPTER = "ref"  # TRL scores the reference with the adapter of this name, and with none where there is none

# Of LoRA's initialisations, those after which the adapter changes nothing.
NEUTRAL = (True, "gaussian")

# What the copy does not take over from the configuration of the adapter, where that has it.
PLAIN = {"init_lora_weights": True, "lora_dropout": 0.0}


def under_adapter(model: Any) -> Any:
    """The model that an adapter is put on; the model itself where it has none."""
    return model.get_base_model() if is_peft_model(model) else model


def starts_as_base(model: Any) -> bool:
    """Whether a new adapter, the active one of a `PeftModel`, changes nothing before it trains.

    PiSSA and its like move a part of the base into the adapter: without it, what is left is another model.
    """
    return getattr(model.active_peft_config, "init_lora_weights", True) in NEUTRAL


def add_reference_adapter(model: Any) -> None:
    """Adds a frozen copy of the adapter that trains, named "ref", which is not saved with the model.

    Args:
        model: a `PeftModel`, of which the active adapter trains.

    Raises:
        ValueError: there is an adapter of that name.
    """
    if REFERENCE_ADAPTER in model.peft_config:
        raise ValueError(
            f"The model has an adapter named {REFERENCE_ADAPTER!r}, which is what the frozen copy of the adapter that "
            "trains is called, the reference of the KL. Load yours under another name; the copy of an earlier run goes "
            f"with model.delete_adapter({REFERENCE_ADAPTER!r})."
        )
    # ZeRO-3 gathers nothing that is frozen, and PEFT cannot save what is not there.
    model.save_pretrained = functools.partial(model.save_pretrained, selected_adapters=list(model.peft_config))
    policy = model.active_adapter
    config = copy.copy(model.peft_config[policy])
    # The weights are copied: PiSSA must not take its part out of the base again. And a reference draws nothing.
    vars(config).update({name: value for name, value in PLAIN.items() if name in vars(config)})
    model.add_adapter(REFERENCE_ADAPTER, config)
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        before, found, after = f"{name}.".rpartition(f".{REFERENCE_ADAPTER}.")
        if found:
            weight.data = weights[f"{before}.{policy}.{after}".rstrip(".")].detach().clone()
            weight.requires_grad_(False)


def check_trainable(model: nn.Module) -> None:
    """Raises a `ValueError` if no parameter of the model trains."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "The model has no trainable parameter, so training would change nothing. An adapter that was loaded for "
            "inference is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)."
        )
