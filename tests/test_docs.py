"""What the README and the pages of the site say is so: their code runs, their tables are those of the package."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from test_config import MAPPED, REFUSED
from tiny import save_tiny_model
from tiny_async import GivenRolloutWorker, NoTransfer, given_group, make_loop, run_on_cpu
from tiny_env import quiet
from transformers import Trainer
from trl import GRPOConfig, ModelConfig
from trl.scripts.vllm_serve import ScriptArguments as Serve
from trl.scripts.vllm_serve import build_command

import hf_grpo_ext
from hf_grpo_ext import PRESETS, AsyncGRPOExtConfig, AsyncGRPOExtTrainer, GRPOExtConfig
from hf_grpo_ext.advantages import ADVANTAGE_ESTIMATORS
from hf_grpo_ext.explain import main as explain_main
from hf_grpo_ext.nemo_rl import FIELDS, OFF, READ
from hf_grpo_ext.objective import ADVANTAGE_FIELDS, LOSS_FIELDS, LOSS_TYPES

pytestmark = quiet
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)
PAGES = [next(iter(entry.values())) for entry in SITE["nav"]]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def with_snippets(page: str) -> str:
    """The text of a page, with the parts of the README that it includes."""
    return re.sub(
        r'^--8<-- "README.md:(\w+)"$',
        lambda found: README.split(f"[start:{found[1]}] -->\n")[1].split(f"<!-- --8<-- [end:{found[1]}]")[0],
        (ROOT / "docs" / page).read_text(),
        flags=re.MULTILINE,
    )


TEXTS = {page: with_snippets(page) for page in PAGES} | {"README.md": README}


def blocks(text: str) -> list[tuple[str, str]]:
    """`(language, code)` of each block."""
    return re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)


# The site


def test_the_site_has_ten_pages_and_no_other() -> None:
    assert len(PAGES) <= 10
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", hf_grpo_ext.__all__)
def test_every_public_name_is_on_one_page(name: str) -> None:
    places = [page for page, text in TEXTS.items() if f"::: hf_grpo_ext.{name}\n" in text]
    assert len(places) == 1, f"{name} is rendered on {places or 'no page'}: add `::: hf_grpo_ext.{name}` to one"


def test_nothing_is_said_twice() -> None:
    paragraphs = [part.strip() for text in [README, *((ROOT / "docs" / page).read_text() for page in PAGES)]
                  for part in text.split("\n\n") if len(part) > 150]  # fmt: skip
    assert len(paragraphs) == len(set(paragraphs))


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    html = "".join(page.read_text() for page in tmp_path.glob("*.html"))
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", html)
    for name in hf_grpo_ext.__all__:
        assert f'id="hf_grpo_ext.{name}"' in html, name


# Its code


class OnGivenRollouts(AsyncGRPOExtTrainer):
    """The asynchronous trainer without a server: the worker's loop scores given rollouts in this process."""

    def __init__(self, model: str, reward_funcs: Any, args: AsyncGRPOExtConfig, train_dataset: Dataset) -> None:
        loop = make_loop([reward_funcs], train_dataset, adv_estimator=args.adv_estimator_config)
        groups = [given_group(prompt, i) for i, prompt in enumerate(train_dataset["prompt"][:4])]
        worker = GivenRolloutWorker(loop, groups)
        super().__init__(model, None, args, train_dataset, rollout_worker=worker, weight_transfer=NoTransfer())


