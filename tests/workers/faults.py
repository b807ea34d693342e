"""Trains into a fault, for each that is named, in one of two processes.

    faults.py MODEL_DIR OUT_FOLDER caught NAME...     and goes on from what is left
    faults.py MODEL_DIR OUT_FOLDER uncaught NAME      and ends by it
    faults.py MODEL_DIR OUT_FOLDER resumed NAME...    goes on from what such an end has left

A fault happens on the second process at the fourth optimizer step, unless its name says otherwise. Checkpoints are
saved every second step, and the latest is kept. Every process saves what the test reads to OUT_FOLDER/NAME.<rank>, and
ends itself by SIGALRM if it hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForSequenceClassification, TrainerCallback, TrainerState

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # the worker beside this one
from ending import leave
from tiny import THREE_SGD_STEPS, prompts  # the path comes first

from hf_grpo_ext import GRPOExtConfig, timeouts

FIELDS: dict[str, Any] = {
    **THREE_SGD_STEPS,
    "max_steps": 5,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 1,
}
AT_STEP = 4
WATCHDOG = {"caught": 300, "uncaught": 80, "resumed": 300}  # seconds
EVALUATED = {"eval_strategy": "steps", "per_device_eval_batch_size": 4, "metric_for_best_model": "reward"}


ARMED = True  # until a run goes on


def meets(process: int | None) -> bool:
    """Whether this process is the one, or every one is, that meets a fault."""
    return ARMED and process in (None, PartialState().process_index)


# What a reward function does instead of answering


def raises(answer: Any) -> Any:
    raise KeyError("solution")


def is_infinite(answer: Any) -> Any:
    return {**answer, "length": [math.inf] * len(answer["length"])}


def is_too_short(answer: Any) -> Any:
    return {**answer, "length": answer["length"][1:]}


def is_nan(answer: Any) -> Any:
    return {name: [math.nan] * len(values) for name, values in answer.items()}


def leaves(answer: Any) -> Any:
    sys.exit(3)


def sleeps(answer: Any) -> Any:
    time.sleep(600)


def searches(answer: Any) -> Any:
    return re.fullmatch("(a|a)*", "a" * 64 + "b")


def swallows(answer: Any) -> Any:
    try:
        time.sleep(600)
    except BaseException:
        return answer


def holds_the_interpreter(answer: Any) -> Any:
    ctypes.PyDLL(None).sleep(600)


def is_killed(answer: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def raises_later(answer: Any) -> Any:
    await asyncio.sleep(0)
    raise KeyError("solution")


async def sleeps_later(answer: Any) -> Any:
    await asyncio.sleep(600)


async def leaves_later(answer: Any) -> Any:
    sys.exit(3)


async def blocks_the_event_loop(answer: Any) -> Any:
    time.sleep(600)


def failing(how: Callable[[Any], Any], process: int | None = 1) -> Callable[..., Any]:
    """`train.reward`, of which one process, or every one, answers one call in another way."""
    calls = itertools.count(1)

    def answers(completions: list[str], prompts: list[str]) -> tuple[Any, bool]:
        return train.reward(completions, prompts), next(calls) == AT_STEP and meets(process)

    def reward(completions: list[str], prompts: list[str], **_: Any) -> Any:
        answer, fails = answers(completions, prompts)
        return how(answer) if fails else answer

    async def later(completions: list[str], prompts: list[str], **_: Any) -> Any:
        answer, fails = answers(completions, prompts)
        return await how(answer) if fails else answer

    later.__name__ = reward.__name__
    return later if asyncio.iscoroutinefunction(how) else reward


def silent(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


# What happens elsewhere


def fills_the_disk(part: str, process: int, size: int) -> Callable[[train.Trainer], None]:
    """No file may be longer, in one process, while the part of a checkpoint is saved."""

    def prepare(trainer: train.Trainer) -> None:
        owner = TrainerState if part == "save_to_json" else trainer
        save = getattr(owner, part)

        def limited(*args: Any, **kwargs: Any) -> Any:
            if not meets(process) or trainer.state.global_step != AT_STEP:
                return save(*args, **kwargs)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            try:
                return save(*args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                setattr(owner, part, save)

        setattr(owner, part, limited)

    return prepare


class Leaves(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == AT_STEP - 1 and meets(1):
            sys.exit(0)


def collator_raises(trainer: train.Trainer) -> None:
    calls = itertools.count(1)

    def collate(rows: Any) -> Any:
        if next(calls) == AT_STEP and meets(1):
            raise OSError("the data is gone")
        return rows

    trainer.data_collator = collate


def reward_model(model: str) -> Any:
    scores = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    calls, forward = itertools.count(1), scores.forward

    def failing_forward(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == AT_STEP and meets(1):
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    scores.forward = failing_forward
    return scores


@dataclass
class Fault:
    reward: Any = train.reward
    prepare: Callable[[train.Trainer], None] = lambda trainer: None
    fields: dict[str, Any] = field(default_factory=dict)


def in_limited_time(how: Callable[[Any], Any]) -> Fault:
    return Fault(failing(how), fields={"reward_timeout": 2.0})


FAULTS: dict[str, Callable[[str], Fault]] = {
    "none": lambda _: Fault(),
    "raises": lambda _: Fault(failing(raises)),
    "raises on both": lambda _: Fault(failing(raises, process=None)),
    "is infinite": lambda _: Fault(failing(is_infinite)),
    "is too short": lambda _: Fault(failing(is_too_short)),
    "is NaN": lambda _: Fault(failing(is_nan)),
    "never applies": lambda _: Fault(silent, fields={"stop_broken_run": True, "max_steps": 12}),
    "leaves": lambda _: Fault(failing(leaves)),
    "sleeps": lambda _: in_limited_time(sleeps),
    "searches": lambda _: in_limited_time(searches),
    "swallows": lambda _: in_limited_time(swallows),
    "async raises": lambda _: Fault(failing(raises_later)),
    "async leaves": lambda _: Fault(failing(leaves_later)),
    "async sleeps": lambda _: in_limited_time(sleeps_later),
    "reward model raises": lambda model: Fault([train.reward, reward_model(model)], fields={"reward_weights": [1, 0]}),
    "raises in evaluation": lambda _: Fault(failing(raises), fields={**EVALUATED, "eval_steps": AT_STEP - 1}),
    "disk full, model": lambda _: Fault(
        prepare=fills_the_disk("save_model", 0, 9999), fields={**EVALUATED, "eval_steps": 2}
    ),
    "disk full, model card": lambda _: Fault(prepare=fills_the_disk("create_model_card", 0, 99)),
    "disk full, optimizer": lambda _: Fault(prepare=fills_the_disk("_save_optimizer_and_scheduler", 0, 9999)),
    "disk full, second process": lambda _: Fault(prepare=fills_the_disk("_save_rng_state", 1, 999)),
    "disk full, trainer state": lambda _: Fault(prepare=fills_the_disk("save_to_json", 0, 99)),
    "holds the interpreter": lambda _: in_limited_time(holds_the_interpreter),
    "blocks the event loop": lambda _: in_limited_time(blocks_the_event_loop),
    "is killed": lambda _: Fault(failing(is_killed)),
    "sleeps without limit": lambda _: Fault(failing(sleeps)),
    "leaves from a callback": lambda _: Fault(prepare=lambda trainer: trainer.add_callback(Leaves())),
    "data loader raises": lambda _: Fault(prepare=collator_raises),
}


def build(model: str, folder: Path, fault: Fault) -> train.Trainer:
    data = {"eval_dataset": prompts(2)} if "eval_strategy" in fault.fields else {}
    args = GRPOExtConfig(**(FIELDS | fault.fields), output_dir=str(folder))
    trainer = train.Trainer(model, fault.reward, args, prompts(64), **data)
    fault.prepare(trainer)
    return trainer


def result(trainer: train.Trainer) -> dict[str, Any]:
    return {
        "processes": trainer.accelerator.num_processes,
        "step": trainer.state.global_step,
        "checkpoints": sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")),
        "weights": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
        "log": trainer.state.log_history,
    }


def caught(model: str, folder: Path, name: str) -> dict[str, Any]:
    trainer = build(model, folder / name, FAULTS[name](model))
    try:
        trainer.train()
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__}
        return found | result(trainer) | {"resumed": resumed(model, folder, name)}
    return result(trainer)


def uncaught(model: str, folder: Path, name: str) -> dict[str, Any]:
    timeouts.GRACE = 1.0
    trainer = build(model, folder / name, FAULTS[name](model))
    trainer.train()
    return result(trainer)


def resumed(model: str, folder: Path, name: str) -> dict[str, Any]:
    global ARMED
    ARMED = False
    trainer = build(model, folder / name, FAULTS[name](model))
    trainer.train(resume_from_checkpoint=name != "none")
    ARMED = True
    return result(trainer)


def main() -> None:
    model, folder, how, *names = sys.argv[1:]
    signal.alarm(WATCHDOG[how])
    rank = os.environ.get("RANK", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.save(globals()[how](model, Path(folder), name), f"{folder}/{name}.{rank}")
    leave()


if __name__ == "__main__":
    main()
