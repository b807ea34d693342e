"""Two processes train to the weights of one, and stop together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_model
from tiny_env import check_same_log

WORKERS = Path(__file__).parent / "workers"
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DDP = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
gpu_ids: all
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: 'no'
"""


def launch(folder: Path, processes: int, worker: str, *arguments: str) -> None:
    """Runs a worker to its end in one process or in two."""
    config = folder / "ddp.yaml"
    config.write_text(DDP)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)] if processes == 2 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKERS / worker), *arguments],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def train(folder: Path, model: str, processes: int, **fields: Any) -> dict[str, Any]:
    out = folder / f"out_{processes}.pt"
    launch(folder, processes, "train.py", model, str(out), json.dumps(fields))
    result: dict[str, Any] = torch.load(out, weights_only=False)
    assert result["processes"] == processes
    assert result["wrapper"] == ("DistributedDataParallel" if processes == 2 else "Qwen2ForCausalLM")
    return result


@pytest.mark.distributed
@pytest.mark.parametrize(
    "fields",
    [
        {"adv_estimator": "gdpo", "loss_type": "dapo", "gradient_accumulation_steps": 2},
        {"adv_estimator": "reinforce_plus_plus", "loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
        {"loss_fn": {"use_kl_in_reward": True}, "beta": 0.1},
        # Half of the prompts are silent, at first all that the first process has, then all of the second.
        {"use_dynamic_sampling": True, "adv_estimator": "gdpo", "shuffle_dataset": False, "silent": list("01467")},
        {"skip_rows_without_signal": True, "shuffle_dataset": False, "silent": list("01467")},
    ],
    ids=["gdpo", "reinforce_plus_plus", "grpo with the KL in the reward", "dynamic sampling", "silent processes"],
)
def test_two_processes_train_to_the_weights_of_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = save_tiny_model(tmp_path / "model")
    # Groups of 4 stand across both processes' batches of 2 (or 4), and their rows differ in length.
    rows = 4 if "gradient_accumulation_steps" in fields else 8
    one = train(tmp_path, model, 1, per_device_train_batch_size=2 * rows, **fields)
    two = train(tmp_path, model, 2, per_device_train_batch_size=rows, **fields)
    start = load_file(f"{model}/model.safetensors")
    changed = torch.cat([(one["weights"][name] - start[name]).flatten() for name in start])
    differs = torch.cat([(one["weights"][name] - two["weights"][name]).flatten() for name in start])
    assert changed.norm() > 0.01
    assert (differs.norm() / changed.norm()).item() < 1e-5
    check_same_log(one["log"], two["log"])  # every metric is that of all rows, however they are split


@pytest.mark.distributed
def test_all_processes_stop_when_one_sees_a_reason(tmp_path: Path) -> None:
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "stopped"
    launch(tmp_path, 2, "stop.py", model, str(out))
    first, second = (torch.load(f"{out}.{rank}") for rank in range(2))
    assert first == second
    assert first["step"] == 2
    assert first["reason"].startswith("local is 1, above its bound of 0.5 in 2 log entries in a row")
