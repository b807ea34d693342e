"""Trains the tiny model with forced completions, once for each of several configurations, under one backend.

    matrix.py MODEL_DIR OUT_FILE JSON_OF_CASES

A case is the fields of a `GRPOExtConfig`, besides `lora` (fields of the `LoraConfig` of a new adapter), `continues` (a
name for the adapter in MODEL_DIR/adapter) and the others that `run` takes out.

One process stands for as many as `SHARES`: it takes the rows of each of them into every step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, set_seed
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from trl.trainer import grpo_trainer

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # the worker beside this one
from ending import leave
from tiny import ADAPTER, SPECIAL, THREE_SGD_STEPS  # the path comes first

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer

SHARES = 2


def prompts() -> Dataset:
    """Prompts of three lengths; the first character tells them apart, and so does the last."""
    return Dataset.from_dict({"prompt": [f"{i % 10} + {(i * 7) % 10}{' + 1' * (i % 3)} = {i % 10}" for i in range(64)]})


class Trainer(train.Trainer):
    """Records what a test must know to believe the weights."""

    truncated = long = ""  # first characters of prompts whose completions have no end, or are long
    generates = False  # by the model instead
    steps = 1  # of an optimizer, or its micro-batches, a generation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows_that_count: list[list[int]] = []  # of each process, at each optimizer step
        self.rows_with_signal: list[list[int]] = []
        self.packed_forwards = 0
        self.logprob_types: set[str] = set()
        self.completions: list[list[list[int]]] = []  # of all processes, at each generation
        # Of the last optimizer step: its weights, and the prompt and completion of each row of all processes.
        self.last_weights: dict[str, torch.Tensor] = {}
        self.last_rows: list[tuple[list[int], list[int]]] = []

    def _generate_single_turn(self, prompt_ids: Any, *args: Any) -> Any:
        if self.generates:
            completions = GRPOExtTrainer._generate_single_turn(self, prompt_ids, *args)[0]
            self.completions.append(gather_object(completions))
            return completions, None
        completions, _ = super()._generate_single_turn(prompt_ids, *args)
        for ids, completion in zip(prompt_ids, completions, strict=True):
            first = self.processing_class.decode(ids[:1])
            if first in self.long:
                completion[:-1] = completion[:-1] * 20
                del completion[20:-1]
            if first in self.truncated:
                completion[-1] = len(SPECIAL)
        return completions, None

    def _prepare_window(self, batches: list[Any]) -> list[dict[str, Any]]:
        window = super()._prepare_window(batches)
        counted = sum(int(batch["sample_mask"].sum()) for batch in window)
        signal = sum(
            int(((batch["advantages"] != 0).reshape(len(batch["sample_mask"]), -1).any(-1)).sum()) for batch in window
        )
        self.rows_that_count.append(gather_object([counted]))
        self.rows_with_signal.append(gather_object([signal]))
        if self.state.global_step == self.args.max_steps - 1:
            self.last_weights = weights(self)
            self.last_rows = gather_object([row for batch in window for row in tokens_of(batch)])
        return window

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._forward(*args, **kwargs)
        self.logprob_types.add(str(result[0].dtype))
        return result

    def _layout(self, *args: Any) -> Any:
        packed = super()._layout(*args)
        self.packed_forwards += packed is not None
        return packed


def steps_of_all_shares(batch: dict[str, Any]) -> dict[str, Any]:
    """In the place of TRL's shuffle: with several optimizer steps a generation, each has the same rows in every run."""
    if dist.is_initialized():
        return batch
    index = torch.arange(len(batch["completion_ids"])).view(SHARES, Trainer.steps, -1).transpose(0, 1).flatten()
    return {
        key: value[index] if isinstance(value, torch.Tensor) and value.dim() else value for key, value in batch.items()
    }


