"""A cell that trains, over the routes that its program answers:

    GET  /state?after=SEQ&wait=S   {seq, version, done: [[epoch, key]], applied: [[version, generation]]}; waits for a
                                   change beyond SEQ. `done` are micro-steps of the open step whose gradients it holds.
    POST /run {epoch, key, core}                    compute a micro-step, once
    POST /pull {epoch, version, core}               take the core's weights of that version
    POST /optimise {version, generation}            core: reduce and make that version, once, and save it
    POST /weights {version, label, receiver}        core: bring a version to `rollout.receiver`; answers {folder}

The last answers when the weights are there, and is asked only where that is set; all others answer at once. On SIGTERM
a satellite hands over what it holds and ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gyre_sched.api import Key

from .lane import CellLostError, Turn
from .processes import Processes, Program, Slot
from .settings import FleetSettings
from .wire import ask

__all__ = ["TrainerState", "Training", "core_address", "key", "read_state"]

_KEY_VARIABLE = "GYRE_PUBLISH_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """What a training program says that it has done."""

    seq: int
    version: int
    done: tuple[tuple[int, Key], ...]
    applied: tuple[tuple[int, int], ...]


def key() -> str | None:
    """What training programs ask for, where it is set."""
    return os.environ.get(_KEY_VARIABLE)


def read_state(address: str, *, after: int, wait_s: float, timeout_s: float) -> TrainerState:
    """Ask it, and wait for a change; OSError when it does not answer as it should."""
    told = ask(f"http://{address}/state?after={after}&wait={wait_s}", timeout_s=timeout_s + wait_s, key=key())
    try:
        return TrainerState(
            seq=int(told["seq"]),
            version=int(told["version"]),
            done=tuple((int(epoch), _key(key)) for epoch, key in told["done"]),
            applied=tuple((int(version), int(generation)) for version, generation in told["applied"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConnectionError(f"{address}: wanted a trainer's state, got {told!r:.200}") from error


def _key(told: Sequence[Any]) -> Key:
    step, query, part = told
    return int(step), str(query), int(part)


class Training:
    """The steps of training, each of which may be begun again by the next controller."""

    def __init__(self, settings: FleetSettings, processes: Processes) -> None:
        self._settings, self._processes = settings, processes
        self._core = settings.cells[0].id

    def join(self, turn: Turn, cell: str, epoch: int) -> int:
        """Bring a cell to train; returns the version it starts with."""
        settings = self._settings.train
        found = self._processes.slot(cell)
        if found is not None and found.running and (found.kind, found.epoch) != ("train", epoch):
            self._processes.end(cell, grace_s=settings.grace_s)
        template = settings.core_command if cell == self._core else settings.command
        values = {"{cell}": cell, "{core}": core_address(self._settings, self._processes)}
        command = []
        for part in template:
            for name, value in values.items():
                part = part.replace(name, value)
            command.append(part)
        slot = self._processes.start(cell, Program(kind="train", epoch=epoch, command=tuple(command)))
        what = f"trainer {slot.address} of cell {cell} ready"
        return turn.until(lambda: self._version(cell, slot), settings.ready_s, what)

    def _version(self, cell: str, slot: Slot) -> int | None:
        try:
            return read_state(slot.address, after=-1, wait_s=0, timeout_s=self._settings.call_s).version
        except OSError:
            now = self._processes.slot(cell)
            if now is None or not now.running:
                raise CellLostError(f"the trainer of cell {cell} ended before it was ready; see its log") from None
            return None

    def tell(self, turn: Turn, cell: str, route: str, body: dict[str, Any]) -> None:
        """Say what to do; it answers at once, and its state tells when it is done."""

        def say() -> None:
            slot = self._processes.slot(cell)
            if slot is None or not slot.running or slot.kind != "train":
                raise CellLostError(f"wanted a trainer in cell {cell}, got {slot}")
            more = {"core": core_address(self._settings, self._processes)} if cell != self._core else {}
            ask(f"http://{slot.address}/{route}", {**body, **more}, timeout_s=self._settings.call_s, key=key())

        turn.insist(say)

    def leave(self, cell: str) -> None:
        """Have a satellite hand over and end."""
        found = self._processes.slot(cell)
        if found is not None and found.kind == "train" and found.running:
            self._processes.end(cell, grace_s=self._settings.train.grace_s)


def core_address(settings: FleetSettings, processes: Processes) -> str:
    """Of the core's training program, which may have ended; empty when it serves."""
    found = processes.slot(settings.cells[0].id)
    return found.address if found is not None and found.kind == "train" else ""
