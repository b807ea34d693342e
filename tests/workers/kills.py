"""Kills whole runs at given moments and lets them go on from what is left.

    kills.py MODEL_DIR OUT_FOLDER JSON

JSON is a list of [processes, num_iterations, moment]; the moment "never" is a run without interruption. A run is a
group of processes that are forked from this one, since importing everything takes longer than the run. Completions are
drawn from the model, dynamic sampling draws further prompts, every step is saved and one checkpoint is kept. How the
processes ended, and what they saw until the end, is saved to OUT_FOLDER/ends.json and OUT_FOLDER/<case>.<rank>.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import TrainerState

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # the worker beside this one
from tiny import THREE_SGD_STEPS, prompts  # the path comes first

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer

AT_STEP = 3
WATCHDOG = 60  # seconds
FIELDS: dict[str, Any] = {
    **THREE_SGD_STEPS,
    "max_steps": 5,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_dynamic_sampling": True,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
}


def kill_all() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
    time.sleep(WATCHDOG)


class Trainer(GRPOExtTrainer):
    """Dies in the third step, or when that is saved, and remembers each generation."""

    moment = "never"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generations: list[tuple[int, Any, Any]] = []

    def dies(self, moment: str, process: int | None = None) -> bool:
        return self.moment == moment and process in (None, self.accelerator.process_index)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.state.global_step >= AT_STEP - 1 and self.dies("in generation"):
            kill_all()
        self.generations.append((self.state.global_step, prompt_ids, drawn[0]))
        return drawn

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == AT_STEP - 1 and self.dies("between micro-batches"):
            kill_all()
        return loss

    @property
    def _saves_third(self) -> bool:
        return self.state.global_step == AT_STEP

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saves_third and self.dies("model saved", process=0):
            kill_all()
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        last = self.accelerator.num_processes - 1
        if self._saves_third and self.dies("all saved but the last process", process=last):
            time.sleep(1)  # the others go on as far as they can
            kill_all()
        super()._save_rng_state(output_dir)

    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)
        if self._saves_third and self.dies("saved"):
            kill_all()


def die_in_functions(trainer: Trainer) -> None:
    save, rotate = TrainerState.save_to_json, transformers.trainer.rotate_checkpoints

    def save_half(state: TrainerState, path: str) -> None:
        save(state, path)
        if state.global_step == AT_STEP and trainer.dies("trainer state half saved"):
            os.truncate(path, os.path.getsize(path) // 2)
            kill_all()

    def do_not_rotate(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == AT_STEP and trainer.dies("before the last checkpoint is deleted"):
            kill_all()
        rotate(*args, **kwargs)

    TrainerState.save_to_json, transformers.trainer.rotate_checkpoints = save_half, do_not_rotate


def forked(processes: int, work: Callable[[int], None]) -> list[int]:
    """Runs `work(rank)` in processes that are a group of their own, and returns how they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids: list[int] = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            signal.alarm(WATCHDOG)
            if processes > 1:
                world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                os.environ |= {name: str(value) for name, value in world.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run(model: str, out: str, iterations: int, moment: str, resumes: bool, rank: int) -> None:
    args = GRPOExtConfig(**FIELDS, num_iterations=iterations, output_dir=out)
    trainer = Trainer(model, [train.reward, train.late], args, prompts(64))
    trainer.moment = "never" if resumes else moment
    die_in_functions(trainer)
    trainer.train(resume_from_checkpoint=resumes)
    seen = {
        "processes": trainer.accelerator.num_processes,
        "from": trainer._initial_global_step,
        "step": trainer.state.global_step,
        "weights": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
        "log": trainer.state.log_history,
        "generations": trainer.generations,
        "checkpoints": sorted(path.name for path in Path(out).glob("checkpoint-*")),
    }
    torch.save(seen, f"{out}.{rank}")


def main() -> None:
    model, folder, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    warnings.simplefilter("ignore")
    train.SILENT[:] = "0146"
    ends = {}
    for processes, iterations, moment in cases:
        name = f"{processes}, {iterations}, {moment}"
        runs = [False] if moment == "never" else [False, True]
        ends[name] = [
            forked(processes, functools.partial(run, model, f"{folder}/{name}", iterations, moment, resumes))
            for resumes in runs
        ]
    Path(folder, "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
