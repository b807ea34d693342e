"""What the benchmarks share: the machine, medians, tables, the file of results."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """A Markdown table."""

    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(text(row[column]) for column in columns) + " |", flush=True)


def write(file: str | None, rows: Sequence[dict[str, Any]], **about: Any) -> None:
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"rows": rows, "machine": machine(), **about}, indent=2) + "\n")
