"""Dynamic sampling in the trainer: rounds of generation until the batch is full of groups that teach something."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from .diagnostics import combine_rounds
from .dynamic_sampling import PromptStream, Rounds, groups_with_signal, joined_columns
from .forward import MODEL_INPUTS
from .micro_batches import concatenate_rows, counted_tokens, take_rows


class DynamicSampling(GRPOTrainer):
    """The part of the trainer that draws prompts again."""

    _logs: dict[str, Any]
    _reward_table: Tensor
    _warned_of_exhaustion: bool

    def _draw_until_full(self, inputs: list[Any]) -> dict[str, Any]:
        """A batch of groups that all have signal, drawn in rounds; the same groups on every process."""
        processes, size = self.accelerator.num_processes, self._group_size
        rounds = Rounds(
            needed=len(inputs) * processes // size,
            max_rounds=self.args.dynamic_sampling_max_gen_batches,
            multiplier=self.args.batch_multiplier,
            whole=processes // math.gcd(processes, size),
        )
        pool: dict[str, Any] = {}  # the rows of the groups that are chosen so far, of all processes
        columns: dict[str, Tensor] = {}
        # TRL's table of completions holds one batch: one without a limit takes the rounds.
        logs, self._logs = self._logs, _without_limit(self._logs)
        metrics = self._metrics[self._mode]
        before = {name: len(values) for name, values in metrics.items()}
        sizes: list[int] = []  # rows of each round
        try:
            while rounds.goes_on:
                table = self._global_rows(self._scored(self._inputs_of_round(inputs, rounds)))
                drawn = self._reward_columns
                votes = counted_tokens(table).any(-1)
                rounds.record(self._groups_with_signal(votes, drawn))
                sizes.append(len(votes))
                rows = [group * size + i for group in rounds.take() for i in range(size)]
                pool = take_rows(concatenate_rows([pool, table]) if pool else table, rows)
                columns = joined_columns(columns, drawn, rows)
        finally:
            collected, self._logs = self._logs, logs
        for name, values in metrics.items():  # one value a batch, of all that was drawn
            new = values[before.get(name, 0) :]
            if len(new) > 1:
                values[-len(new) :] = [combine_rounds(name, new, sizes)]
        self._end_rounds(rounds, collected)

        absent = self._reward_table.new_full((len(rounds.chosen()) * size,), torch.nan)
        self._reward_table = torch.stack([columns.get(name, absent) for name in self.reward_func_names], dim=-1)
        mine = self._local_rows(len(inputs))
        return {key: value[mine] if value.dim() else value for key, value in pool.items()}

    def _groups_with_signal(self, votes: Tensor, columns: dict[str, Tensor]) -> Tensor:
        """Whether each group has signal; a row that is masked has no say."""
        return groups_with_signal(
            {name: column.masked_fill(~votes, torch.nan) for name, column in columns.items()},
            self._weight_of_component,
            self._group_size,
            per_component=self.args.adv_estimator_config.name == "gdpo",
        )

    def _end_rounds(self, rounds: Rounds, collected: dict[str, Any]) -> None:
        """Logs what was drawn and the completions that train; warns, or raises, where groups are missing."""
        size, log = self._group_size, self._metrics[self._mode]
        rows = [group * size + i for group in rounds.chosen() for i in range(size)]
        self._align_log_columns(list(collected["rewards"]))
        for column, values in _log_columns(self._logs, collected):
            column.extend([values[row] for row in rows] if len(values) == rounds.drawn * size else values)
        log["frac_reward_zero_std"][-1] = 1 - len(rounds.kept) / rounds.drawn
        for name, value in rounds.metrics().items():
            log[name].append(value)
        if not rounds.missing:
            return
        problem = (
            f"Dynamic sampling drew {rounds.drawn} groups in {rounds.count} rounds, and the rewards differ in "
            f"{len(rounds.kept)} of them, where {rounds.needed} are needed."
        )
        remedy = (
            "Use prompts that the model sometimes solves, a reward with more levels, a higher temperature or more "
            "num_generations, or raise dynamic_sampling_max_gen_batches"
        )
        if self.args.dynamic_sampling_on_exhaustion == "raise":
            raise ValueError(f"{problem} {remedy}; dynamic_sampling_on_exhaustion='train' goes on without.")
        if not self._warned_of_exhaustion:
            self._warned_of_exhaustion = True
            warnings.warn(
                f"{problem} The batch is filled up with groups that teach nothing. {remedy}. This is said once; "
                "dynamic_sampling/frac_rows_with_signal is logged.",
                stacklevel=2,
            )

    def _inputs_of_round(self, inputs: list[Any], rounds: Rounds) -> list[Any]:
        """The examples of this process: those of the data loader first, then prompts of the stream."""
        extra = rounds.next_size() - (0 if rounds.count else rounds.needed)
        prompts = cast(PromptStream, self._prompt_stream).take(extra)
        if rounds.count == 0 and not prompts:
            return inputs
        examples: list[Any] = [] if rounds.count else list(gather_object(inputs))
        indices = [index for index in prompts for _ in range(self._group_size)]
        rows = len(examples) + len(indices)
        mine = self._local_rows(rows // self.accelerator.num_processes)
        # An example of its own for each row, since TRL writes into it.
        return [
            examples[row] if row < len(examples) else dict(self.train_dataset[indices[row - len(examples)]])
            for row in range(rows)[mine]
        ]

    def _global_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        if set(MODEL_INPUTS) & set(batch):
            raise ValueError(
                "use_dynamic_sampling=True with images or token types: the rows of a batch are moved between "
                "processes, and these inputs do not lie by rows. Set use_dynamic_sampling=False."
            )
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and key != "advantages"}
        return {key: self._gathered_rows(key, value) if value.dim() else value for key, value in tensors.items()}


def _without_limit(logs: dict[str, Any]) -> dict[str, Any]:
    """TRL's logged columns, empty and of any length."""
    return {key: deque() if isinstance(value, deque) else defaultdict(deque) for key, value in logs.items()}


def _log_columns(logs: dict[str, Any], others: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each column of `logs` with the one of the same name in `others`."""
    for key, values in others.items():
        if isinstance(values, dict):
            yield from ((logs[key][name], column) for name, column in values.items())
        else:
            yield logs[key], values
