"""Publish by Mooncake: `gyre receive` beside each engine reads the checkpoint out of the trainer's memory.

RDMA by configuration (written, not yet verified), TCP where there is none (tested). Mooncake has neither checksum nor
authentication: whoever reaches its port can read and write what is registered. So files are mapped privately (a foreign
write cannot reach the checkpoint), and name, version and sha256 travel by the receiver's own HTTP route, which asks for
a key. The engine computes while bytes travel; it is paused only to load them from its own machine's memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_data.errors import ConfigError, EngineError
from gyre_data.installing import pip_install
from gyre_data.types import PolicyVersion

from .control import Deadline, EngineControl, ask

__all__ = ["KEY_VARIABLE", "SIDE_FILES", "MooncakeCarrier", "Transfer"]

KEY_VARIABLE = "GYRE_PUBLISH_KEY"
SIDE_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""Sent with the request itself."""
_PIECE_BYTES = 64 << 20


class Transfer:
    """One process's end of Mooncake; made when first needed."""

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        self._settings = (host, "P2PHANDSHAKE", protocol, device)
        self._engine: Any = None
        self._lock = threading.Lock()

    def _opened(self) -> Any:
        with self._lock:
            if self._engine is None:
                os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it tells its whole topology
                try:
                    from mooncake.engine import TransferEngine
                except ImportError as error:
                    raise ConfigError(
                        f"publish.method = mooncake: wanted the package and its libraries, got {error}; run "
                        f"{pip_install('transfer')}, and install the system's libibverbs1 and libnuma1"
                    ) from None
                engine = TransferEngine()
                if engine.initialize(*self._settings) != 0:
                    raise ConfigError(
                        f"Mooncake: wanted it to start with {self._settings}, it refused; check host, protocol, device"
                    )
                self._engine = engine
            return self._engine

    @property
    def session(self) -> str:
        """How the other side addresses this process."""
        return f"{self._settings[0]}:{self._opened().get_rpc_port()}"

    def register(self, data: np.ndarray) -> int:
        """Open memory to the other side; returns its address."""
        if self._opened().register_memory(data.ctypes.data, data.nbytes) != 0:
            raise EngineError(f"Mooncake: wanted {data.nbytes} bytes registered, it refused; is there room?")
        return int(data.ctypes.data)

    def unregister(self, data: np.ndarray) -> None:
        """Close it again."""
        self._opened().unregister_memory(data.ctypes.data)

    def read(self, session: str, address: int, into: np.ndarray, deadline: Deadline) -> None:
        """Fill `into` from the other side's memory, in pieces; EngineError when it fails or takes too long."""
        here, engine = self.register(into), self._opened()
        for start in range(0, into.nbytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, into.nbytes - start)
            failed = engine.transfer_sync_read(session, here + start, address + start, size) != 0
            if failed or deadline.passed:
                self._engine = None  # one that has failed may refuse every later transfer
                raise EngineError(
                    f"Mooncake: wanted {into.nbytes} bytes from {session}, "
                    f"{'it failed' if failed else 'the time was up'} at {start}; is the trainer there?"
                )
        self.unregister(into)


class MooncakeCarrier:
    """Offers the folder's files and has each engine's receiver fetch them; the engine then loads the copy."""

    whole = True

    def __init__(
        self, receivers: Sequence[str], *, host: str = "127.0.0.1", protocol: str = "tcp", device: str = ""
    ) -> None:
        self._receivers = tuple(receivers)
        self._transfer = Transfer(host, protocol, device)
        self._offers: list[_Offer] = []
        self._lock = threading.Lock()

    def stage(self, number: int, folder: Path, version: PolicyVersion, deadline: Deadline) -> str:
        """Have the engine's receiver fetch the files; returns their folder on the engine's machine."""
        return self.bring(self._receivers[number], folder, version, deadline)

    def bring(self, receiver: str, folder: Path, version: PolicyVersion, deadline: Deadline) -> str:
        """Have this receiver fetch the files; returns their folder on its machine."""
        files = self._offer(folder, version)
        body = {"version": str(version), "session": self._transfer.session, "timeout_s": deadline.left(), **files}
        url = f"{receiver.rstrip('/')}/pull"
        answer = ask("POST", url, body, timeout_s=deadline.left(), key=os.environ.get(KEY_VARIABLE))
        if answer.get("version") != str(version) or not isinstance(answer.get("folder"), str):
            raise EngineError(f"{url}: wanted the folder of {version}, got {answer}; is it `gyre receive`?")
        return str(answer["folder"])

    def swap(self, engine: EngineControl, staged: str, version: PolicyVersion, deadline: Deadline) -> None:
        """Load and flush."""
        engine.load(staged, str(version), deadline)

    def _offer(self, folder: Path, version: PolicyVersion) -> dict[str, Any]:
        with self._lock:
            if not self._offers or self._offers[-1].version != version:
                self._offers.append(_Offer(folder, version, self._transfer))
                # The one before stays: a receiver that hung may still be reading it.
                for old in self._offers[:-2]:
                    old.close(self._transfer)
                del self._offers[:-2]
            return self._offers[-1].files


class _Offer:
    """A folder's files, mapped and registered."""

    def __init__(self, folder: Path, version: PolicyVersion, transfer: Transfer) -> None:
        self.version = version
        self._maps = []
        offered = []
        for file in sorted(folder.glob("model*.safetensors")):
            data = np.memmap(file, np.uint8, "c")
            self._maps.append(data)
            digest = hashlib.sha256(memoryview(data.data)).hexdigest()
            offered.append(
                {"name": file.name, "bytes": data.nbytes, "address": transfer.register(data), "sha256": digest}
            )  # fmt: skip
        texts = {name: (folder / name).read_text("utf-8") for name in SIDE_FILES if (folder / name).is_file()}
        self.files = {"files": offered, "texts": texts}

    def close(self, transfer: Transfer) -> None:
        for data in self._maps:
            transfer.unregister(data)
