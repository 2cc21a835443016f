"""Commands in a child process, with the time and the memory that they took."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Took", "gyre"]

_EVERY_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """What a command said, and what it took.

    `anonymous_mib` is memory of its own. `resident_mib` counts mapped pages of files too, which the system takes back
    when somebody needs them: the kernel's own high-water mark. The first is the largest value seen every 10 ms.
    """

    out: str
    wall_s: float
    cpu_s: float
    anonymous_mib: float
    resident_mib: float


def gyre(*arguments: str) -> Took:
    """Run `gyre ARGUMENTS` as a user would and wait for it."""
    with tempfile.TemporaryFile("w+") as out:
        before, started = os.times(), time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "gyre_data", *arguments], stdout=out)
        anonymous = resident = 0.0
        while process.poll() is None:
            memory = _memory(process.pid)
            anonymous = max(anonymous, memory.get("RssAnon", 0.0) + memory.get("RssShmem", 0.0))
            resident = max(resident, memory.get("VmHWM", 0.0))
            time.sleep(_EVERY_S)
        wall, after = time.perf_counter() - started, os.times()
        if process.returncode:
            raise RuntimeError(f"gyre {' '.join(arguments)} ended with {process.returncode}")
        out.seek(0)
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Took(out=out.read(), wall_s=wall, cpu_s=cpu, anonymous_mib=anonymous, resident_mib=resident)


def _memory(pid: int) -> dict[str, float]:
    """MiB by name, of a live process on Linux; nothing elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith(("RssAnon", "RssShmem", "VmHWM")))
    return {name.rstrip(":"): int(kib) / 1024 for name, kib, _ in pairs}
