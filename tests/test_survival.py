"""What a run leaves behind when something breaks, and that it goes on from there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import DDP, SETTINGS, WORKERS
from tiny import save_tiny_model
from tiny_env import by_completion, difference, make_trainer, quiet, trained
from transformers import TrainerCallback

from hf_grpo_ext import GRPOExtConfig
from hf_grpo_ext.checkpoints import checkpoint_to_resume, is_complete
from hf_grpo_ext.failures import FailedTogether, raise_together
from hf_grpo_ext.timeouts import awaited, time_limit

pytestmark = [quiet, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


# Limits on time


def sleep() -> None:
    time.sleep(60)


def search() -> None:
    re.fullmatch("(a|a)*", "a" * 64 + "b")


def swallow() -> None:
    with suppress(BaseException):
        time.sleep(60)


def swallow_once() -> None:
    swallow()
    time.sleep(60)


@pytest.mark.parametrize("hang", [sleep, search, swallow, swallow_once])
def test_a_call_that_hangs_is_interrupted(hang: Any) -> None:
    before, start = signal.getsignal(signal.SIGVTALRM), time.monotonic()
    with pytest.raises(TimeoutError, match=r"^It took longer than reward_timeout=0.2 seconds.$"), time_limit(0.2, "It"):
        hang()
    assert 0.2 <= time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert "time_limit" not in [thread.name for thread in threading.enumerate()]


def test_the_error_shows_where_the_call_hung() -> None:
    with pytest.raises(TimeoutError) as caught, time_limit(0.1, "It"):
        sleep()
    assert caught.traceback[-1].name in ("sleep", "interrupt")
    assert "sleep" in [entry.name for entry in caught.traceback]


def test_a_call_in_time_is_not_interrupted() -> None:
    with time_limit(0.5, "It"):
        pass
    with pytest.raises(KeyError), time_limit(0.5, "It"):
        raise KeyError
    time.sleep(0.7)


def test_alarms_of_the_call_are_its_own() -> None:
    """The `signal.alarm` with which math verifiers limit themselves."""

    def ring(*_: Any) -> None:
        raise LookupError

    def ring_soon() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(5)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(LookupError), time_limit(10, "It"):
            ring_soon()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_limit_needs_the_main_thread() -> None:
    errors: list[BaseException] = []

    def limited() -> None:
        try:
            with time_limit(1, "The reward function 'f'"):
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join()
    assert "'f' has a time limit of 1 seconds, which takes signals to the main thread" in str(errors[0])


def test_a_coroutine_in_limited_time() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 3

    assert asyncio.run(awaited(answer(), 5, "It")) == 3
    assert asyncio.run(awaited(answer(), None, "It")) == 3
    with pytest.raises(TimeoutError, match="It took longer than reward_timeout=0.1 seconds"):
        asyncio.run(awaited(asyncio.sleep(60), 0.1, "It"))


HARD_ENDS = {
    "holds the interpreter": """
        import ctypes
        with timeouts.time_limit(0.1, "It"):
            ctypes.PyDLL(None).sleep(60)""",
    "blocks the event loop": """
        import asyncio, time
        async def block():
            time.sleep(60)
        asyncio.run(timeouts.awaited(block(), 0.1, "It"))""",
}


@pytest.mark.parametrize("how", HARD_ENDS)
def test_a_call_that_heeds_no_interruption_ends_its_process(how: str) -> None:
    lines = ["        from hf_grpo_ext import timeouts", "        timeouts.GRACE = 0.2", HARD_ENDS[how].lstrip("\n")]
    code = "\n".join(line[8:] for line in "\n".join(lines).splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:00.3" in done.stderr or "It took longer than reward_timeout=0.1 seconds." in done.stderr
    assert 'File "<string>", line' in done.stderr


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(seconds: float) -> None:
    with pytest.raises(ValueError, match="reward_timeout=.*: it must be a positive number of seconds, or None"):
        GRPOExtConfig(use_cpu=True, bf16=False, reward_timeout=seconds)


# Which checkpoints are complete


def save_checkpoint(folder: Path, step: int, state: str | None = "{}") -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    if state is not None:
        (checkpoint / "trainer_state.json").write_text(state)
    return checkpoint


def test_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_to_resume(True, str(tmp_path)) == (True, [])
    nine, ten = save_checkpoint(tmp_path, 9), save_checkpoint(tmp_path, 10)
    half, none = save_checkpoint(tmp_path, 11, '{"global_step": 1'), save_checkpoint(tmp_path, 12, None)
    save_checkpoint(tmp_path, 8, None)
    (tmp_path / "checkpoint-last").mkdir()
    assert [is_complete(path) for path in (nine, ten, half, none)] == [True, True, False, False]
    assert checkpoint_to_resume(True, str(tmp_path)) == (str(ten), [none, half])
    assert checkpoint_to_resume(str(nine), str(tmp_path)) == (str(nine), [])
    for asked in (None, False, "not here"):
        assert checkpoint_to_resume(asked, str(tmp_path)) == (asked, [])


def test_a_checkpoint_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    half = save_checkpoint(tmp_path, 3, "{")
    with pytest.raises(ValueError, match=r"checkpoint-3 has no trainer_state.json that can be read.*interrupted"):
        checkpoint_to_resume(str(half), str(tmp_path))
    with pytest.raises(ValueError, match=r"No checkpoint in .* is complete.* Train without resume_from_checkpoint"):
        checkpoint_to_resume(True, str(tmp_path))


# One message


def test_every_process_raises_the_first_failure() -> None:
    mine = KeyError("x")
    for error in (None, mine):
        with pytest.raises(FailedTogether, match=r"^A \(the first of 2 .*\)\nAll processes end here. Do B.$") as caught:
            raise_together([None, "A", "C"], error, "Do B.")
        assert caught.value.__cause__ is error
    raise_together([None, None], None, "Do B.")


def test_one_process_alone_raises_its_own_error() -> None:
    with pytest.raises(KeyError):
        raise_together(["A"], KeyError("x"), "Do B.")


# One process


def failing(function: Any, call: int, error: BaseException) -> Any:
    """A reward function that raises once."""
    calls = iter(range(1, 100))

    def score(**kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(**kwargs)

    return score


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


EACH_GENERATION = {"learning_rate": 1e-3, "max_steps": 4}
CASES = {
    "one generation a step": ({}, 4, 3),
    "two steps a generation": ({"num_iterations": 2}, 2, 2),
    # The second step takes the end of the third generation batch, all of the fourth, and fails at the fifth.
    "several generations a step": (
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 5,
            "steps_per_generation": 2,
            "num_train_epochs": 3,
        },
        5,
        1,
    ),
    "saved already": ({"save_steps": 1}, 4, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reward_that_fails_leaves_the_last_step(model: str, tmp_path: Path, case: str) -> None:
    args, call, last = CASES[case]
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 100, **args}
    whole = trained(model, tmp_path / "whole", by_completion, **args)
    broken = make_trainer(model, tmp_path / "broken", failing(by_completion, call, LookupError("solution")), **args)
    with pytest.raises(LookupError, match="^solution$"):
        broken.train()
    assert f"checkpoint-{last}" in checkpoints(tmp_path / "broken")
    rest = make_trainer(model, tmp_path / "broken", by_completion, **args)
    rest.train(resume_from_checkpoint=True)
    assert len(rest.watch.gradients) == 4 - last
    assert difference(rest.watch.gradients[0], whole.watch.gradients[last]) < 1e-5


@pytest.mark.parametrize(
    ("args", "call", "left"),
    [
        ({"save_strategy": "no"}, 3, []),
        ({"save_strategy": "steps", "save_steps": 100}, 1, []),  # nothing is trained
    ],
)
def test_a_reward_that_fails_leaves_no_step(
    model: str, tmp_path: Path, args: dict[str, Any], call: int, left: list[str]
) -> None:
    with pytest.raises(LookupError):
        trained(model, tmp_path, failing(by_completion, call, LookupError()), **EACH_GENERATION, **args)
    assert checkpoints(tmp_path) == left


def test_a_reward_that_fails_at_once_does_not_touch_what_was_resumed(model: str, tmp_path: Path) -> None:
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 2}
    trained(model, tmp_path, by_completion, **args)
    (checkpoint,) = tmp_path.glob("checkpoint-2")
    before = (checkpoint / "trainer_state.json").stat().st_mtime_ns
    rest = make_trainer(model, tmp_path, failing(by_completion, 1, LookupError()), **args)
    with pytest.raises(LookupError):
        rest.train(resume_from_checkpoint=str(checkpoint))
    assert (checkpoint / "trainer_state.json").stat().st_mtime_ns == before


def test_a_reward_that_leaves_does_so(model: str, tmp_path: Path) -> None:
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 100}
    with pytest.raises(SystemExit, match="3"):
        trained(model, tmp_path, failing(by_completion, 3, SystemExit(3)), **args)
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_an_async_reward_that_leaves_is_an_error(model: str, tmp_path: Path) -> None:
    async def score(**_: Any) -> Any:
        sys.exit(3)

    with pytest.raises(RuntimeError, match=r"The reward function 'score' called sys.exit\(3\)"):
        trained(model, tmp_path, score)


def test_a_reward_in_limited_time(model: str, tmp_path: Path) -> None:
    def score(**_: Any) -> Any:
        time.sleep(60)

    with pytest.raises(TimeoutError, match="The reward function 'score' took longer than reward_timeout=0.2 seconds"):
        trained(model, tmp_path, score, reward_timeout=0.2)


class SaveBeforeTheStep(TrainerCallback):
    """What transformers' `enable_jit_checkpoint` does on SIGTERM, once in the second step."""

    trainer: Any

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_training_stop = True


