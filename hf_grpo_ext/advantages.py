"""Advantage estimators: from the reward table of a generation batch to one number a rollout, or one a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .kl import kl_penalty
from .loss_config import ClippedPGLossConfig, check_types, numbers_from_text, reject_unknown_keys
from .normalization import each_component, normalized_advantage, whiten_rows, whiten_tokens
from .reductions import masked_sum
from .rewards import component_weights, weighted_sum

ROUNDED_OPERATIONS = 16  # that a term of an advantage has behind it, at most


@dataclass(frozen=True)
class AdvEstimatorConfig:
    """The knobs of an advantage estimator; checked once, when made.

    Args:
        name: "grpo", "gdpo" or "reinforce_plus_plus".
        use_leave_one_out_baseline: a rollout is left out of its own baseline and std (grpo, gdpo).
        normalize_rewards: divide by the std of the group where it is > 0 (grpo, gdpo).
        minus_baseline: subtract the group mean (reinforce_plus_plus).
        advantage_clip_low: lower clamp of the advantage, the last step; `None` for none.
        advantage_clip_high: upper clamp.

    Raises:
        TypeError: a knob has the wrong type.
        ValueError: the name is not known, the clamps cross, or a knob does nothing for this estimator.

    Example:
        >>> AdvEstimatorConfig(name="gdpo").use_leave_one_out_baseline
        True
    """

    name: str = "grpo"
    use_leave_one_out_baseline: bool = True
    normalize_rewards: bool = True
    minus_baseline: bool = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        reject_unknown_keys([self.name], ADVANTAGE_ESTIMATORS, "`adv_estimator`")
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"advantage_clip_low={low} is above advantage_clip_high={high}: no advantage is in between."
            )
        for name, value, outside in (
            ("advantage_clip_low", low, low is not None and low > 0),
            ("advantage_clip_high", high, high is not None and high < 0),
        ):
            if outside:
                raise ValueError(
                    f"{name}={value}: the range must hold 0, the advantage of a rollout that nothing scored and of a "
                    "group without signal, or these would train."
                )
        if self.name != "reinforce_plus_plus" and not self.minus_baseline:
            raise ValueError(
                f"minus_baseline=False with name={self.name!r}: only reinforce_plus_plus reads it, a group-relative "
                "estimator is its baseline. Remove it, or use name='reinforce_plus_plus'."
            )

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> AdvEstimatorConfig:
        """Builds the config from a mapping; an unknown key is a `ValueError` that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        reject_unknown_keys(knobs, known, "The advantage estimator (`adv_estimator`)")
        return cls(**numbers_from_text(cls, knobs))


