"""Checkpoints that are complete whenever a run ends, and a run that goes on from them exactly."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from trl import GRPOTrainer

from .checkpoints import checkpoint_to_resume, is_complete
from .failures import FailedTogether, failure_text, raise_together

logger = logging.get_logger(__name__)


class CompleteCheckpoints(GRPOTrainer):
    """The part of the trainer that saves and resumes."""

    control: Any
    _card_of_checkpoint = False  # whether the next model card is that of a checkpoint, which all processes write

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
                self._card_of_checkpoint = True
                super()._save_checkpoint(model, trial)
        except Exception:
            if self.args.should_save and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                logger.error("Saving %s failed, and what was written of it is removed.", folder)
            raise
        self._saved_step = self.state.global_step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's. In a checkpoint an error ends all here, before some wait in a barrier of the parent's."""
        of_checkpoint = _internal_call and output_dir is not None  # not of `push_to_hub`, which one process may call
        with self._saving_together(output_dir) if of_checkpoint else nullcontext():
            super().save_model(output_dir, _internal_call)

    @contextmanager
    def _writing_card(self) -> Iterator[None]:
        of_checkpoint, self._card_of_checkpoint = self._card_of_checkpoint, False
        with self._saving_together("the model card") if of_checkpoint else nullcontext():
            yield

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