def with_defaults(init: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    @functools.wraps(init)
    def with_them(self: Any, *args: Any, **fields: Any) -> None:
        init(self, *args, **(defaults | fields))

    return with_them


@pytest.fixture
def a_newcomers_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder; no GPU and little patience: one step of training, on a CPU."""
    monkeypatch.chdir(tmp_path)
    on_cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    monkeypatch.setattr(GRPOExtConfig, "__init__", with_defaults(GRPOExtConfig.__init__, **on_cpu))
    init = with_defaults(AsyncGRPOExtConfig.__init__, **on_cpu, token_budget=0)
    monkeypatch.setattr(AsyncGRPOExtConfig, "__init__", init)
    monkeypatch.setattr(hf_grpo_ext, "AsyncGRPOExtTrainer", OnGivenRollouts)
    run_on_cpu(monkeypatch)

    train = Trainer.train

    def one_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        self.args.max_steps, self.args.eval_steps = 1, 1
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", one_step)


@pytest.mark.usefixtures("a_newcomers_machine")
@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "```python" in text])
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "model")
    scope: dict[str, Any] = {"__name__": "__main__"}
    found = [*blocks(TEXTS[page]), ("", "")]
    for (language, code), (following, expected) in itertools.pairwise(found):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code.replace(MODEL, tiny).replace("outputs/gdpo_math", tiny), page, "exec"), scope)
            if following == "text":
                assert out.getvalue().endswith(expected)  # after the log, where it trains


def flags_of(*configs: type) -> set[str]:
    return {f"--{field.name}" for config in configs for field in dataclasses.fields(config)}


def script_flags(script: Path) -> set[str]:
    """The options of a recipe: the fields of its dataclass beside those of the configs."""
    own = {
        f"--{line.target.id}"
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }
    return own | flags_of(GRPOExtConfig, ModelConfig) | {"--config"}


def names_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def check_command(words: list[str], made_by_the_page: set[str]) -> None:
    """A command names programs, files and options that exist, and its JSON can be read."""
    for word in words:
        if word.startswith("{"):
            json.loads(word)
    while "=" in words[0]:  # variables
        words = words[1:]
    program, *rest = words
    if program == "accelerate" or (program == "python" and rest[0] != "-m"):
        place = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        launch, script, options = rest[1:place], rest[place], rest[place + 1 :]
        known = {name for action in launch_command_parser()._actions for name in action.option_strings}
        assert names_in(launch) <= known
        assert script in made_by_the_page or (ROOT / script).is_file(), script
        if script not in made_by_the_page:
            assert names_in(options) <= script_flags(ROOT / script)
        files = [word for word in launch if word.endswith(".yaml")]
        assert all((ROOT / file).is_file() for file in files), files
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), rest[0]
    elif program == "python":
        assert rest[:3] == ["-m", "hf_grpo_ext", "explain"]
        assert names_in(rest) <= flags_of(GRPOExtConfig) | {"--config"}
    elif program == "vllm":
        served = build_command(Serve(model=rest[1], dtype="float32"))
        assert rest[0] == "serve"
        assert set(rest) <= {*served, json_as_written(served)}
    else:
        assert (program, rest[0]) in {("pip", "install"), ("git", "clone")}, words


def json_as_written(command: list[str]) -> str:
    return command[command.index("--weight-transfer-config") + 1]


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "```bash" in text])
def test_the_commands_of_a_page_name_what_exists(page: str) -> None:
    made = set(re.findall(r"^# (\w+\.\w+)$", TEXTS[page], flags=re.MULTILINE))
    for language, code in blocks(TEXTS[page]):
        if language == "bash":
            subprocess.run(["bash", "-n"], input=code, text=True, check=True, timeout=10)
            for line in code.replace("\\\n", " ").splitlines():
                check_command(shlex.split(line, comments=True), made)


def test_explain_prints_what_the_quickstart_says(capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = next(
        (code, text)
        for (_, code), (language, text) in itertools.pairwise(blocks(TEXTS["index.md"]))
        if language == "text" and code.startswith("python -m hf_grpo_ext")
    )
    explain_main([*shlex.split(command)[3:], "--use_cpu"])
    beginning, rest = shown.split("...")
    assert rest.strip() == ""
    assert capsys.readouterr().out.startswith(beginning)


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "```yaml" in text])
def test_the_yaml_of_a_page_is_a_configuration(page: str) -> None:
    for language, code in blocks(TEXTS[page]):
        if language == "yaml":
            GRPOExtConfig(**yaml.safe_load(code), use_cpu=True, bf16=False)


# Its tables


def rows_of(text: str, columns: int = 2) -> list[list[str]]:
    """The rows of the tables whose first cell is code."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [row for row in rows if len(row) >= columns]


def test_the_method_tables_are_complete_and_true() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \| ([^|]*)\|', README, flags=re.MULTILINE)
    assert {name for name, _ in rows} == {*PRESETS, *ADVANTAGE_ESTIMATORS}
    losses = rows[len(ADVANTAGE_ESTIMATORS) :]
    assert [name for name, _ in losses] == list(PRESETS)
    for name, knobs in losses:
        for knob, value in re.findall(r"(\w+)=([^,`]+)", knobs):
            assert ast.literal_eval(value) == PRESETS[name][knob], (name, knob)


def test_the_fields_of_trl_that_are_knobs_are_listed() -> None:
    listed = {}
    for field, knobs in (row[:2] for row in rows_of(TEXTS["from_trl.md"])):
        listed[re.findall(r"`(\w+)`", field)[0]] = tuple(re.findall(r"`(\w+)`", knobs))
    clips = {"advantage_clip_low", "advantage_clip_high"}  # of both sides, and ours
    twins = {name: knobs for name, knobs in (LOSS_FIELDS | ADVANTAGE_FIELDS).items() if name not in clips}
    assert listed.keys() == twins.keys() == MAPPED
    assert all(set(twins[name]) <= set(knobs) for name, knobs in listed.items())


def test_what_is_refused_of_trl_is_listed() -> None:
    section = TEXTS["from_trl.md"].split("## What is refused")[1].split("\n## ")[0]
    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    of_trl = set(re.findall(r"'(\w+)'", help_text))
    assert {"sapo", "dapo"} <= of_trl, "the help text reads otherwise now; find TRL's losses another way"
    for name in REFUSED | (of_trl - set(LOSS_TYPES)):
        assert re.search(rf'[`"]{name}[`"]', section), name


def test_the_keys_of_nemo_rl_are_listed() -> None:
    rows = {key.strip("`"): field for key, field in (row[:2] for row in rows_of(TEXTS["from_nemo_rl.md"]))}
    for key, field in FIELDS.items():
        assert rows[key] == f"`{field}`", key
    text = TEXTS["from_nemo_rl.md"]
    assert all(f"`{key}`" in text for key in {*READ, *OFF})
