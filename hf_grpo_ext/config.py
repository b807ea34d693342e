"""`GRPOExtConfig`: TRL's `GRPOConfig` with an advantage estimator and a loss, resolved and checked once."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from trl import GRPOConfig

from .advantages import ADVANTAGE_ESTIMATORS, AdvEstimatorConfig, get_advantage_estimator
from .loss_config import PRESETS, ClippedPGLossConfig, reject_unknown_keys
from .nemo_rl import read_nemo_rl

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

# What the objective is made of, besides the two blocks.
RESOLVED_FIELDS = (
    *LOSS_FIELDS,
    *ADVANTAGE_FIELDS,
    "adv_estimator",
    "loss_fn",
    "num_iterations",
    "steps_per_generation",
    "gradient_accumulation_steps",
)
# A preset says what its method is even where it says the default.
STRUCTURE = {"use_cispo": False, "sequence_level_importance_ratios": False, "disable_ppo_ratio": False}

# Fields that only losses which are refused would read.
REFUSED_FIELDS = dict.fromkeys(
    (
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    "only the losses 'sapo' and 'vespo' read it, which this trainer does not have",
)


@dataclass
class GRPOExtConfig(GRPOConfig):
    """`GRPOConfig` with NeMo-RL's advantage estimators and loss.

    One rule joins the two sets of names: a knob of `adv_estimator` or `loss_fn` that you do not name keeps the meaning
    of TRL's own field (`beta`, `epsilon`, `epsilon_high`, `delta`, `loss_type`, `importance_sampling_level`,
    `use_bias_correction_kl`, `scale_rewards`, `multi_objective_aggregation`), so that a TRL script keeps its
    objective. A knob that you name wins, and TRL's field is set to agree. Naming both with different values is a
    `ValueError`. Without any `loss_fn` the objective is TRL's to the letter, so the KL is not clamped either; with one,
    the clamps have the defaults of `ClippedPGLossConfig`.

    After construction `adv_estimator` is an `AdvEstimatorConfig` and `loss_fn` a `ClippedPGLossConfig`.

    Args:
        adv_estimator: a name ("grpo", "gdpo", "reinforce_plus_plus"), a dict of the knobs of `AdvEstimatorConfig`, the
            same as a JSON string, or an `AdvEstimatorConfig`.
        loss_fn: the name of a preset, a dict of the knobs of `ClippedPGLossConfig` (its key `name` may hold a preset
            that the other keys change), the same as a JSON string, or a `ClippedPGLossConfig`.
        advantage_clip_low: lower clamp of the advantages, the last step of every estimator.
        advantage_clip_high: upper clamp.
        use_dynamic_sampling: drop groups whose rewards do not differ, and draw new prompts until the generation batch
            is full of groups that do (DAPO, arXiv:2503.14476). The new prompts come from a stream of their own over
            the data set.
        dynamic_sampling_max_gen_batches: at most so many rounds for one generation batch.
        dynamic_sampling_on_exhaustion: what to do when the rounds are spent and groups are missing: "train" (fill up
            with groups without signal, warn once) or "raise".
        batch_multiplier: draw so many times more prompts at once than a full batch needs, at least 1; what is more than
            needed is dropped. Needs `use_dynamic_sampling`.
        seq_logprob_error_threshold: a rollout on whose tokens the engine that sampled and the one that trains disagree
            by more than this factor (the mean of exp|gen - prev|) neither votes nor trains; above 1. `None` for none.
        shared_prompt_forward: "auto", `True` or `False`: compute a prompt once for all of its completions in a
            micro-batch, and no padding. The log-probabilities and the gradient are the same up to rounding. "auto" does
            it where the model can and it pays; `True` is an error where the model cannot.
        skip_rows_without_signal: do not compute rows whose advantage is exactly 0 where the loss has no term that needs
            them. The gradient is the same; the metrics of the loss are averaged over the rows that are computed.
        stop_broken_run: stop a run whose loss is NaN, whose engine has drifted away or whose rewards teach nothing; see
            `StopBrokenRun`, which is added with its defaults.
        reward_timeout: seconds that one call of a reward function may take; then the run ends as it does when the
            function fails. `None` for no limit. It holds for functions, `async` functions and an environment's
            `get_reward`, on Linux and macOS with the training in the main thread; not for reward models. A function
            that cannot be interrupted ends its process 30 seconds later, with its stack on stderr.
        nemo_rl_config: a NeMo-RL YAML file; its blocks become the fields that are not set otherwise.
        reward_weights: TRL's list, one weight a reward function, which applies to each of its components; or a dict by
            component name (1 for a component that it does not name), also as a JSON string.

    Raises:
        TypeError: a block or a knob has the wrong type.
        ValueError: an unknown key, a combination that cannot be, or a field of TRL's that cannot be honoured.

    Example:
        >>> args = GRPOExtConfig(adv_estimator="gdpo", loss_fn={"ratio_clip_max": 0.28}, use_cpu=True)
        >>> args.adv_estimator.name, args.loss_fn.ratio_clip_max, args.epsilon_high, args.multi_objective_aggregation
        ('gdpo', 0.28, 0.28, 'normalize_then_sum')
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
    use_dynamic_sampling: bool = field(
        default=False,
        metadata={"help": "Draw new prompts until the generation batch is full of groups whose rewards differ."},
    )
    dynamic_sampling_max_gen_batches: int = field(
        default=10, metadata={"help": "Rounds of dynamic sampling for one generation batch, at most."}
    )
    dynamic_sampling_on_exhaustion: str = field(
        default="train",
        metadata={
            "help": "When the rounds are spent: 'train' on what there is, filled up with groups without signal, or "
            "'raise'."
        },
    )
    batch_multiplier: float = field(
        default=1.0,
        metadata={"help": "Draw so many times more prompts at once than a full batch needs (dynamic sampling)."},
    )
    seq_logprob_error_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Leave out rollouts whose mean of exp|gen - prev| over their tokens, between the engine that "
            "sampled and the one that trains, is above this."
        },
    )
    if TYPE_CHECKING:
        shared_prompt_forward: bool | str = "auto"
    else:
        # `str`, because the command line reads a field that may be a bool as one.
        shared_prompt_forward: str = field(
            default="auto",
            metadata={
                "help": "Compute a prompt once for all of its completions in a micro-batch: 'auto' (where the model "
                "can and it pays), 'true' (an error where the model cannot) or 'false'."
            },
        )
    skip_rows_without_signal: bool = field(
        default=True,
        metadata={"help": "Do not compute rows whose advantage is exactly 0 where no term of the loss needs them."},
    )
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
    nemo_rl_config: str | None = field(
        default=None,
        metadata={
            "help": "A NeMo-RL YAML file. Its `grpo:`, `loss_fn:` and `policy:` blocks become the fields that are not "
            "set otherwise."
        },
    )

    def __post_init__(self) -> None:
        if self.nemo_rl_config is not None:
            _take_nemo_rl(self)
        self.adv_estimator = _read_json("adv_estimator", self.adv_estimator)
        self.loss_fn = _read_json("loss_fn", self.loss_fn)
        super().__post_init__()
        self.reward_weights = _read_reward_weights(self.reward_weights)
        self.shared_prompt_forward = _read_shared_prompt_forward(self.shared_prompt_forward)
        self.sources = {}
        _refuse_fields(self)
        self.adv_estimator = _resolve_adv_estimator(self)
        self.loss_fn = _resolve_loss(self)
        get_advantage_estimator(self.adv_estimator_config, self.loss_config)  # do the two go together?
        _check_updates_per_rollout(self)
        _check_dynamic_sampling(self)
        if self.reward_timeout is not None and not 0 < self.reward_timeout < math.inf:
            raise ValueError(
                f"reward_timeout={self.reward_timeout}: it must be a positive number of seconds, or None for no limit."
            )
        self.resolved = {name: getattr(self, name) for name in RESOLVED_FIELDS}

    def check_unchanged(self) -> None:
        """Raises a `ValueError` if a field that the objective was made of was assigned after construction."""
        for name, value in self.resolved.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} was set to {getattr(self, name)!r} after the configuration was made with {value!r}: the "
                    "loss and the advantages are resolved once. Pass it to GRPOExtConfig(...)."
                )

    @classmethod
    def from_nemo_rl(cls, source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> GRPOExtConfig:
        """Builds the config from a NeMo-RL file or its content; see `nemo_rl.read_nemo_rl`.

        Args:
            source: the path of a YAML file, or a dict.
            **overrides: fields that win over the file.
        """
        return cls(**read_nemo_rl(source, **overrides))

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
        plain: dict[str, Any] = super().to_dict()
        for name in ("adv_estimator", "loss_fn"):
            plain[name] = dataclasses.asdict(plain[name])
        return plain


def _check_dynamic_sampling(args: GRPOExtConfig) -> None:
    if args.dynamic_sampling_max_gen_batches < 1:
        raise ValueError(
            f"dynamic_sampling_max_gen_batches={args.dynamic_sampling_max_gen_batches}: at least one round is drawn."
        )
    if args.dynamic_sampling_on_exhaustion not in ("train", "raise"):
        raise ValueError(
            f"dynamic_sampling_on_exhaustion={args.dynamic_sampling_on_exhaustion!r}: it must be 'train' or 'raise'."
        )
    if not 1 <= args.batch_multiplier < math.inf:
        raise ValueError(f"batch_multiplier={args.batch_multiplier}: it must be at least 1, a round fills a batch.")
    if args.batch_multiplier != 1 and not args.use_dynamic_sampling:
        raise ValueError(
            f"batch_multiplier={args.batch_multiplier} without use_dynamic_sampling: rollouts beyond a batch would be "
            "generated and thrown away. Set use_dynamic_sampling=True, or leave batch_multiplier at 1."
        )
    threshold = args.seq_logprob_error_threshold
    if threshold is not None and not threshold > 1:
        raise ValueError(
            f"seq_logprob_error_threshold={threshold}: it is compared with a mean of exp|gen - prev|, which is 1 where "
            "the engines agree, so it must be above 1 (or None)."
        )


def _read_shared_prompt_forward(value: Any) -> bool | str:
    known: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    text = str(value).lower()
    if text not in known:
        raise ValueError(f"shared_prompt_forward={value!r}: it must be 'auto', True or False.")
    return known[text]


def _take_nemo_rl(args: GRPOExtConfig) -> None:
    path, args.nemo_rl_config = str(args.nemo_rl_config), None  # read once: a config made of this one has its fields
    set_here = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and _is_set(args, f.name)}
    for name, value in read_nemo_rl(path, **set_here).items():
        setattr(args, name, value)


