"""The asynchronous trainer with the real worker: a child process, and a server that answers as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import save_tiny_model
from tiny_async import make_async_trainer, run_on_cpu
from tiny_env import PROMPTS, chat, logged, quiet, tool_tokenizer
from trl.experimental.async_grpo import async_rollout_worker
from workers import async_http
from workers.async_http import CompletionServer, Faulty

pytestmark = [quiet, pytest.mark.slow]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    # TRL's worker wants vLLM to be there, and uses its protocol alone.
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CompletionServer]:
    with CompletionServer(save_tiny_model(tmp_path / "model", vocab_size=64)) as server:
        yield server


def make_trainer(server: CompletionServer, folder: Path, reward_funcs: Any, **args: Any) -> Any:
    """Two groups of four a step, one group sampled at a time."""
    parts = {"reward_funcs": reward_funcs, "processing_class": tool_tokenizer(), "weight_transfer": server}
    fields = {"vllm_server_base_url": server.url, "max_inflight_tasks": 4, "max_staleness": 100} | args
    parts |= fields.pop("trainer", {})
    return make_async_trainer(server.folder, folder, None, chat(), trainer=parts, **fields)


def test_components_of_functions_and_environments(server: CompletionServer, tmp_path: Path) -> None:
    weights = {"short": 2.0, "last": 0.0, "warm": 4.0}
    trainer = make_trainer(
        server,
        tmp_path / "out",
        [async_http.named, async_http.by_sample],
        trainer={"environment_factory": async_http.Room},
        reward_weights=weights,
        adv_estimator="gdpo",
        learning_rate=1e-3,
        max_steps=2,
    )
    trainer.train()
    components = {"short", "odd", "last", "tidy", "warm"}
    for entry in trainer.state.log_history[:2]:
        assert {key.removeprefix("rewards/") for key in entry if key.startswith("rewards/")} == components
        assert entry["rewards/warm"] == 0.25
        want = sum(weights.get(name, 1.0) * entry[f"rewards/{name}"] for name in components)
        assert entry["reward"] == pytest.approx(want)
        assert entry["num_valid_samples"] == 8
    # The server had the weights of the trainer, and every log-probability stands at its token.
    assert logged(trainer, "token_mult_prob_error")[0] == pytest.approx(1, abs=1e-5)
    assert trainer.watch.gradients[0].norm() > 1e-3
    for name, weight in server.model.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name]), name


def test_dropped_groups_are_done_with(server: CompletionServer, tmp_path: Path) -> None:
    """Half of the prompts have no signal, and an epoch counts them."""
    fields = {"drop_groups_without_signal": True, "save_strategy": "steps", "save_steps": 1, "max_steps": -1}
    trainer = make_trainer(server, tmp_path, async_http.of_even_prompts, num_train_epochs=1, **fields)
    trainer.train()
    # Groups 0, 2 | 4, 6 | 8, 10 train. TRL counts those of the next step, which are fetched ahead.
    assert trainer.state.global_step == 2
    assert trainer._trained_groups == set(range(11))
    assert logged(trainer, "rollout/dropped_groups_total")[0] >= 1
    assert logged(trainer, "frac_reward_zero_std")[0] == pytest.approx(0.5, abs=0.2)
    assert logged(trainer, "batch/samples_per_step") == [8, 8]

    state = json.loads((tmp_path / "checkpoint-1" / "rollout_state.json").read_text())
    assert state["prompt_index"] == 7
    server.prompts.clear()
    resumed = make_trainer(server, tmp_path, async_http.of_even_prompts, num_train_epochs=1, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    assert tool_tokenizer().decode(server.prompts[0]).split()[2] == PROMPTS[7][0]


def test_a_pass_without_signal_ends_the_training(server: CompletionServer, tmp_path: Path) -> None:
    trainer = make_trainer(server, tmp_path, async_http.constant, drop_groups_without_signal=True)
    with pytest.raises(RuntimeError, match="No group of the last 10 had rewards that differ.*set drop_groups"):
        trainer.train()


def test_rewards_that_take_too_long(server: CompletionServer, tmp_path: Path) -> None:
    trainer = make_trainer(server, tmp_path, async_http.endless, reward_timeout=0.5)
    with pytest.raises(RuntimeError, match=r"took longer than reward_timeout=0.5 seconds \(reward functions: endless"):
        trainer.train()


def test_a_worker_that_is_killed_in_the_middle_of_a_sample(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_rollout_worker.AsyncRolloutWorker, "_loop_cls", async_http.HalfASample)
    trainer = make_trainer(server, tmp_path, async_http.constant)
    with pytest.raises(RuntimeError, match="Its process is gone .exit code -9"):
        trainer.train()


def test_prompts_of_plain_text_are_refused(server: CompletionServer, tmp_path: Path) -> None:
    parts = {"reward_funcs": async_http.constant, "processing_class": tool_tokenizer(), "weight_transfer": server}
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    with pytest.raises(ValueError, match=r"a prompt that is plain text, '0 \+ 1 =': the rollout worker puts"):
        make_async_trainer(server.folder, tmp_path, None, dataset, trainer=parts)


class OtherLoop(async_rollout_worker._AsyncRolloutLoop): ...


def test_a_loop_with_other_advantages_is_refused(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_rollout_worker.AsyncRolloutWorker, "_loop_cls", OtherLoop)
    with pytest.raises(ValueError, match="OtherLoop, scores rollouts with advantages of TRL's"):
        make_trainer(server, tmp_path, async_http.constant)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "ZeroDivisionError: no such answer"),
        ("answers too little", "ValueError: The reward function 'faulty' returned 1 values for 4 completions"),
        ("is killed", "Its process is gone .exit code -9"),
        ("hangs", "heartbeat stale: .* child is hung"),
    ],
)
def test_a_worker_that_fails_leaves_a_checkpoint(
    server: CompletionServer, tmp_path: Path, fault: str, text: str
) -> None:
    fields = {"save_strategy": "steps", "save_steps": 100, "heartbeat_stale_after_s": 5 if fault == "hangs" else 300}
    trainer = make_trainer(server, tmp_path, Faulty(fault, groups=4), max_steps=9, **fields)
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(RuntimeError, match=f"worker has failed.* Step 2 is saved in {checkpoint}. .*{text}"):
        trainer.train()
    assert json.loads((checkpoint / "rollout_state.json").read_text())["prompt_index"] == 4
    if fault == "is killed":
        resumed = make_trainer(server, tmp_path, Faulty("", groups=100), max_steps=3, **fields)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.global_step == 3
        start, end = (trained.watch.weights[index] for trained, index in ((resumed, 0), (trainer, -1)))
        assert any(not torch.equal(start[name], end[name]) for name in start)
