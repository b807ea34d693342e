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
def test_the_first_code_installs_and_nothing_else_does(file: Path) -> None:
    install, *rest = map(source, cells(file, "code"))
    assert install == source(cells(NOTEBOOKS[0], "code")[0])
    assert "pip" in install
    for code in rest:
        ast.parse(code)  # no magic
        assert "subprocess" not in code


WHEEL, CLONE = "hf_grpo_ext-1-py3-none-any.whl", "hf_grpo_ext/__init__.py"


@pytest.mark.parametrize(
    ("missing", "files", "installed"),
    [
        ((), [CLONE, f"notebooks/{WHEEL}"], []),
        (("hf_grpo_ext",), [CLONE, f"notebooks/{WHEEL}"], [WHEEL]),
        (("hf_grpo_ext",), [CLONE, "notebooks/another-1-py3-none-any.whl"], ["the clone"]),
        (("peft",), [CLONE], ["the clone"]),
        (("hf_grpo_ext",), ["pyproject.toml"], FileNotFoundError),  # of another project
    ],
)
def test_what_is_installed(
    missing: tuple[str, ...],
    files: list[str],
    installed: list[str] | type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "hf_grpo_ext").mkdir()
    for file in files:
        (tmp_path / file).touch()
    given = []

    def run(command: list[str], check: bool) -> None:
        assert check
        given.append(command[-1].replace(str(tmp_path), "the clone"))

    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr("subprocess.run", run)
    install = source(cells(NOTEBOOKS[0], "code")[0])
    if installed is FileNotFoundError:
        with pytest.raises(FileNotFoundError, match="pip wheel"):
            exec(install, {})
    else:
        exec(install, {})
        assert given == [f"{what}[recipes]" for what in installed]
