"""Reads the `grpo:`, `loss_fn:` and `policy:` blocks of a NeMo-RL file as fields of a `GRPOExtConfig`."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .advantages import AdvEstimatorConfig
from .loss_config import ClippedPGLossConfig

# Keys that are another name for a field, by their place in the file.
FIELDS = {
    "grpo.num_generations_per_prompt": "num_generations",
    "grpo.max_num_epochs": "num_train_epochs",
    "grpo.seed": "seed",
    "grpo.overlong_filtering": "mask_truncated_completions",
    "grpo.advantage_clip_low": "advantage_clip_low",
    "grpo.advantage_clip_high": "advantage_clip_high",
    "grpo.reward_weights": "reward_weights",
    "grpo.use_dynamic_sampling": "use_dynamic_sampling",
    "grpo.dynamic_sampling_max_gen_batches": "dynamic_sampling_max_gen_batches",
    "grpo.batch_multiplier": "batch_multiplier",
    "grpo.seq_logprob_error_threshold": "seq_logprob_error_threshold",
    "policy.max_grad_norm": "max_grad_norm",
    "policy.optimizer.kwargs.lr": "learning_rate",
    "policy.optimizer.kwargs.weight_decay": "weight_decay",
    "policy.optimizer.kwargs.eps": "adam_epsilon",
    "policy.generation.temperature": "temperature",
    "policy.generation.top_p": "top_p",
    "policy.generation.top_k": "top_k",
    "policy.generation.max_new_tokens": "max_completion_length",
}
# Keys that other rules below read.
READ = {
    "grpo.num_prompts_per_step",
    "grpo.max_num_steps",
    "grpo.adv_estimator",
    "grpo.normalize_rewards",
    "grpo.use_leave_one_out_baseline",
}
# What would change the objective if it were left out, with the value that leaves it off.
OFF = {
    "grpo.reward_shaping.enabled": False,
    "grpo.reward_scaling.enabled": False,
    "grpo.async_grpo.enabled": False,
}
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read_nemo_rl(source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """The fields of a `GRPOExtConfig` that a NeMo-RL configuration asks for.

    A step of NeMo-RL samples `num_prompts_per_step * num_generations_per_prompt` rollouts and makes one update for each
    `policy.train_global_batch_size` of them, so that `max_num_steps` steps are that many times more optimizer steps.
    What has no counterpart is listed in one warning; what would change the objective is an error.

    Args:
        source: the path of a YAML file (its `defaults:` are followed), or its content.
        **overrides: fields that win over the file; `loss_fn` and `adv_estimator` may be dicts that change single knobs.

    Returns:
        Field names and values, with `overrides` in.

    Raises:
        ValueError: the file asks for something that changes the objective and that this trainer does not do, a knob is
            not known, or the batch sizes do not divide.

    Example:
        >>> nemo = {"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 8}, "loss_fn": {}}
        >>> fields = read_nemo_rl(nemo)
        >>> fields["generation_batch_size"], fields["num_generations"]
        (32, 8)
    """
    content = _load(source)
    for key, off in OFF.items():
        if (value := _get(content, key)) is not None and value != off:
            raise ValueError(
                f"{key}={value!r} in the NeMo-RL configuration would change the objective, and this trainer does not "
                f"do it. Set it to {off!r} if you can do without."
            )
    fields: dict[str, Any] = {
        field: value for key, field in FIELDS.items() if (value := _get(content, key)) is not None
    }
    if isinstance(betas := _get(content, "policy.optimizer.kwargs.betas"), list):
        fields["adam_beta1"], fields["adam_beta2"] = betas
    fields |= _batch_sizes(content, overrides)
    fields["adv_estimator"] = _adv_estimator(content, overrides.pop("adv_estimator", None))
    fields["loss_fn"] = _loss_fn(content, overrides.pop("loss_fn", None))
    _warn_of_the_rest(content)
    return fields | overrides


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        if "defaults" in source:
            raise ValueError("The configuration has `defaults:`, which name other files: pass its path instead.")
        content = dict(source)
    else:
        content = _load_file(Path(source))
    if not any(isinstance(content.get(block), Mapping) for block in ("grpo", "loss_fn")):
        raise ValueError(
            f"There is no `grpo:` or `loss_fn:` block in it, only {list(content)}: is this a NeMo-RL file?"
        )
    return content


def _load_file(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text()) or {}
    parents = content.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = _merge(merged, _load_file(path.parent / parent))
    return _merge(merged, content)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    if above.get("_override_"):
        return {key: value for key, value in above.items() if key != "_override_"}
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _get(content: Mapping[str, Any], key: str) -> Any:
    """The value at `a.b.c`, with a reference `${x.y}` followed; None where there is none."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
        return _get(content, reference.group(1))
    return value


def _batch_sizes(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, int]:
    prompts, group = _get(content, "grpo.num_prompts_per_step"), _get(content, "grpo.num_generations_per_prompt")
    if prompts is None or group is None:
        return {}
    rollouts = prompts * overrides.get("num_generations", group)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    per_update = _get(content, "policy.train_global_batch_size") or rollouts
    micro = overrides.get("per_device_train_batch_size", _get(content, "policy.train_micro_batch_size") or per_update)
    if rollouts % per_update or per_update % (micro * processes):
        raise ValueError(
            f"{prompts} prompts x {rollouts // prompts} generations, train_global_batch_size={per_update} and "
            f"train_micro_batch_size={micro} on {processes} processes do not divide: each must be a multiple of the "
            "next. Override per_device_train_batch_size."
        )
    sizes = {
        "generation_batch_size": rollouts,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": per_update // (micro * processes),
    }
    if (steps := _get(content, "grpo.max_num_steps")) is not None:
        sizes["max_steps"] = steps * (rollouts // per_update)
    return sizes


def _adv_estimator(content: Mapping[str, Any], override: Any) -> Any:
    if override is not None and not isinstance(override, Mapping):
        return override
    knobs = dict(_get(content, "grpo.adv_estimator") or {})
    for legacy in ("normalize_rewards", "use_leave_one_out_baseline"):
        if (value := _get(content, f"grpo.{legacy}")) is not None:
            knobs.setdefault(legacy, value)
    knobs |= override or {}
    if knobs.get("name", "grpo") != "reinforce_plus_plus":
        knobs.pop("minus_baseline", None)  # one block serves all estimators there
    return AdvEstimatorConfig.from_dict(knobs)


def _loss_fn(content: Mapping[str, Any], override: Any) -> Any:
    if override is not None and not isinstance(override, Mapping):
        return override
    knobs = {**(_get(content, "loss_fn") or {}), **(override or {})}
    if knobs.get("truncated_importance_sampling_ratio") is None:
        # A file may name the type, which does nothing there without a ratio.
        knobs.pop("truncated_importance_sampling_type", None)
        knobs.pop("truncated_importance_sampling_ratio_min", None)
    elif knobs.get("truncated_importance_sampling_type") is None:
        knobs["truncated_importance_sampling_type"] = "tis"
    return ClippedPGLossConfig.from_dict(knobs)


def _warn_of_the_rest(content: Mapping[str, Any]) -> None:
    read = {*FIELDS, *READ, *OFF}
    rest = [
        f"grpo.{key}"
        for key in content.get("grpo") or {}
        if not any(known == f"grpo.{key}" or known.startswith(f"grpo.{key}.") for known in read)
    ]
    if _get(content, "policy.scheduler") is not None:
        rest.append("policy.scheduler (see lr_scheduler_type)")
    if _get(content, "policy.model_name") is not None:
        rest.append("policy.model_name (the trainer's `model`)")
    rest += [block for block in content if block not in ("grpo", "loss_fn", "policy")]
    if rest:
        warnings.warn(f"Of the NeMo-RL configuration, these have no counterpart here: {', '.join(rest)}.", stacklevel=4)
