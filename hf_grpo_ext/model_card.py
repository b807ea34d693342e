"""What the model card says besides TRL's: the method with its papers, the objective, the knobs, the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from trl import GRPOConfig

from .config import GRPOExtConfig
from .explain import method_name, named_preset, objective_lines
from .objective import ADVANTAGE_FIELDS
from .papers import ESTIMATOR_PAPERS, LOSS_PAPERS, Paper

# The fields of TRL's that a reader asks for, besides the objective.
RUN_FIELDS = (
    "reward_weights",
    "num_generations",
    "num_iterations",
    "steps_per_generation",
    "max_completion_length",
    "mask_truncated_completions",
    "temperature",
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "seed",
)
# TRL's own fields give these another value than `ClippedPGLossConfig` where the block does not name them.
NAMED_WITH_A_KL = ("reference_policy_kl_penalty", "kl_importance_weight")
KL_KNOBS = ("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value", "kl_importance_weight")
# The heading of TRL's card that ours goes before.
NEXT_HEADING = "### Framework versions"


def loss_paper(args: Any) -> Paper:
    """The paper of the loss: of the preset that it is, or was made from, else of the method that it is a form of."""
    c = args.loss_config
    forms = {
        "cispo": c.use_cispo,
        "gspo": c.sequence_level_importance_ratios,
        "reinforce": c.disable_ppo_ratio,
        "dual_clip": c.ratio_clip_c is not None,
        "ppo": True,
    }
    form = next(name for name, applies in forms.items() if applies)
    return LOSS_PAPERS.get(method_name(args)) or LOSS_PAPERS[named_preset(args) or form]


def method(args: Any) -> tuple[str, dict[str, str]]:
    """The name of the method and its paper, as the fields of TRL's template: `id`, `title`, `citation`.

    Args:
        args: a `GRPOExtConfig` or an `AsyncGRPOExtConfig`.

    Example:
        >>> name, paper = method(GRPOExtConfig(adv_estimator="gdpo", loss_fn="dapo", use_cpu=True))
        >>> name, paper["id"], paper["citation"].count("@misc")
        ('GDPO and the DAPO loss', '2601.05242', 2)
    """
    estimator, loss = ESTIMATOR_PAPERS[args.adv_estimator_config.name], loss_paper(args)
    papers = list(dict.fromkeys([estimator, loss]))
    name = estimator.method if loss == estimator else f"{estimator.method} and the {loss.method} loss"
    citation = "\n\n".join(paper.bibtex for paper in papers)
    return name, {"title": estimator.title, "id": str(estimator.arxiv), "citation": citation}


def differences(args: GRPOExtConfig) -> dict[str, Any]:
    """What a configuration changes of the objective and the run, as the fields that make it again.

    Example:
        >>> args = GRPOExtConfig(loss_fn="dapo", learning_rate=1e-5, use_cpu=True)
        >>> differences(args)
        {'adv_estimator': {'name': 'grpo'},
         'loss_fn': {'ratio_clip_max': 0.28, 'reference_policy_kl_penalty': 0.0},
         'learning_rate': 1e-05}
    """
    c = args.loss_config
    of_trl = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOExtConfig) if f.init}
    defaults["steps_per_generation"] = args.gradient_accumulation_steps  # TRL's, which its field does not tell
    ours = set(defaults) - set(of_trl) - set(ADVANTAGE_FIELDS) - {"adv_estimator", "loss_fn"}
    loss_type = ("loss_type",) if args.loss_type == "dr_grpo" else ()  # which no knob of the loss says
    fields = [*loss_type, *RUN_FIELDS, *(name for name in defaults if name in ours)]
    return {
        "adv_estimator": _changed(args.adv_estimator_config, always=("name",)),
        "loss_fn": _changed(
            c,
            always=NAMED_WITH_A_KL if c.reference_policy_kl_penalty else NAMED_WITH_A_KL[:1],
            never=() if c.reference_policy_kl_penalty else KL_KNOBS,
        ),
        **{name: _plain(getattr(args, name)) for name in fields if getattr(args, name) != defaults[name]},
    }


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _changed(config: Any, always: tuple[str, ...], never: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name in always or (f.name not in never and getattr(config, f.name) != f.default)
    }


def describe_dataset(dataset: Any, name: str | None = None) -> str:
    """The data set by its name, its size and its columns, as far as it tells them.

    Example:
        >>> from datasets import Dataset
        >>> describe_dataset(Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="]}), "mine/sums")
        'mine/sums, 2 rows, columns prompt'
    """
    rows = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else "streamed"
    columns = getattr(dataset, "column_names", None)
    info = getattr(dataset, "info", None)
    parts = [
        name or getattr(info, "dataset_name", None),
        rows,
        f"columns {', '.join(columns)}" if columns else None,
    ]
    return ", ".join(filter(None, parts))


def objective_section(args: GRPOExtConfig, weights: Mapping[str, float], data: str) -> str:
    """The section of the card on what was trained.

    Args:
        args: the configuration.
        weights: reward component -> its weight.
        data: the data set, in words.
    """
    estimator, loss = ESTIMATOR_PAPERS[args.adv_estimator_config.name], loss_paper(args)
    changed = "" if method_name(args) in LOSS_PAPERS else ", with its knobs changed"
    rewards = ", ".join(f"`{name}` (weight {weight:g})" for name, weight in weights.items())
    return "\n".join(
        [
            "### Objective",
            "",
            f"- Advantages: {estimator.link}",
            f"- Loss: {loss.link}{changed}",
            f"- Rewards: {rewards}",
            f"- Data: {data}",
            "",
            "```text",
            *objective_lines(args),
            "```",
            "",
            "What differs from the defaults, as `GRPOExtConfig` takes it:",
            "",
            "```yaml",
            yaml.safe_dump(differences(args), sort_keys=False, allow_unicode=True).rstrip(),
            "```",
        ]
    )


def with_places(card: str, model: str, folder: str) -> str:
    """TRL's card with names from this machine where it has none of the Hub.

    Args:
        card: the card.
        model: what was trained, a name or a folder.
        folder: where the trained model is. Of a folder the card tells the last part alone, since it may be published.

    Example:
        >>> with_places('a version of [None](https://huggingface.co/None): model="None"', "/me/base", "outputs/run")
        'a version of `base`: model="run"'
    """
    base, trained = Path(model).name, Path(folder).resolve().name
    return card.replace("[None](https://huggingface.co/None)", f"`{base}`").replace(
        'model="None"', f'model="{trained}"'
    )


def add_section(card: str, section: str) -> str:
    r"""The card with a section before the versions, or at its end where it has none.

    Example:
        >>> add_section("# Card\n\n### Framework versions\n", "### Objective")
        '# Card\n\n### Objective\n\n### Framework versions\n'
    """
    before, heading, after = card.partition(NEXT_HEADING)
    return f"{before.rstrip()}\n\n{section}\n\n{heading}{after}"