def test_a_checkpoint_from_the_middle_of_a_step_is_the_one_before(model: str, tmp_path: Path) -> None:
    args = {**EACH_GENERATION, "num_iterations": 2}
    whole = trained(model, tmp_path / "whole", by_completion, **args)
    save = SaveBeforeTheStep()
    broken = make_trainer(model, tmp_path / "broken", by_completion, callbacks=[save], **args)
    save.trainer = broken
    broken.train()
    rest = make_trainer(model, tmp_path / "broken", by_completion, **args)
    rest.train(resume_from_checkpoint=True)
    assert len(rest.watch.gradients) == 3
    for again, first in zip(rest.watch.gradients, whole.watch.gradients[1:], strict=True):
        assert difference(again, first) < 1e-5


def test_the_components_of_a_run_outlive_it(model: str, tmp_path: Path) -> None:
    """A component that was seen before the interruption keeps its curve and its weight."""
    first = [{"a": 1.0, "b": 0.0}, {"a": 0.0}, {"a": 0.0}, {"a": 0.0}] * 2
    args = {**EACH_GENERATION, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "reward_weights": {"b": 2}}
    answers = iter([first, [{"a": 1.0}, {"a": 0.0}] * 4])
    with pytest.raises(StopIteration):
        trained(model, tmp_path, lambda **_: next(answers), **{**args, "max_steps": 3})
    rest = make_trainer(model, tmp_path, lambda **_: [{"a": 1.0}, {"a": 0.0}] * 4, **args)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "rewards/b/mean" in rest.state.log_history[-2]