def let_fsdp_run_on_cpu() -> None:
    """Accelerate looks for shards on accelerators alone: there several CPU processes are plain DDP."""
    init = AcceleratorState.__init__

    def as_on_gpus(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        init(self, *args, **kwargs)

    AcceleratorState.__init__ = as_on_gpus


def let_deepspeed_run_on_cpu() -> None:
    import deepspeed

    # Compiled at first use, for a minute, and not needed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter of which every process may hold a shard; all processes call this together."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().clone()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        if parameter.ds_status == deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE:
            return parameter.detach().clone()  # to let it go in the middle of a step is an error
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    bare = trainer.accelerator.unwrap_model(trainer.model)
    return {name: whole(parameter) for name, parameter in bare.named_parameters()}


def tokens_of(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The prompt and the completion of each row, without padding."""
    prompts, completions = (
        [ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    )
    return list(zip(prompts, completions, strict=True))


def share_held(parameters: list[torch.Tensor]) -> float:
    """Which part of the weights this process keeps between steps."""
    held = total = 0
    for parameter in parameters:
        total += getattr(parameter, "ds_numel", parameter.numel())
        if isinstance(parameter, DTensor):
            held += parameter.to_local().numel()
        else:
            held += parameter.ds_tensor.numel() if hasattr(parameter, "ds_tensor") else parameter.numel()
    return held / total


@contextmanager
def second_layer_refuses_packed_rows(refuses: bool) -> Iterator[None]:
    """An architecture of which only its forward tells that it cannot share prompts, when part of it has run."""
    forward = Qwen2Attention.forward

    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 1 and kwargs.get("packed") is not None:
            raise TypeError("packed rows")
        return forward(self, *args, **kwargs)

    if refuses:
        Qwen2Attention.forward = refusing
    try:
        yield
    finally:
        Qwen2Attention.forward = forward


def build(model: str, fields: dict[str, Any], lora: dict[str, Any] | None, continues: str | None) -> Trainer:
    args = GRPOExtConfig(**({**THREE_SGD_STEPS, "logging_steps": 1, "shuffle_dataset": False} | fields))
    Trainer.steps = args.steps_per_generation
    set_seed(0)
    policy: Any = model
    if continues is not None:
        base = AutoModelForCausalLM.from_pretrained(model)
        policy = PeftModel.from_pretrained(base, f"{model}/adapter", adapter_name=continues, is_trainable=True)
    return Trainer(
        policy,
        [train.reward, train.late],
        args,
        prompts(),
        eval_dataset=prompts().select(range(8)),
        peft_config=None if lora is None else LoraConfig(**(ADAPTER | lora)),
    )


def run(model: str, folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    train.SILENT[:] = fields.pop("silent", "")
    Trainer.truncated, Trainer.long = fields.pop("truncated", ""), fields.pop("long", "")
    Trainer.generates, ends = fields.pop("generates", False), fields.pop("ends", None)
    adapter = {"lora": fields.pop("lora", None), "continues": fields.pop("continues", None)}
    resumes, refuses = fields.pop("resumes", False), fields.pop("refuses", False)
    fields["output_dir"] = folder
    with second_layer_refuses_packed_rows(refuses):
        if resumes:
            build(model, {**fields, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}, **adapter).train()
        trainer = build(model, fields, **adapter)
        if ends:
            trainer.eos_token_ids = trainer.generation_config.eos_token_id = ends
        start = weights(trainer)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if resumes else None)
    bare, trained = trainer.accelerator.unwrap_model(trainer.model), weights(trainer)
    wrapped = trainer.model_wrapped
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "wrapper": type(wrapped).__name__,
        "zero_stage": wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else None,
        "fsdp_units": sum(isinstance(module, FSDPModule) for module in bare.modules()),
        "share_held": share_held(list(bare.parameters())),
        "packs": list(trainer._packs.values()),
        "packed_forwards": trainer.packed_forwards,
        "logprob_types": trainer.logprob_types,
        "completions": trainer.completions,
        "rows_that_count": trainer.rows_that_count,
        "rows_with_signal": trainer.rows_with_signal,
        "weights": trained,
        "moved": max((trained[name] - start[name]).abs().max().item() for name in trained),
        "last_weights": trainer.last_weights,
        "last_rows": trainer.last_rows,
        "log": trainer.state.log_history,
    }


def main() -> None:
    model, out, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    grpo_trainer.shuffle_sequence_dict = steps_of_all_shares
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_fsdp_run_on_cpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        let_deepspeed_run_on_cpu()
    # What was imported so far need not be searched for garbage after every case.
    gc.freeze()
    results = {}
    for number, (name, fields) in enumerate(cases.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[name] = run(model, f"{out}.{number}", dict(fields))
        gc.collect()
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(results, out)
    leave()


if __name__ == "__main__":
    main()
