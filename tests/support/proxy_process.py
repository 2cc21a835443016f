"""`gyre proxy` as a process of its own, to be stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from gyre_data.child import free_port
from tests.support.engines import ROOT

__all__ = ["ProxyProcess"]


class ProxyProcess:
    """Starts on construction and is up then; `run.json` says where."""

    def __init__(self, run: Path, engine: str | None, tokenizer: Path, *flags: str, verify: Any = True) -> None:
        self.run, self._verify = run, verify
        behind = ["--engine", engine] if engine else ["--await-engines"]
        start = "import sys; from gyre_data.main import run; sys.exit(run())"
        command = [sys.executable, "-c", start, "proxy", "--run", str(run), *behind]
        if not (run / "run.json").exists():  # a proxy that comes back takes its own port again
            command += ["--port", str(free_port())]
        path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
        self._log = (run.parent / "proxy.log").open("ab")
        self._process = subprocess.Popen(
            [*command, "--tokenizer", str(tokenizer), *flags],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.url = self._wait()

    def _wait(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                info = json.loads((self.run / "run.json").read_text())
                if info.get("pid") == self._process.pid:
                    url = str(info["endpoints"]["proxy"])
                    if httpx.get(url + "/api/status", trust_env=False, verify=self._verify).status_code in (200, 401):
                        return url
            except (FileNotFoundError, KeyError, httpx.TransportError):
                pass
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"gyre proxy did not come up: {(self.run.parent / 'proxy.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self.kill()
