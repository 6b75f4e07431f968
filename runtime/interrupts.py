"""Ctrl-C between steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT while the body runs; the yielded call raises KeyboardInterrupt if one came.

    A step that is cut in the middle could leave half an update behind, so the body calls it
    where stopping is safe. Does nothing outside the main thread or where the program has a
    handler of its own. One that comes after the last call is raised on leaving.
    """
    received: list[int] = []

    def raise_if_interrupted() -> None:
        if received:
            received.clear()
            raise KeyboardInterrupt

    def remember(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_if_interrupted
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_if_interrupted()
