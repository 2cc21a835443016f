"""SIGTERM and Ctrl-C as a request to end in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["asked_to_stop"]


@contextmanager
def asked_to_stop(ask: Callable[[signal.Signals], None], *, once: bool = True) -> Iterator[None]:
    """While the context is open, SIGTERM and Ctrl-C call `ask`; with `once`, a second Ctrl-C interrupts at once.

    Outside the main thread nothing changes: signals belong to whoever owns that one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _: Any) -> None:
        if once:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
        ask(signal.Signals(number))

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
