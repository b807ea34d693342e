"""`AsyncGRPOExtTrainer`: TRL's asynchronous trainer with the same estimators and the same loss.

The seams, and what each one changes:

| of TRL's | here |
| --- | --- |
| `AsyncRolloutWorker._loop_cls` | `RolloutLoop`: components, and what a group decides of its advantages |
| `create_accelerator_and_postprocess` | the parent's, then FSDP2 rounds no log-probability to bf16 |
| `get_train_dataloader` | the parent's; when the worker has failed it ends instead of raising on one process |
| `get_batch_samples` | the parent's micro-batches of an optimizer step, whitened and counted over all processes |
| `compute_loss` | the parent's forward, and the reference's, into our loss |

`SEAMS` names all that is relied on; `tests/test_trl_seams.py` fails first when TRL changes one of them.
"""

from __future__ import annotations

import queue
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id, use_adapter

from .adapters import REFERENCE_ADAPTER, add_reference_adapter, check_trainable, starts_as_base, under_adapter
from .advantages import get_advantage_estimator
from .async_config import AsyncGRPOExtConfig
from .async_rollouts import RolloutLoop
from .callbacks import add_stop_broken_run
from .diagnostics import MetricWindow
from .explain import explain, warning_of_cut_sampling
from .loss import METRIC_REDUCTIONS, ClippedPGLossFn
from .micro_batches import constant_length_scale
from .model_card import method
from .packing import SegmentRows
from .reductions import masked_mean
from .sharding import keep_float32_outputs, prepare_shards
from .shared_prompt import draws_dropout
from .trainer import TRL_METRIC_NAMES

SEAMS = ("get_train_dataloader", "get_batch_samples", "compute_loss", "_save_checkpoint")


class AsyncGRPOExtTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` with the advantage estimator and the loss of an `AsyncGRPOExtConfig`.

    The worker scores a group: it reads the components of its rewards, named ones too, and takes off the baseline. What
    needs the batch, the whitening of gdpo and reinforce_plus_plus, is done over the samples of an optimizer step on all
    processes. (A conversation that TRL splits into several rows is as many samples, as in TRL's loss.)

    The log-probabilities `prev` are those of the policy at the start of the optimizer step. A rollout trains in one
    step and the weights do not move inside it, so that they are the current ones, `sg(lp)`.

    Args:
        model: as TRL's, like the rest.
        reward_funcs: as TRL's, and with components, as for `GRPOExtTrainer`. They run in a child process.
        args: an `AsyncGRPOExtConfig`; by default one with the defaults.
        train_dataset: as TRL's.
        *more: as TRL's.
        **kwargs: as TRL's. A `rollout_worker` of your own puts into `RolloutSample.advantage` what
            `AdvantageEstimator.group_advantages` returns for its group, NaN for a completion that nothing scored.

    Raises:
        TypeError: `args` is no `AsyncGRPOExtConfig`.
        ValueError: nothing is trainable, prompts are plain text, or the worker has advantages of TRL's.
        RuntimeError: in training, the rollout worker is dead or hangs; the last step is saved before.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "async-grpo", "hf_grpo_ext"]

    args: AsyncGRPOExtConfig

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: AsyncGRPOExtConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        args = AsyncGRPOExtConfig(f"{model.split('/')[-1]}-AsyncGRPO") if args is None else args
        if not isinstance(args, AsyncGRPOExtConfig):
            raise TypeError(
                f"args is a {type(args).__name__}: AsyncGRPOExtTrainer needs an AsyncGRPOExtConfig, which takes the "
                "same fields as AsyncGRPOConfig."
            )
        args.check_unchanged()
        super().__init__(model, reward_funcs, args, train_dataset, *more, **kwargs)
        check_trainable(self.model)
        self.loss_fn = ClippedPGLossFn(args.loss_config)
        self.adv_estimator = get_advantage_estimator(args.adv_estimator_config, args.loss_config)
        self.ref_model = self._make_reference()
        self._name, self._paper = method(args)  # for TRL's model card
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            _adopt(self.rollout_worker, args)
        if (advice := warning_of_cut_sampling(args)) and self.accelerator.is_main_process:
            warnings.warn(advice, stacklevel=2)
        if args.stop_broken_run:
            add_stop_broken_run(self)
        self._rollouts: _Rollouts | None = None  # of the main process
        self._metric_window = MetricWindow()
        self._shards_know_what_trains = False

    def explain(self) -> str:
        """The objective that is trained, in words and numbers; see `explain.explain`."""
        return explain(self.args, has_dropout=draws_dropout(self.model))

    def create_accelerator_and_postprocess(self) -> None:
        """The parent's; FSDP2 then returns log-probabilities as they were computed, and not rounded to bf16."""
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)

    # Rollouts

    def get_train_dataloader(self) -> Any:
        """The parent's; its rollouts end when the worker has failed, since an error on one process hangs the others."""
        loader = super().get_train_dataloader()
        if self.accelerator.is_main_process:
            planner = loader.dataset
            self._rollouts = planner.dataset = _Rollouts(planner.dataset, self.rollout_worker, self._trained_groups)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The parent's micro-batches of an optimizer step, with their advantages and the counts of the whole step."""
        try:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        except (TypeError, ValueError):  # accelerate's, of data that end before the first batch
            self._end_if_worker_failed()
            raise
        if len(batches) < num_batches:  # the same on every process
            self._end_if_worker_failed()
        return self._with_advantages(batches) if batches else batches, num_items

    def _end_if_worker_failed(self) -> None:
        """Ends the training on all processes, with a checkpoint of the last step."""
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        # The main process looks for all: it may be making the folder by the time that another one looks.
        seen = [self._rollouts and self._rollouts.failure, folder.exists()]
        failure, is_saved = broadcast_object_list(seen, from_process=0)
        if failure is None:
            return
        saved = ""
        if step and self.args.save_strategy != SaveStrategy.NO:
            if not is_saved:
                self._save_checkpoint(self.model, trial=None)
            saved = f" Step {step} is saved in {folder}."
        if isinstance(self.rollout_worker, AsyncRolloutWorker) and self.rollout_worker._process is not None:
            self.rollout_worker._process.kill()  # a process that hangs does not hear that it should end
            self.rollout_worker._process.join()
        raise RuntimeError(f"The rollout worker has failed, and training ends.{saved} {failure}")

    def _with_advantages(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the groups decided, made into advantages over the samples of the step on all processes."""
        selected = [batch["token_index"] >= 0 for batch in batches]
        rows = [SegmentRows.of(batch["segment_id"][kept]) for batch, kept in zip(batches, selected, strict=True)]
        relative = [
            part.pad(batch["advantages"][kept])[:, 0] for part, batch, kept in zip(rows, batches, selected, strict=True)
        ]
        local = torch.stack([torch.cat(relative), torch.cat([part.mask.sum(-1) for part in rows]).float()], dim=-1)
        # Processes hold different numbers of samples: what pads them has no token.
        table = self.accelerator.pad_across_processes(local, dim=0)
        everything: Tensor = self.accelerator.gather(table)
        tokens = everything[:, 1].long()
        first = self.accelerator.process_index * len(table)
        mine = self.adv_estimator.over_batch(everything[:, 0], tokens)[first : first + len(local)]
        counts = {"global_valid_toks": tokens.sum(), "global_valid_seqs": (tokens > 0).sum()}
        of_rows = torch.split(mine, [len(part) for part in relative])
        return [
            {**batch, "rows": part, "row_advantages": advantages, **counts}
            for batch, part, advantages in zip(batches, rows, of_rows, strict=True)
        ]

    # The loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The share of a micro-batch in the loss of the optimizer step; the forward is the parent's."""
        seen: dict[str, Any] = {}

        def forward(**kwargs: Any) -> Any:
            seen["reference"] = self._reference(model, kwargs)
            self._show_shards(model)
            seen["policy"] = model(**kwargs)
            return seen["policy"]

        # The parent's loss is another one, and so are its metrics.
        metrics, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            super().compute_loss(forward, inputs)
        finally:
            self._metrics["train"] = metrics

        selected = inputs["token_index"] >= 0
        places = inputs["token_index"][selected]
        rows: SegmentRows = inputs["rows"]

        def padded(values: Tensor) -> Tensor:
            return rows.pad(values.flatten()[places])

        reference = seen["reference"]
        batch = {
            "advantages": inputs["row_advantages"][:, None],
            "token_mask": rows.mask,
            "sample_mask": rows.mask.any(-1),
            "generation_logprobs": rows.pad(inputs["old_log_probs"][selected]),
            "reference_policy_logprobs": None if reference is None else padded(reference),
        }
        toks, seqs = inputs["global_valid_toks"], inputs["global_valid_seqs"]
        loss: Tensor
        loss, values = self.loss_fn(
            padded(seen["policy"].log_probs),
            cast(dict[str, Tensor], batch),
            global_valid_toks=toks,
            global_valid_seqs=seqs,
        )
        if self.args.loss_type == "dr_grpo":
            loss = loss * constant_length_scale(toks, seqs, self.args.max_completion_length)
        # Gradients are averaged over processes, and the loss is a share of a sum over them.
        loss = loss * self.accelerator.num_processes
        values["entropy"] = masked_mean(padded(seen["policy"].entropy.detach()), rows.mask, toks)
        if self.aux_loss_enabled:
            aux_loss = seen["policy"].aux_loss / self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * aux_loss
            values["aux_loss"] = aux_loss.detach() / self.accelerator.num_processes
        if not self.args.loss_config.has_kl_term:
            del values["kl_penalty"], values["kl"]
        self._metric_window.add(values, METRIC_REDUCTIONS | dict.fromkeys(("entropy", "aux_loss"), "sum"))
        self._flush_metrics()
        return loss

    def _show_shards(self, model: nn.Module) -> None:
        """Once, and after the reference: FSDP2 sets itself up at the first forward, which may have the adapter off."""
        if self._shards_know_what_trains:
            return
        prepare_shards(model, under_adapter(self.accelerator.unwrap_model(model)))
        self._shards_know_what_trains = True

    def _flush_metrics(self) -> None:
        """Logs the optimizer step, on its last micro-batch, from one collective."""
        if not self.accelerator.sync_gradients:
            return
        log = self._metrics["train"]
        for name, value in self._metric_window.flush(self.accelerator.gather).items():
            log[name].append(value)
            if name in TRL_METRIC_NAMES:
                log[TRL_METRIC_NAMES[name]].append(value)

    def _make_reference(self) -> Any:
        """The initial weights of a model that is trained whole; a model with an adapter has them itself."""
        if not self.args.loss_config.has_kl_term:
            return None
        if is_peft_model(self.model):
            if not starts_as_base(self.model):
                add_reference_adapter(self.model)
            return None
        options = dict(self.args.model_init_kwargs or {})  # the parent has completed it
        name = get_config_model_id(self.model.config)
        reference = create_model_from_path(
            name, device_map=None, attn_implementation=self.model.config._attn_implementation, **options
        )
        add_fused_lm_head(reference, temperature=self.temperature)
        reference.eval().requires_grad_(False)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _reference(self, model: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
        """Log-probabilities of the reference policy at the positions of the packed row."""
        if not self.args.loss_config.has_kl_term:
            return None
        with torch.no_grad():
            if self.ref_model is not None:
                return cast(Tensor, self.ref_model(**kwargs).log_probs)
            policy = self.accelerator.unwrap_model(model)
            with use_adapter(policy, REFERENCE_ADAPTER if REFERENCE_ADAPTER in policy.peft_config else None):
                return cast(Tensor, model(**kwargs).log_probs)


def _adopt(worker: Any, args: AsyncGRPOExtConfig) -> None:
    """Lets TRL's worker score as `args` say, and lets it be stopped when it is dead."""
    dataset = worker._loop_kwargs["dataset"]
    if isinstance(dataset, Dataset) and isinstance(dataset[0].get("prompt"), str):
        raise ValueError(
            f"train_dataset has a prompt that is plain text, {dataset[0]['prompt'][:40]!r}: the rollout worker puts "
            "prompts into the chat template, and would sample from an empty one. A prompt must be a list of messages, "
            '[{"role": "user", "content": "..."}].'
        )
    if worker._loop_cls is _AsyncRolloutLoop:
        worker._loop_cls = RolloutLoop
    if not issubclass(worker._loop_cls, RolloutLoop):
        raise ValueError(
            f"The loop of the rollout worker, {worker._loop_cls.__name__}, scores rollouts with advantages of TRL's, "
            "which are not those of adv_estimator. Use AsyncRolloutWorker, or derive the loop from "
            "hf_grpo_ext.async_rollouts.RolloutLoop."
        )
    worker._loop_kwargs |= {
        "adv_estimator": args.adv_estimator_config,
        "reward_weights": args.reward_weights,
        "drop_groups_without_signal": args.drop_groups_without_signal,
        "reward_timeout": args.reward_timeout,
    }
    worker.stop = partial(_stop, worker, worker.stop)


def _stop(worker: Any, stop: Callable[[], None]) -> None:
    if worker._process is not None and not worker._process.is_alive():
        worker._process = None  # or the parent's waits for it to hear that it should end
    stop()


class _Rollouts(IterableDataset):  # type: ignore[type-arg]
    """TRL's samples, which end when the worker fails; `failure` then says how.

    Args:
        samples: TRL's.
        worker: the rollout worker.
        trained_groups: the groups that are done with; takes those that the worker dropped.
    """

    def __init__(self, samples: Any, worker: Any, trained_groups: set[int]) -> None:
        self.failure: str | None = None
        self._samples = samples
        self._worker = worker
        self._check_health = samples.check_health_fn
        samples.check_health_fn = self._check
        samples.queue = _Samples(samples.queue, trained_groups)

    def _check(self, stale_after_s: float) -> None:
        self._check_health(stale_after_s)
        process = getattr(self._worker, "_process", None)
        if process is not None and not process.is_alive():
            raise RuntimeError(f"Its process is gone (exit code {process.exitcode}).")

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._worker, AsyncRolloutWorker):
            # Its death then ends a read, where otherwise we would wait for the rest of a sample for ever.
            self._worker.rollout_buffer._writer.close()
        samples = iter(self._samples)
        while True:
            try:
                sample = next(samples)
            except RuntimeError as error:
                self.failure = str(error.__cause__ or error)
                return
            yield sample


class _Samples:
    """The queue of samples: notes which groups the worker has dropped before them, and is empty once it is gone."""

    def __init__(self, samples: Any, trained_groups: set[int]) -> None:
        self._samples = samples
        self._trained_groups = trained_groups

    def get(self, timeout: float) -> Any:
        try:
            sample = self._samples.get(timeout=timeout)
        except (EOFError, OSError):  # between two samples, or inside one
            raise queue.Empty from None
        self._trained_groups.update(getattr(sample, "dropped_groups", ()))
        return sample

    def qsize(self) -> int:
        return int(self._samples.qsize())
