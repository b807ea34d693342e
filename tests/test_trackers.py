"""What reaches the trackers and the console: the components under their names, as plain numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny import save_tiny_model
from tiny_env import G, constant, logged, make_trainer, quiet, trained
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import rewrite_logs

pytestmark = quiet
# Two prompts with four rollouts each; `brief` applies to no rollout of the first step.
FIRST = {"right": [1.0, 0.0] * G, "brief": [None] * 2 * G}
SECOND = {"right": [0.0, 0.0, 0.0, 1.0] * 2, "brief": [0.5, 0.25] * G}
TWO_STEPS: dict[str, Any] = {"max_steps": 2, "adv_estimator": "gdpo"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


def in_turn(*answers: Any) -> Any:
    """A reward function that gives one answer a batch."""
    left = iter(answers)

    def score(**_: Any) -> Any:
        return next(left)

    return score


class Listener(TrainerCallback):
    """Keeps what a tracker is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        self.sent.append(dict(logs))


def test_the_components_are_sent_as_numbers_under_their_names(tiny_model: str, tmp_path: Path) -> None:
    listener = Listener()
    trainer = trained(
        tiny_model,
        tmp_path,
        in_turn(SECOND, SECOND, SECOND),
        callbacks=[listener],
        trainer={"eval_dataset": Dataset.from_dict({"prompt": ["9 + 9 =", "8 + 8 ="]})},
        per_device_eval_batch_size=2 * G,
        **TWO_STEPS,
    )
    trainer.evaluate()
    names = {name for entry in listener.sent for name in rewrite_logs(entry)}
    for component in ("right", "brief"):
        for what in ("mean", "std", "frac_groups_without_signal", "advantage_share"):
            assert f"train/rewards/{component}/{what}" in names
            assert f"eval/rewards/{component}/{what}" in names
    assert "train/rewards/correlation/brief/right" in names
    values = [value for entry in listener.sent for value in entry.values()]
    assert {type(value) for value in values} <= {float, int}
    assert all(map(math.isfinite, values))


def test_a_component_that_applies_to_no_rollout_has_a_gap(tiny_model: str, tmp_path: Path) -> None:
    listener = Listener()
    trained(tiny_model, tmp_path, in_turn(FIRST, SECOND), callbacks=[listener], **TWO_STEPS)
    first, second = (entry for entry in listener.sent if "loss" in entry)
    # None is TRL's gap: TensorBoard leaves it out, wandb and trackio store it as such.
    assert {name for name, value in first.items() if value is None} == {"rewards/brief/mean", "rewards/brief/std"}
    assert first["rewards/right/mean"] == 0.5
    assert second["rewards/brief/mean"] == pytest.approx(0.375)


def test_tensorboard_has_the_curves(tiny_model: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    board = TensorBoardCallback(SummaryWriter(str(tmp_path / "runs")))
    trainer = trained(tiny_model, tmp_path, in_turn(FIRST, SECOND), callbacks=[board], **TWO_STEPS)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    curves = {
        name: [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        for name in ("reward", "rewards/right/mean", "rewards/right/advantage_share", "rewards/brief/mean")
    }
    assert curves["rewards/right/mean"] == [(1, 0.5), (2, 0.25)]
    assert curves["rewards/brief/mean"] == [(2, 0.375)]
    assert [value for _, value in curves["reward"]] == pytest.approx(logged(trainer, "reward"))


def test_the_table_in_the_console_has_the_components_and_what_trained(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    trainer = make_trainer(
        tiny_model, tmp_path, constant(SECOND), adv_estimator="gdpo", log_completions=True, disable_tqdm=True
    )
    trainer.train()
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in printed.splitlines()]
    cells = [line[2:7] for line in lines if len(line) == 9]  # within the frames of the panel and of the table
    assert cells[0] == ["Prompt", "Completion", "brief", "right", "Advantage"]
    advantages = trainer.scored[-1]["advantages"].tolist()
    expected = zip(SECOND["brief"], SECOND["right"], advantages, strict=True)
    assert [row[2:] for row in cells[1 : 1 + 2 * G]] == [[f"{value:.2f}" for value in row] for row in expected]
