"""`AsyncGRPOExtConfig`: TRL's `AsyncGRPOConfig` with the two blocks of `GRPOExtConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl.experimental.async_grpo import AsyncGRPOConfig

from .loss_config import PRESETS, ClippedPGLossConfig
from .objective import ObjectiveConfig, as_block

CORRECTION = "use_importance_sampling_correction"


@dataclass
class AsyncGRPOExtConfig(ObjectiveConfig, AsyncGRPOConfig):
    """`AsyncGRPOConfig` with NeMo-RL's advantage estimators and loss.

    A rollout trains in one optimizer step, whose weights are some updates newer than those that sampled it. The policy
    ratio is taken to the weights at the start of that step, `prev = sg(lp)`, so that it is 1 and no clip bites; what
    the age of a rollout changes is corrected by the weight `exp(prev - gen)` of every token, which is always on, and
    which `truncated_importance_sampling_type` bounds.

    Args:
        adv_estimator: as in `GRPOExtConfig`.
        loss_fn: as in `GRPOExtConfig`; `reference_policy_kl_penalty` above 0 makes the trainer keep a reference policy.
            TRL's `epsilon` and `epsilon_high` are its `ratio_clip_min` and `ratio_clip_max`.
        advantage_clip_low: lower clamp of the advantages.
        advantage_clip_high: upper clamp.
        reward_weights: one weight a reward function (then one for each environment that scores), or a dict by
            component name.
        drop_groups_without_signal: the worker drops a group whose rewards are all equal, in every component under
            gdpo, so that it costs no training token.
        reward_timeout: seconds that the rewards of a group may take; then the run ends. `None` for no limit.
        use_dynamic_sampling: refused; see `drop_groups_without_signal`.
        stop_broken_run: adds `StopBrokenRun` with its defaults.

    Raises:
        TypeError: a block or a knob has the wrong type.
        ValueError: an unknown key, or a combination that cannot be.

    Example:
        >>> args = AsyncGRPOExtConfig(adv_estimator="gdpo", loss_fn="dapo", use_cpu=True)
        >>> args.loss_fn.use_importance_sampling_correction
        True
    """

    drop_groups_without_signal: bool = field(
        default=False,
        metadata={
            "help": "Drop groups whose rewards are all equal in the worker, so that they cost no training token."
        },
    )
    use_dynamic_sampling: bool = field(
        default=False, metadata={"help": "Refused: use `drop_groups_without_signal` instead."}
    )

    # What `GRPOConfig` has fields for, with its defaults; here the two blocks alone say it.
    beta = 0.0
    delta = None
    loss_type = "dapo"
    importance_sampling_level = "token"
    use_bias_correction_kl = True
    scale_rewards = "group"
    multi_objective_aggregation = "sum_then_normalize"
    # A rollout trains once.
    num_iterations = 1

    def __post_init__(self) -> None:
        self.read_blocks()
        super().__post_init__()
        if self.use_dynamic_sampling:
            raise ValueError(
                "use_dynamic_sampling=True: the asynchronous trainer has no generation batch to fill up, its worker "
                "samples all the time. Set drop_groups_without_signal=True: groups without signal are then dropped in "
                "the worker, and the next ones take their place."
            )
        block = as_block(self.loss_fn, "loss_fn", PRESETS, ClippedPGLossConfig)
        if block.get(CORRECTION, True) is not True:
            raise ValueError(
                f"{CORRECTION}={block[CORRECTION]!r} with the asynchronous trainer: its rollouts come from older "
                "weights, and without the correction their gradient is that of another policy. Leave it out, or set it "
                "to True."
            )
        if block.get("use_kl_in_reward"):
            raise ValueError(
                "use_kl_in_reward=True with the asynchronous trainer: rewards are made by the worker, which has no "
                "reference policy. Use the KL term of the loss (use_kl_in_reward=False)."
            )
        self.loss_fn = {**block, CORRECTION: True}
        self.resolve()
        self.sources[f"loss_fn.{CORRECTION}"] = "asynchronous"
