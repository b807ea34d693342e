"""What training without an accelerator needs to know about the processor."""

import math
import os
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env


def defaults() -> dict:
    """bfloat16 only where the processor computes in it; elsewhere a CPU emulates it, slower than float32."""
    on_cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    return {"use_cpu": True, "bf16": torch.cpu._is_avx512_bf16_supported()} if on_cpu else {}


def cores() -> int:
    """The cores that this machine grants."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(granted, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or no limit in it
        return granted


def use_all_cores() -> None:
    """Share the cores this machine grants among the local processes."""
    # One thread is what `accelerate launch` sets where nobody chose a number.
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
