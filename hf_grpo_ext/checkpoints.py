"""Which checkpoints are complete, so that a run may go on from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def is_complete(checkpoint: Path) -> bool:
    """Whether saving came to its end: `trainer_state.json` is written last, so it is there and whole."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in the output folder of a run, complete or not, the latest first."""
    steps = {
        int(match[1]): path
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }
    return [steps[step] for step in sorted(steps, reverse=True)]


def checkpoint_to_resume(asked: Any, output_dir: str) -> tuple[Any, list[Path]]:
    """The checkpoint that a training goes on from.

    Args:
        asked: `resume_from_checkpoint` of `train`: the path of a checkpoint, or `True` for the latest complete one.
        output_dir: of the run.

    Returns:
        `(checkpoint, skipped)`: what to resume from, and the later checkpoints that are not complete. Where there is
        none at all it is what was asked, which transformers has a message for.

    Raises:
        ValueError: the checkpoint, or every one in `output_dir`, is not complete.
    """
    if asked is not True:
        if asked and Path(asked).is_dir() and not is_complete(Path(asked)):
            raise ValueError(
                f"{asked} has no {TRAINER_STATE_NAME} that can be read, which is written last: saving it was "
                "interrupted. resume_from_checkpoint=True takes the latest checkpoint that is complete."
            )
        return asked, []
    checkpoints = checkpoints_in(Path(output_dir))
    for place, checkpoint in enumerate(checkpoints):
        if is_complete(checkpoint):
            return str(checkpoint), checkpoints[:place]
    if checkpoints:
        raise ValueError(
            f"No checkpoint in {output_dir} is complete (none has a {TRAINER_STATE_NAME} that can be read): saving was "
            "interrupted. Train without resume_from_checkpoint."
        )
    return True, []