def test_a_run_goes_on_from_the_latest_complete_checkpoint(model: str, tmp_path: Path) -> None:
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 1}
    trained(model, tmp_path, by_completion, **args)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    rest = make_trainer(model, tmp_path, by_completion, **args)
    with pytest.warns(
        UserWarning, match=r"checkpoint-[34] is skipped, since .* goes on from .*checkpoint-2\."
    ) as found:
        rest.train(resume_from_checkpoint=True)
    assert sum("is skipped" in str(warning.message) for warning in found) == 2
    assert len(rest.watch.gradients) == 2
    assert is_complete(tmp_path / "checkpoint-4")


@contextmanager
def failing_at(owner: Any, name: str, step: int, trainer: Any) -> Iterator[None]:
    """A part of saving that stops midway at a step."""
    save = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        save(*args, **kwargs)
        if trainer.state.global_step == step:
            raise OSError("No space left on device")

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, save)


@pytest.mark.parametrize("part", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_fails_leaves_the_checkpoint_before(model: str, tmp_path: Path, part: str) -> None:
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(model, tmp_path, by_completion, **args)
    with pytest.raises(OSError, match="No space left"), failing_at(trainer, part, 3, trainer):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_a_checkpoint_that_is_written_again_is_not_complete_before_it_is(model: str, tmp_path: Path) -> None:
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 1}
    trained(model, tmp_path, by_completion, **args)
    again = make_trainer(model, tmp_path, by_completion, **args)
    with pytest.raises(OSError, match="No space left"), failing_at(again, "save_model", 3, again):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


