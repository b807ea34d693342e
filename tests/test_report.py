"""The report: one page that holds what it is given, whatever that is, and the numbers of the run."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from page import Page
from tiny import save_tiny_model
from tiny_env import PROMPTS, G, make_trainer, quiet

from hf_grpo_ext.report import (
    CHARACTERS_SHOWN,
    PANELS,
    Rollouts,
    component_figure,
    component_summary,
    curve,
    draw,
    shown_groups,
    write_report,
)

pytestmark = quiet
METRICS_PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()


def svg(image: str) -> str:
    return base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")).decode()


def history(names: list[str], steps: int = 3) -> list[dict[str, Any]]:
    """Log entries of a training with these components, and an evaluation at its end."""
    entries = [
        {
            "step": step,
            "loss": 0.01 * step,
            "reward": 0.1 * step,
            "frac_reward_zero_std": 0.5,
            **{f"rewards/{name}/mean": 0.25 * step for name in names},
            **{f"rewards/{name}/std": 0.5 for name in names},
            **{f"rewards/{name}/advantage_share": 1 / len(names) for name in names},
        }
        for step in range(1, steps + 1)
    ]
    evaluation = {"step": steps, **{f"eval_rewards/{name}/mean": 0.9 for name in names}}
    return [*entries, evaluation, {"step": steps, "train_runtime": 1.0}]


def rollouts(completions: list[Any], advantages: list[float], **rewards: list[float | None]) -> Rollouts:
    size = len(advantages)
    return Rollouts(["1 + 1 ="] * size, completions, rewards, advantages, group_size=size)


def written(folder: Path, **parts: Any) -> Page:
    parts = {"title": "A run", "objective": "Loss: dapo", "log_history": []} | parts
    return Page(write_report(folder / "some" / "report.html", **parts))


def test_everything_that_it_is_given_is_on_the_page(tmp_path: Path) -> None:
    page = written(
        tmp_path,
        log_history=history(["right", "brief"]),
        facts={"Model": "tiny"},
        tables={"Held out": [{"component": "right", "before": 0.125, "after": 0.5}]},
        rollouts=rollouts(["2", "3"], [0.75, -0.75], right=[1.0, 0.0], brief=[None, 0.25]),
    )
    for text in ("A run", "Loss: dapo", "tiny", "Held out", "1 of 1 prompts", "advantage 0.75", "right 1", "brief -"):
        assert text in page.text, text
    assert page.tables[0] == [["component", "before", "after"], ["right", "0.125", "0.5"]]
    head, right, brief = page.tables[1]
    assert dict(zip(head, right, strict=True)) == {
        "component": "right",
        "mean, first": "0.25",
        "mean, last": "0.75",
        "groups without signal, last": "-",
        "share of the advantage, last": "0.5",
        "lowest correlation, last": "-",
    }
    assert brief[0] == "brief"
    # A diagram for each component, and for each metric that was logged.
    assert len(page.images) == 2 + len(["reward", "frac_reward_zero_std", "loss"])


def test_the_summary_has_the_last_values_and_the_lowest_correlation() -> None:
    def entry(step: int, mean: float, without: float, with_b: float, with_c: float) -> dict[str, float]:
        of_a = {"rewards/a/mean": mean, "rewards/a/std": 0.1, "rewards/a/frac_groups_without_signal": without}
        return {"step": step, **of_a, "rewards/correlation/a/b": with_b, "rewards/correlation/a/c": with_c}

    log = [entry(1, 0.25, 0.9, 0.5, -0.7), entry(2, 0.5, 0.3, -0.1, 0.2)]
    assert component_summary(log, "a", ["a", "b", "c"]) == {
        "component": "a",
        "mean, first": 0.25,
        "mean, last": 0.5,
        "groups without signal, last": 0.3,
        "share of the advantage, last": None,
        "lowest correlation, last": "-0.1 with b",
    }


def test_what_becomes_more_likely_is_marked_up(tmp_path: Path) -> None:
    page = written(tmp_path, rollouts=rollouts(["2", "3", "4"], [-0.75, 0.0, 0.75], right=[0.0, 0.5, 1.0]))
    marks = [attrs["class"].split() for _, attrs in page.elements if attrs.get("class", "").startswith("rollout")]
    assert marks == [["rollout", "up"], ["rollout"], ["rollout", "down"]]


def test_it_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    page = written(tmp_path, log_history=history(["right"]))
    assert page.images
    assert all(image.startswith("data:image/svg+xml;base64,") for image in page.images)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "a"}
    assert not re.search(r"https?://|@import|url\(", page.source)
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


HOSTILE = (
    "</pre></td></div><script>alert(1)</script><img src=x onerror='alert(1)'>\" onload=\"alert(1) & {{ 7 * 7 }} $x_"
)


def page_full_of(text: str, folder: Path) -> Page:
    message = {"role": text, "content": text, "tool_calls": [{"function": {"name": text, "arguments": {}}}]}
    return written(
        folder,
        title=text,
        objective=text,
        facts={text: text},
        tables={text: [{text: text}]},
        log_history=history([text]),
        rollouts=Rollouts([text, text], [text, [message, message]], {text: [1.0, 0.0]}, [1.0, -1.0], 2),
    )


def test_what_comes_from_models_and_data_is_text(tmp_path: Path) -> None:
    page, harmless = (page_full_of(text, tmp_path) for text in (HOSTILE, "QQQ"))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in harmless.elements]
    assert [set(attrs) for _, attrs in page.elements] == [set(attrs) for _, attrs in harmless.elements]
    assert page.text == harmless.text.replace("QQQ", HOSTILE)
    # Title twice, objective, a fact, a table; the summary and the diagram of a component; and the rollouts.
    assert page.text.count(HOSTILE) == 2 + 1 + 2 + 3 + 2 + (1 + 2 + 1 + 6)
    assert page.images == harmless.images


ODD_RUNS: dict[str, dict[str, Any]] = {
    "nothing at all": {},
    "one step": {"log_history": history(["right"], steps=1)[:1]},
    "an evaluation alone": {"log_history": [{"step": 0, "eval_rewards/a/mean": 0.1, "eval_rewards/a/std": 0.0}]},
    "values that are none": {
        "log_history": [
            {"step": step, "loss": value, "rewards/a/mean": value, "rewards/a/std": value}
            for step, value in enumerate([math.nan, None, math.inf, 0.5])
        ]
    },
    "never a value": {"log_history": [{"step": 1, "loss": math.nan, "rewards/a/mean": None, "rewards/a/std": None}]},
    "entries without a step": {"log_history": [{"loss": 0.5}]},
    "a component that comes late": {"log_history": [*history(["a"]), *history(["a", "b"])]},
    "30 components": {
        "log_history": history([f"component_{i}" for i in range(30)]),
        "rollouts": rollouts(["2", "3"], [1.0, -1.0], **{f"component_{i}": [1.0, math.nan] for i in range(30)}),
    },
    "huge and tiny numbers": {"log_history": [{"step": 10**9, "loss": 1e300}, {"step": 10**9 + 1, "loss": -1e-300}]},
    "100,000 characters": {"rollouts": rollouts(["x" * 100_000, ""], [1.0, -1.0])},
    "other scripts": {
        "log_history": history(["正解", "إجابة", "🙂"]),
        "rollouts": rollouts(["答えは 42 です。", "الجواب هو ٤٢ 🙂"], [1.0, -1.0], 正解=[1.0, 0.0]),
    },
    "what no file can hold": {"rollouts": rollouts(["\ud800", "\x00\x1b[31m"], [1.0, -1.0])},
    "no completions": {"rollouts": Rollouts([], [], {}, [], group_size=4)},
    "a group that is cut": {"rollouts": Rollouts(["p"] * 3, ["c"] * 3, {"a": [1.0] * 3}, [0.0] * 3, group_size=2)},
    "an advantage that is NaN": {"rollouts": rollouts(["2", "3"], [math.nan, 0.5])},
}


@pytest.mark.parametrize("name", ODD_RUNS)
@pytest.mark.filterwarnings("error")
def test_odd_runs_have_a_page(tmp_path: Path, name: str) -> None:
    page = written(tmp_path, **ODD_RUNS[name])
    assert "Loss: dapo" in page.text
    assert "nan" not in page.text.lower()
    assert len(page.source.encode()) < 2_000_000


def test_a_long_text_shows_its_beginning_and_its_end(tmp_path: Path) -> None:
    page = written(tmp_path, rollouts=rollouts(["begin" + "x" * 100_000 + "end", "short"], [1.0, -1.0]))
    assert "beginx" in page.text
    assert "xend" in page.text
    left_out = 100_000 + len("begin") + len("end") - CHARACTERS_SHOWN
    assert f"[... {left_out:,} characters ...]" in page.text
    assert page.text.count("x" * 100) < 100


def test_rollouts_are_shown_from_the_highest_advantage_to_the_lowest(tmp_path: Path) -> None:
    size = 20
    many = Rollouts(
        prompts=[f"prompt {row // size}" for row in range(6 * size)],
        completions=[f"completion {row % size}." for row in range(6 * size)],
        rewards={},
        advantages=[float(row % size) for row in range(6 * size)],
        group_size=size,
    )
    page = written(tmp_path, rollouts=many)
    assert "4 of 6 prompts" in page.text
    assert "The 8 highest and lowest of 20 completions." in page.text
    assert re.findall(r"completion (\d+)\.", page.text)[:8] == ["19", "18", "17", "16", "3", "2", "1", "0"]
    assert re.findall(r"prompt (\d)", page.text) == ["0", "1", "2", "3"]


def test_a_conversation_shows_who_says_what(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "double", "arguments": {"x": 3}}}]}
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}
    talk = [call, {"role": "tool", "content": "6"}]
    page = written(tmp_path, rollouts=Rollouts([[image]], [talk], {}, [0.0], group_size=1))
    for text in ("assistant", "double({'x': 3})", "tool", "6", "[image] how many?"):
        assert text in page.text


def test_a_gap_in_a_curve_is_a_gap() -> None:
    entries = [{"step": 1, "kl": 0.5}, {"step": 2, "kl": None}, {"step": 3, "kl": math.inf}, {"step": 3, "eval_kl": 1}]
    points = curve(entries, "kl")
    assert points[0] == (1, 0.5)
    assert [step for step, _ in points] == [1, 2, 3]
    assert all(math.isnan(value) for _, value in points[1:])


def test_the_diagram_has_the_points() -> None:
    def heights(values: list[float]) -> list[float]:
        points = list(enumerate(values))
        drawn = svg(draw([[{"color": "#1d4ed8", "points": points, "held_out": []}]]))
        line = re.search(r'<path d="([^"]*)"[^>]*stroke: #1d4ed8', drawn)
        assert line is not None
        return [float(y) for y in re.findall(r"[ML] \S+ (\S+)", line.group(1))]

    low, high, middle = heights([0.0, 1.0, 0.5])  # upside down, as SVG counts
    assert high < middle < low
    assert middle == pytest.approx((high + low) / 2, rel=1e-3)


def test_a_point_without_a_neighbour_is_seen() -> None:
    def markers(values: list[float]) -> int:
        drawn = svg(draw([[{"color": "#1d4ed8", "points": list(enumerate(values)), "held_out": []}]]))
        return len(re.findall(r"<use [^>]*fill: #1d4ed8", drawn))

    assert [markers(values) for values in ([1.0, 2.0], [1.0], [1.0, 2.0, math.nan, 3.0])] == [0, 1, 1]


def test_a_component_has_its_mean_above_and_its_part_in_the_advantage_below() -> None:
    whole = component_figure(history(["right"]), "right")
    assert [label for label, _ in whole["legend"]] == ["mean", "share of the advantage"]
    assert whole["held_out"]
    drawn = svg(whole["image"])
    assert len(set(re.findall(r'id="(axes_\d)"', drawn))) == 2
    for _, color in whole["legend"]:
        assert color in drawn
    alone = component_figure([{"step": 1, "rewards/right/mean": 1.0}], "right")
    assert not alone["held_out"]
    assert len(set(re.findall(r'id="(axes_\d)"', svg(alone["image"])))) == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]  # what an import then fails on
    page = written(tmp_path, log_history=history(["right"]))
    assert "Curves need matplotlib: pip install matplotlib." in page.text
    assert page.images == []
    assert page.tables[0][1][:3] == ["right", "0.25", "0.75"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_the_page_on_metrics_says_the_same_of_a_healthy_run(panel: Any) -> None:
    rows = [line for line in METRICS_PAGE.splitlines() if f"`{panel.metrics[0]}`" in line]
    assert any(panel.healthy in row for row in rows)
    assert all(f"`{metric}`" in METRICS_PAGE for metric in panel.metrics)


# Of a training


def score(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
    return {
        "length": [float(len(ids)) for ids in completion_ids],
        "first": [float(ids[0] % 2) for ids in completion_ids],
    }


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


def test_it_shows_what_trained_and_not_what_was_evaluated_since(tiny_model: str, tmp_path: Path) -> None:

    held_out = Dataset.from_dict({"prompt": ["9 + 9 =", "8 + 8 ="]})
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        score,
        trainer={"eval_dataset": held_out},
        per_device_eval_batch_size=8,
        adv_estimator="gdpo",
        max_steps=2,
    )
    trainer.train()
    trained = trainer.scored[-1]
    trainer.evaluate()
    assert len(trainer.scored) == 3
    rows = trainer._last_rollouts
    assert rows.advantages == pytest.approx(trained["advantages"].tolist())
    assert rows.rewards["length"] == trained["reward/length"].tolist()
    assert rows.rewards["first"] == trained["reward/first"].tolist()
    assert rows.prompts == [prompt for prompt in PROMPTS[2:4] for _ in range(G)]

    path = trainer.write_report(tables={"Mine": [{"what": "x", "value": 0.25}]})
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert trainer.explain() in page.text
    assert "GDPO and the PPO loss" in page.text
    assert "10 rows, columns prompt" in page.text
    assert page.tables[0] == [["what", "value"], ["x", "0.25"]]
    assert "2 of 2 prompts" in page.text
    assert PROMPTS[2] in page.text
    assert "9 + 9 =" not in page.text
    shown = [float(value) for value in re.findall(r"advantage (-?\d\S*)", page.text)]
    assert sorted(shown) == pytest.approx(sorted(trained["advantages"].tolist()), abs=1e-3)
    summary = {row[0]: row for row in page.tables[1][1:]}
    last = [entry for entry in trainer.state.log_history if "rewards/length/mean" in entry][-1]
    assert float(summary["length"][2]) == pytest.approx(last["rewards/length/mean"], rel=1e-3)
    assert trainer.write_report(tmp_path / "other.html").exists()


def test_with_dynamic_sampling_it_shows_the_groups_that_were_kept(tiny_model: str, tmp_path: Path) -> None:
    def even(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        # Prompts with an even first number have no signal, and are dropped.
        return [
            float(len(ids)) if int(prompt[0]) % 2 else 0.0 for ids, prompt in zip(completion_ids, prompts, strict=True)
        ]

    trainer = make_trainer(tiny_model, tmp_path, even, use_dynamic_sampling=True)
    trainer.train()
    rows, trained = trainer._last_rollouts, trainer.scored[-1]
    assert rows.advantages == pytest.approx(trained["advantages"].tolist())
    assert rows.rewards["even"] == trained["reward/even"].tolist()
    assert all(int(prompt[0]) % 2 for prompt in rows.prompts)
    assert [rows.prompts[i : i + G] for i in (0, G)] == [[rows.prompts[i]] * G for i in (0, G)]


def test_rollouts_without_signal_do_not_take_the_place_of_those_with_it(tiny_model: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def first_two_batches(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(len(completion_ids))
        return [float(i % 2 and len(calls) <= 2) for i in range(len(completion_ids))]

    trainer = make_trainer(tiny_model, tmp_path, first_two_batches, max_steps=4)
    trainer.train()
    assert len(calls) == 4
    assert trainer._last_rollouts.advantages == pytest.approx(trainer.scored[1]["advantages"].tolist())
    assert "becomes more likely" in Page(trainer.write_report()).text


def test_it_says_when_nothing_has_trained(tmp_path: Path) -> None:
    page = written(tmp_path, rollouts=rollouts(["2", "3"], [0.0, 0.0], right=[1.0, 1.0]))
    assert "None of them trains" in page.text
    assert "becomes more likely" not in page.text


def test_prompts_with_signal_come_first() -> None:
    advantages = [0.0] * 10 + [0.5, -0.5]
    batch = Rollouts([f"p{i // 2}" for i in range(12)], ["a"] * 12, {"right": [0.0] * 12}, advantages, group_size=2)
    assert [group["prompt"] for group in shown_groups(batch)] == ["p5", "p0", "p1", "p2"]


def test_a_number_of_a_table_has_four_digits(tmp_path: Path) -> None:
    row = {"what": "x", "value": 0.2659374885, "count": 123456, "none": None, "done": True}
    page = written(tmp_path, tables={"Mine": [row, dict(reversed(row.items())), {"what": "y"}]})
    assert page.tables[0][1:] == [["x", "0.2659", "123456", "-", "True"]] * 2 + [["y", "-", "-", "-", "-"]]


def test_a_later_row_has_no_other_columns(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"The table 'Mine' has the columns \['a'\] in its first row, and \['a', 'c'\] later"
    ):
        written(tmp_path, tables={"Mine": [{"a": 1}, {"a": 1, "c": 4}]})


@pytest.mark.parametrize("table", [{"a": 1}, "a", ["a"], None])
def test_a_table_is_a_list_of_rows(table: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match="The table 'Mine' is .*: a table is a list of rows, each a dict, column -> value"
    ):
        written(tmp_path, tables={"Mine": table})


def test_one_process_writes_it(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_model, tmp_path, score)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    assert trainer.write_report() is None
    assert not (tmp_path / "report.html").exists()
    monkeypatch.undo()
    assert "None is kept" in Page(trainer.write_report()).text


def test_the_numbers_of_the_recipe_are_those_of_its_summary(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "recipes")
    import gdpo_math

    trainer = make_trainer(
        tiny_model, tmp_path, score, trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS})}
    )
    trainer.train()
    # Before, on the way and after: the table has the first and the last.
    means = {"correctness": (0.123456, 0.9, 0.6543219), "format": (1.0, 0.0, 1.0), "length": (0.5, 0.25, 0.333333)}
    evaluations = [
        {"step": step}
        | {f"eval_rewards/{name}/mean": at[step] for name, at in means.items()}
        | {f"eval_rewards/{name}/std": 0.1 for name in means}
        for step in range(3)
    ]
    trainer.state.log_history += evaluations
    gdpo_math.report(trainer, "tiny", seconds=1.0)
    summary = json.loads((tmp_path / "summary.json").read_text())["eval"]
    head, *rows = Page(tmp_path / "report.html").tables[0]
    assert head == ["component", "before", "after", "change"]
    assert [name for name, *_ in rows] == [f"reward/{name}" for name in means]
    for name, before, after, change in rows:
        assert float(before) == summary["before"][name]
        assert float(after) == summary["after"][name]
        assert float(change) == pytest.approx(summary["after"][name] - summary["before"][name], abs=1e-9)
    assert summary["before"]["reward/correctness"] == 0.1235
    assert summary["after"]["reward/correctness"] == 0.6543
