"""A failure on one process that ends all of them, with one message."""

from __future__ import annotations

from collections.abc import Sequence


class FailedTogether(RuntimeError):
    """What every process raises when one of them has failed and told the others."""


def failure_text(what: str, process: int, error: BaseException) -> str:
    """What one process tells the others.

    Example:
        >>> failure_text("The reward function 'score'", 1, KeyError("solution"))
        "The reward function 'score' failed on process 1: KeyError: 'solution'"
    """
    return f"{what} failed on process {process}: {type(error).__name__}: {error}"


def raise_together(told: Sequence[str | None], mine: BaseException | None, remedy: str) -> None:
    """Raises if any process has failed; every process calls this with the same `told`.

    Args:
        told: for each process its `failure_text`, or `None`.
        mine: the error of this process, or `None`.
        remedy: what to do, the end of the message.

    Raises:
        FailedTogether: the first failure, in the same words everywhere; from `mine`, where there is one. With a single
            process `mine` is raised as it is.

    Example:
        >>> raise_together([None, "Saving out failed on process 1: OSError: disk full"], None, "Free some space.")
        Traceback (most recent call last):
            ...
        hf_grpo_ext.failures.FailedTogether: Saving out failed on process 1: OSError: disk full
        All processes end here. Free some space.
    """
    failed = [text for text in told if text is not None]
    if not failed:
        return
    if len(told) == 1 and mine is not None:
        raise mine
    others = f" (the first of {len(failed)} processes that failed)" if len(failed) > 1 else ""
    raise FailedTogether(f"{failed[0]}{others}\nAll processes end here. {remedy}") from mine
