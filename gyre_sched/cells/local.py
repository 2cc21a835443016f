"""Cells as processes of this machine; they live on when the controller dies, and the next one finds them again.

A process is known by its id and the time it was started, which the child itself writes down before it becomes the
program, so that no crash in between leaves one that nobody knows. An id that was given to another process later is
told apart by the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .ports import free_port
from .processes import Program, Slot, SlotTakenError

__all__ = ["LocalProcesses"]

_BORN = """\
{ echo $$; cut -d" " -f22 /proc/$$/stat 2>/dev/null || ps -o lstart= -p $$; } > "$0.new" && mv "$0.new" "$0" \\
  && exec "$@" </dev/null
"""
"""Run by sh: writes its id and start time, then becomes the program, which keeps both, and lets go of the lock."""
_BIRTH_S = 10.0
_LOOK_S = 0.005


class LocalProcesses:
    """One folder for each cell: `slot.json` says what was started, `born` which process that is, `log` what it said."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.host = folder.resolve(), host
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def slot(self, cell: str) -> Slot | None:
        """What is there."""
        folder = self.folder / cell
        try:
            told = json.loads((folder / "slot.json").read_text())
        except FileNotFoundError:
            return None
        child = self._children.get(cell)
        if child is not None:
            child.poll()  # takes a dead child's entry from the kernel
        born = self._born(folder)
        running = born is not None and _started(born[0]) == born[1]
        address = f"{self.host}:{told['port']}"
        return Slot(
            kind=told["kind"], epoch=told["epoch"], running=running, address=address, pid=born[0] if born else 0
        )

    def start(self, cell: str, program: Program) -> Slot:
        """Start it, unless it runs."""
        folder = self.folder / cell
        folder.mkdir(parents=True, exist_ok=True)
        # The child has the lock as its input until it is born: one whose controller was killed meanwhile is waited for.
        with (folder / "lock").open("a") as lock:
            _locked(lock.fileno(), _BIRTH_S, cell)
            found = self.slot(cell)
            if found is not None and found.running:
                if (found.kind, found.epoch) == (program.kind, program.epoch):
                    return found
                raise SlotTakenError(
                    f"wanted cell {cell} free for {program.kind} of epoch {program.epoch}, got {found}; end it first"
                )
            self._begin(cell, folder, program, lock.fileno())
        made = self.slot(cell)
        assert made is not None
        return made

    def _begin(self, cell: str, folder: Path, program: Program, lock: int) -> None:
        born, port = folder / "born", free_port(self.host)
        born.unlink(missing_ok=True)
        told = {"kind": program.kind, "epoch": program.epoch, "port": port}
        new = folder / "slot.new"
        new.write_text(json.dumps(told))
        new.rename(folder / "slot.json")
        command = [part.replace("{port}", str(port)).replace("{host}", self.host) for part in program.command]
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"wanted a program for cell {cell}, got {command[0]!r}, which is none; correct it")
        with (folder / "log").open("ab") as log:
            child = subprocess.Popen(
                ["sh", "-c", _BORN, str(born), *command],
                stdin=lock,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.env, "GYRE_CELL": cell},
                start_new_session=True,
            )
        self._children[cell] = child
        deadline = time.monotonic() + _BIRTH_S
        while not born.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def end(self, cell: str, *, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL for its whole session."""
        found = self.slot(cell)
        if found is None or not found.running:
            self._sweep(cell)
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and self._runs(cell):
            time.sleep(_LOOK_S)
        went = not self._runs(cell)
        self._sweep(cell)
        while self._runs(cell):
            time.sleep(_LOOK_S)
        if (child := self._children.pop(cell, None)) is not None:
            child.wait()  # takes its entry from the kernel
        return went

    def release(self, cell: str) -> None:
        """End it; this machine keeps no place for it."""
        self.end(cell, grace_s=0.0)

    def _runs(self, cell: str) -> bool:
        found = self.slot(cell)
        return found is not None and found.running

    def _sweep(self, cell: str) -> None:
        """End what is left of a session: children of an engine that was killed hold its memory."""
        born = self._born(self.folder / cell)
        if born is not None and _started(born[0]) in (None, born[1]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(born[0], signal.SIGKILL)

    @staticmethod
    def _born(folder: Path) -> tuple[int, str] | None:
        try:
            pid, started = (folder / "born").read_text().split("\n")[:2]
        except (FileNotFoundError, ValueError):
            return None
        return int(pid), started.strip()


def _started(pid: int) -> str | None:
    """When a process was started, as its birth wrote it; None when it is gone, or dead and not yet taken away."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return None
    else:
        return None if after_name[0] in "ZX" else after_name[19]
    done = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = done.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def _locked(file: int, seconds: float, cell: str) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"wanted the lock of cell {cell}, another process holds it; does a second controller run?"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return
