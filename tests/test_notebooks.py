"""The notebooks as they are committed: without outputs, and ready for Colab. `make notebooks` runs them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(file: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_no_output_is_committed(file: Path) -> None:
    for cell in cells(file, "code"):
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_opens_in_colab(file: Path) -> None:
    # Without a public address of the repository the link leads to the page where one is chosen.
    address = re.search(r'^Repository = "https://github.com/(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    link = "https://colab.research.google.com/github"
    if address is not None:
        link += f"/{address[1]}/blob/main/notebooks/{file.name}"
    assert f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})" in source(
        cells(file, "markdown")[0]
    )


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_first_code_installs_what_is_missing_and_nothing_else_does(file: Path) -> None:
    install, *rest = map(source, cells(file, "code"))
    assert install == source(cells(NOTEBOOKS[0], "code")[0])
    assert re.search(r'^if importlib.util.find_spec\("hf_grpo_ext"\) is None:\n(    .*\n?)*\Z', install, re.MULTILINE)
    assert not any(re.search(r"^\s*[%!]", code, flags=re.MULTILINE) for code in rest)
    for code in rest:
        ast.parse(code)
