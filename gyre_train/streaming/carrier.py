"""How a replica's tensors reach another process: a file that both see, or out of the owner's memory by Mooncake.

Either way they travel as one safetensors image with its sha256, so that what arrives is what was offered or an error.
Whoever offers keeps it there until `withdraw`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save

from gyre_data.errors import EngineError
from gyre_train.publish.control import Deadline
from gyre_train.publish.mooncake import Transfer

from .settings import StreamConfig

__all__ = ["Carrier", "Offer", "open_carrier"]

Offer = dict[str, Any]
"""What the other side needs to fetch: JSON."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


class Carrier(Protocol):
    """One process's end; both ends are of the same kind."""

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Offer:
        """Lay out tensors for others under a name that nobody else uses; they are copied."""
        ...

    def fetch(self, offer: Offer, deadline: Deadline) -> dict[str, torch.Tensor]:
        """Return another's tensors, on the CPU; EngineError when they are gone, late or not what was offered."""
        ...

    def withdraw(self, name: str) -> None:
        """Let go of an offer of this process; nothing happens when there is none."""
        ...


def open_carrier(stream: StreamConfig, folder: Path, host: str) -> Carrier:
    """The carrier that a config asks for: `folder` is the shared one, `host` how the other side reaches this one."""
    if stream.method == "mooncake":
        return _Memory(Transfer(host, stream.protocol))
    return _Files(folder)


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Offer:
        image = save(dict(tensors))
        file = self._folder / f"{name}.safetensors"
        partial = file.with_suffix(".partial")
        partial.write_bytes(image)
        partial.rename(file)
        return {"file": file.name, "sha256": hashlib.sha256(image).hexdigest()}

    def fetch(self, offer: Offer, deadline: Deadline) -> dict[str, torch.Tensor]:
        name = str(offer.get("file"))
        if not _NAME.fullmatch(name):
            raise EngineError(f"{name}: wanted the name of a file in {self._folder}, it is none; use one stream.method")
        try:
            image = (self._folder / name).read_bytes()
        except OSError as error:
            raise EngineError(f"{self._folder / name}: wanted tensors, got {error}; do all see this folder?") from error
        return _checked(image, offer, name)

    def withdraw(self, name: str) -> None:
        (self._folder / f"{name}.safetensors").unlink(missing_ok=True)


class _Memory:
    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._held: dict[str, np.ndarray[Any, Any]] = {}

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Offer:
        self.withdraw(name)
        image = np.frombuffer(bytearray(save(dict(tensors))), np.uint8)
        self._held[name] = image
        address = self._transfer.register(image)
        digest = hashlib.sha256(memoryview(image.data)).hexdigest()
        return {"session": self._transfer.session, "address": address, "bytes": image.nbytes, "sha256": digest}

    def fetch(self, offer: Offer, deadline: Deadline) -> dict[str, torch.Tensor]:
        try:
            session, address, size = str(offer["session"]), int(offer["address"]), int(offer["bytes"])
        except (KeyError, ValueError) as error:
            raise EngineError(f"wanted a place in memory, got {offer}; use one stream.method everywhere") from error
        image = np.empty(size, np.uint8)
        self._transfer.read(session, address, image, deadline)
        return _checked(image.tobytes(), offer, session)

    def withdraw(self, name: str) -> None:
        image = self._held.pop(name, None)
        if image is not None:
            self._transfer.unregister(image)


def _checked(image: bytes, offer: Offer, where: str) -> dict[str, torch.Tensor]:
    found = hashlib.sha256(image).hexdigest()
    if found != offer.get("sha256"):
        raise EngineError(f"{where}: wanted sha256 {offer.get('sha256')}, {found} arrived; it is asked for again")
    tensors: dict[str, torch.Tensor] = load(image)
    return tensors
