"""`GRPOExtConfig`: TRL's `GRPOConfig` with an advantage estimator and a loss, resolved and checked once."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig

from .nemo_rl import read_nemo_rl
from .objective import LOSS_TYPES, ObjectiveConfig, is_set

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
class GRPOExtConfig(ObjectiveConfig, GRPOConfig):
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
    nemo_rl_config: str | None = field(
        default=None,
        metadata={
            "help": "A NeMo-RL YAML file. Its `grpo:`, `loss_fn:` and `policy:` blocks become the fields that are not "
            "set otherwise."
        },
    )

    FIXED: ClassVar[tuple[str, ...]] = (
        *ObjectiveConfig.FIXED,
        "num_iterations",
        "steps_per_generation",
        "gradient_accumulation_steps",
    )

    def __post_init__(self) -> None:
        if self.nemo_rl_config is not None:
            _take_nemo_rl(self)
        self.read_blocks()
        super().__post_init__()
        self.shared_prompt_forward = _read_shared_prompt_forward(self.shared_prompt_forward)
        _refuse_fields(self)
        self.resolve()
        if self.loss_config.use_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False  # ours stands in its place
        _check_updates_per_rollout(self)
        _check_dynamic_sampling(self)

    @classmethod
    def from_nemo_rl(cls, source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> GRPOExtConfig:
        """Builds the config from a NeMo-RL file or its content; see `nemo_rl.read_nemo_rl`.

        Args:
            source: the path of a YAML file, or a dict.
            **overrides: fields that win over the file.
        """
        return cls(**read_nemo_rl(source, **overrides))


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
    set_here = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and is_set(args, f.name)}
    for name, value in read_nemo_rl(path, **set_here).items():
        setattr(args, name, value)


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
        if is_set(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r} would be ignored: {why}. Remove it.")
    if args.loss_type == "bnpo":
        warnings.warn(
            "loss_type='bnpo' divides by the tokens of each micro-batch, so that its gradient depends on how rows are "
            "split. Here the denominator is the tokens of the whole optimizer step, as with 'dapo'.",
            stacklevel=4,
        )


def _check_updates_per_rollout(args: GRPOExtConfig) -> None:
    micro_batches_a_rollout = args.steps_per_generation * args.num_iterations
    if args.loss_config.force_on_policy_ratio and args.gradient_accumulation_steps % micro_batches_a_rollout != 0:
        raise ValueError(
            f"force_on_policy_ratio=True with several updates a rollout (steps_per_generation="
            f"{args.steps_per_generation}, num_iterations={args.num_iterations}, gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}): after the first update the ratio is not 1. Set num_iterations=1 and "
            "steps_per_generation=gradient_accumulation_steps, or force_on_policy_ratio=False."
        )
