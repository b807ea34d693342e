"""The knobs of the clipped policy-gradient loss, the rules between them, and the published methods as presets."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .importance import TRUNCATION_TYPES
from .kl import KL_TYPES

KL_WEIGHTS = ("score_function", "policy_ratio", "none")

PRESETS: dict[str, dict[str, Any]] = {
    # Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347
    "ppo": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.0,
    },
    # Shao et al., DeepSeekMath, arXiv:2402.03300
    "grpo": {
        "token_level_loss": False,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.04,
        "reference_policy_kl_type": "k3",
    },
    # Williams, Simple Statistical Gradient-Following Algorithms (1992)
    "reinforce": {"token_level_loss": True, "disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0},
    # Ahmadian et al., Back to Basics, arXiv:2402.14740: REINFORCE; the leave-one-out baseline is the estimator's
    "rloo": {"token_level_loss": True, "disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0},
    # Yu et al., DAPO, arXiv:2503.14476
    "dapo": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "reference_policy_kl_penalty": 0.0,
    },
    # Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783: the caller divides by rows times the longest
    # allowed completion instead of the number of valid tokens
    "dr_grpo": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.0,
    },
    # Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071
    "gspo": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 3e-4,
        "ratio_clip_max": 4e-4,
        "reference_policy_kl_penalty": 0.0,
    },
    # MiniMax-M1, arXiv:2506.13585 (no lower bound); the cap of 5 is from ScaleRL, arXiv:2510.13786
    "cispo": {
        "token_level_loss": True,
        "use_cispo": True,
        "ratio_clip_min": 1.0,
        "ratio_clip_max": 4.0,
        "reference_policy_kl_penalty": 0.0,
    },
    # Ye et al., Mastering Complex Control in MOBA Games, arXiv:1912.09729
    "dual_clip": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": 3.0,
        "reference_policy_kl_penalty": 0.0,
    },
    # Hu et al., REINFORCE++, arXiv:2501.03262, with the k2 penalty of its baseline variant
    "reinforce_plus_plus": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k2",
    },
}
"""Each method as the knobs that make it, with the numbers of its paper.

