"""What is optimized, as fields: the estimator's block and the loss's, read together with TRL's own names for them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from .advantages import ADVANTAGE_ESTIMATORS, AdvEstimatorConfig, get_advantage_estimator
from .loss_config import PRESETS, ClippedPGLossConfig, reject_unknown_keys

# TRL's loss types, as what our loss averages over. `dr_grpo` differs from `dapo` in the denominator alone, which the
# trainer chooses.
TOKEN_LEVEL_LOSS_TYPES = ("dapo", "bnpo", "dr_grpo", "cispo")
LOSS_TYPES = ("grpo", *TOKEN_LEVEL_LOSS_TYPES)

# TRL's fields and the knobs that say the same. A knob that is named wins over its field; naming both with different
# values is an error.
LOSS_FIELDS = {
    "beta": ("reference_policy_kl_penalty",),
    "epsilon": ("ratio_clip_min",),
    "epsilon_high": ("ratio_clip_max",),
    "delta": ("ratio_clip_c",),
    "loss_type": ("token_level_loss", "use_cispo"),
    "importance_sampling_level": ("sequence_level_importance_ratios",),
    "use_bias_correction_kl": ("kl_importance_weight",),
}
ADVANTAGE_FIELDS = {
    "multi_objective_aggregation": ("name",),
    "scale_rewards": ("normalize_rewards",),
    "advantage_clip_low": ("advantage_clip_low",),
    "advantage_clip_high": ("advantage_clip_high",),
}
# What a preset says about these is a number of its paper, which TRL's own field may replace; the rest is what the
# method is.
PRESET_NUMBERS = ("reference_policy_kl_penalty", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
# A preset says what its method is even where it says the default.
STRUCTURE = {"use_cispo": False, "sequence_level_importance_ratios": False, "disable_ppo_ratio": False}


@dataclass
class ObjectiveConfig:
    """The fields that say what is optimized; joins a TRL config, whose own fields say the rest.

    `read_blocks()` comes before TRL's `__post_init__` and `resolve()` after it.
    """

    # The command line takes a field of several types as text, so `str` stands second in these unions.
    adv_estimator: dict[str, Any] | str | AdvEstimatorConfig | None = field(
        default=None,
        metadata={
            "help": "Advantage estimator: 'grpo', 'gdpo' or 'reinforce_plus_plus', or a dict of its knobs. A knob that "
            "is not named keeps the meaning of `scale_rewards` and `multi_objective_aggregation`."
        },
    )
    loss_fn: dict[str, Any] | str | ClippedPGLossConfig | None = field(
        default=None,
        metadata={
            "help": "Loss: a preset (" + ", ".join(PRESETS) + ") or a dict of the knobs of `ClippedPGLossConfig`. A "
            "knob that is not named keeps the meaning of TRL's own field."
        },
    )
    advantage_clip_low: float | None = field(default=None, metadata={"help": "Lower clamp of the advantages."})
    advantage_clip_high: float | None = field(default=None, metadata={"help": "Upper clamp of the advantages."})
    stop_broken_run: bool = field(
        default=False,
        metadata={
            "help": "Stop a run whose loss or gradient is not finite, whose engine has drifted away from the trainer, "
            "or in which no group of rollouts has had signal for long: adds the callback `StopBrokenRun`."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a reward function (no reward model) may take before the run ends, with "
            "the last step saved. `None` for no limit."
        },
    )
    if TYPE_CHECKING:
        reward_weights: list[float] | dict[str, float] | None = None
    else:
        # `list[str]`, so that the command line takes both `1.0 0.5` and a JSON object.
        reward_weights: list[str] | None = field(
            default=None,
            metadata={
                "help": "Weight of each reward function, in their order (a function's weight applies to each of its "
                "components), or a dict (on the command line: a JSON object) by component name."
            },
        )

    # Where each value of the two blocks came from: "named", "preset 'dapo'", "TRL's beta". For `explain`.
    sources: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    # The fields that the objective was made of, as they were then. For `check_unchanged`.
    resolved: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    # Fields whose later change would not reach the loss or the advantages.
    FIXED: ClassVar[tuple[str, ...]] = (*LOSS_FIELDS, *ADVANTAGE_FIELDS, "adv_estimator", "loss_fn")

    def read_blocks(self) -> None:
        """Reads what the command line gives as text."""
        self.adv_estimator = _read_json("adv_estimator", self.adv_estimator)
        self.loss_fn = _read_json("loss_fn", self.loss_fn)
        self.reward_weights = _read_reward_weights(self.reward_weights)

    def resolve(self) -> None:
        """Makes the two config objects, sets TRL's fields to agree, and remembers what came from where."""
        self.sources = {}
        self.adv_estimator = _resolve_adv_estimator(self)
        self.loss_fn = _resolve_loss(self)
        get_advantage_estimator(self.adv_estimator_config, self.loss_config)  # do the two go together?
        if self.reward_timeout is not None and not 0 < self.reward_timeout < math.inf:
            raise ValueError(
                f"reward_timeout={self.reward_timeout}: it must be a positive number of seconds, or None for no limit."
            )
        self.resolved = {name: getattr(self, name) for name in self.FIXED}

    def check_unchanged(self) -> None:
        """Raises a `ValueError` if a field that the objective was made of was assigned after construction."""
        for name, value in self.resolved.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} was set to {getattr(self, name)!r} after the configuration was made with {value!r}: the "
                    f"loss and the advantages are resolved once. Pass it to {type(self).__name__}(...)."
                )

    @property
    def adv_estimator_config(self) -> AdvEstimatorConfig:
        """`adv_estimator`, for type checkers: what the field holds after construction."""
        return cast(AdvEstimatorConfig, self.adv_estimator)

    @property
    def loss_config(self) -> ClippedPGLossConfig:
        """`loss_fn`, for type checkers: what the field holds after construction."""
        return cast(ClippedPGLossConfig, self.loss_fn)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as `TrainingArguments.to_dict`."""
        plain: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # of the TRL config
        for name in ("adv_estimator", "loss_fn"):
            plain[name] = dataclasses.asdict(plain[name])
        return plain


def is_set(args: Any, name: str) -> bool:
    """Whether a field has another value than its default."""
    return bool(getattr(args, name) != getattr(type(args), name, dataclasses.MISSING))


def _read_json(name: str, value: Any) -> Any:
    """A JSON object as the dict it is; anything else as it came."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value!r} is no JSON object: {error}. Keys need double quotes.") from None


