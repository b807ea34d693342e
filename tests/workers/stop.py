"""Trains until `StopBrokenRun` stops it, for a reason that one process alone sees.

    stop.py MODEL_DIR OUT_FILE

Every process saves its step and reason to OUT_FILE.<rank>.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent.parent))

from ending import leave
from tiny import THREE_SGD_STEPS, prompts  # the path comes first
from train import Trainer, reward  # the worker beside this one

from hf_grpo_ext import GRPOExtConfig, StopBrokenRun


class LocalMetric(TrainerCallback):
    """Logs a metric that is the number of the process, as a script may do."""

    trainer: Trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer._metrics["train"]["local"].append(float(self.trainer.accelerator.process_index))


def main() -> None:
    model, out = sys.argv[1:]
    arguments = {**THREE_SGD_STEPS, "output_dir": tempfile.mkdtemp(), "logging_steps": 1, "max_steps": 5}
    local, stop = LocalMetric(), StopBrokenRun(bounds={"local": 0.5}, patience=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local.trainer = Trainer(model, reward, GRPOExtConfig(**arguments), prompts(64), callbacks=[local, stop])
        local.trainer.train()
    rank = local.trainer.accelerator.process_index
    torch.save({"step": local.trainer.state.global_step, "reason": stop.reason}, f"{out}.{rank}")
    leave()


if __name__ == "__main__":
    main()
