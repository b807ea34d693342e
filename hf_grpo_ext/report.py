"""One page about a run: the objective, what was measured before and after, curves, and rollouts that trained.

The page is one file that needs no network and runs no script. What comes from models and data sets is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

INSTALL_MATPLOTLIB = "Curves need matplotlib: pip install matplotlib."
COLORS = ("#1d4ed8", "#c2410c", "#4b5563")

# How much of the last generation batch is shown.
PROMPTS_SHOWN = 4
ROLLOUTS_SHOWN = 8
CHARACTERS_SHOWN = 2000


@dataclass(frozen=True)
class Panel:
    """Metrics that share a diagram.

    Args:
        title: of the diagram.
        metrics: their names in the log.
        healthy: what `docs/metrics.md` says of the first one in a healthy run.
        held_out: whether the values of an evaluation say something besides.
    """

    title: str
    metrics: tuple[str, ...]
    healthy: str = ""
    held_out: bool = False


PANELS = (
    Panel("Reward", ("reward",), "rises, then levels off", held_out=True),
    Panel("Groups without signal", ("frac_reward_zero_std",), "below 0.6"),
    Panel("Entropy of the policy (nats)", ("entropy",), "falls slowly", held_out=True),
    Panel("Gradient norm", ("grad_norm",), "steady, within a factor of ten"),
    Panel("Loss (nats)", ("loss",), "any value on-policy"),
    Panel("Share of tokens clipped", ("clip_fraction_low", "clip_fraction_high"), "0 on-policy; up to 0.2 off-policy"),
    Panel("Policy ratio", ("probs_ratio", "probs_ratio_min", "probs_ratio_max"), "mean within 0.01 of 1"),
    Panel("KL to the reference (nats)", ("kl",), "0 at the first step, rises slowly, below 1"),
    Panel("Engine against trainer", ("token_mult_prob_error",), "1.00 to 1.05"),
    Panel("Outside the truncation", ("is_oob_ratio",), "below 0.05"),
    Panel("Rollouts the engines disagree on", ("seq_logprob_error/masked_rows",), "0, or a few"),
    Panel("Rows not computed", ("frac_rows_skipped",)),
    Panel("Rounds of dynamic sampling", ("dynamic_sampling/rounds",), "1 to 3"),
    Panel("Completion length (tokens)", ("completions/mean_length", "completions/max_length"), held_out=True),
    Panel("Completions cut off", ("completions/clipped_ratio",), "below 0.2", held_out=True),
)


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a generation batch, one value a rollout; those of one prompt lie side by side.

    Args:
        prompts: text, or the messages of a conversation.
        completions: the same.
        rewards: component -> scores; NaN or `None` where a component does not apply.
        advantages: what each rollout trained with.
        group_size: rollouts a prompt.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    rewards: Mapping[str, Sequence[float | None]]
    advantages: Sequence[float | None]
    group_size: int


def write_report(
    path: str | Path,
    *,
    title: str,
    objective: str,
    log_history: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    rollouts: Rollouts | None = None,
) -> Path:
    """Writes a page about a run.

    Args:
        path: of the file; its folder is made.
        title: of the page.
        objective: what was trained, as `explain` prints it.
        log_history: the log entries, as `trainer.state.log_history` has them; each with its `step`.
        facts: what is said of the run in its head, name -> value.
        tables: title -> rows, each column -> value; numbers are shown with four digits.
        rollouts: a generation batch, of which some are shown; best one that has advantages.

    Returns:
        The path. Without matplotlib the page has no curves, and says so.

    Raises:
        TypeError: a table is no list of rows.
        ValueError: a row of it has columns that its first one has not.
    """
    for name, rows in (tables or {}).items():
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(f"The table {name!r} is {rows!r}: a table is a list of rows, each a dict, column -> value.")
        if odd := next((row for row in rows if row.keys() - rows[0].keys()), None):
            raise ValueError(
                f"The table {name!r} has the columns {list(rows[0])} in its first row, and {list(odd)} later."
            )
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"score": score, "messages": messages}
    components = component_names(log_history)
    page = environment.get_template("report.html").render(
        title=title,
        facts=facts or {},
        objective=objective,
        tables=tables or {},
        summary=[component_summary(log_history, name, components) for name in components],
        component_figures=[component_figure(log_history, name) for name in components],
        figures=[panel_figure(log_history, panel) for panel in PANELS if has_values(log_history, panel.metrics)],
        missing="" if has_matplotlib() else INSTALL_MATPLOTLIB,
        groups=shown_groups(rollouts) if rollouts else [],
        count=len(rollouts.advantages) // rollouts.group_size if rollouts else 0,
        with_signal=any(rollouts.advantages) if rollouts else False,
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page.encode("utf-8", errors="replace"))  # a lone surrogate, which no file can hold
    return path


# The log


def curve(log_history: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    """The points (step, value) of a metric; a value that is not finite, or `None`, is NaN: a gap.

    Example:
        >>> curve([{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 2, "eval_loss": 1.0}], "loss")
        [(1, 0.5), (2, nan)]
    """
    points = [(entry.get("step", 0), entry[metric]) for entry in log_history if metric in entry]
    return [(step, value if value is not None and math.isfinite(value) else math.nan) for step, value in points]


def has_values(log_history: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> bool:
    """Whether any of the metrics has a value anywhere."""
    return any(not math.isnan(value) for metric in metrics for _, value in curve(log_history, metric))


def component_names(log_history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reward components, in the order in which they were first logged.

    Example:
        >>> component_names([{"rewards/b/mean": 0.1, "rewards/b/std": 0.0, "rewards/correlation/a/mean": 0.5}])
        ['b']
    """
    keys = dict.fromkeys(key.removeprefix("eval_") for entry in log_history for key in entry)
    columns = [key.removesuffix("/std") for key in keys if key.startswith("rewards/") and key.endswith("/std")]
    return [column.removeprefix("rewards/") for column in columns if f"{column}/mean" in keys]