class AdvantageEstimator:
    """What the estimators share: the reward table, who is valid, the clamp.

    A new estimator defines `_relative`, and `_over_batch` if it needs the batch, and takes a line in
    `ADVANTAGE_ESTIMATORS`.

    Args:
        config: the knobs of the estimator.
        loss_config: the knobs of the loss, which say whether the KL belongs to the reward.
    """

    token_level: ClassVar[bool] = False  # one advantage a token instead of one a rollout
    allows_kl_in_reward: ClassVar[bool] = True

    def __init__(self, config: AdvEstimatorConfig, loss_config: ClippedPGLossConfig | None = None) -> None:
        self.config = config
        self.loss_config = loss_config or ClippedPGLossConfig()
        if self.loss_config.use_kl_in_reward and not self.allows_kl_in_reward:
            raise ValueError(
                f"use_kl_in_reward=True with adv_estimator {config.name!r}: which component would carry the KL is not "
                "defined. Use the KL term of the loss (use_kl_in_reward=False), or another estimator."
            )

    def compute_advantage(
        self,
        group_ids: Tensor,
        rewards: Mapping[str, Tensor],
        mask: Tensor,
        *,
        reward_weights: Mapping[str, float] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
    ) -> Tensor:
        """Computes the advantages of a generation batch (the rollouts of all processes).

        Args:
            group_ids: `[N]` integers, equal for the rollouts of one prompt draw.
            rewards: component name -> `[N]`, floating point, NaN where a component does not apply to a row.
            mask: `[N, T]`, 1 on tokens that count. A row without any neither votes nor receives an advantage. An
                estimator with one advantage a rollout takes `[N, 1]` as well.
            reward_weights: component name -> weight, 1 for a component that is not named.
            logprobs_policy: `[N, T]`, `prev`, nats; needed with `use_kl_in_reward`.
            logprobs_reference: `[N, T]`, `ref`, nats; needed with `use_kl_in_reward`.

        Returns:
            `[N]`, or `[N, T]` from a token-level estimator, in float32 (float64 for float64 rewards).

        Raises:
            TypeError: `rewards` is not a mapping.
            ValueError: shapes do not match, a weight has no component, log-probabilities are missing.
        """
        names, table, weights, mask = self._checked(group_ids, rewards, mask, reward_weights)
        if not len(group_ids):
            return table.new_zeros(mask.shape if self.token_level else 0)
        kl = self._kl_in_reward(mask, table.dtype, logprobs_policy, logprobs_reference)
        scored = ~table.T.isnan().all(0)
        relative, resolution = self._relative(group_ids, names, table, weights, mask, kl)
        return self._clamped(self._over_batch(relative, mask & scored[:, None], resolution, kl))

    def group_advantages(
        self,
        group_ids: Tensor,
        rewards: Mapping[str, Tensor],
        *,
        reward_weights: Mapping[str, float] | None = None,
    ) -> Tensor:
        """What a group alone decides of the advantages, for whoever does not see the batch; `over_batch` does the rest.

            over_batch(group_advantages(...), tokens)  =  compute_advantage(...)

        Args:
            group_ids: as in `compute_advantage`, like the rest.
            rewards: component name -> `[N]`.
            reward_weights: component name -> weight.

        Returns:
            `[N]`; NaN for a row that nothing scored.

        Raises:
            TypeError: `rewards` is not a mapping.
            ValueError: shapes do not match, or a weight has no component.
        """
        everything = torch.ones_like(group_ids, dtype=torch.bool)[:, None]
        names, table, weights, mask = self._checked(group_ids, rewards, everything, reward_weights)
        if not len(group_ids):
            return table.new_zeros(0)
        relative, resolution = self._relative(group_ids, names, table, weights, mask, None)
        # Who divides by the spread of these numbers later does not know how they were rounded.
        relative = relative.masked_fill(relative.abs() <= resolution, 0)
        return relative.masked_fill(table.T.isnan().all(0), torch.nan)

    def over_batch(self, relative: Tensor, tokens: Tensor) -> Tensor:
        """The advantages of a batch from what its groups decided: whitened where the method whitens, and clamped.

        Args:
            relative: `[N]`, from `group_advantages`; NaN for a row without an advantage.
            tokens: `[N]`, how many tokens of each row count; a row without any has no say.

        Returns:
            `[N]`, the advantage of every token of the row; exactly 0 where `relative` is NaN or no token counts.
        """
        tokens = tokens.masked_fill(relative.isnan(), 0)[:, None]
        relative = relative.nan_to_num(0.0)
        resolution = ROUNDED_OPERATIONS * torch.finfo(relative.dtype).eps * relative.abs().amax()
        advantages = self._over_batch(relative, tokens, resolution, None)
        return self._clamped(advantages.view(len(relative)).masked_fill(tokens[:, 0] == 0, 0))

    def _clamped(self, advantages: Tensor) -> Tensor:
        low, high = self.config.advantage_clip_low, self.config.advantage_clip_high
        return advantages if low is None and high is None else advantages.clamp(low, high)

    def component_advantages(
        self,
        group_ids: Tensor,
        rewards: Mapping[str, Tensor],
        mask: Tensor,
        *,
        reward_weights: Mapping[str, float] | None = None,
    ) -> Tensor:
        """What each component puts into the advantage, before it is divided, whitened or clamped.

            D_ik = w_k (r_ik - b_ik),   so that   sum_k D_ik = r_i - b_i
            D_ik = w_k A_ik                                               (gdpo: the terms that it sums)

        with the baseline of this estimator (none under reinforce_plus_plus with `minus_baseline=False`). A component
        that is absent from a row counts as 0 there, as in the sum of the rewards; under gdpo it does not vote.

        Args:
            group_ids: as in `compute_advantage`, like the rest.
            rewards: component name -> `[N]`.
            mask: `[N, T]` or `[N, 1]`.
            reward_weights: component name -> weight.

        Returns:
            `[N, K]`, components in the order of `rewards`; NaN in a row that is masked out or that nothing scored.

        Raises:
            TypeError: `rewards` is not a mapping.
            ValueError: shapes do not match, or a weight has no component.

        Example:
            >>> estimator = get_advantage_estimator(AdvEstimatorConfig(use_leave_one_out_baseline=False))
            >>> rewards = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([0.0, 2.0])}
            >>> estimator.component_advantages(torch.zeros(2), rewards, torch.ones(2, 1)).tolist()
            [[0.5, -1.0], [-0.5, 1.0]]
        """
        _, table, weights, _ = self._checked(group_ids, rewards, mask, reward_weights)
        counts = ~table.isnan().all(-1, keepdim=True)
        return self._terms(group_ids, table, weights).masked_fill(~counts, torch.nan)

    def _checked(
        self, group_ids: Tensor, rewards: Mapping[str, Tensor], mask: Tensor, reward_weights: Mapping[str, float] | None
    ) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """`(names, table, weights, mask)`; a row that does not vote is NaN in the table `[N, K]`."""
        names, table = _reward_table(rewards, group_ids, mask)
        weights = torch.tensor(component_weights(names, reward_weights or {}), dtype=table.dtype, device=table.device)
        mask = mask.bool()
        if len(group_ids):
            _check_magnitude(names, table * weights)
            # A row that is masked out does not vote; nor does one that nothing could score, which is NaN already.
            # (`any` over one column takes as long as over many.)
            counts = mask[:, 0] if mask.shape[1] == 1 else mask.any(-1)
            table = table.T.masked_fill(~counts, torch.nan).T
        return names, table, weights, mask

    def _relative(
        self, group_ids: Tensor, names: list[str], table: Tensor, weights: Tensor, mask: Tensor, kl: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        """`(what a group decides alone, [N], how far rounding can have moved it)`."""
        raise NotImplementedError

    def _over_batch(self, relative: Tensor, mask: Tensor, resolution: Tensor | float, kl: Tensor | None) -> Tensor:
        """What the batch makes of it, `[N]`, or `[N, T]` from a token-level estimator."""
        return relative

    def _terms(self, group_ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
        """`D` of `component_advantages`, of any value in the rows that do not count."""
        return weights * each_component(
            _absent_as_zero(table), group_ids, leave_one_out=self.config.use_leave_one_out_baseline, normalize=False
        )

    def _kl_in_reward(
        self, mask: Tensor, dtype: torch.dtype, policy: Tensor | None, reference: Tensor | None
    ) -> Tensor | None:
        """`beta * kl_t`, `[N, T]`, or `None` where the KL is no part of the reward."""
        loss = self.loss_config
        if not loss.use_kl_in_reward:
            return None
        if policy is None or reference is None:
            raise ValueError(
                "use_kl_in_reward=True needs logprobs_policy and logprobs_reference, [N, T]: the log-probabilities of "
                "the rollout under the policy that is trained and under the reference."
            )
        if policy.shape != mask.shape or reference.shape != mask.shape:
            raise ValueError(
                f"logprobs_policy has shape {list(policy.shape)} and logprobs_reference {list(reference.shape)}: both "
                f"must have the shape of mask, {list(mask.shape)}."
            )
        log_ratio = (reference - policy).to(dtype)
        log_ratio = torch.where(mask | log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
        return loss.reference_policy_kl_penalty * kl_penalty(
            log_ratio,
            loss.reference_policy_kl_type,
            input_clamp=loss.kl_input_clamp_value,
            output_clamp=loss.kl_output_clamp_value,
        )


class GRPOAdvantageEstimator(AdvantageEstimator):
    """Group-relative advantage of the weighted sum of the components.

        r_i = sum_k w_k r_ik  (- beta * sum_t kl_it  with use_kl_in_reward)
        A_i = (r_i - b_i) / (std_i + 1e-6)

    with `b_i`, `std_i` from `grouping.group_baseline_and_std`; not divided where `std_i` is 0 or without
    `normalize_rewards`. Leave-one-out without division is RLOO.

    Source:
        DeepSeekMath, arXiv:2402.03300; RLOO, arXiv:2402.14740.
    """

    def _relative(
        self, group_ids: Tensor, names: list[str], table: Tensor, weights: Tensor, mask: Tensor, kl: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        rewards, resolution = weighted_sum(table, weights)
        if kl is not None:
            rewards = rewards - masked_sum(kl, mask, dim=-1)
        advantages = normalized_advantage(
            rewards,
            group_ids,
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            resolution=resolution,
        )
        return advantages, 0.0  # what is within the resolution is 0 already


class GDPOAdvantageEstimator(AdvantageEstimator):
    """Each component is compared with its group and normalised on its own; the sum is whitened over the batch.

        A_ik = (r_ik - b_ik) / (std_ik + 1e-6)      for each component k
        S_i  = sum_k w_k A_ik
        A_i  = (S_i - mean(S)) / std(S)             over all valid rows of the generation batch

    Rewards that differ in scale or hit rate keep their say, where the sum of the rewards would let the loudest speak.

    Source:
        GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242.
    """

    allows_kl_in_reward = False

    def _relative(
        self, group_ids: Tensor, names: list[str], table: Tensor, weights: Tensor, mask: Tensor, kl: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        if len(names) < 2:
            raise ValueError(
                f"gdpo needs at least two reward components, but saw {len(names)}: {names}. Return several named "
                'components from the reward functions, or use adv_estimator="grpo".'
            )
        terms = self._terms(group_ids, table, weights)
        resolution = ROUNDED_OPERATIONS * len(names) * torch.finfo(table.dtype).eps * terms.abs().amax()
        return terms.sum(-1), resolution

    def _over_batch(self, relative: Tensor, mask: Tensor, resolution: Tensor | float, kl: Tensor | None) -> Tensor:
        return whiten_rows(relative, mask.any(-1), resolution)

    def _terms(self, group_ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
        return weights * each_component(
            table,
            group_ids,
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
        )


class ReinforcePlusPlusAdvantageEstimator(AdvantageEstimator):
    """The reward less the mean of its group, spread over the tokens and whitened over all tokens of the batch.

        A_it = r_i - mean_group(r)   (- beta * kl_it  with use_kl_in_reward)
        A_it <- (A_it - mean(A)) * rsqrt(max(var(A), 1e-8))

    `minus_baseline=False` leaves the group mean out. Long rollouts weigh more, since whitening is over tokens.

    Source:
        REINFORCE++, arXiv:2501.03262.
    """

    token_level = True

    def _relative(
        self, group_ids: Tensor, names: list[str], table: Tensor, weights: Tensor, mask: Tensor, kl: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        rewards, resolution = weighted_sum(table, weights)
        if self.config.minus_baseline:
            rewards = normalized_advantage(
                rewards, group_ids, leave_one_out=False, normalize=False, resolution=resolution
            )
        return rewards, 0.0

    def _over_batch(self, relative: Tensor, mask: Tensor, resolution: Tensor | float, kl: Tensor | None) -> Tensor:
        values = relative[:, None] if kl is None else relative[:, None] - kl
        advantages = torch.where(mask.any(-1, keepdim=True), whiten_tokens(values, mask), 0)
        return advantages.expand_as(mask).contiguous()

    def _terms(self, group_ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
        components = _absent_as_zero(table)
        if self.config.minus_baseline:
            components = each_component(components, group_ids, leave_one_out=False, normalize=False)
        return weights * components


ADVANTAGE_ESTIMATORS: dict[str, type[AdvantageEstimator]] = {
    "grpo": GRPOAdvantageEstimator,
    "gdpo": GDPOAdvantageEstimator,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantageEstimator,
}


def get_advantage_estimator(
    config: AdvEstimatorConfig, loss_config: ClippedPGLossConfig | None = None
) -> AdvantageEstimator:
    """The estimator that `config.name` names.

    Raises:
        ValueError: the estimator cannot do what `loss_config` asks (`use_kl_in_reward` with gdpo).
    """
    return ADVANTAGE_ESTIMATORS[config.name](config, loss_config)


def _reward_table(rewards: Mapping[str, Tensor], group_ids: Tensor, mask: Tensor) -> tuple[list[str], Tensor]:
    """Component names and the table `[N, K]`; shapes are checked before any arithmetic."""
    if not isinstance(rewards, Mapping):
        raise TypeError(f"rewards is a {type(rewards).__name__}: it must map component names to [N] tensors.")
    if not rewards:
        raise ValueError("rewards holds no component: at least one is needed.")
    if group_ids.dim() != 1 or mask.dim() != 2 or mask.shape[0] != group_ids.shape[0]:
        raise ValueError(
            f"group_ids has shape {list(group_ids.shape)} and mask {list(mask.shape)}: they must be [N] and [N, T]."
        )
    for name, column in rewards.items():
        if not isinstance(column, Tensor):
            raise TypeError(f"reward component {name!r} is a {type(column).__name__}: it must be a [N] tensor.")
        if column.shape != group_ids.shape:
            raise ValueError(
                f"reward component {name!r} has shape {list(column.shape)}: it must have the shape of group_ids, "
                f"{list(group_ids.shape)}."
            )
    # One component after the other in memory, which is the faster way to reduce over them.
    table = torch.stack([column.detach() for column in rewards.values()]).T
    return list(rewards), table.to(torch.promote_types(table.dtype, torch.float32))


def _absent_as_zero(table: Tensor) -> Tensor:
    """The table as the sum of the rewards reads it: an absent component adds 0 to a row that has another."""
    scored = ~table.isnan().all(-1, keepdim=True)
    return torch.where(scored & table.isnan(), torch.zeros_like(table), table)


def _check_magnitude(names: list[str], terms: Tensor) -> None:
    """Refuses rewards whose variance would not fit into the dtype, and with it those that are infinite."""
    largest = terms.abs().nan_to_num(0.0, posinf=torch.inf).amax(0)
    limit = torch.finfo(terms.dtype).max ** 0.5 / 1e3
    for name, value in zip(names, largest.tolist(), strict=True):
        if value > limit:
            raise ValueError(
                f"reward component {name!r}, times its weight, reaches {value:.3g}: the variance of such rewards does "
                f"not fit into {terms.dtype}. A reward must be finite and below {limit:.0e}; scale it down."
            )
