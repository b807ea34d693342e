"""What TRL's asynchronous trainer needs to run on a CPU, on given rollouts, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from tiny import make_tokenizer
from tiny_env import EOS, G, Watch, given_completion, tool_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence

from hf_grpo_ext import AdvEstimatorConfig, AsyncGRPOExtConfig, AsyncGRPOExtTrainer
from hf_grpo_ext.async_rollouts import RolloutLoop


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """In the place of the FlashAttention kernel: segments `[N, H, D]`, a query aligned with the end of its keys."""
    repeats = query.shape[1] // key.shape[1]
    bounds = zip(*(b.tolist() for b in (query_bounds, query_bounds[1:], key_bounds, key_bounds[1:])), strict=False)
    outputs = []
    for q0, q1, k0, k1 in bounds:
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        sees = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0), attn_mask=sees, scale=softmax_scale
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def run_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """The packed attention has kernels for GPUs alone, and a CPU no peak of operations a second."""
    patch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    patch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


class NoTransfer:
    """There is no server to bring the weights to."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def make_loop(reward_funcs: list[Any], dataset: Dataset, **options: Any) -> RolloutLoop:
    """The loop of the worker, which scores groups here."""
    PartialState(cpu=True)  # TRL's logger wants it
    defaults = {
        "model_name": "tiny",
        "dataset": dataset,
        "reward_funcs": reward_funcs,
        "processing_class": tool_tokenizer(),
        "eos_token_ids": [EOS],
        "rollout_buffer": queue.Queue(),
        "model_version_value": SimpleNamespace(value=0),
        "heartbeat_value": SimpleNamespace(value=0.0),
        "failed_event": None,
        "exception_info_queue": queue.Queue(),
        "metrics_queue": queue.Queue(),
        "num_generations": G,
        "adv_estimator": AdvEstimatorConfig(),
        "reward_weights": None,
        "drop_groups_without_signal": False,
        "reward_timeout": None,
    }
    return RolloutLoop(**(defaults | options))


def moved_policy(model: str, factor: float) -> Any:
    """A policy that another one, of the same logits up to a factor, has moved away from."""
    moved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        moved.lm_head.weight.mul_(factor)
    return moved


def logprobs_of(model: Any) -> Callable[[list[int], list[int]], list[float]]:
    """Scores the completion of a prompt by a model, in the place of the engine that sampled it."""

    def of(prompt: list[int], completion: list[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            lp = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        return lp.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()

    return of


def named(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float | None]]:
    """Two components of different scale; one, or both, do not apply to some completions."""
    digests = [hashlib.sha256(str(ids).encode()).digest() for ids in completion_ids]
    return {
        "fine": [None if d[2] % 8 == 0 else d[0] / 64 for d in digests],
        "coarse": [None if d[2] % 16 == 0 else float(d[1] % 2) for d in digests],
    }


def given_group(
    prompt: str | list[dict[str, str]],
    group_id: int,
    *,
    version: int = 0,
    longest: int = 7,
    logprobs: Callable[[list[int], list[int]], list[float]] = lambda prompt, completion: [0.0] * len(completion),
    **columns: Any,
) -> RolloutGroup:
    """The rollouts of a prompt that `GivenRollouts` hands the synchronous trainer."""
    tokenizer = make_tokenizer()
    ids = tokenizer(prompt if isinstance(prompt, str) else prompt[-1]["content"])["input_ids"]
    completions = [given_completion(ids, rank, longest) for rank in range(G)]
    texts = [tokenizer.decode(completion, skip_special_tokens=True) for completion in completions]
    sequences = [
        [
            TrainingSequence(
                input_ids=[*ids, *completion],
                completion_mask=[0] * len(ids) + [1] * len(completion),
                old_log_probs=[0.0] * len(ids) + logprobs(ids, completion),
                rollout_id=f"{group_id}/{rank}",
            )
        ]
        for rank, completion in enumerate(completions)
    ]
    return RolloutGroup(
        prompts=[prompt] * G,
        reward_kwargs={name: [value] * G for name, value in columns.items()},
        completions=texts if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in texts],
        completions_ids=completions,
        completions_sequences=sequences,
        tool_call_counts=[0] * G,
        tool_failure_counts=[0] * G,
        model_version=version,
        group_id=group_id,
        env_rewards=[None] * G,
        rollout_rewards=[None] * G,
    )


class GivenRolloutWorker:
    """A rollout worker in this process, which scores given rollouts with the real loop and has them all at once.

    Args:
        loop: scores.
        groups: what there is to train on.
    """

    def __init__(self, loop: RolloutLoop, groups: list[RolloutGroup]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = loop._metrics_queue
        self.versions: list[int] = []
        self._loop, self._groups = loop, groups

    def start(self) -> None:
        for group in self._groups:
            for sample in asyncio.run(self._loop._score_group(group)):
                self.rollout_buffer.put(sample)

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("There are no more rollouts.")


def make_async_trainer(
    model: str, folder: Path, worker: Any, dataset: Dataset, *, trainer: dict[str, Any] | None = None, **args: Any
) -> Any:
    """A trainer on CPU, SGD with learning rate 1, 8 samples a step, one step; `trainer.watch`."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2 * G,
        "num_generations": G,
        "max_completion_length": 8,
        "max_steps": 1,
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "token_budget": 0,
    }
    watch = Watch()
    made = AsyncGRPOExtTrainer(
        model,
        args=AsyncGRPOExtConfig(**(defaults | args)),
        train_dataset=dataset,
        rollout_worker=worker,
        callbacks=[watch],
        **({"weight_transfer": NoTransfer()} | (trainer or {})),
    )
    made.watch = watch
    return made