def component_summary(
    log_history: Sequence[Mapping[str, Any]], name: str, components: Sequence[str]
) -> dict[str, str | float | None]:
    """A row of the table of components: where it began and where it stands now."""

    def value(metric: str, place: int) -> float | None:
        known = [value for _, value in curve(log_history, metric) if not math.isnan(value)]
        return known[place] if known else None

    pairs = {other: "/".join(sorted((name, other))) for other in components if other != name}
    correlations = {other: value(f"rewards/correlation/{pair}", -1) for other, pair in pairs.items()}
    lowest = min(((v, other) for other, v in correlations.items() if v is not None), default=None)
    return {
        "component": name,
        "mean, first": value(f"rewards/{name}/mean", 0),
        "mean, last": value(f"rewards/{name}/mean", -1),
        "groups without signal, last": value(f"rewards/{name}/frac_groups_without_signal", -1),
        "share of the advantage, last": value(f"rewards/{name}/advantage_share", -1),
        "lowest correlation, last": f"{score(lowest[0])} with {lowest[1]}" if lowest else None,
    }


# The curves


def has_matplotlib() -> bool:
    """Whether curves can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def component_figure(log_history: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The mean of a component above, what it gives to the advantage below."""
    lower = {
        "share of the advantage": f"rewards/{name}/advantage_share",
        "groups without signal": f"rewards/{name}/frac_groups_without_signal",
    }
    lines = [_line(log_history, "mean", f"rewards/{name}/mean", 0, held_out=True)]
    below = [_line(log_history, label, metric, i) for i, (label, metric) in enumerate(lower.items(), start=1)]
    return {
        "title": name,
        "legend": [(line["label"], line["color"]) for line in [*lines, *below] if line["points"]],
        "held_out": bool(lines[0]["held_out"]),
        "healthy": "",
        "image": draw([lines, below] if any(line["points"] for line in below) else [lines]),
    }


def panel_figure(log_history: Sequence[Mapping[str, Any]], panel: Panel) -> dict[str, Any]:
    """The curves of a panel."""
    metrics = [metric for metric in panel.metrics if has_values(log_history, [metric])]
    lines = [_line(log_history, metric, metric, i, panel.held_out) for i, metric in enumerate(metrics)]
    return {
        "title": panel.title,
        "legend": [(line["label"], line["color"]) for line in lines],
        "held_out": any(line["held_out"] for line in lines),
        "healthy": panel.healthy,
        "image": draw([lines]),
    }