def _default(name: str) -> Any:
    return next((f.default for f in dataclasses.fields(GRPOConfig) if f.name == name), None)


def _is_set(args: GRPOExtConfig, name: str) -> bool:
    return bool(getattr(args, name) != _default(name))


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


def _refuse_fields(args: GRPOExtConfig) -> None:
    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={args.loss_type!r} cannot be expressed by this trainer's loss: use one of "
            f"{', '.join(LOSS_TYPES)}, or TRL's own GRPOTrainer."
        )
    if args.scale_rewards not in ("group", "none"):
        raise ValueError(
            f"scale_rewards={args.scale_rewards!r} cannot be honoured: rewards are scaled by the std of their group "
            "('group') or not at all ('none'). To whiten over the batch use adv_estimator='reinforce_plus_plus', or "
            "'gdpo' for several components."
        )
    if args.multi_objective_aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r}: must be 'sum_then_normalize' or "
            "'normalize_then_sum'."
        )
    if args.importance_sampling_level not in ("token", "sequence"):
        raise ValueError(
            f"importance_sampling_level={args.importance_sampling_level!r}: must be 'token' or 'sequence'."
        )
    for name, why in REFUSED_FIELDS.items():
        if _is_set(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r} would be ignored: {why}. Remove it.")
    if args.loss_type == "bnpo":
        warnings.warn(
            "loss_type='bnpo' divides by the tokens of each micro-batch, so that its gradient depends on how rows are "
            "split. Here the denominator is the tokens of the whole optimizer step, as with 'dapo'.",
            stacklevel=4,
        )


