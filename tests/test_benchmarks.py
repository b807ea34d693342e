"""The claims of speed are those that were recorded, and they are good enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "BENCHMARKS.md").read_text()


def recorded(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return result


def test_the_training_phase_as_it_was_recorded() -> None:
    result = recorded("training_phase")
    assert [row["work"] for row in result["rows"]] == list(result["needed"])
    assert result["command"] in PAGE
    for row in result["rows"]:
        assert row["time_ratio"] >= result["needed"][row["work"]]
        assert row["memory_ratio"] >= 1
        assert max(row["grad_rel_error"], row.get("grad_rel_error_kl") or 0) < 1e-5
        assert f"**{row['time_ratio']:.2f}** | {row['memory_ratio']:.2f} |" in PAGE
        assert f"{row['trl_tokens']} / {row['ours_tokens']} |" in PAGE


def test_the_kernels_as_they_were_recorded() -> None:
    rows = recorded("kernels")["rows"]
    assert len(rows) == 4
    for row in rows[:3]:
        assert row["time_ratio"] >= row["needed"]
    for row in rows:
        assert f"**{row['time_ratio']:.3g}** |" in PAGE


@pytest.mark.slow
def test_the_script_of_the_kernels_runs(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--repeats", "1", "--json", str(out)]
    subprocess.run(script, check=True, capture_output=True, timeout=300)
    # Whatever the times, the script has compared our values with those of the loops.
    assert {"work", "time_ratio", "needed"} <= json.loads(out.read_text())["rows"][0].keys()