def test_a_checkpoint_that_is_complete_outlives_a_failure_after_it(model: str, tmp_path: Path) -> None:
    """What TRL saves after it has deleted the checkpoint before is not all that is left to lose."""
    args = {**EACH_GENERATION, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    adaptive = {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.1}
    whole = trained(model, tmp_path / "whole", by_completion, **args, **adaptive)
    trainer = make_trainer(model, tmp_path / "broken", by_completion, **args, **adaptive)
    with pytest.raises(OSError, match="No space left"), failing_at(json, "dump", 3, trainer):
        trainer.train()
    assert checkpoints(tmp_path / "broken") == ["checkpoint-3"]
    (tmp_path / "broken" / "checkpoint-3" / "entropy_ctrl_state.json").unlink()
    rest = make_trainer(model, tmp_path / "broken", by_completion, **args, **adaptive)
    rest.train(resume_from_checkpoint=True)
    assert rest.entropy_coef == whole.entropy_coef != 0


# Two processes


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def launch(folder: Path, *arguments: str, then: Any = None) -> subprocess.CompletedProcess[str]:
    """Runs the worker of faults in two processes, which end themselves if they hang."""
    config = folder / "ddp.yaml"
    config.write_text(DDP)
    process = subprocess.Popen(
        [*ACCELERATE, str(config), str(WORKERS / "faults.py"), *arguments],
        env=os.environ | SETTINGS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if then is not None:
            then(process)
        _, stderr = process.communicate(timeout=400)
    finally:
        process.kill()
    assert "SIGALRM" not in stderr, "a process hung"
    return subprocess.CompletedProcess([], process.returncode, "", stderr)


def reward(error: str) -> str:
    return f"The reward function 'reward' failed on process 1: {error}\nAll processes end here. A reward function may "


def saving(process: int) -> str:
    return f"checkpoint-4 failed on process {process}: "


LATE = "TimeoutError: The reward function 'reward' took longer than reward_timeout=2 seconds."
LENGTH = "Component 'length' of the reward function 'reward'"
# name -> what every process says, the checkpoint that is left
END_TOGETHER = {
    "raises": (reward("KeyError: 'solution'"), 3),
    "raises on both": (
        "The reward function 'reward' failed on process 0: KeyError: 'solution' (the first of 2 processes that failed)",
        3,
    ),
    "is infinite": (
        reward(f"ValueError: {LENGTH} holds inf: a reward must be finite, or None."),
        3,
    ),
    "is too short": (
        reward(f"ValueError: {LENGTH} returned 3 values for 4 completions: return one for each completion."),
        3,
    ),
    "leaves": (reward("SystemExit: 3"), 3),
    "sleeps": (reward(LATE), 3),
    "searches": (reward(LATE), 3),
    "swallows": (reward(LATE), 3),
    "async raises": (reward("KeyError: 'solution'"), 3),
    "async leaves": (reward("RuntimeError: The reward function 'reward' called sys.exit(3)."), 3),
    "async sleeps": (reward(LATE), 3),
    "reward model raises": ("Scoring the completions failed on process 1: RuntimeError: out of memory\n", 3),
    "raises in evaluation": (reward("KeyError: 'solution'"), 3),
    "disk full, model": (saving(0), 2),
    "disk full, model card": ("Saving the model card failed on process 0: ", 2),
    "disk full, optimizer": (saving(0), 2),
    "disk full, second process": (saving(1), 2),
    "disk full, trainer state": (saving(0), 2),
}
ROUNDING = 2e-6  # of AdamW, since the rows of a batch that is drawn again are shuffled in another way
GO_ON = ("none", "is NaN", "never applies")


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, list[dict[str, Any]]]:
    """What both processes saw of each fault that they end by, or pass, together; one launch for all."""
    folder = tmp_path_factory.mktemp("caught")
    names = [*GO_ON, *END_TOGETHER]
    done = launch(folder, model, str(folder), "caught", *names)
    assert done.returncode == 0, done.stderr[-6000:]
    return {name: [torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(2)] for name in names}


def assert_same_weights(got: dict[str, Any], want: dict[str, Any], bound: float) -> None:
    assert got["step"] == want["step"]
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=bound)