The advantage side is chosen apart, by `adv_estimator`.
"""


def reject_unknown_keys(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises a `ValueError` that names the nearest known key for the first unknown one."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f"{what} does not know {key!r}: did you mean {nearest(str(key), known)!r}? Known: {', '.join(known)}."
            )


def nearest(word: str, known: Sequence[str]) -> str:
    """The known word that was most likely meant; of two as near, the one with the same letters.

    Example:
        >>> nearest("gpdo", ["grpo", "gdpo"]), nearest("ratio_clip", ["kl_type", "ratio_clip_min"])
        ('gdpo', 'ratio_clip_min')
    """
    return max(known, key=lambda name: (difflib.SequenceMatcher(a=name, b=word).ratio(), sorted(name) == sorted(word)))


def numbers_from_text(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns text into a number where a dataclass field holds a float: YAML reads `3e-4` (no dot) as text."""
    floats = {f.name for f in dataclasses.fields(cls) if str(f.type).startswith("float")}
    converted = dict(values)
    for key in floats & values.keys():
        if isinstance(values[key], str):
            try:
                converted[key] = float(values[key])
            except ValueError:
                raise TypeError(f"{key}={values[key]!r} is text: it must be a number.") from None
    return converted


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """The knobs of `ClippedPGLossFn`; checked once, when made.

    Args:
        ratio_clip_min: distance of the lower bound from 1 (not a minimum): the ratio is clipped to
            `[1 - ratio_clip_min, 1 + ratio_clip_max]`.
        ratio_clip_max: distance of the upper bound from 1. A value that differs from `ratio_clip_min` is DAPO's
            clip-higher.
        ratio_clip_c: dual clip, `L <= -A * c` where A < 0; must be > 1. `None` for none.
        token_level_loss: mean over all tokens; otherwise the mean over sequences of their token mean.
        sequence_level_importance_ratios: one ratio a sequence (GSPO); needs `token_level_loss=False`.
        disable_ppo_ratio: REINFORCE: the log-probability takes the place of the ratio, nothing is clipped.
        force_on_policy_ratio: the ratio is 1 with the gradient of `exp(lp - sg(lp))`; right with one update a rollout.
        use_cispo: `-sg(clip(ratio)) * A * lp`; excludes dual clip, `disable_ppo_ratio`, `force_on_policy_ratio`,
            sequence ratios and the sequence-level loss.
        reference_policy_kl_penalty: beta, the weight of the KL term.
        reference_policy_kl_type: "k1", "k2" or "k3".
        kl_input_clamp_value: clamp of `ref - lp`; `None` for no clamp.
        kl_output_clamp_value: clamp of the weighted KL of a token; `None` for no clamp.
        kl_importance_weight: what multiplies the KL of a token. "score_function": `exp(lp - sg(lp))`, value 1 and the
            gradient of the score-function term. "policy_ratio": the ratio of the policy term, as TRL's
            `use_bias_correction_kl` (the same on-policy). "none": the bare estimator.
        use_kl_in_reward: the KL is in the reward, so the loss has no KL term.
        use_importance_sampling_correction: weight every token by `exp(prev - gen)`.
        truncated_importance_sampling_type: "tis", "icepop", "seq-mask-tis" or `None`; needs the correction.
        truncated_importance_sampling_ratio: upper bound, > 0.
        truncated_importance_sampling_ratio_min: lower bound; 0 by default for tis, required by the other two.
        use_on_policy_kl_approximation: the KL weight is `exp(lp - gen)`.

    Raises:
        TypeError: a knob has the wrong type.
        ValueError: a knob is out of range, or two knobs exclude each other.

    Example:
        >>> ClippedPGLossConfig(ratio_clip_c=0.9)
        Traceback (most recent call last):
        ...
        ValueError: ratio_clip_c=0.9: the dual clip must be > 1, or it cuts off the unclipped range. ...
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    kl_importance_weight: str = "score_function"
    use_kl_in_reward: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    use_on_policy_kl_approximation: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _check_ranges(self)
        _check_exclusions(self)
        _check_truncation(self)

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> ClippedPGLossConfig:
        """Builds the config from a mapping; an unknown key is a `ValueError` that names the nearest known one."""
        reject_unknown_keys(knobs, (f.name for f in dataclasses.fields(cls)), "The loss (`loss_fn`)")
        return cls(**numbers_from_text(cls, knobs))

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss holds a KL term, and so needs `reference_policy_logprobs`."""
        return self.reference_policy_kl_penalty != 0 and not self.use_kl_in_reward

    @property
    def needs_generation_logprobs(self) -> bool:
        """Whether the loss needs the log-probabilities of the engine that sampled."""
        return self.use_importance_sampling_correction or (self.has_kl_term and self.use_on_policy_kl_approximation)


