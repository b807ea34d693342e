"""Rooms and arrows: who may import whom, and what the package must not contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hf_grpo_ext

PACKAGE = Path(hf_grpo_ext.__file__).parent
# Each module may import those above it.
ORDER = [
    "failures",
    "timeouts",
    "checkpoints",
    "reductions",
    "grouping",
    "kl",
    "importance",
    "entropy",
    "rewards",
    "dynamic_sampling",
    "loss_config",
    "papers",
    "normalization",
    "advantages",
    "loss",
    "diagnostics",
    "packing",
    "prefill",
    "micro_batches",
    "shared_prompt",
    "adapters",
    "sharding",
    "nemo_rl",
    "objective",
    "config",
    "explain",
    "__main__",
    "model_card",
    "report",
    "callbacks",
    "forward",
    "drawing",
    "saving",
    "trainer",
    "async_config",
    "async_rollouts",
    "async_trainer",
]
KNOW_TRL = {
    "config",
    "explain",
    "model_card",
    "forward",
    "drawing",
    "saving",
    "trainer",
    "async_config",
    "async_rollouts",
    "async_trainer",
}
KNOW_OTHERS = {
    "adapters": {"accelerate"},
    "checkpoints": {"transformers"},
    "shared_prompt": {"transformers"},
    "callbacks": {"accelerate", "transformers"},
}


def imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ORDER, "__init__"}


def test_arrows_point_one_way() -> None:
    for place, module in enumerate(ORDER):
        ours = {name.lstrip(".") for name in imports(module) if name.startswith(".")}
        assert ours <= set(ORDER[:place]), f"{module} imports {sorted(ours - set(ORDER[:place]))}"


def test_the_mathematics_knows_no_trl() -> None:
    for module in set(ORDER) - KNOW_TRL:
        roots = {name.split(".")[0] for name in imports(module) if not name.startswith(".")}
        allowed = KNOW_OTHERS.get(module, set())
        assert not roots & {"trl", "transformers", "accelerate", "peft", "datasets"} - allowed, module


def test_importing_the_mathematics_loads_no_trl() -> None:
    code = "import sys, hf_grpo_ext; sys.exit(any(m in sys.modules for m in ('trl', 'transformers', 'accelerate')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_assert_in_the_package() -> None:
    for path in PACKAGE.glob("*.py"):
        asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not asserts, f"{path.name}: `python -O` strips the asserts in lines {asserts}"