def curves(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is logged in each step, but for times."""
    return [{k: v for k, v in entry.items() if k != "step_time"} for entry in result["log"] if "loss" in entry]


@pytest.mark.distributed
class TestFaultsOnOneOfTwoProcesses:
    @pytest.mark.parametrize("name", END_TOGETHER)
    def test_all_end_with_one_message(self, caught: dict[str, list[dict[str, Any]]], name: str) -> None:
        text, _ = END_TOGETHER[name]
        first, second = caught[name]
        assert [result["processes"] for result in caught[name]] == [2, 2]
        assert first["text"] == second["text"]
        assert text in first["text"]
        assert first["error"] == second["error"] == "FailedTogether"
        causes = {first["cause"], second["cause"]}
        assert causes != {"NoneType"}
        assert ("NoneType" in causes) == (name != "raises on both")

    @pytest.mark.parametrize("name", END_TOGETHER)
    def test_the_run_goes_on_from_what_is_left(self, caught: dict[str, list[dict[str, Any]]], name: str) -> None:
        _, last = END_TOGETHER[name]
        assert caught[name][0]["checkpoints"] == [f"checkpoint-{last}"]
        for result, whole in zip(caught[name], caught["none"], strict=True):
            assert_same_weights(result["resumed"], whole, ROUNDING)
            steps = [entry["step"] for entry in result["resumed"]["log"] if "loss" in entry]
            assert steps == [1, 2, 3, 4, 5]

    def test_nan_does_not_apply_and_the_run_goes_on(self, caught: dict[str, list[dict[str, Any]]]) -> None:
        for result, whole in zip(caught["is NaN"], caught["none"], strict=True):
            assert result["step"] == 5
            assert all(weight.isfinite().all() for weight in result["weights"].values())
            # Of the two groups one is left.
            shown, usual = (run["log"][3]["rewards/length/mean"] for run in (result, whole))
            assert shown != pytest.approx(usual)

    def test_a_run_in_which_no_reward_applies_is_stopped(self, caught: dict[str, list[dict[str, Any]]]) -> None:
        for result in caught["never applies"]:
            assert result["step"] == 10
            assert result["log"][0]["rewards/silent/mean"] is None


def terminate(folder: Path) -> Any:
    def then(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and not is_complete(folder / "sleeps without limit" / "checkpoint-2"):
            time.sleep(0.2)
        process.terminate()

    return then


# name -> what is on stderr, the checkpoint that is left
END_ONE = {
    "raises": ("The reward function 'reward' failed on process 1: KeyError: 'solution'", 3),
    "holds the interpreter": ("Timeout (0:00:03)!", 2),
    "blocks the event loop": (f"{LATE.removeprefix('TimeoutError: ')} It blocks the event loop", 2),
    "is killed": ("Signal 9 (SIGKILL)", 2),
    "leaves from a callback": ("", 2),
    "data loader raises": ("OSError: the data is gone", 2),
    "sleeps without limit": ("SIGTERM", 2),
}


@pytest.mark.distributed
def test_the_launcher_ends_what_one_process_cannot(tmp_path: Path, model: str) -> None:
    for name, (text, last) in END_ONE.items():
        then = terminate(tmp_path) if name == "sleeps without limit" else None
        done = launch(tmp_path, model, str(tmp_path), "uncaught", name, then=then)
        assert done.returncode != 0, name
        assert text in done.stderr, f"{name}: {done.stderr[-6000:]}"
        assert checkpoints(tmp_path / name) == [f"checkpoint-{last}"], name
    done = launch(tmp_path, model, str(tmp_path), "resumed", "none", *END_ONE)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        whole = torch.load(tmp_path / f"none.{rank}", weights_only=False)
        for name in END_ONE:
            assert_same_weights(torch.load(tmp_path / f"{name}.{rank}", weights_only=False), whole, ROUNDING)


# Killed, all processes at once

MOMENTS = {  # the step that the run goes on from, when it is killed in the third or while that is saved
    "in generation": 2,
    "between micro-batches": 2,
    "model saved": 2,
    "all saved but the last process": 2,
    "trainer state half saved": 2,
    "before the last checkpoint is deleted": 3,
    "saved": 3,
}
KILLS = [(processes, iterations, moment) for processes in (1, 2) for iterations in (1, 2) for moment in MOMENTS]


def load(folder: Path, *case: Any) -> list[dict[str, Any]]:
    name = ", ".join(map(str, case))
    return [torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(case[0])]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("killed")
    whole = [(processes, iterations, "never") for processes in (1, 2) for iterations in (1, 2)]
    done = subprocess.run(
        [sys.executable, str(WORKERS / "kills.py"), model, str(folder), json.dumps(whole + KILLS)],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, {"stderr": done.stderr, **json.loads((folder / "ends.json").read_text())}


@pytest.mark.distributed
@pytest.mark.parametrize(("processes", "iterations", "moment"), KILLS)
def test_a_run_that_is_killed_goes_on_as_if_it_were_not(
    killed: tuple[Path, dict[str, Any]], processes: int, iterations: int, moment: str
) -> None:
    folder, ends = killed
    first, second = ends[f"{processes}, {iterations}, {moment}"]
    assert first == [-signal.SIGKILL] * processes, ends["stderr"][-6000:]
    assert second == [0] * processes, ends["stderr"][-6000:]
    whole = load(folder, processes, iterations, "never")
    for rest, uninterrupted in zip(load(folder, processes, iterations, moment), whole, strict=True):
        assert rest["processes"] == processes
        assert rest["from"] == MOMENTS[moment]
        assert_same_weights(rest, uninterrupted, bound=0)
        assert curves(rest) == curves(uninterrupted)
        later = [generation for generation in uninterrupted["generations"] if generation[0] >= rest["from"]]
        assert rest["generations"] == later
        assert later
        assert max(entry.get("dynamic_sampling/rounds", 0) for entry in curves(rest)) > 1
        assert rest["checkpoints"] == ["checkpoint-5"]
