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

What calls the model is in `forward.py`, what draws prompts again in `drawing.py`, what saves in `saving.py`.
`SEAMS` names all that is relied on; `tests/test_trl_seams.py` fails first when TRL changes one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import get_config_model_id, is_async_callable

from .adapters import add_reference_adapter, check_trainable, starts_as_base
from .advantages import get_advantage_estimator
from .callbacks import add_stop_broken_run
from .config import GRPOExtConfig
from .diagnostics import MetricWindow, mismatch_metrics, reward_metrics, sequence_logprob_error
from .drawing import DynamicSampling
from .dynamic_sampling import PromptStream
from .entropy import adapted_entropy_coef
from .explain import explain, warning_of_cut_sampling
from .failures import failure_text, raise_together
from .forward import MODEL_INPUTS, SharedPromptForward, cannot_share
from .loss import ENGINE_METRICS, METRIC_REDUCTIONS, ClippedPGLossFn
from .micro_batches import (
    PROMPT_KEYS,
    constant_length_scale,
    counted_tokens,
    loss_token_mask,
    plan_micro_batches,
    valid_counts,
)
from .model_card import add_section, describe_dataset, method, objective_section, with_places
from .reductions import masked_mean, masked_sum
from .report import Rollouts, write_report
from .rewards import (
    COMPONENT_PREFIX,
    AsyncComponentReward,
    ComponentNames,
    ComponentReward,
    component_weights,
)
from .saving import CompleteCheckpoints
from .sharding import keep_float32_outputs, prepare_shards
from .shared_prompt import (
    draws_dropout,
    positions_are_relative,
)

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


# How many tokens and rows the loss of an optimizer step is divided by, and how many its metrics are averaged over.
COUNTS = ("global_valid_toks", "global_valid_seqs", "metric_valid_toks", "metric_valid_seqs")

# Logged of every step, also of one without a row that is computed.
ROW_METRICS = ("num_valid_samples", "frac_rows_skipped", "entropy_coef")

# Whose versions a report tells.
LIBRARIES = ("hf_grpo_ext", "trl", "transformers", "torch")


# Our metrics under the names that TRL's users have on their dashboards.
TRL_METRIC_NAMES = {
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
}


class GRPOExtTrainer(DynamicSampling, SharedPromptForward, CompleteCheckpoints):
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
        if args.stop_broken_run:
            add_stop_broken_run(self)

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
            raise cannot_share(reason)

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
            "Learning rate": f"{args.learning_rate:g}",
            "Reward weights": ", ".join(f"{name} {weight:g}" for name, weight in self._weight_of_component.items()),
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
        with self._writing_card():
            super().create_model_card(model_name, dataset_name, tags)
            if self.is_world_process_zero():
                dataset = describe_dataset(self.train_dataset, dataset_name)
                section = objective_section(self.args, self._weight_of_component, dataset)
                card = Path(self.args.output_dir, "README.md")
                text = add_section(card.read_text(encoding="utf-8"), section)
                text = with_places(text, get_config_model_id(self.model.config), self.args.output_dir)
                card.write_text(text, encoding="utf-8")

    def create_accelerator_and_postprocess(self) -> None:
        """The parent's; FSDP2 then returns log-probabilities as they were computed, and not rounded to bf16."""
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)

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
            prepare_shards(self.model, self._base_model(self.model))
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
        names, owners = self._components.names, self._components.owners
        return dict(zip(names, self._weights_of(names, owners), strict=True))

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

    def _log_advantages(self, advantages: Tensor, mask: Tensor, columns: dict[str, Tensor], group_ids: Tensor) -> None:
        """Puts what trained in the place of what TRL logged."""
        if advantages.dim() == 2:
            advantages = masked_mean(advantages, mask, mask.sum(-1), dim=-1)
        logged, count = self._logs["advantages"], min(len(advantages), len(self._logs["advantages"]))
        for index, value in zip(range(-count, 0), advantages.tolist()[-count:], strict=True):
            logged[index] = value
        if self.model.training and (self._last_rollouts is None or any(logged)):
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

    # The loss

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


@contextmanager
def _shown_to_trl(args: GRPOExtConfig, values: dict[str, Any]) -> Iterator[None]:
    """Shows TRL's constructor other values of some fields, which it would refuse or act on otherwise."""
    ours = {name: getattr(args, name) for name in values}
    args.__dict__.update(values)
    try:
        yield
    finally:
        args.__dict__.update(ours)


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
