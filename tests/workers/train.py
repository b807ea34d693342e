"""Trains the tiny model with forced completions in one of several processes, and saves what the test compares.

    train.py MODEL_DIR OUT_FILE JSON_OF_FIELDS

Completions depend on the prompt and the rank in its group alone, so that every number of processes sees the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ending import leave
from tiny import SPECIAL, THREE_SGD_STEPS, prompts  # the path comes first

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer


class Trainer(GRPOExtTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *args: Any) -> Any:
        first = self.accelerator.process_index * len(prompt_ids)
        out = []
        for row, ids in enumerate(prompt_ids):
            digest = hashlib.sha256(f"{ids}/{(first + row) % self._group_size}".encode()).digest()
            letters = len(self.processing_class) - len(SPECIAL)
            # Prompts differ in their longest completion, and so do the processes.
            longest = 1 + hashlib.sha256(str(ids).encode()).digest()[0] % 8
            out.append([len(SPECIAL) + digest[1 + t] % letters for t in range(1 + digest[0] % longest)] + [1])
        return out, None


SILENT: list[str] = []  # first characters of prompts whose completions are all rewarded alike


def reward(completions: list[str], prompts: list[str], **_: Any) -> dict[str, list[float]]:
    seen = ["" if p[0] in SILENT else c for p, c in zip(prompts, completions, strict=True)]
    return {
        "length": [len(c) / 10 for c in seen],
        "digits": [float(any(map(str.isdigit, c))) for c in seen],
    }


def late(completions: list[str], prompts: list[str], **_: Any) -> list[dict[str, float] | None]:
    """Names that only some prompts have, and so perhaps only one of the processes."""
    pairs = zip(prompts, completions, strict=True)
    return [{f"first_{p[0]}": float("a" in c and p[0] not in SILENT)} for p, c in pairs]


def main() -> None:
    model, out, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    SILENT.extend(fields.pop("silent", []))
    arguments = {**THREE_SGD_STEPS, "output_dir": tempfile.mkdtemp(), "logging_steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model, [reward, late], GRPOExtConfig(**(arguments | fields)), prompts(64))
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(
            {
                "processes": trainer.accelerator.num_processes,
                "wrapper": type(trainer.model_wrapped).__name__,
                "weights": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
                "log": trainer.state.log_history,
            },
            out,
        )
    leave()


if __name__ == "__main__":
    main()