def _read_reward_weights(weights: Any) -> list[float] | dict[str, float] | None:
    if weights is None:
        return None
    text = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
    if isinstance(text, str):
        content = _read_json("reward_weights", text)
        weights = content if isinstance(content, Mapping) else [text]
    try:
        numbers = [float(weight) for weight in (weights.values() if isinstance(weights, Mapping) else weights)]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"reward_weights={weights!r}: give one finite number for each reward function, or a dict (on the command "
            "line a JSON object) of such numbers by component name."
        ) from None
    return dict(zip(weights, numbers, strict=True)) if isinstance(weights, Mapping) else numbers


def as_block(value: Any, kind: str, names: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """A name, a dict, a config object or `None` as a dict of named knobs (JSON strings are dicts by now)."""
    if value is None:
        return {}
    if isinstance(value, config_class):
        return dataclasses.asdict(cast(Any, value))
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            raise TypeError(f"{kind}={value!r} is a JSON list: give an object of knobs, or a name.")
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise TypeError(f"{kind} is a {type(value).__name__}: give a name, a dict of knobs, or its config object.")
    if "name" in value:
        reject_unknown_keys([value["name"]], names, f"`{kind}`")
    return dict(value)


def _agree(args: Any, kind: str, named: Mapping[str, Any], fields: Mapping[str, Any], twins: Any) -> None:
    """Sets TRL's fields to what the knobs say, or raises if both were named with different values."""
    for name, value in fields.items():
        current = getattr(args, name)
        same = math.isclose(current, value) if _both_numbers(current, value) else current == value
        if same:
            continue
        knobs = [knob for knob in twins[name] if knob in named]
        if knobs and is_set(args, name):
            raise ValueError(
                f"{kind} names {knobs[0]}={named[knobs[0]]!r}, which is the field {name}={value!r}, and "
                f"{name}={current!r} is set too. They are the same setting: name one of them."
            )
        setattr(args, name, value)


def _both_numbers(a: Any, b: Any) -> bool:
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))


def _resolve_adv_estimator(args: Any) -> AdvEstimatorConfig:
    named = as_block(args.adv_estimator, "adv_estimator", ADVANTAGE_ESTIMATORS, AdvEstimatorConfig)
    normalize_then_sum = args.multi_objective_aggregation == "normalize_then_sum"
    knobs = {"name": "gdpo" if normalize_then_sum else "grpo", **named}
    if knobs["name"] != "reinforce_plus_plus":
        # Under `normalize_then_sum` TRL always normalises, whatever `scale_rewards` says.
        from_trl = normalize_then_sum and "name" not in named
        knobs.setdefault("normalize_rewards", from_trl or args.scale_rewards == "group")
    for clip in ("advantage_clip_low", "advantage_clip_high"):
        if getattr(args, clip) is not None and knobs.get(clip) is None:
            knobs[clip] = getattr(args, clip)
    config = AdvEstimatorConfig.from_dict(knobs)
    _note_sources(args, "adv_estimator", ADVANTAGE_FIELDS, {"named": named}, of_trl=knobs)
    scales = config.normalize_rewards and config.name != "reinforce_plus_plus"
    fields = {
        "multi_objective_aggregation": "normalize_then_sum" if config.name == "gdpo" else "sum_then_normalize",
        "scale_rewards": "group" if scales else "none",
        "advantage_clip_low": config.advantage_clip_low,
        "advantage_clip_high": config.advantage_clip_high,
    }
    _agree(args, "adv_estimator", named, fields, ADVANTAGE_FIELDS)
    return config


