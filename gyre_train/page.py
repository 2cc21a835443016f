"""The page of `gyre view` beside a training run, in a process of its own: training waits for nobody who looks."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from gyre_data.child import answers, start_gyre, stop

from .config import OutputConfig

__all__ = ["Page"]

_LOG = logging.getLogger(__name__)


class Page:
    """Serves the folder while it is open, where `output.page` names a port; what goes wrong stands in page.log."""

    def __init__(self, output: OutputConfig) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        if not output.page:
            return
        url = f"http://127.0.0.1:{output.page}/"
        if answers(url):  # that of a trainer that was killed goes on, and shows this one
            _LOG.info("%s is served already, no other page is started", url)
            return
        asked = ["view", output.dir, "--no-open", "--port", str(output.page)]
        self._child = start_gyre(asked, Path(output.dir) / "page.log")
        _LOG.info("page %s while it trains, then: gyre view %s", url, output.dir)

    def close(self) -> None:
        """End the server."""
        if self._child is not None:
            stop(self._child)
            self._child = None