def _line(
    log_history: Sequence[Mapping[str, Any]], label: str, metric: str, place: int, held_out: bool = False
) -> dict[str, Any]:
    return {
        "label": label,
        "color": COLORS[place],
        "points": curve(log_history, metric),
        "held_out": curve(log_history, f"eval_{metric}") if held_out else [],
    }


def draw(axes_lines: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Diagrams with one x-axis, as an image for a page (a data URI of an SVG); "" without matplotlib.

    There is no text in it but numbers and "step": names may hold anything, and the page can wrap them.
    """
    if not has_matplotlib():
        return ""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heights = [2.0, 1.0][: len(axes_lines)]
    figure = Figure(figsize=(4.0, 1.2 * sum(heights) + 0.2), layout="constrained")
    all_axes = figure.subplots(len(axes_lines), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, lines in zip(all_axes, axes_lines, strict=True):
        for line in lines:
            steps, values = _columns(line["points"])
            axes.plot(steps, values, color=line["color"], linewidth=1.2, marker=".", markevery=alone(values))
            axes.plot(*_columns(line["held_out"]), "D", color=line["color"], markerfacecolor="white", markersize=6)
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    all_axes[-1].set_xlabel("step")
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def alone(values: Sequence[float]) -> list[int]:
    """The places of the values without a neighbour, which no line goes through.

    Example:
        >>> alone([1.0, 2.0, math.nan, 3.0])
        [3]
    """
    gap = [True, *map(math.isnan, values), True]
    return [i for i in range(len(values)) if gap[i] and not gap[i + 1] and gap[i + 2]]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


# The rollouts


def shown_groups(rollouts: Rollouts) -> list[dict[str, Any]]:
    """The first prompts with signal, each with its rollouts by their advantage: all, or the highest and the lowest."""
    size, total = rollouts.group_size, len(rollouts.advantages)
    with_signal_first = sorted(
        range(0, total, size), key=lambda start: not any(rollouts.advantages[start : start + size])
    )
    groups = []
    for start in with_signal_first[:PROMPTS_SHOWN]:
        rows = range(start, min(start + size, total))
        ordered = sorted(rows, key=lambda row: -(rollouts.advantages[row] or 0.0))
        if len(ordered) > ROLLOUTS_SHOWN:
            ordered = ordered[: ROLLOUTS_SHOWN // 2] + ordered[-(ROLLOUTS_SHOWN // 2) :]
        shown = [
            {
                "completion": rollouts.completions[row],
                "advantage": rollouts.advantages[row],
                "scores": {name: column[row] for name, column in rollouts.rewards.items()},
            }
            for row in ordered
        ]
        groups.append({"prompt": rollouts.prompts[start], "rollouts": shown, "size": len(rows)})
    return groups


def messages(entry: Any) -> list[tuple[str, str]]:
    """A prompt or a completion as pairs (role, text); one message needs no role. Long texts lose their middle.

    Example:
        >>> messages([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}])
        [('', '[image] What is it?')]
        >>> messages([{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}])
        [('user', 'What is it?'), ('assistant', 'A cat.')]
    """
    if not isinstance(entry, list) or not all(isinstance(message, Mapping) for message in entry):
        return [("", shortened(str(entry)))]
    texts = [shortened(_text_of(message)) for message in entry]
    roles = [str(message.get("role", "")) for message in entry] if len(entry) > 1 else [""]
    return list(zip(roles, texts, strict=True))


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = " ".join(str(block.get("text", f"[{block.get('type')}]")) for block in content)
    thought = message.get("reasoning_content") or message.get("thinking") or ""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join(str(part) for part in (thought, content, *called) if part)


def shortened(text: str) -> str:
    r"""The text, or its beginning and its end.

    Example:
        >>> shortened("x" * 3000)[1495:1530]
        'xxxxx\n[... 1,000 characters ...]\nxx'
    """
    if len(text) <= CHARACTERS_SHOWN:
        return text
    head = CHARACTERS_SHOWN * 3 // 4
    tail = CHARACTERS_SHOWN - head
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters ...]\n{text[-tail:]}"


def score(value: float | None) -> str:
    """A number in four digits; a dash for none.

    Example:
        >>> score(0.123456), score(float("nan")), score(None)
        ('0.1235', '-', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
