"""The resolved objective: the formula with its numbers, where each value came from, what experience warns of."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .config import GRPOExtConfig
from .loss_config import PRESETS, ClippedPGLossConfig
from .objective import ObjectiveConfig

# The values with which an engine samples from the whole softmax, which is what the trainer computes.
UNCUT_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
}


def explain(args: Any, has_dropout: bool = True) -> str:
    """The objective of a configuration, as text.

    Args:
        args: a `GRPOExtConfig` or an `AsyncGRPOExtConfig`.
        has_dropout: whether the model has any.

    Example:
        >>> print(explain(GRPOExtConfig(loss_fn="dapo", use_cpu=True)).splitlines()[0])
        Loss: dapo
    """
    lines = [
        *objective_lines(args),
        "Values:",
        *_values("loss_fn", args.loss_config, args),
        *_values("adv_estimator", args.adv_estimator_config, args),
    ]
    if advice := warnings_of_experience(args, has_dropout):
        lines += ["Warnings:", *(f"    - {line}" for line in advice)]
    return "\n".join(lines)


def objective_lines(args: Any) -> list[str]:
    """What is trained, with its numbers in: the loss, the advantage, and what stands beside them."""
    return [
        f"Loss: {method_name(args)}",
        *(f"    {line}" for line in loss_formula(args)),
        f"Advantage: {args.adv_estimator_config.name}",
        *(f"    {line}" for line in advantage_formula(args)),
        *(_beside(args) if isinstance(args, GRPOExtConfig) else _beside_asynchronous(args)),
    ]


def method_name(args: Any) -> str:
    """The preset whose knobs these are (the weight of the KL aside), the one that was named first, or "custom"."""
    loss = dataclasses.asdict(args.loss_config)
    defaults = {f.name: f.default for f in dataclasses.fields(ClippedPGLossConfig)}
    free = {
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "kl_importance_weight",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
    }
    matching = [
        name
        for name, knobs in PRESETS.items()
        if (name == "dr_grpo") == (args.loss_type == "dr_grpo")
        and all(loss[knob] == value for knob, value in (defaults | knobs).items() if knob not in free)
    ]
    named = named_preset(args)
    return named if named in matching else next(iter(matching), "custom")


def named_preset(args: Any) -> str | None:
    """The preset that `loss_fn` names, whatever else it changes; `None` if it names none."""
    sources = {source for value, source in args.sources.items() if value.startswith("loss_fn.")}
    return next((name for name in PRESETS if f"preset {name!r}" in sources), None)


def loss_formula(args: Any) -> list[str]:
    """The formula of the loss, with its numbers in."""
    c = args.loss_config
    low, high = f"{max(0.0, 1 - c.ratio_clip_min):.6g}", f"{1 + c.ratio_clip_max:.6g}"
    ratio = "exp(mean_t(lp - prev))" if c.sequence_level_importance_ratios else "exp(lp - prev)"
    if c.force_on_policy_ratio:
        ratio = ratio.replace("prev", "sg(lp)")
    lines = [f"rho = {ratio}"]
    if c.disable_ppo_ratio:
        lines = ["L = -A lp"]
    elif c.use_cispo:
        lines.append(f"L = -sg(clip(rho, {low}, {high})) A lp")
    elif c.force_on_policy_ratio:
        lines.append("L = -A rho")
    else:
        lines.append(f"L = max(-A rho, -A clip(rho, {low}, {high}))")
    if c.ratio_clip_c is not None:
        lines.append(f"L <- min(L, -{c.ratio_clip_c:g} A) where A < 0")
    if c.use_importance_sampling_correction:
        weight = "exp(sum_t(prev - gen))" if c.sequence_level_importance_ratios else "exp(prev - gen)"
        if kind := c.truncated_importance_sampling_type:
            bounds = f"{c.truncated_importance_sampling_ratio_min or 0:g}, {c.truncated_importance_sampling_ratio:g}"
            weight = f"{kind}({weight}, {bounds})"
        lines.append(f"L <- {weight} L")
    if c.token_level_loss:
        count = "rows x max_completion_length" if args.loss_type == "dr_grpo" else "valid tokens"
        mean = f"sum over tokens / {count} of the optimizer step"
    else:
        mean = "mean over tokens of a sequence, then over the sequences of the optimizer step"
    lines.append(f"loss = {mean}" + _kl_term(c))
    return lines


def _kl_term(c: ClippedPGLossConfig) -> str:
    if not c.has_kl_term:
        return "" if not c.use_kl_in_reward else "   (the KL is in the reward)"
    weight = {"score_function": "exp(lp - sg(lp)) ", "policy_ratio": "rho ", "none": ""}[c.kl_importance_weight]
    if c.use_on_policy_kl_approximation:
        weight = "exp(lp - gen) "
    estimate = {"k1": "-x", "k2": "x^2/2", "k3": "(e^x - 1 - x)"}[c.reference_policy_kl_type]
    clamps = [
        f"{what} clamped to +-{value:g}"
        for what, value in (("x", c.kl_input_clamp_value), ("the product", c.kl_output_clamp_value))
        if value is not None
    ]
    return f" + {c.reference_policy_kl_penalty:g} * {weight}{estimate}, x = ref - lp" + (
        f" ({', '.join(clamps)})" if clamps else ""
    )


def advantage_formula(args: ObjectiveConfig) -> list[str]:
    """The formula of the advantage."""
    a = args.adv_estimator_config
    batch = "generation batch" if isinstance(args, GRPOExtConfig) else "optimizer step"
    peers = "the other rollouts of the group" if a.use_leave_one_out_baseline else "the rollouts of the group"
    relative = f"r - mean over {peers}"
    if a.normalize_rewards:
        relative = f"({relative}) / (std over them + 1e-6)"
    lines = {
        "grpo": [f"A = {relative}, r = weighted sum of the components"],
        "gdpo": [
            f"A_k = {relative}, for each component k",
            f"A = whiten(sum_k w_k A_k) over all rows of the {batch}",
        ],
        "reinforce_plus_plus": [
            "A = r - mean over the rollouts of the group" if a.minus_baseline else "A = r",
            f"A <- whiten(A) over all tokens of the {batch}",
        ],
    }.get(a.name, [])
    if args.loss_config.use_kl_in_reward:
        kl = (
            f"{args.loss_config.reference_policy_kl_penalty:g} * {args.loss_config.reference_policy_kl_type}(prev, ref)"
        )
        if a.name == "grpo":
            lines.insert(0, f"r <- r - sum over tokens of {kl}")
        else:
            lines.insert(1, f"A <- A - {kl}, at each token")
    if a.advantage_clip_low is not None or a.advantage_clip_high is not None:
        lines.append(f"A <- clamp(A, {a.advantage_clip_low}, {a.advantage_clip_high})")
    return lines


def warnings_of_experience(args: Any, has_dropout: bool = True) -> list[str]:
    """What is allowed but has gone wrong for others.

    Args:
        args: the configuration.
        has_dropout: whether the model has any; unknown without a model, and then assumed.
    """
    c, a = args.loss_config, args.adv_estimator_config
    advice = []
    if c.sequence_level_importance_ratios and c.ratio_clip_max >= 0.1:
        advice.append(
            f"Sequence ratios with a clip of {c.ratio_clip_max:g}: they vary far less than token ratios, so that it "
            "never bites. The GSPO paper has 3e-4 and 4e-4."
        )
    if c.disable_ppo_ratio and args.num_iterations > 1:
        advice.append(
            f"disable_ppo_ratio with num_iterations={args.num_iterations}: after the first update nothing corrects for "
            "the policy that has moved."
        )
    if c.use_cispo and c.ratio_clip_max < 1:
        advice.append(
            f"CISPO with a cap of {1 + c.ratio_clip_max:g}: it cuts the weight of most off-policy tokens. ScaleRL has "
            "4 to 8 (ratio_clip_max 3 to 7)."
        )
    if a.use_leave_one_out_baseline and args.num_generations == 2 and a.name != "reinforce_plus_plus":
        advice.append(
            "Leave-one-out with two generations: the baseline is one rollout, and there is no std to divide by."
        )
    if (cut := warning_of_cut_sampling(args)) is not None:
        advice.append(cut)
    if args.beta > 0 and has_dropout and not getattr(args, "disable_dropout", False):
        remedy = (
            "disable_dropout=True" if hasattr(args, "disable_dropout") else "the dropouts of the model's config to 0"
        )
        advice.append(f"beta > 0 with dropout on: the KL also measures the dropout. Set {remedy}.")
    return advice


def warning_of_cut_sampling(args: Any) -> str | None:
    """Why an importance correction is biased where the engine samples from a distribution that was cut or reshaped.

    Args:
        args: the configuration.

    Returns:
        The advice, or `None` where nothing is corrected or the engine samples from the softmax alone.
    """
    corrects = args.loss_config.needs_generation_logprobs or (
        args.use_vllm and args.vllm_importance_sampling_correction
    )
    uncut = UNCUT_SAMPLING | {"temperature": (args.temperature,)}
    asked = {name: getattr(args, name) for name in uncut}
    asked |= getattr(args, "generation_kwargs", None) or {}  # which win, as in TRL
    cut = [f"{name}={asked[name]}" for name in uncut if asked[name] not in uncut[name]]
    if not corrects or not cut:
        return None
    or_not = ", or switch the correction off" if isinstance(args, GRPOExtConfig) else ""
    return (
        f"{', '.join(cut)} with an importance correction: the engine renormalises its log-probabilities over what is "
        "left, the trainer's are of the whole softmax at `temperature`. Then exp(prev - gen) is not 1 even where the "
        "two agree, and the gradient is biased. Sample from the whole softmax (top_p=1.0, top_k=0, min_p=None, "
        f"repetition_penalty=1.0){or_not}."
    )


def _beside(args: GRPOExtConfig) -> list[str]:
    """What else decides what is trained."""
    beside = {
        f"reward weights {args.reward_weights}": args.reward_weights is not None,
        f"entropy bonus, {'adaptive from' if args.use_adaptive_entropy else 'weight'} {args.entropy_coef:g}": (
            args.entropy_coef != 0 or args.use_adaptive_entropy
        ),
        f"policy term on the {args.top_entropy_quantile:.0%} tokens of highest entropy": args.top_entropy_quantile < 1,
        f"rows with A < 0 and a KL above {args.off_policy_mask_threshold} are left out": (
            args.off_policy_mask_threshold is not None
        ),
        "truncated completions are left out": args.mask_truncated_completions,
        f"dynamic sampling, at most {args.dynamic_sampling_max_gen_batches} rounds a batch, then "
        f"{args.dynamic_sampling_on_exhaustion}": args.use_dynamic_sampling,
        f"rollouts whose mean of exp|gen - prev| is above {args.seq_logprob_error_threshold} are left out": (
            args.seq_logprob_error_threshold is not None
        ),
        f"TRL's correction of vLLM, {args.vllm_importance_sampling_mode}": (
            args.use_vllm and args.vllm_importance_sampling_correction
        ),
    }
    lines = [f"    {text}" for text, applies in beside.items() if applies]
    return ["Beside it:", *lines] if lines else []


def _beside_asynchronous(args: Any) -> list[str]:
    beside = {
        "prev = sg(lp), the policy at the start of the optimizer step: rho is 1, and no clip bites": True,
        f"rollouts more than {args.max_staleness} updates old are left out": True,
        f"reward weights {args.reward_weights}": args.reward_weights is not None,
        "groups whose rewards are all equal are dropped": args.drop_groups_without_signal,
    }
    return ["Beside it:", *(f"    {text}" for text, applies in beside.items() if applies)]


def _values(block: str, config: Any, args: ObjectiveConfig) -> list[str]:
    return [
        f"    {block}.{f.name} = {getattr(config, f.name)!r}  ({args.sources.get(f'{block}.{f.name}', 'default')})"
        for f in dataclasses.fields(config)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m hf_grpo_ext explain [--config file.yaml] [--any_flag ...]`."""
    from trl import TrlParser

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments.pop(0) != "explain":
        raise SystemExit("usage: python -m hf_grpo_ext explain [--config file.yaml] [--any_flag_of_GRPOExtConfig ...]")
    parser = TrlParser(GRPOExtConfig)
    parser.set_defaults_with_config(use_cpu=not torch.accelerator.is_available())  # nothing is trained here
    with warnings.catch_warnings():
        # Names that TRL's own defaults use, and transformers will drop.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        try:
            (args,) = parser.parse_args_and_config(arguments)
        except (TypeError, ValueError) as error:
            raise SystemExit(f"error: {error}") from error
    print(explain(args))
