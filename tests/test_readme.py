"""What the README says is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hf_grpo_ext import PRESETS
from hf_grpo_ext.advantages import ADVANTAGE_ESTIMATORS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_method_tables_are_complete_and_true() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \| ([^|]*)\|', README, flags=re.MULTILINE)
    assert {name for name, _ in rows} == {*PRESETS, *ADVANTAGE_ESTIMATORS}
    losses = rows[len(ADVANTAGE_ESTIMATORS) :]
    assert [name for name, _ in losses] == list(PRESETS)
    for name, knobs in losses:
        for knob, value in re.findall(r"(\w+)=([^,`]+)", knobs):
            assert ast.literal_eval(value) == PRESETS[name][knob], (name, knob)


def test_the_example_without_a_trainer_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[-1]
    scope: dict = {}
    exec(code, scope)
    assert scope["advantages"].std().item() == pytest.approx(1)
