"""`StopBrokenRun`: a callback that ends a run which the logs show to be broken."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

NO_SIGNAL = "frac_reward_zero_std"
# A factor of 1.5 a token is far beyond rounding (1.01 to 1.05) and beyond weights that are a few updates old.
BOUNDS = {"token_mult_prob_error": 1.5}


class StopBrokenRun(TrainerCallback):
    """Stops a run that its own logs show to be broken, before it spends more time or overwrites a good checkpoint.

    It reads each log entry of the training, so once in `logging_steps` steps (TRL's default is 10), and stops when

    - the loss or the norm of the gradient is NaN or infinite, at once. Under fp16 a gradient that overflows is how the
      loss scale is found: there the norm counts after `patience` entries in a row. (`logging_nan_inf_filter`, on by
      default, hides a loss that is NaN; the norm of its gradient shows it.)
    - a metric was above its bound in `patience` entries in a row;
    - no group had signal in `signal_patience` entries in a row, `frac_reward_zero_std` = 1.

    An entry that lacks a metric says nothing about it: it neither counts nor ends a row. All processes stop at the same
    step, as soon as one of them sees a reason.

    Args:
        bounds: name of a logged metric -> the largest value it may have; by default `{"token_mult_prob_error": 1.5}`,
            the mean factor by which the engine that sampled and the trainer disagree on the probability of a token.
        patience: log entries in a row above a bound that stop the run, at least 1.
        signal_patience: log entries in a row without any signal that stop the run, at least 1; `None` for never.
        action: "stop" ends the training after the current step, without saving or evaluating it; what your script does
            after `train()` still runs, and `reason` tells it. "raise" is a `RuntimeError`.

    Attributes:
        reason: what was seen, or `None` while nothing was.

    Raises:
        TypeError: `patience` or `signal_patience` is no integer, or a bound no number.
        ValueError: `patience` or `signal_patience` is below 1, a bound is NaN, or the action is not known.
        RuntimeError: in training, with `action="raise"`.

    Example:
        >>> StopBrokenRun(bounds={"token_mult_prob_error": 1.2, "kl": 10.0}, action="raise").patience
        3
    """

    def __init__(
        self,
        bounds: Mapping[str, float] | None = None,
        patience: int = 3,
        signal_patience: int | None = 10,
        action: str = "stop",
    ) -> None:
        _check_patience("patience", patience)
        if signal_patience is not None:
            _check_patience("signal_patience", signal_patience)
        for name, bound in (bounds or {}).items():
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                raise TypeError(f"bounds[{name!r}]={bound!r} is a {type(bound).__name__}: it must be a number.")
            if math.isnan(bound):
                raise ValueError(f"bounds[{name!r}] is NaN, which nothing is above: give it a number, or leave it out.")
        if action not in ("stop", "raise"):
            raise ValueError(f"action={action!r}: it must be 'stop' or 'raise'.")
        self.bounds = dict(BOUNDS if bounds is None else bounds)
        self.patience = patience
        self.signal_patience = signal_patience
        self.action = action
        self.reason: str | None = None
        self._in_a_row: dict[str, int] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forgets an earlier training."""
        self.reason = None
        self._in_a_row.clear()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Reads a log entry, and stops all processes if one of them has a reason."""
        # Entries with a loss are the trainer's own, made on all processes; what a script logs may be on one of them.
        if logs is None or "loss" not in logs or self.reason is not None:
            return
        self.reason = next(filter(None, gather_object([self._reason_in(logs, fp16=args.fp16)])), None)
        if self.reason is None:
            return
        message = f"StopBrokenRun, step {state.global_step}: {self.reason}"
        if self.action == "raise":
            raise RuntimeError(message)
        if state.is_world_process_zero:
            warnings.warn(f"{message} Training stops here, and this step is not saved.", stacklevel=2)
        self._end(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keeps a run that was stopped from being saved and evaluated at the end of its epoch."""
        if self.reason is not None:
            self._end(control)

    @staticmethod
    def _end(control: TrainerControl) -> None:
        control.should_training_stop = True
        control.should_save = False
        control.should_evaluate = False

    def _reason_in(self, logs: Mapping[str, Any], fp16: bool) -> str | None:
        """What is wrong with the run by this log entry, and what to do; `None` for nothing."""
        loss, norm = logs["loss"], logs.get("grad_norm")
        overflows = self._count("grad_norm", None if norm is None else not math.isfinite(norm))
        for name, value, broken in (
            ("loss", loss, not math.isfinite(loss)),
            ("grad_norm", norm, overflows >= (self.patience if fp16 else 1)),
        ):
            if broken:
                return (
                    f"{name} is {value}, and with it the weights. Go back to the last checkpoint; lower the learning "
                    "rate, set max_grad_norm, and look for a log-probability or a reward that is not finite."
                )
        for name, bound in self.bounds.items():
            value = logs.get(name)
            if self._count(name, None if value is None else not value <= bound) >= self.patience:
                return (
                    f"{name} is {value:.4g}, above its bound of {bound:g} in {self.patience} log entries in a row. "
                    "docs/metrics.md says what it measures; raise the bound if this run is healthy all the same."
                )
        share = logs.get(NO_SIGNAL)
        silent = self._count(NO_SIGNAL, None if share is None else share >= 1)
        if self.signal_patience is not None and silent >= self.signal_patience:
            return (
                f"{NO_SIGNAL} is 1 in {self.signal_patience} log entries in a row: in no group does one rollout have a "
                "reward that differs from another's, so there is nothing to learn from. Use prompts that the model "
                "solves sometimes, more generations a prompt, or a reward with more steps between wrong and right."
            )
        return None

    def _count(self, name: str, broken: bool | None) -> int:
        """How often in a row this was broken; `None` is an entry that does not say."""
        if broken is not None:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if broken else 0
        return self._in_a_row.get(name, 0)


def _check_patience(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: it must be a number of log entries.")
    if value < 1:
        raise ValueError(f"{name}={value}: it must be at least 1 log entry.")


def add_stop_broken_run(trainer: Any) -> None:
    """Adds `StopBrokenRun` with its defaults to a trainer that has none."""
    if not any(isinstance(callback, StopBrokenRun) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(StopBrokenRun())