def _as_block(value: Any, kind: str, names: Mapping[str, Any], config_class: type) -> dict[str, Any]:
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


def _agree(args: GRPOExtConfig, kind: str, named: Mapping[str, Any], fields: Mapping[str, Any], twins: Any) -> None:
    """Sets TRL's fields to what the knobs say, or raises if both were named with different values."""
    for name, value in fields.items():
        current = getattr(args, name)
        same = math.isclose(current, value) if _both_numbers(current, value) else current == value
        if same:
            continue
        knobs = [knob for knob in twins[name] if knob in named]
        if knobs and _is_set(args, name):
            raise ValueError(
                f"{kind} names {knobs[0]}={named[knobs[0]]!r}, which is the field {name}={value!r}, and "
                f"{name}={current!r} is set too. They are the same setting: name one of them."
            )
        setattr(args, name, value)


def _both_numbers(a: Any, b: Any) -> bool:
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))


def _resolve_adv_estimator(args: GRPOExtConfig) -> AdvEstimatorConfig:
    named = _as_block(args.adv_estimator, "adv_estimator", ADVANTAGE_ESTIMATORS, AdvEstimatorConfig)
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


def _note_sources(args: GRPOExtConfig, block: str, twins: Any, said: Mapping[str, Any], of_trl: Any) -> None:
    """Records where each knob came from; what is said later in `said` wins."""
    for trl_field, knobs in twins.items():
        for knob in knobs:
            if knob in of_trl:
                whose = "TRL's " if trl_field not in ("advantage_clip_low", "advantage_clip_high") else ""
                args.sources[f"{block}.{knob}"] = whose + trl_field + ("" if _is_set(args, trl_field) else ", default")
    for source, knobs in said.items():
        for knob in knobs:
            args.sources[f"{block}.{knob}"] = source


