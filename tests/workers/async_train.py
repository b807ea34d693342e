"""Trains the asynchronous trainer on given rollouts, once for each of several configurations, under one backend.

    async_train.py MODEL_DIR MODEL_DIR_OF_SAMPLER OUT_FILE JSON_OF_CASES

A case is the fields of an `AsyncGRPOExtConfig`, besides `lora` (fields of the `LoraConfig` of a new adapter) and
`groups` (how many there are).

One process stands for two: it takes the samples of both into every step. Every process saves what it saw to
OUT_FILE.rank<number>.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from ending import leave
from matrix import let_deepspeed_run_on_cpu, let_fsdp_run_on_cpu, share_held, weights
from tiny import ADAPTER, THREE_SGD_STEPS  # the path comes first
from tiny_async import (
    GivenRolloutWorker,
    given_group,
    logprobs_of,
    make_async_trainer,
    make_loop,
    named,
    run_on_cpu,
)
from tiny_env import PROMPTS

from hf_grpo_ext import AdvEstimatorConfig

RANK = int(os.environ.get("RANK", 0))
DATASET = Dataset.from_dict({"prompt": PROMPTS})


class RecordingLoss:
    """Which samples each micro-batch had here, and in which type their log-probabilities came."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn
        self.tokens: list[list[int]] = []
        self.types: set[str] = set()

    def __call__(self, logprobs: torch.Tensor, batch: Any, **counts: Any) -> Any:
        self.tokens.append(batch["token_mask"].sum(-1).tolist())
        self.types.add(str(logprobs.dtype))
        return self.loss_fn(logprobs, batch, **counts)


def rollouts(stale: str, estimator: str, groups: int) -> GivenRolloutWorker:
    """Groups of four completions of one to seven tokens, by another policy."""
    sampler = AutoModelForCausalLM.from_pretrained(stale, dtype=torch.float32)
    given = [given_group(PROMPTS[i % 10], i, logprobs=logprobs_of(sampler)) for i in range(groups)]
    loop = make_loop([named], DATASET, adv_estimator=AdvEstimatorConfig(name=estimator))
    return GivenRolloutWorker(loop, given)


def run(model: str, stale: str, folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    lora = fields.pop("lora", None)
    adapter = None if lora is None else LoraConfig(**(ADAPTER | lora))
    groups = fields.pop("groups", 24)
    # As in TRL, the main process alone has a worker.
    worker = rollouts(stale, fields["adv_estimator"], groups) if RANK == 0 else None
    fields = {**THREE_SGD_STEPS, "logging_steps": 1} | fields
    trainer = make_async_trainer(model, Path(folder), worker, DATASET, trainer={"peft_config": adapter}, **fields)
    trainer.remove_callback(trainer.watch)  # which looks at whole gradients
    trainer.loss_fn = seen = RecordingLoss(trainer.loss_fn)
    start, failure = weights(trainer), None
    try:
        trainer.train()
    except RuntimeError as error:
        failure = str(error)
    trained = weights(trainer)
    wrapped = trainer.model_wrapped
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "wrapper": type(wrapped).__name__,
        "share_held": share_held(list(trainer.model.parameters())),
        "weights": trained,
        "moved": max((trained[name] - start[name]).abs().max().item() for name in trained),
        "steps": trainer.state.global_step,
        "tokens": seen.tokens,
        "types": seen.types,
        "failure": failure,
        "log": trainer.state.log_history,
    }


def main() -> None:
    model, stale, out, cases = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    run_on_cpu(pytest.MonkeyPatch())
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_fsdp_run_on_cpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        let_deepspeed_run_on_cpu()
    results = {}
    for number, (name, fields) in enumerate(cases.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[name] = run(model, stale, f"{out}.{number}", dict(fields))
        gc.collect()
    torch.save(results, f"{out}.rank{RANK}")
    leave()


if __name__ == "__main__":
    main()
