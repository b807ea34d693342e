"""Limits on the time of a call that may hang in any way."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

GRACE = 30.0  # seconds that a call which heeds no interruption has left, before the process ends
STDERR = 2  # the file that it is, whatever `sys.stderr` was replaced by
AGAIN = 1.0  # seconds after which a call that goes on is interrupted once more


class _TimeIsUp(BaseException):
    """No `Exception`, which the code that is interrupted might catch."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Interrupts the block when its time is up.

    A thread interrupts what runs Python, sleeps or waits. A regular expression keeps every other thread from running:
    the kernel's timer of the time on the CPU interrupts that. What heeds neither, such as native code that keeps the
    interpreter to itself, ends the process `GRACE` seconds later, with its stack on stderr. SIGVTALRM and the one timer
    of `faulthandler` are taken for the time of the block.

    Args:
        seconds: how long the block may take; `None` for no limit.
        what: its name in the message, at the start of a sentence.

    Raises:
        TimeoutError: the time is up; also where the block has swallowed the interruption, once it ends.
        ValueError: there is a limit, and this is not the main thread of a POSIX process.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "pthread_kill") or threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"{what} has a time limit of {seconds:g} seconds, which takes signals to the main thread, on Linux or "
            "macOS. Train in the main thread, or set reward_timeout=None."
        )
    main, deadline = threading.get_ident(), time.monotonic() + seconds
    over = threading.Event()

    def interrupt(*_: object) -> None:
        if not over.is_set() and time.monotonic() >= deadline:
            raise _TimeIsUp

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            signal.pthread_kill(main, signal.SIGVTALRM)
            wait = AGAIN

    watcher = threading.Thread(target=watch, name="time_limit", daemon=True)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=STDERR)
    watcher.start()
    try:
        yield
        over.set()
    except _TimeIsUp as interruption:
        raise TimeoutError(_too_long(what, seconds)).with_traceback(interruption.__traceback__) from None
    finally:
        over.set()
        watcher.join()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if time.monotonic() >= deadline:
        raise TimeoutError(_too_long(what, seconds))


async def awaited(call: Awaitable[T], seconds: float | None, what: str) -> T:
    """The result of a coroutine that may take so many seconds.

    One that blocks its event loop cannot be interrupted: the process ends `GRACE` seconds later.

    Raises:
        TimeoutError: the time is up.
    """
    if seconds is None:
        return await call
    text = _too_long(what, seconds)
    end = threading.Timer(
        seconds + GRACE, _end_process, (f"{text} It blocks the event loop: await what it waits for.",)
    )
    end.daemon = True
    end.start()
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        end.cancel()
    if not done:
        task.cancel()
        raise TimeoutError(text)
    return task.result()


def _too_long(what: str, seconds: float) -> str:
    return f"{what} took longer than reward_timeout={seconds:g} seconds."


def _end_process(text: str) -> None:
    os.write(STDERR, f"{text}\n".encode())
    faulthandler.dump_traceback(file=STDERR)
    os._exit(1)
