"""What FSDP2 has to be shown of a model, so that it trains what the same model trains on one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_float32_outputs(accelerator: Any) -> None:
    """Lets FSDP2 return log-probabilities as they were computed, and not rounded to bf16."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def prepare_shards(model: nn.Module, base: Any) -> None:
    """What has to be done once FSDP2 has set itself up, before the policy's first forward.

    Args:
        model: the policy.
        base: the model under its wrappers and its adapter.
    """
    _show_what_trains(model)
    _reduce_gradient_of_head(base)


def _show_what_trains(model: nn.Module) -> None:
    """Lets FSDP2 see which parameters train: it looks at the first forward, and the reference's has the adapter off."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _reduce_gradient_of_head(base: Any) -> None:
    """Lets FSDP2 average the gradient of the head, which it does only for shards that it has put together itself.

    TRL reads the weight of the head and never calls it. That goes unnoticed where another module of its unit is called,
    as the last norm of a plain model is; under an adapter, which may train a whole head, it is a unit of its own.
    """
    head = base.get_output_embeddings()
    if isinstance(head, FSDPModule):
        base.base_model.register_forward_pre_hook(lambda *_: head.unshard() if torch.is_grad_enabled() else None)
