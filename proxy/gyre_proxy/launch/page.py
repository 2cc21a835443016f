"""The live page beside a recording: `gyre view` as its own process, so that who looks does not slow the recording."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gyre_data.child import answers, free_port, start_gyre, stop

__all__ = ["PAGE_PORT", "can_open", "live_page"]

PAGE_PORT = 8766
_WAIT_S = 30.0


def can_open(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a browser window can come up for the one who started this: a terminal, a display, no text browser."""
    if not sys.stderr.isatty() or (sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & environ.keys()):
        return False
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser  # that one takes the client's terminal
    except webbrowser.Error:
        return False


@contextmanager
def live_page(run: Path, *, open_it: bool) -> Iterator[str]:
    """Serve the page of `run` while the block runs, and give its address; with `open_it` a browser opens there.

    The block is entered at once: the page comes up a moment later. What it has to say goes to `view.log` in the run.
    """
    port = free_port(PAGE_PORT)
    url = f"http://127.0.0.1:{port}"
    child = start_gyre(["view", str(run), "--no-open", "--port", str(port)], run / "view.log")
    if open_it:
        threading.Thread(target=_open_when_up, args=(child, url), daemon=True).start()
    try:
        yield url
    finally:
        stop(child)


def _open_when_up(child: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while child.poll() is None and time.monotonic() < deadline:
        if answers(url):
            webbrowser.open(url)
            return
        time.sleep(0.2)
