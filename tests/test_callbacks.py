"""`StopBrokenRun` stops what is broken, at once or after a while, and leaves the rest alone."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from tiny_env import by_completion, constant, make_trainer, quiet
from torch import nn
from transformers import TrainerCallback, TrainerControl

from hf_grpo_ext import StopBrokenRun

pytestmark = quiet
HEALTHY = {"loss": 0.0, "grad_norm": 1.0, "token_mult_prob_error": 1.01, "frac_reward_zero_std": 0.5}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


def stops_at(entries: list[dict[str, Any]], fp16: bool = False, **arguments: Any) -> int | None:
    """The first of the log entries at which a run stops, counted from 1; `None` if it does not."""
    callback, control = StopBrokenRun(**arguments), TrainerControl(should_save=True, should_evaluate=True)
    args, state = SimpleNamespace(fp16=fp16), SimpleNamespace(global_step=7, is_world_process_zero=True)
    for number, entry in enumerate(entries, start=1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callback.on_log(args, state, control, logs=entry)  # type: ignore[arg-type]
        stopped = callback.reason is not None
        assert control.should_training_stop == stopped
        assert control.should_save == control.should_evaluate == (not stopped)
        if stopped:
            return number
    return None


def run(**changes: list[Any]) -> list[dict[str, Any]]:
    """Healthy log entries with some values changed, one for each value of the list."""
    count = len(next(iter(changes.values())))
    return [HEALTHY | {name: values[i] for name, values in changes.items()} for i in range(count)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_not_finite_stops_at_once(name: str, value: float) -> None:
    assert stops_at(run(**{name: [0.1, value, 0.1]})) == 2


def test_a_gradient_that_overflows_under_fp16_has_patience() -> None:
    overflows = run(grad_norm=[math.inf, math.inf, 1.0, math.inf, math.nan, math.inf])
    assert stops_at(overflows, fp16=True) == 6
    assert stops_at(run(loss=[math.nan]), fp16=True) == 1


def test_a_metric_above_its_bound_in_a_row() -> None:
    assert stops_at(run(token_mult_prob_error=[1.6, 1.6, 1.4, 1.6, 1.6, 1.6])) == 6
    assert stops_at(run(token_mult_prob_error=[1.6, 1.5] * 5)) is None, "a value at the bound is within it"
    assert stops_at(run(token_mult_prob_error=[1.2, 1.2]), bounds={"token_mult_prob_error": 1.1}, patience=2) == 2
    assert stops_at(run(kl=[11.0]), bounds={"kl": 10.0}, patience=1) == 1
    assert stops_at(run(token_mult_prob_error=[9.0] * 5), bounds={}) is None


def test_no_signal_in_a_row() -> None:
    assert stops_at(run(frac_reward_zero_std=[1.0] * 12)) == 10
    assert stops_at(run(frac_reward_zero_std=[1.0, 1.0, 0.9] * 10), signal_patience=3) is None
    assert stops_at(run(frac_reward_zero_std=[1.0] * 30), signal_patience=None) is None


def test_an_entry_without_the_metric_says_nothing() -> None:
    # Steps that reuse their rollouts log no rewards; TRL logs None for a metric that was NaN.
    assert stops_at(run(token_mult_prob_error=[2.0, None, 2.0, None, 2.0])) == 5
    silent = run(frac_reward_zero_std=[1.0] * 4)
    del silent[1]["frac_reward_zero_std"], silent[1]["grad_norm"]
    assert stops_at(silent, signal_patience=3) == 4


def test_entries_that_are_not_the_trainers_are_not_read() -> None:
    assert stops_at([{"eval_loss": math.nan}, {"train_loss": math.nan}, {"frac_reward_zero_std": 1.0}] * 9) is None


def test_every_training_starts_anew() -> None:
    callback, control = StopBrokenRun(signal_patience=2), TrainerControl()
    args, state = SimpleNamespace(fp16=False), SimpleNamespace(global_step=1, is_world_process_zero=True)
    for _ in range(3):
        callback.on_train_begin(args, state, control)  # type: ignore[arg-type]
        callback.on_log(args, state, control, logs=run(frac_reward_zero_std=[1.0])[0])  # type: ignore[arg-type]
    assert callback.reason is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"patience": 0}, ValueError, "patience=0: it must be at least 1"),
        ({"patience": 2.5}, TypeError, "patience=2.5 is a float: it must be a number of log entries"),
        ({"signal_patience": -1}, ValueError, "signal_patience=-1: it must be at least 1"),
        ({"bounds": {"kl": "10"}}, TypeError, r"bounds\['kl'\]='10' is a str: it must be a number"),
        ({"bounds": {"kl": math.nan}}, ValueError, r"bounds\['kl'\] is NaN, which nothing is above"),
        ({"action": "halt"}, ValueError, "action='halt': it must be 'stop' or 'raise'"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        StopBrokenRun(**arguments)


# In a training

FIVE_STEPS: dict[str, Any] = {"max_steps": 5, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}


class Poison(TrainerCallback):
    """Puts a NaN into the weights before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.lm_head.weight[0, 0] = math.nan


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("stop", [True, False])
def test_a_run_whose_weights_are_nan_stops_before_it_is_saved(tiny_model: str, tmp_path: Path, stop: bool) -> None:
    trainer = make_trainer(
        tiny_model, tmp_path, by_completion, callbacks=[Poison(step=2)], stop_broken_run=stop, **FIVE_STEPS
    )
    if not stop:
        trainer.train()
        assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in range(1, 6)]
        return
    with pytest.warns(UserWarning, match=r"StopBrokenRun, step 3: grad_norm is nan, .* last checkpoint.*stops here"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_run_without_signal_stops_and_the_script_goes_on(tiny_model: str, tmp_path: Path) -> None:
    stop, fields = StopBrokenRun(signal_patience=2), FIVE_STEPS | {"save_strategy": "epoch"}
    trainer = make_trainer(tiny_model, tmp_path, constant([0.5] * 8), callbacks=[stop], **fields)
    with pytest.warns(UserWarning, match="step 2: frac_reward_zero_std is 1 in 2 log entries in a row"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert stop.reason is not None
    assert checkpoints(tmp_path) == []


def test_it_can_raise(tiny_model: str, tmp_path: Path) -> None:
    stop = StopBrokenRun(signal_patience=3, action="raise")
    trainer = make_trainer(tiny_model, tmp_path, constant([0.5] * 8), callbacks=[stop], **FIVE_STEPS)
    with pytest.raises(RuntimeError, match="step 3: frac_reward_zero_std is 1 in 3 log entries.*more generations"):
        trainer.train()


def test_the_flag_adds_it_once_and_by_default_not_at_all(tiny_model: str, tmp_path: Path) -> None:
    def installed(callbacks: list[Any], **fields: Any) -> list[Any]:
        trainer = make_trainer(tiny_model, tmp_path, by_completion, callbacks=callbacks, **fields)
        return [c for c in trainer.callback_handler.callbacks if isinstance(c, StopBrokenRun)]

    assert installed([]) == []
    (added,) = installed([], stop_broken_run=True)
    assert (added.patience, added.signal_patience, added.action) == (3, 10, "stop")
    own = StopBrokenRun(patience=7)
    assert installed([own], stop_broken_run=True) == [own]