def _note_sources(args: Any, block: str, twins: Any, said: Mapping[str, Any], of_trl: Any) -> None:
    """Records where each knob came from; what is said later in `said` wins."""
    for trl_field, knobs in twins.items():
        for knob in knobs:
            if knob in of_trl:
                whose = "TRL's " if trl_field not in ("advantage_clip_low", "advantage_clip_high") else ""
                args.sources[f"{block}.{knob}"] = whose + trl_field + ("" if is_set(args, trl_field) else ", default")
    for source, knobs in said.items():
        for knob in knobs:
            args.sources[f"{block}.{knob}"] = source


def _loss_knobs_of_trl_fields(args: Any, use_cispo: bool) -> dict[str, Any]:
    """What TRL's own fields mean, as knobs."""
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    if use_cispo and (args.loss_type == "cispo" or args.epsilon_high is not None):
        # Under CISPO TRL's `epsilon_high` is the cap itself, and there is no lower bound.
        low, high = 1.0, high - 1.0
    knobs: dict[str, Any] = {
        "reference_policy_kl_penalty": args.beta,
        "token_level_loss": args.loss_type in TOKEN_LEVEL_LOSS_TYPES,
        "use_cispo": use_cispo,
        "sequence_level_importance_ratios": args.importance_sampling_level == "sequence",
        "kl_importance_weight": "policy_ratio" if args.use_bias_correction_kl else "none",
        "ratio_clip_min": low,
        "ratio_clip_max": high,
    }
    if args.loss_fn is None:  # TRL's objective as it is: its KL has no clamps
        knobs |= {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    if args.delta is not None:
        # TRL takes min(rho, delta) before the clip. Below 1 + epsilon_high that lowers the upper clip where A > 0,
        # and where A < 0 the bound that is left is 1 + epsilon_high.
        knobs["ratio_clip_max"] = min(high, args.delta - 1) if args.delta > 1 else high
        knobs["ratio_clip_c"] = max(args.delta, 1 + high) if args.delta > 1 else args.delta
    return knobs


def _trl_fields_of_loss(config: ClippedPGLossConfig, loss_type: str) -> dict[str, Any]:
    """What the knobs mean, as TRL's fields."""
    if config.use_cispo:
        loss_type = "cispo"
    elif not config.token_level_loss:
        loss_type = "grpo"
    elif loss_type not in TOKEN_LEVEL_LOSS_TYPES or loss_type == "cispo":
        loss_type = "dapo"
    fields = {
        "beta": config.reference_policy_kl_penalty,
        "epsilon_high": config.ratio_clip_max + (1.0 if config.use_cispo else 0.0),
        "delta": config.ratio_clip_c,
        "loss_type": loss_type,
        "importance_sampling_level": "sequence" if config.sequence_level_importance_ratios else "token",
        "use_bias_correction_kl": config.kl_importance_weight != "none",
    }
    if not config.use_cispo:
        fields["epsilon"] = config.ratio_clip_min
    return fields


def _resolve_loss(args: Any) -> ClippedPGLossConfig:
    named = as_block(args.loss_fn, "loss_fn", PRESETS, ClippedPGLossConfig)
    method = named.pop("name", None)
    preset = STRUCTURE | PRESETS[method] if method else {}
    use_cispo = {**preset, **named}.get("use_cispo", args.loss_type == "cispo")

    # TRL's numbers, where they are set, replace those of a preset; what the method is stays.
    of_trl = _loss_knobs_of_trl_fields(args, use_cispo=bool(use_cispo))
    for trl_field, knobs in LOSS_FIELDS.items():
        for knob in knobs:
            if knob in PRESET_NUMBERS and is_set(args, trl_field):
                preset.pop(knob, None)
    _note_sources(args, "loss_fn", LOSS_FIELDS, {f"preset {method!r}": preset, "named": named}, of_trl=of_trl)
    named = {**preset, **named}
    if named.get("use_on_policy_kl_approximation"):
        of_trl["kl_importance_weight"] = "score_function"
    config = ClippedPGLossConfig.from_dict({**of_trl, **named})

    if method == "dr_grpo" and not is_set(args, "loss_type"):
        args.loss_type = "dr_grpo"
    _agree(args, "loss_fn", named, _trl_fields_of_loss(config, args.loss_type), LOSS_FIELDS)
    if config.use_kl_in_reward and config.reference_policy_kl_penalty == 0:
        raise ValueError(
            "use_kl_in_reward=True with reference_policy_kl_penalty=0: there is no KL to put into the reward. Set "
            "reference_policy_kl_penalty (beta) above 0, or use_kl_in_reward=False."
        )
    return config