def check_types(config: Any) -> None:
    """Checks the fields of a dataclass whose hints are bool, float or str, with or without `| None`."""
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), str(field.type)
        if value is None and hint.endswith("| None"):
            continue
        kind = hint.removesuffix(" | None")
        wanted = {"bool": bool, "float": numbers.Real, "str": str}[kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
            raise TypeError(f"{field.name}={value!r} is a {type(value).__name__}: it must be of type {hint}.")
        if kind == "float" and value != value:
            raise ValueError(f"{field.name} is NaN: give it a number.")


def _check_ranges(c: ClippedPGLossConfig) -> None:
    if c.ratio_clip_min < 0:
        raise ValueError(f"ratio_clip_min={c.ratio_clip_min}: a distance below 1 must be >= 0.")
    # Under CISPO the clipped ratio is a weight, and a cap below 1 only makes it smaller.
    if c.ratio_clip_max < 0 and not (c.use_cispo and 1 + c.ratio_clip_max > max(0, 1 - c.ratio_clip_min)):
        raise ValueError(f"ratio_clip_max={c.ratio_clip_max}: a distance above 1 must be >= 0.")
    if c.ratio_clip_c is not None and c.ratio_clip_c <= 1:
        raise ValueError(
            f"ratio_clip_c={c.ratio_clip_c}: the dual clip must be > 1, or it cuts off the unclipped range. Use 3.0, "
            "the value of the paper, or None for no dual clip."
        )
    if c.reference_policy_kl_penalty < 0:
        raise ValueError(
            f"reference_policy_kl_penalty={c.reference_policy_kl_penalty}: a negative penalty drives the policy away "
            "from its reference. It must be >= 0."
        )
    if c.reference_policy_kl_type not in KL_TYPES:
        raise ValueError(f"reference_policy_kl_type={c.reference_policy_kl_type!r}: must be one of {KL_TYPES}.")
    if c.kl_importance_weight not in KL_WEIGHTS:
        raise ValueError(f"kl_importance_weight={c.kl_importance_weight!r}: must be one of {KL_WEIGHTS}.")
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        if (value := getattr(c, name)) is not None and value <= 0:
            raise ValueError(f"{name}={value}: a clamp must be > 0. Use None for no clamp.")


def _check_exclusions(c: ClippedPGLossConfig) -> None:
    if c.sequence_level_importance_ratios and c.token_level_loss:
        raise ValueError(
            "sequence_level_importance_ratios=True with token_level_loss=True: GSPO averages over sequences, a token "
            "mean would weigh each by its length. Set token_level_loss=False."
        )
    if c.disable_ppo_ratio and c.force_on_policy_ratio:
        raise ValueError(
            "disable_ppo_ratio=True with force_on_policy_ratio=True: the first has no ratio to force. Set one of them."
        )
    if c.disable_ppo_ratio and c.ratio_clip_c is not None:
        raise ValueError(
            f"disable_ppo_ratio=True with ratio_clip_c={c.ratio_clip_c}: REINFORCE clips nothing. Remove ratio_clip_c."
        )
    if c.disable_ppo_ratio and c.sequence_level_importance_ratios:
        raise ValueError(
            "disable_ppo_ratio=True with sequence_level_importance_ratios=True: REINFORCE has no ratio. Set one of "
            "them."
        )
    if c.use_on_policy_kl_approximation and c.kl_importance_weight != "score_function":
        raise ValueError(
            f"use_on_policy_kl_approximation=True with kl_importance_weight={c.kl_importance_weight!r}: both choose "
            "the weight of the KL term. Leave kl_importance_weight at 'score_function'."
        )
    if not c.use_cispo:
        return
    excluded = {
        "ratio_clip_c": c.ratio_clip_c is not None,
        "disable_ppo_ratio": c.disable_ppo_ratio,
        "force_on_policy_ratio": c.force_on_policy_ratio,
        "sequence_level_importance_ratios": c.sequence_level_importance_ratios,
        "token_level_loss": not c.token_level_loss,
    }
    for name, clashes in excluded.items():
        if clashes:
            raise ValueError(
                f"use_cispo=True with {name}={getattr(c, name)!r}: CISPO clips the weight of a token-level "
                f"log-probability and nothing else. Leave {name} at its default, or set use_cispo=False."
            )


def _check_truncation(c: ClippedPGLossConfig) -> None:
    kind, high = c.truncated_importance_sampling_type, c.truncated_importance_sampling_ratio
    low = c.truncated_importance_sampling_ratio_min
    if kind is None:
        if high is not None or low is not None:
            raise ValueError(
                f"truncated_importance_sampling_ratio={high}, truncated_importance_sampling_ratio_min={low} without "
                f"truncated_importance_sampling_type: the bounds would do nothing. Name one of {TRUNCATION_TYPES}."
            )
        return
    if kind not in TRUNCATION_TYPES:
        raise ValueError(f"truncated_importance_sampling_type={kind!r}: must be one of {TRUNCATION_TYPES}, or None.")
    if not c.use_importance_sampling_correction:
        raise ValueError(
            f"truncated_importance_sampling_type={kind!r} with use_importance_sampling_correction=False: there is no "
            "weight to truncate. Set use_importance_sampling_correction=True."
        )
    if high is None or high <= 0:
        raise ValueError(f"truncated_importance_sampling_ratio={high}: {kind} needs an upper bound > 0.")
    if low is None and kind != "tis":
        raise ValueError(f"truncated_importance_sampling_ratio_min=None: {kind} needs a lower bound too.")
    if low is not None and not 0 <= low <= high:
        raise ValueError(
            f"truncated_importance_sampling_ratio_min={low} with truncated_importance_sampling_ratio={high}: the lower "
            "bound must be >= 0 and not above the upper one."
        )
