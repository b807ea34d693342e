"""What the worker of the asynchronous trainer makes of a group: components, its part of the advantage, signal."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop
from trl.trainer.utils import is_async_callable

from .advantages import AdvEstimatorConfig, get_advantage_estimator
from .dynamic_sampling import groups_with_signal
from .rewards import AsyncComponentReward, ComponentNames, ComponentReward, component_weights, weighted_sum


@dataclass(slots=True)
class ScoredSample(RolloutSample):
    """TRL's sample, whose `advantage` is what its group decides; the trainer makes the advantage of it.

    Args:
        dropped_groups: the groups that were dropped since the last sample.
    """

    dropped_groups: tuple[int, ...] = ()


class RolloutLoop(_AsyncRolloutLoop):
    """TRL's loop, with rewards that have components and the group's part of our advantages.

    Args:
        adv_estimator: the knobs of the estimator.
        reward_weights: a weight for each reward function and then each environment that scores; or by component name.
        drop_groups_without_signal: whether to drop groups whose rewards are all equal.
        reward_timeout: seconds that the rewards of a group may take, or `None`.
        **kwargs: TRL's.

    Raises:
        ValueError: two reward functions have one name, or the weights are not as many as the functions.
        RuntimeError: in the loop, the rewards of a group took too long, or no group of a whole pass had signal.
    """

    # What TRL's constructor sets and we change.
    reward_funcs: list[Any]

    def __init__(
        self,
        *,
        adv_estimator: AdvEstimatorConfig,
        reward_weights: Sequence[float] | Mapping[str, float] | None,
        drop_groups_without_signal: bool,
        reward_timeout: float | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._estimator = get_advantage_estimator(adv_estimator)
        self._drops_silent_groups = drop_groups_without_signal
        self._reward_timeout = reward_timeout
        self.reward_funcs = [
            (AsyncComponentReward if is_async_callable(function) else ComponentReward)(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=False)
        ]
        self._environments = {kind: ComponentReward(_answers, kind.__name__) for kind in self._env_reward_types}
        self._components = ComponentNames(self.reward_func_names)
        if isinstance(reward_weights, Sequence) and len(reward_weights) != len(self.reward_func_names):
            raise ValueError(
                f"reward_weights has {len(reward_weights)} values for {len(self.reward_func_names)} sources of reward "
                f"({', '.join(self.reward_func_names)}): give one for each, or a dict by component name."
            )
        self._reward_weights = reward_weights
        self._dropped: list[int] = []

    def run(self) -> None:
        """The parent's; once it was told to stop, what nobody will read does not keep the process from ending."""
        super().run()
        self.rollout_buffer.cancel_join_thread()
        self._metrics_queue.cancel_join_thread()

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        self._read_environments(group)
        try:
            samples = await asyncio.wait_for(super()._score_group(group), self._reward_timeout)
        except asyncio.TimeoutError:
            raise RuntimeError(
                f"The rewards of a group took longer than reward_timeout={self._reward_timeout:g} seconds "
                f"(reward functions: {', '.join(self.reward_func_names)})."
            ) from None
        sources = [*self.reward_funcs, *self._environments.values()]
        self._components.update([[list(source.components) for source in sources]])
        columns = dict(
            zip(
                self._components.names,
                torch.tensor(self._components.local_columns(sources, len(group.completions)), dtype=torch.float64),
                strict=True,
            )
        )
        weights = self._weights()
        has_signal = groups_with_signal(
            columns, weights, len(group.completions), per_component=self._estimator.config.name == "gdpo"
        ).item()
        self._push_metrics({"frac_reward_zero_std": (float(not has_signal), 1.0)})
        if self._drops_silent_groups and not has_signal:
            return self._drop(group)

        dropped, self._dropped = tuple(self._dropped), []
        relative = self._estimator.group_advantages(
            torch.zeros(len(group.completions), dtype=torch.long), columns, reward_weights=weights
        ).tolist()
        metrics = self._reward_metrics(columns, weights)
        owners = [i for i, sequences in enumerate(group.completions_sequences) for _ in sequences]
        return [
            ScoredSample(
                **{f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
                | {
                    "advantage": relative[owner],
                    "metrics": {k: v for k, v in sample.metrics.items() if not k.startswith("rewards/")}
                    | metrics[owner],
                    "dropped_groups": dropped if place == 0 else (),
                }
            )
            for place, (sample, owner) in enumerate(zip(samples, owners, strict=True))
        ]

    def _read_environments(self, group: RolloutGroup) -> None:
        """Leaves TRL the number of each environment's answer, and keeps the components."""
        for kind, reader in self._environments.items():
            mine = [entry is not None and entry[0] is kind for entry in group.env_rewards]
            answers = [entry[1] if own else None for entry, own in zip(group.env_rewards, mine, strict=True)]
            numbers = reader(completions=group.completions, answers=answers)
            group.env_rewards = [
                (kind, number) if own else entry
                for entry, number, own in zip(group.env_rewards, numbers, mine, strict=True)
            ]

    def _weights(self) -> dict[str, float]:
        names, weights = self._components.names, self._reward_weights
        if weights is None or isinstance(weights, Mapping):
            return dict(zip(names, component_weights(names, weights or {}), strict=True))
        return {name: weights[owner] for name, owner in zip(names, self._components.owners, strict=True)}

    def _drop(self, group: RolloutGroup) -> list[RolloutSample]:
        self._push_metrics({"rollout/dropped_groups_total": 1.0})
        self._dropped.append(group.group_id)
        if hasattr(self.dataset, "__len__") and len(self._dropped) >= len(self.dataset):
            raise RuntimeError(
                f"No group of the last {len(self._dropped)} had rewards that differ, as many as the data set has "
                "prompts: there is nothing to train on. Use prompts that the model sometimes solves, a reward with "
                "more levels, a higher temperature or more num_generations, or set drop_groups_without_signal=False."
            )
        return []

    @staticmethod
    def _reward_metrics(columns: Mapping[str, Tensor], weights: Mapping[str, float]) -> list[dict[str, float]]:
        """What each completion of the group logs."""
        table = torch.stack(list(columns.values()), dim=-1)
        totals = weighted_sum(table, torch.tensor(list(weights.values()), dtype=table.dtype))[0]
        scored = totals[~totals.isnan()]
        std = scored.std(correction=0).item() if len(scored) else torch.nan
        return [
            {"reward": total, "reward_std": std}
            | {f"rewards/{name}": value for name, value in zip(columns, row, strict=True)}
            for total, row in zip(totals.tolist(), table.tolist(), strict=True)
        ]


def _answers(completions: list[Any], answers: list[Any]) -> list[Any]:
    return answers