def _loss_knobs_of_trl_fields(args: GRPOExtConfig, use_cispo: bool) -> dict[str, Any]:
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


def _resolve_loss(args: GRPOExtConfig) -> ClippedPGLossConfig:
    named = _as_block(args.loss_fn, "loss_fn", PRESETS, ClippedPGLossConfig)
    method = named.pop("name", None)
    preset = STRUCTURE | PRESETS[method] if method else {}
    use_cispo = {**preset, **named}.get("use_cispo", args.loss_type == "cispo")

    # TRL's numbers, where they are set, replace those of a preset; what the method is stays.
    of_trl = _loss_knobs_of_trl_fields(args, use_cispo=bool(use_cispo))
    for trl_field, knobs in LOSS_FIELDS.items():
        for knob in knobs:
            if knob in PRESET_NUMBERS and _is_set(args, trl_field):
                preset.pop(knob, None)
    _note_sources(args, "loss_fn", LOSS_FIELDS, {f"preset {method!r}": preset, "named": named}, of_trl=of_trl)
    named = {**preset, **named}
    if named.get("use_on_policy_kl_approximation"):
        of_trl["kl_importance_weight"] = "score_function"
    config = ClippedPGLossConfig.from_dict({**of_trl, **named})

    if method == "dr_grpo" and not _is_set(args, "loss_type"):
        args.loss_type = "dr_grpo"
    _agree(args, "loss_fn", named, _trl_fields_of_loss(config, args.loss_type), LOSS_FIELDS)
    if config.use_kl_in_reward and config.reference_policy_kl_penalty == 0:
        raise ValueError(
            "use_kl_in_reward=True with reference_policy_kl_penalty=0: there is no KL to put into the reward. Set "
            "reference_policy_kl_penalty (beta) above 0, or use_kl_in_reward=False."
        )
    if config.use_importance_sampling_correction:
        args.vllm_importance_sampling_correction = False  # ours stands in its place
    return config


def _check_updates_per_rollout(args: GRPOExtConfig) -> None:
    micro_batches_a_rollout = args.steps_per_generation * args.num_iterations
    if args.loss_config.force_on_policy_ratio and args.gradient_accumulation_steps % micro_batches_a_rollout != 0:
        raise ValueError(
            f"force_on_policy_ratio=True with several updates a rollout (steps_per_generation="
            f"{args.steps_per_generation}, num_iterations={args.num_iterations}, gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}): after the first update the ratio is not 1. Set num_iterations=1 and "
            "steps_per_generation=gradient_accumulation_steps, or force_on_policy_ratio=False."
        )
