"""`GRPOExtTrainer`: TRL's `GRPOTrainer` with the advantages and the loss replaced.

The seams, and what each one changes:

| method of TRL's | here |
| --- | --- |
| `create_accelerator_and_postprocess` | the parent's, then FSDP2 rounds no log-probability to bf16 |
| `_calculate_rewards` | the parent's, then the table of components instead of one column a function |
| `_generate_and_score_completions` | the parent's result with the advantages replaced |
| `get_batch_samples`, `_prepare_inputs` | the parent's, for a whole optimizer step: rows planned, tokens counted |
| `_get_per_token_logps_and_entropies` | each prompt computed once for its completions, or the parent's |
| `_save_checkpoint`, `save_model` | the parent's; what fails on one process ends all |
| `_save_rng_state`, `_load_optimizer_and_scheduler` | the parent's, with the place in the rollouts and the prompts |
| `train` | the parent's, from complete checkpoints; the last step is saved before a reward that failed ends the run |
| `_generate_single_turn` | the parent's, with each prompt prefilled once |
| `create_model_card` | the parent's card, with the objective in it |
| `_compute_loss` | the parent's log-probabilities into our loss; entropy bonus and router loss as TRL documents them |

`SEAMS` names all that is relied on; `tests/test_trl_seams.py` fails first when TRL changes one of them.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import gather_object, is_peft_model, send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id, is_async_callable

from .adapters import add_reference_adapter, starts_as_base
from .advantages import get_advantage_estimator
from .callbacks import StopBrokenRun
from .checkpoints import checkpoint_to_resume, is_complete
from .config import GRPOExtConfig
from .diagnostics import MetricWindow, combine_rounds, mismatch_metrics, reward_metrics, sequence_logprob_error
from .dynamic_sampling import PromptStream, Rounds, groups_with_signal, joined_columns
from .entropy import adapted_entropy_coef
from .explain import explain, warning_of_cut_sampling
from .failures import FailedTogether, failure_text, raise_together
from .loss import ENGINE_METRICS, METRIC_REDUCTIONS, ClippedPGLossFn
from .micro_batches import (
    PROMPT_KEYS,
    concatenate_rows,
    constant_length_scale,
    counted_tokens,
    loss_token_mask,
    plan_micro_batches,
    take_rows,
    valid_counts,
)
from .model_card import add_section, describe_dataset, method, objective_section
from .packing import PackedRows, pack_rows
from .prefill import prefill_once
from .reductions import masked_mean, masked_sum
from .report import Rollouts, write_report
from .rewards import (
    COMPONENT_PREFIX,
    AsyncComponentReward,
    ComponentNames,
    ComponentReward,
    component_weights,
)
from .shared_prompt import (
    draws_dropout,
    packed_log_probs,
    positions_are_relative,
    prepare_model,
    same_in_both_layouts,
    why_not_packed,
)

logger = logging.get_logger(__name__)

SEAMS = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_prepare_inputs",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_generate_single_turn",
    "_save_checkpoint",
    "_load_optimizer_and_scheduler",
    "create_model_card",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "training_step",
)

# What the model needs of a batch besides the tokens.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

# How many tokens and rows the loss of an optimizer step is divided by, and how many its metrics are averaged over.
COUNTS = ("global_valid_toks", "global_valid_seqs", "metric_valid_toks", "metric_valid_seqs")

# Logged of every step, also of one without a row that is computed.
ROW_METRICS = ("num_valid_samples", "frac_rows_skipped", "entropy_coef")

# Whose versions a report tells.
LIBRARIES = ("hf_grpo_ext", "trl", "transformers", "torch")

# Packing takes a few gathers a layer; it pays where it leaves out at least one token in twenty.
WORTH_PACKING = 0.95

# Our metrics under the names that TRL's users have on their dashboards.
TRL_METRIC_NAMES = {
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
}


class GRPOExtTrainer(GRPOTrainer):
    """`GRPOTrainer` with the advantage estimator and the loss of a `GRPOExtConfig`, and rewards with components.

    A reward function may return, besides TRL's list of floats, named components: a dict `{name: list or tensor of N}`
    or a list of N dicts. The same holds for `async` functions and for an environment's `get_reward`. Everything else
    is TRL's: see `trl.GRPOTrainer` for the arguments.

    Args:
        model: as TRL's.
        reward_funcs: as TRL's, and with components.
        args: a `GRPOExtConfig`; by default one with TRL's objective and a leave-one-out baseline.
        train_dataset: as TRL's; at least one generation batch of prompts.
        *more: as TRL's.
        **kwargs: as TRL's.

    Raises:
        TypeError: `args` is no `GRPOExtConfig`.
        ValueError: nothing is trainable, two reward functions have one name, the data set is smaller than a generation
            batch, or the loss needs log-probabilities of an engine that there is not.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "hf_grpo_ext"]

    # What TRL's constructor sets and we change.
    args: GRPOExtConfig
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: Tensor
    beta: float
    entropy_coef: float
    _name: str
    _paper: dict[str, str]
    _last_world_entropy: float
    control: Any
    _step: int
    _logs: dict[str, Any]
    _buffered_inputs: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOExtConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = GRPOExtConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOExtConfig):
            raise TypeError(
                f"args is a {type(args).__name__}: GRPOExtTrainer needs a GRPOExtConfig, which takes the same fields."
            )
        args.check_unchanged()
        _check_dataset(train_dataset, args)
        needs_engine = args.loss_config.needs_generation_logprobs or args.seq_logprob_error_threshold is not None
        if needs_engine and not (args.use_vllm or kwargs.get("rollout_func")):
            raise ValueError(
                "use_importance_sampling_correction, use_on_policy_kl_approximation or seq_logprob_error_threshold "
                "needs the log-probabilities of the engine that sampled. Set use_vllm=True, or pass a rollout_func "
                "that returns its `logprobs`."
            )
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        shown: dict[str, Any] = {"reward_weights": None} if isinstance(args.reward_weights, dict) else {}
        if needs_engine:  # then TRL looks whether a vLLM server reports the log-probabilities that a correction needs
            shown["vllm_importance_sampling_correction"] = True
        # TRL would copy the adapter named "default", whichever trains. (It refuses sync_ref_model if it sees beta.)
        continued = isinstance(model, nn.Module) and is_peft_model(model) and not args.sync_ref_model
        if continued:
            shown["beta"] = 0.0
        with _shown_to_trl(args, shown):
            # A list of its own, since TRL replaces the names of reward models by the models in it.
            super().__init__(
                model, None if reward_funcs is None else list(functions), args, train_dataset, *more, **kwargs
            )
        self.vllm_importance_sampling_correction = args.vllm_importance_sampling_correction
        self.beta = args.beta
        if self.beta != 0 and (continued or (is_peft_model(self.model) and not starts_as_base(self.model))):
            add_reference_adapter(self.model)
        check_trainable(self.model)
        if (advice := warning_of_cut_sampling(args)) and self.accelerator.is_main_process:
            warnings.warn(advice, stacklevel=2)
        if args.stop_broken_run and not any(isinstance(c, StopBrokenRun) for c in self.callback_handler.callbacks):
            self.add_callback(StopBrokenRun())

        self.loss_fn = ClippedPGLossFn(args.loss_config)
        self.adv_estimator = get_advantage_estimator(args.adv_estimator_config, args.loss_config)
        # TRL's own advantages are computed and replaced; this path of theirs takes any number of components.
        self.multi_objective_aggregation = "sum_then_normalize"

        self._function_names = list(self.reward_func_names)
        self._function_weights = self.reward_weights.tolist()
        self._components = ComponentNames(self._function_names)
        self.reward_funcs = [
            _with_components(function, name, args.reward_timeout)
            for function, name in zip(self.reward_funcs, self._function_names, strict=True)
        ]
        self._raw_window: list[Any] = []
        self._prepared_window: list[dict[str, Any]] = []
        # The optimizer steps before the one that is being prepared or taken, and where the run was then.
        self._place_of_step: tuple[int, dict[str, Any]] = (-1, {})
        self._metric_window = MetricWindow()
        self._last_rollouts: Rollouts | None = None
        self._name, self._paper = method(args)  # for TRL's model card
        self._warned_of_exhaustion = self._shards_know_what_trains = False
        self._prompt_stream = PromptStream(len(self.train_dataset), args.seed) if args.use_dynamic_sampling else None
        self._draws_dropout = draws_dropout(self.model)
        self._reasons_said: set[str] = set()
        self._bases: dict[nn.Module, Any] = {}  # of each model, what is under its wrappers and its adapter
        self._packs: dict[int, bool] = {}  # of each model, by identity: whether its forward takes packed rows
        if args.use_dynamic_sampling and not positions_are_relative(self._base_model(self.model)):
            raise ValueError(
                f"use_dynamic_sampling=True with {type(self._base_model(self.model)).__name__}: its rounds differ in "
                "width, and the log-probabilities of a model without a rotary embedding of a fixed scale depend on "
                "padding. Use another model, or use_dynamic_sampling=False."
            )
        if args.shared_prompt_forward is True and (reason := self._why_not_packed(self._base_model(self.model))):
            raise _cannot_share(reason)

    def explain(self) -> str:
        """The objective that is trained, in words and numbers; see `explain.explain`."""
        return explain(self.args, has_dropout=self._draws_dropout)

    def write_report(
        self, path: str | Path | None = None, tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    ) -> Path | None:
        """Writes one page about the run: objective, curves, and what trained last; call it after `train()`.

        Args:
            path: of the page; by default `report.html` in `output_dir`.
            tables: what your script has measured besides, title -> rows, each column -> value.

        Returns:
            The path; `None` on processes other than the first, which writes it.
        """
        if not self.is_world_process_zero():
            return None
        args, state = self.args, self.state
        facts = {
            "Method": self._name,
            "Model": get_config_model_id(self.model.config),
            "Data": describe_dataset(self.train_dataset),
            "Optimizer steps": state.global_step,
            "Rollouts a generation batch": f"{args.generation_batch_size}, {self.num_generations} a prompt",
            "Processes": self.accelerator.num_processes,
            "Seed": args.seed,
            "Versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        }
        return write_report(
            Path(args.output_dir, "report.html") if path is None else path,
            title=f"Training report: {Path(args.output_dir).resolve().name}",
            objective=self.explain(),
            log_history=state.log_history,
            facts=facts,
            tables=tables,
            rollouts=self._last_rollouts,
        )

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's card, `README.md` in `output_dir`, and in it what was trained.

        Args:
            model_name: as TRL's.
            dataset_name: of the data set on the Hub, which does not tell it itself.
            tags: as TRL's.
        """
        super().create_model_card(model_name, dataset_name, tags)
        if not self.is_world_process_zero():
            return
        card = Path(self.args.output_dir, "README.md")
        section = objective_section(
            self.args, self._weight_of_component, describe_dataset(self.train_dataset, dataset_name)
        )
        card.write_text(add_section(card.read_text(encoding="utf-8"), section), encoding="utf-8")

    def create_accelerator_and_postprocess(self) -> None:
        """The parent's; FSDP2 then returns log-probabilities as they were computed, and not rounded to bf16."""
        super().create_accelerator_and_postprocess()
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy: Any = getattr(plugin, "mixed_precision_policy", None)
        if getattr(policy, "output_dtype", None) is not None:
            plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)

    # Rewards

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self.reward_func_names = self._function_names
        failure: BaseException | None = None
        try:
            per_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except (Exception, SystemExit) as error:
            failure = error
            # The last thing that the parent does, and what the other processes wait for.
            nothing = torch.zeros(len(prompts), len(self.reward_funcs), device=self.accelerator.device)
            per_function = self.accelerator.gather(nothing)
        ours = [function if isinstance(function, ComponentReward) else None for function in self.reward_funcs]
        seen = [list(function.components) if function else [] for function in ours]
        self._components.update(self._seen_everywhere(seen, failure))
        names, owners = self._components.names, self._components.owners

        columns = self._components.local_columns(ours, len(prompts))
        local = torch.tensor(columns, dtype=torch.float32, device=self.accelerator.device).T
        table: Tensor = self.accelerator.gather(local.contiguous())
        for index, owner in enumerate(owners):
            if ours[owner] is None:  # a reward model, whose column TRL has computed
                table[:, index] = per_function[:, owner]

        self._check_groups(len(table))
        self._align_log_columns(names)
        self.reward_func_names = names
        self.reward_weights = torch.tensor(self._weights_of(names, owners), dtype=torch.float32)
        self._reward_table = table
        return table

    def _seen_everywhere(self, seen: list[list[str]], failure: BaseException | None) -> list[list[list[str]]]:
        """The components that each process saw; where one has failed, all raise."""
        text = None
        if failure is not None:
            failed = [repr(function.name) for function in self.reward_funcs if getattr(function, "failed", False)]
            what = f"The reward function {failed[0]}" if failed else "Scoring the completions"
            text = failure_text(what, self.accelerator.process_index, failure)
        everywhere = gather_object([(seen, text)])
        told = [text for _, text in everywhere]
        self._rewards_failed = any(told)
        raise_together(told, failure, "A reward function may return None for a completion that it cannot score.")
        return [seen for seen, _ in everywhere]

    def _weights_of(self, names: Sequence[str], owners: Sequence[int]) -> list[float]:
        if isinstance(self.args.reward_weights, dict):
            return component_weights(names, self.args.reward_weights)
        return [self._function_weights[owner] for owner in owners]

    def _align_log_columns(self, names: Sequence[str]) -> None:
        """The table of logged completions needs columns of one length: fills those that are new, drops those gone."""
        columns = self._logs["rewards"]
        for name in set(columns) - set(names):
            del columns[name]
        for name in names:
            if name not in columns:
                columns[name].extend([float("nan")] * len(self._logs["advantages"]))

    def _check_groups(self, rows: int) -> None:
        if rows % self._group_size:
            raise ValueError(
                f"A batch of {rows} completions does not hold whole groups of {self._group_size} generations. In "
                "evaluation, per_device_eval_batch_size times the number of processes must be a multiple of "
                "num_generations_eval, and the data set must fill the last batch."
            )

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    # Advantages

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.args.use_dynamic_sampling and self.model.training:
            batch = self._draw_until_full(inputs)
        else:
            batch = self._scored(inputs)
        token_mask = counted_tokens(batch)
        columns = self._reward_columns
        group_ids = torch.arange(len(self._reward_table), device=token_mask.device) // self._group_size
        everywhere = self._gathered_for_advantages(batch, token_mask)
        advantages = self.adv_estimator.compute_advantage(
            group_ids, columns, reward_weights=self._weight_of_component, **everywhere
        )

        mine = self._local_rows(len(token_mask))
        batch["advantages"] = advantages[mine] if advantages.dim() == 1 else advantages[mine, : token_mask.shape[1]]
        for name, column in columns.items():
            batch[f"{COMPONENT_PREFIX}{name}"] = column[mine]
        self._log_advantages(advantages, everywhere["mask"], columns, group_ids)
        return batch

    def _scored(self, inputs: Any) -> dict[str, Any]:
        """The parent's batch, with the rows that count and the log-probabilities that we need besides."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self._shards_know_what_trains:
            show_what_trains(self.model)
            reduce_gradient_of_head(self._base_model(self.model))
            self._shards_know_what_trains = True
        batch["sample_mask"] = loss_token_mask(batch).any(-1)
        threshold = self.args.seq_logprob_error_threshold
        needs_prev = self.args.loss_config.use_kl_in_reward or threshold is not None
        if needs_prev and "old_per_token_logps" not in batch:
            size = (
                self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
            )
            with torch.no_grad():
                batch["old_per_token_logps"] = self._forward(self.model, batch, batch_size=size)[0]
        if threshold is not None and self.model.training:
            batch["sample_mask"] = self._rows_that_agree(batch, threshold)
        return batch

    def _rows_that_agree(self, batch: dict[str, Any], threshold: float) -> Tensor:
        """Rows on which the engine that sampled and ours agree; logs how far they do not."""
        generation = batch.get("sampling_per_token_logps")
        if generation is None:
            raise ValueError(
                f"seq_logprob_error_threshold={threshold}, but the rollouts carry no log-probabilities of the engine "
                "that sampled. vLLM gives them; a rollout_func must return them as `logprobs`."
            )
        counts: Tensor = batch["sample_mask"]
        error = sequence_logprob_error(batch["old_per_token_logps"], generation, loss_token_mask(batch))
        agree: Tensor = counts & (error <= threshold)
        table = self.accelerator.gather(torch.stack([error, counts.float(), agree.float()], dim=-1))
        for name, value in mismatch_metrics(table[:, 0], table[:, 1].bool(), table[:, 2].bool()).items():
            self._metrics[self._mode][name].append(value)
        return agree

    @property
    def _reward_columns(self) -> dict[str, Tensor]:
        return dict(zip(self.reward_func_names, self._reward_table.unbind(-1), strict=True))

    @property
    def _weight_of_component(self) -> dict[str, float]:
        return dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))

    def _local_rows(self, rows: int) -> slice:
        """Which of the rows of all processes, `rows` on each, are ours."""
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _gathered_for_advantages(self, batch: dict[str, Any], token_mask: Tensor) -> dict[str, Tensor]:
        """What the estimator reads of all processes: the mask, and the log-probabilities if the KL is in the reward."""
        # Not bool: padding would make an integer of it, on those processes alone that have something to pad.
        local = {"mask": token_mask.long()}
        if self.args.loss_config.use_kl_in_reward:
            local["logprobs_policy"] = batch["old_per_token_logps"]
            local["logprobs_reference"] = batch["ref_per_token_logps"]
        elif not self.adv_estimator.token_level:
            local["mask"] = local["mask"].amax(-1, keepdim=True)
        return {key: self._gathered_rows(key, value) for key, value in local.items()}

    def _gathered_rows(self, key: str, values: Tensor) -> Tensor:
        """Rows of all processes, padded to one width on the side where this key has its padding."""
        if values.dim() > 1:
            values = self.accelerator.pad_across_processes(values.contiguous(), dim=1, pad_first=key in PROMPT_KEYS)
        gathered: Tensor = self.accelerator.gather(values.contiguous())
        return gathered

    # Dynamic sampling

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

    def _log_advantages(self, advantages: Tensor, mask: Tensor, columns: dict[str, Tensor], group_ids: Tensor) -> None:
        """Puts what trained in the place of what TRL logged."""
        if advantages.dim() == 2:
            advantages = masked_mean(advantages, mask, mask.sum(-1), dim=-1)
        logged, count = self._logs["advantages"], min(len(advantages), len(self._logs["advantages"]))
        for index, value in zip(range(-count, 0), advantages.tolist()[-count:], strict=True):
            logged[index] = value
        if self.model.training:
            logs = self._logs
            rewards = {name: list(column) for name, column in logs["rewards"].items()}
            self._last_rollouts = Rollouts(
                list(logs["prompt"]), list(logs["completion"]), rewards, list(logged), self._group_size
            )
        self._log_signal(mask, columns, group_ids)

    def _log_signal(self, mask: Tensor, columns: dict[str, Tensor], group_ids: Tensor) -> None:
        """How many groups can teach something, and what each component says; the same on every process."""
        log = self._metrics[self._mode]
        if not (self.args.use_dynamic_sampling and self.model.training):  # which has logged it, of all it drew
            votes = mask.bool().any(-1)
            log["frac_reward_zero_std"][-1] = 1 - self._groups_with_signal(votes, columns).float().mean().item()
        weights = self._weight_of_component
        parts = self.adv_estimator.component_advantages(group_ids, columns, mask, reward_weights=weights)
        for name, value in reward_metrics(columns, group_ids, parts).items():
            log[name].append(value)

    # The optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The parent's, and remembers them: they are the micro-batches of one optimizer step."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._raw_window, self._prepared_window = list(batches), []
        self._metric_window = MetricWindow()  # of an interrupted run, nothing is left
        return batches, num_items

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self.model.training:
            return self._with_denominators([super()._prepare_inputs(generation_batch)])[0]
        if not self._prepared_window:
            self._prepared_window = self._prepare_window(self._raw_window or [generation_batch])
            self._raw_window = []
        return self._prepared_window.pop(0)

    def _prepare_window(self, batches: list[Any]) -> list[dict[str, Any]]:
        """All micro-batches of the optimizer step, so that their tokens are counted before the first backward."""
        self._place_of_step = (self.state.global_step, self._place())
        first, window = self._step, []
        try:
            for offset, batch in enumerate(batches):
                self._step = first + offset  # TRL generates, or takes a slice of the buffer, by the step
                window.append(super()._prepare_inputs(batch))
        finally:
            self._step = first
        return self._with_denominators(self._planned(window), window)

    def _planned(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same rows, less those without signal, so that the micro-batches cost little; or the window as it is."""
        # Images do not lie by rows; a quantile of entropies and a router loss belong to the micro-batch.
        moves = len({frozenset(batch) for batch in window}) == 1 and not set(MODEL_INPUTS) & set(window[0])
        widths = {(batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]) for batch in window}
        trim = positions_are_relative(self._base_model(self.model))
        if not moves or self.top_entropy_quantile < 1 or self.aux_loss_enabled or (len(widths) > 1 and not trim):
            return window
        needs_all = self.args.loss_config.has_kl_term or self._entropy_bonus_enabled
        return plan_micro_batches(
            window,
            skip_silent_rows=self.args.skip_rows_without_signal and not needs_all,
            share_prompts=self._can_pack(self.model),
            trim=trim,
            multiple_of=self.pad_to_multiple_of,
        )

    def _with_denominators(
        self, batches: list[dict[str, Any]], window: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Counts of the whole step on all processes: of its rows, and of those that are left to compute."""
        local = torch.cat([valid_counts(window or batches), valid_counts(batches)])
        counts = dict(zip(COUNTS, self.accelerator.reduce(local, reduction="sum").unbind(), strict=True))
        return [{**batch, **counts} for batch in batches]

    # Checkpoints

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """TRL's, and it goes on from complete checkpoints alone.

        Args:
            resume_from_checkpoint: `True` for the latest complete checkpoint in `output_dir`, or the path of one.
            trial: as TRL's.
            ignore_keys_for_eval: as TRL's.

        Raises:
            ValueError: a checkpoint is asked for that is not complete.
            RuntimeError: a reward function or a save has failed on one of several processes. On a single process its
                own error is raised. Where a reward has failed, the last step is saved before.
        """
        self._saved_step, self._rewards_failed = 0, False
        checkpoint, skipped = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        for folder in skipped if self.accelerator.is_main_process else ():
            warnings.warn(
                f"{folder} is skipped, since saving it was interrupted: the run goes on from {checkpoint}.",
                stacklevel=2,
            )
        try:
            return super().train(checkpoint, trial, ignore_keys_for_eval)
        except (Exception, SystemExit):
            if self._rewards_failed:
                self._save_last_step(trial)
            raise

    def _save_last_step(self, trial: Any) -> None:
        """Saves the step before the one whose rewards failed; all processes do, at the same place."""
        if self.args.save_strategy == "no" or self.state.global_step == self._saved_step:
            return
        self._save_checkpoint(self.model_wrapped, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.accelerator.is_main_process:
            logger.warning(
                "%s holds the last finished step: train(resume_from_checkpoint=True) goes on from there.",
                self._checkpoint_folder(trial),
            )

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The parent's, in an order that leaves a complete checkpoint whenever it is interrupted.

        The parent writes `trainer_state.json` last, which makes a checkpoint complete, and deletes older ones then.
        `_save_rng_state` has waited before for the files of all processes.
        """
        folder = self._checkpoint_folder(trial)
        try:
            with self._saving_together(folder):
                if self.args.should_save:
                    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
                super()._save_checkpoint(model, trial)
        except Exception:
            if self.args.should_save and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._saved_step = self.state.global_step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's. In a checkpoint the processes wait for each other, since the parent may do so next."""
        of_checkpoint = _internal_call and output_dir is not None  # not of `push_to_hub`, which one process may call
        with self._saving_together(output_dir) if of_checkpoint else nullcontext():
            super().save_model(output_dir, _internal_call)

    def _save_rng_state(self, output_dir: str) -> None:
        """The parent's, and what an exact continuation needs besides: the place in the rollouts and in the prompts."""
        with self._saving_together(output_dir):
            super()._save_rng_state(output_dir)
            step, place = self._place_of_step
            # A save in the middle of a step (of `enable_jit_checkpoint`) has the weights from before it.
            place = place if step == self.state.global_step else self._place()
            torch.save({"processes": self.accelerator.num_processes, **place}, Path(output_dir) / self._state_file)

    @contextmanager
    def _saving_together(self, folder: Any) -> Iterator[None]:
        """The processes leave the block together, or all raise what one of them has raised in it or since the last."""
        failure = None
        try:
            yield
        except FailedTogether:
            raise
        except Exception as error:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise  # the others may be exchanging their shards; the launcher ends them
            failure = error
        text = None if failure is None else failure_text(f"Saving {folder}", self.accelerator.process_index, failure)
        raise_together(gather_object([text]), failure, "The latest complete checkpoint is the one to resume from.")

    def _place(self) -> dict[str, Any]:
        """Where the run is, besides its weights and the data loader."""
        unused = self._step % (self.args.steps_per_generation * self.num_iterations)
        return {
            "step": self._step,
            "drawn": self._prompt_stream.drawn if self._prompt_stream else 0,
            # Rollouts that the next steps train on, where this is in the middle of a generation batch.
            "rollouts": self._buffered_inputs if unused else None,
            "components": {
                name: list(seen) for name, seen in zip(self._function_names, self._components.seen, strict=True)
            },
            # TRL saves these too, but after it has deleted the checkpoint before.
            "entropy": (self.entropy_coef, self._last_world_entropy),
        }

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._saved_step = self.state.global_step
        file = Path(checkpoint) / self._state_file
        # By way of the CPU, since torch cannot load to the "cpu:0" of a process among several.
        state = send_to_device(torch.load(file, map_location="cpu"), self.accelerator.device) if file.exists() else {}
        if state.get("processes") != self.accelerator.num_processes:
            warnings.warn(
                f"{checkpoint} has no rollouts for {self.accelerator.num_processes} processes: the run goes on from "
                "its weights with a new generation batch, and not exactly as without the interruption.",
                stacklevel=2,
            )
            return
        self._step, self._buffered_inputs = state["step"], state["rollouts"]
        self._components.seen = [state["components"].get(name, []) for name in self._function_names]
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = state["entropy"]
        if self._prompt_stream:
            self._prompt_stream.drawn = state["drawn"]

    @property
    def _state_file(self) -> str:
        return f"grpo_ext_state_{self.accelerator.process_index}.pt"

    # The forward

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with prefill_once(self._base_model(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **model_inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def of_parent(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            result: tuple[Tensor, Tensor | None, Tensor | None]
            result = super(GRPOExtTrainer, self)._get_per_token_logps_and_entropies(
                model, ids, mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **model_inputs
            )
            return result

        has_images = any(value is not None for value in model_inputs.values())
        if has_images or compute_aux_loss or not self._can_pack(model):
            return of_parent(input_ids, attention_mask)
        size = batch_size or len(input_ids)
        logps: list[Tensor] = []
        entropies: list[Any] = []
        for ids, mask in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True):
            packed = self._layout(ids, mask, logits_to_keep)
            if packed is None:
                values, entropy, _ = of_parent(ids, mask)
            else:
                with self.accelerator.autocast():
                    values, entropy = packed_log_probs(model, packed)
            logps.append(values)
            entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _layout(self, ids: Tensor, mask: Tensor, completion_length: int) -> PackedRows | None:
        packed = pack_rows(ids, mask, completion_length)
        if packed is None or self.args.shared_prompt_forward is True:
            return packed
        # The attention of a packed row looks at fewer pairs as well, so the tokens decide.
        return packed if packed.input_ids.numel() <= WORTH_PACKING * ids.numel() else None

    def _can_pack(self, model: nn.Module) -> bool:
        """Whether the forward of this model takes packed rows; checked once, by all processes together."""
        if self.args.shared_prompt_forward is False:
            return False
        if self._draws_dropout and self.model.training:
            self._say_that_rows_are_alone("the model has dropout")
            return False
        base = self._base_model(model)
        if id(base) not in self._packs:
            reason = self._why_not_packed(base)
            if reason is None:
                prepare_model(base)
                half = self.accelerator.mixed_precision != "no" or base.dtype.itemsize < 4
                with torch.no_grad(), self.accelerator.autocast():
                    same = same_in_both_layouts(model, tolerance=0.25 if half else 1e-3, device=self.accelerator.device)
                if not all(gather_object([same])):
                    reason = f"{type(base).__name__} computes other log-probabilities when the prompt is shared"
            if reason is not None:
                if self.args.shared_prompt_forward is True:
                    raise _cannot_share(reason)
                self._say_that_rows_are_alone(reason)
            self._packs[id(base)] = reason is None
        return self._packs[id(base)]

    def _say_that_rows_are_alone(self, reason: str) -> None:
        if reason not in self._reasons_said:
            self._reasons_said.add(reason)
            logger.info("Every row is computed on its own, since %s.", reason)

    def _base_model(self, model: nn.Module) -> Any:
        if model not in self._bases:  # kept, since Accelerate reads the metadata of packages every time
            base = self.accelerator.unwrap_model(model)
            self._bases[model] = base.get_base_model() if is_peft_model(base) else base
        return self._bases[model]

    def _why_not_packed(self, base: nn.Module) -> str | None:
        if self.pad_to_multiple_of is not None:
            return f"pad_to_multiple_of is {self.pad_to_multiple_of}"
        if self.args.torch_compile:
            return "torch_compile is on"
        if self._draws_dropout and self.args.shared_prompt_forward is True:
            return (
                "the model has dropout (disable_dropout=True removes that of its modules, attention_dropout=0 in its "
                "config that of its attention)"
            )
        if self.aux_loss_enabled:
            return "the model has a router loss, which counts every token of every row"
        adapters = getattr(self.model, "peft_config", {}).values()
        if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
            return "the adapter adds tokens to the prompt"
        return why_not_packed(base)

    # The loss

    def _forward(
        self, model: nn.Module, batch: dict[str, Any], batch_size: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies of the completion tokens, `[B, T]`, and the router loss of a MoE model."""
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=batch_size,
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: batch[name] for name in MODEL_INPUTS if name in batch},
        )
        return logprobs, cast(Tensor, entropies), aux_loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        logprobs, entropies, aux_loss = self._forward(model, inputs)
        mask = counted_tokens(inputs)
        active = mask
        if self.top_entropy_quantile < 1.0:
            active = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        advantages = inputs["advantages"]
        batch = {
            "advantages": advantages if advantages.dim() == 2 else advantages[:, None],
            "token_mask": mask,
            "sample_mask": inputs["sample_mask"],
            "prev_logprobs": inputs.get("old_per_token_logps"),
            "generation_logprobs": inputs.get("sampling_per_token_logps"),
            "reference_policy_logprobs": inputs.get("ref_per_token_logps"),
        }
        batch["policy_weights"] = self._policy_weights(inputs, batch, logprobs, active)
        toks, seqs = inputs["global_valid_toks"], inputs["global_valid_seqs"]
        loss: Tensor
        loss, metrics = self.loss_fn(logprobs, batch, **{name: inputs[name] for name in COUNTS})
        if self.args.loss_type == "dr_grpo":
            loss = loss * constant_length_scale(toks, seqs, self.max_completion_length)
        # Gradients are averaged over processes, and the loss is a share of a sum over them.
        loss = loss * self.accelerator.num_processes
        if batch["generation_logprobs"] is None:  # nothing to compare with, and a curve of zeros would look like health
            metrics = {name: value for name, value in metrics.items() if name not in ENGINE_METRICS}
        if not self.args.loss_config.has_kl_term:
            del metrics["kl_penalty"], metrics["kl"]
        rows = {
            "num_valid_samples": seqs,
            "frac_rows_skipped": (seqs - inputs["metric_valid_seqs"]) / seqs.clamp(min=1),
        }
        self._metric_window.add(metrics | rows, METRIC_REDUCTIONS | dict.fromkeys(rows, "max"))
        loss = loss + self._regularizers(entropies, active, mask, aux_loss, toks, inputs["metric_valid_toks"])
        self._flush_metrics()
        return loss

    def _policy_weights(
        self, inputs: dict[str, Any], batch: dict[str, Any], logprobs: Tensor, active: Tensor
    ) -> Tensor:
        """The weights of TRL's that multiply the policy term alone: entropy mask, off-policy mask, vLLM correction."""
        weights = active.to(torch.float32)
        if self.off_policy_mask_threshold is not None:
            behaviour = batch["generation_logprobs"]
            behaviour = batch["prev_logprobs"] if behaviour is None else behaviour
            weights = weights * self.get_off_policy_mask(
                advantages=batch["advantages"],
                per_token_logps=logprobs,
                sampling_per_token_logps=logprobs.detach() if behaviour is None else behaviour,
                mask=batch["token_mask"].to(torch.float32),
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if "importance_sampling_ratio" in inputs:
            weights = weights * inputs["importance_sampling_ratio"]
        return weights

    def _regularizers(
        self,
        entropies: Tensor,
        active: Tensor,
        mask: Tensor,
        aux_loss: Tensor | None,
        toks: Tensor,
        metric_toks: Tensor,
    ) -> Tensor:
        """The terms beside the policy's: minus the entropy bonus, plus the load-balancing loss of a MoE model."""
        share = 1.0 / (self.current_gradient_accumulation_steps if self.model.training else 1)
        total = torch.zeros((), device=entropies.device)
        metrics = {"entropy": masked_mean(entropies.detach(), mask, metric_toks)}
        if self._entropy_bonus_enabled:
            if active is mask:
                bonus = masked_mean(entropies, mask, toks) * self.accelerator.num_processes
            else:  # how many tokens pass the quantile is known for this micro-batch only
                bonus = masked_mean(entropies, active, active.sum()) * share
            gated = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
            total = total - (0.0 if gated else self.entropy_coef) * bonus
            metrics["active_entropy"] = masked_sum(entropies.detach(), active)
            metrics["active_tokens"] = active.sum()
        if aux_loss is not None:
            total = total + self.router_aux_loss_coef * aux_loss * share
            metrics["aux_loss"] = aux_loss.detach() * share / self.accelerator.num_processes
        self._metric_window.add(metrics, dict.fromkeys(metrics, "sum"))
        return total

    def _flush_metrics(self) -> None:
        """Logs the optimizer step, on its last micro-batch, from one collective."""
        if self.model.training and not self.accelerator.sync_gradients:
            return
        values = self._metric_window.flush(self.accelerator.gather)
        if self._entropy_bonus_enabled:
            total, tokens = values.pop("active_entropy"), values.pop("active_tokens")
            if self.model.training:
                if tokens:
                    self._adapt_entropy_coef(total / tokens)
                values["entropy_coef"] = self.entropy_coef
        # With no row to average over there is a gap in the curves.
        if not values["num_valid_samples"] or values["frac_rows_skipped"] >= 1:
            values = {name: values[name] for name in ROW_METRICS if name in values}
        log = self._metrics[self._mode]
        for name, value in values.items():
            log[name].append(value)
            if name in TRL_METRIC_NAMES:
                log[TRL_METRIC_NAMES[name]].append(value)

    def _adapt_entropy_coef(self, entropy: float) -> None:
        if not self.use_adaptive_entropy:
            return
        self.entropy_coef = adapted_entropy_coef(
            self.entropy_coef,
            entropy,
            target=self.args.entropy_target,
            step=self.args.entropy_coef_delta,
            lowest=self.args.entropy_coef_min,
            highest=self.args.entropy_coef_max,
        )
        self._last_world_entropy = entropy


def _with_components(function: Any, name: str, timeout: float | None) -> Any:
    if isinstance(function, nn.Module):
        return function
    wrapper = AsyncComponentReward if is_async_callable(function) else ComponentReward
    return wrapper(function, name, timeout)


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


@contextmanager
def _shown_to_trl(args: GRPOExtConfig, values: dict[str, Any]) -> Iterator[None]:
    """Shows TRL's constructor other values of some fields, which it would refuse or act on otherwise."""
    ours = {name: getattr(args, name) for name in values}
    args.__dict__.update(values)
    try:
        yield
    finally:
        args.__dict__.update(ours)


def _cannot_share(reason: str) -> ValueError:
    return ValueError(
        f"shared_prompt_forward=True, but {reason}: a prompt cannot be computed once for all its completions. Use "
        "shared_prompt_forward='auto', which computes every row on its own where it must."
    )


def check_trainable(model: nn.Module) -> None:
    """Raises a `ValueError` if no parameter of the model trains."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "The model has no trainable parameter, so training would change nothing. An adapter that was loaded for "
            "inference is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)."
        )


def show_what_trains(model: nn.Module) -> None:
    """Lets FSDP2 see which parameters train: it looks at the first forward, and the reference's has the adapter off."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def reduce_gradient_of_head(base: Any) -> None:
    """Lets FSDP2 average the gradient of the head, which it does only for shards that it has put together itself.

    TRL reads the weight of the head and never calls it. That goes unnoticed where another module of its unit is called,
    as the last norm of a plain model is; under an adapter, which may train a whole head, it is a unit of its own.
    """
    head = base.get_output_embeddings()
    if isinstance(head, FSDPModule):
        base.base_model.register_forward_pre_hook(lambda *_: head.unshard() if torch.is_grad_enabled() else None)


def _check_dataset(dataset: Any, args: GRPOExtConfig) -> None:
    prompts = args.generation_batch_size // args.num_generations
    if args.use_dynamic_sampling:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ValueError(
                "use_dynamic_sampling=True draws further prompts by their place in the data set, and a streamed one "
                "has no places. Load it without streaming, or set use_dynamic_sampling=False."
            )
        if images := {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
            raise ValueError(
                f"use_dynamic_sampling=True with a column {sorted(images)[0]!r}: the rows of a batch are moved between "
                "processes, and images do not lie by rows. Set use_dynamic_sampling=False."
            )
    if hasattr(dataset, "__len__") and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts, but one generation batch takes {prompts} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}), so that "
            "there would be no step. Add prompts, or lower per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation."
        )
