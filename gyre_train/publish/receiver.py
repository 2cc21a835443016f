"""`gyre receive`: stands beside an engine and fetches published weights into a folder that the engine can load.

POST /pull {version, session, timeout_s, files: [{name, bytes, address, sha256}], texts: {name: text}} answers
{version, folder} once every byte is there and its sha256 is right; anything less leaves no folder.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from gyre_data.errors import ConfigError, EngineError, GyreError

from .control import Deadline
from .mooncake import KEY_VARIABLE, SIDE_FILES, Transfer

__all__ = ["Receiver", "is_loopback", "receive"]

_LOG = logging.getLogger(__name__)
_WEIGHTS_NAME = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_KEPT = 2
"""Versions that stay: the one that is served and the one before."""
_MOST_BODY_BYTES = 64 << 20


class Receiver:
    """Fetches versions into `folder`, one at a time."""

    def __init__(self, folder: Path, transfer: Transfer) -> None:
        self._folder, self._transfer = folder, transfer
        self._lock = threading.Lock()
        self._has: dict[str, list[tuple[str, str]]] = {}
        """Names and digests of the files of each version that was fetched."""
        self._came: list[Path] = []
        """Those that stay, the newest last: by their times many would be equally new to a file system."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def pull(self, body: dict[str, Any]) -> Path:
        """Fetch what `body` describes and return its folder; a GyreError leaves nothing behind."""
        files, texts, version = body.get("files"), body.get("texts"), body.get("version")
        named = [f.get("name") for f in files if isinstance(f, dict)] if isinstance(files, list) else []
        if (
            not isinstance(version, str)
            or not named
            or not all(isinstance(name, str) and _WEIGHTS_NAME.fullmatch(name) for name in named)
            or not isinstance(texts, dict)
            or not set(texts) <= set(SIDE_FILES)
        ):
            raise ConfigError(f"wanted a version, model*.safetensors files and {', '.join(SIDE_FILES)}, got others")
        deadline = Deadline(float(body["timeout_s"]))
        wanted = [(file["name"], file["sha256"]) for file in body["files"]]
        final = self._folder / re.sub(r"[^A-Za-z0-9._-]", "_", version)
        with self._lock:
            if self._has.get(version) == wanted and final.is_dir():
                return final.resolve()  # for another engine of this machine; the first one may be reading it
            made = Path(tempfile.mkdtemp(prefix=".incoming-", dir=self._folder))
            try:
                for file in body["files"]:
                    self._fetch(made / file["name"], file, str(body["session"]), deadline)
                for name, text in texts.items():
                    (made / name).write_text(text, "utf-8")
                if final.exists():
                    final.rename(self._folder / f".old-{made.name}")
                made.rename(final)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
            self._has[version] = wanted
            self._came = [*(one for one in self._came if one != final), final]
            self._forget()
            return final.resolve()

    def _fetch(self, path: Path, file: dict[str, Any], session: str, deadline: Deadline) -> None:
        size = int(file["bytes"])
        if size > shutil.disk_usage(self._folder).free:
            raise EngineError(f"{path.name}: wanted room for {size} bytes in {self._folder}, there is less; free some")
        with path.open("wb") as opened:
            opened.truncate(size)
        data = np.memmap(path, np.uint8, "r+")
        self._transfer.read(session, int(file["address"]), data, deadline)
        found = hashlib.sha256(memoryview(data.data)).hexdigest()
        if found != file["sha256"]:
            raise EngineError(
                f"{path.name}: wanted sha256 {file['sha256']}, {found} arrived; the memory was changed on the way: "
                "publish again, on a network that nobody else reaches"
            )

    def _forget(self) -> None:
        folders = [p for p in self._folder.iterdir() if p.is_dir()]
        earlier = [p for p in folders if not p.name.startswith(".") and p not in self._came]  # of another process
        here = [*sorted(earlier, key=lambda p: p.stat().st_mtime_ns), *(p for p in self._came if p in folders)]
        for old in [p for p in folders if p.name.startswith(".")] + here[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        self._came = [p for p in self._came if p in here[-_KEPT:]]


def receive(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    protocol: str = "tcp",
    device: str = "",
    on_bound: Callable[[ThreadingHTTPServer], None] = lambda _: None,
) -> None:
    """Serve a Receiver until interrupted; `on_bound` gets the server once it listens. Off loopback it wants a key."""
    key = os.environ.get(KEY_VARIABLE)
    if not key and not is_loopback(host):
        raise ConfigError(f"host {host}: wanted a key for others to publish here, got none; set {KEY_VARIABLE}")
    receiver = Receiver(folder, Transfer(host, protocol, device))
    server = ThreadingHTTPServer((host, port), _handler(receiver, key))
    server.daemon_threads = True
    on_bound(server)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _handler(receiver: Receiver, key: str | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if key and not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {key}"):
                self._answer(401, {"error": f"wanted the key of this receiver; set {KEY_VARIABLE} for the trainer"})
                return
            try:
                size = int(self.headers.get("Content-Length", "0"))
                if self.path != "/pull" or not 0 < size <= _MOST_BODY_BYTES:
                    self._answer(404, {"error": "wanted POST /pull with a body"})
                    return
                body = json.loads(self.rfile.read(size))
                self._answer(200, {"version": body["version"], "folder": str(receiver.pull(body))})
            except (GyreError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                _LOG.warning("%s", error)
                self._answer(400, {"error": f"{type(error).__name__}: {error}"})

        def _answer(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            _LOG.debug(format, *args)

    return Handler
