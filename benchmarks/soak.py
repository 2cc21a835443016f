"""A soak: 8 harnesses, a fleet of three cells that serve and train in turns, and somebody who kills and stops them all.

Run: python benchmarks/soak.py [--minutes 60] [--seed 0] [--out FOLDER] [--keep FOLDER]

Everything is real: `gyre proxy`, `gyre run`, the scheduler's controller, `gyre engine` in the cells that serve, `gyre
train` and its satellites in those that train, a tiny model, and harnesses over HTTP, every third of them a real client
where tools/clients/install.sh has installed some. Every one to four minutes one of them is killed (`kill -9`) or
stopped for a while; proxy, launcher and controller are started again by the same command. Harnesses keep a journal of
each reply that came to its end; at the end the record is held against it, the trainer's ledger against the
controller's, and `gyre verify` looks at both folders. 1 when anything is wrong.

`--report FOLDER` makes the report of a soak that was kept. `--out` writes soak.json there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _soak_audit import KINDS, Evidence, audit, failures, gather
from _soak_world import JOBS, World, schedule

__all__ = ["report", "soak"]

_GAP_S = (60.0, 240.0)
_GROWTH = 1.25
"""Most that a process may hold in the last third over the first: mean RSS, cells by what they do."""


def soak(folder: Path, seconds: float, seed: int, gap_s: tuple[float, float] = _GAP_S, *, real: bool = True) -> None:
    """Live it through; what is left is for `report`. The last tenth is quiet, so that what was hit can come back."""
    world = World(folder, real=real)
    try:
        world.start()
        told = {"seconds": seconds, "seed": seed, "clients": sorted(world.clients), "jobs": JOBS}
        (folder / "soak.json").write_text(json.dumps(told))
        for fault in schedule(seed, seconds * 0.9, gap_s):
            time.sleep(max(0.0, world.began + fault.at_s - time.time()))
            if time.time() < world.began + seconds * 0.9:
                world.play(fault)
        time.sleep(max(0.0, world.began + seconds - time.time()))
        world.stop()
    finally:
        world.kill_all()


def report(folder: Path) -> dict[str, Any]:
    """What a soak shows: its audit, its faults, memory by process, and how much there was of everything."""
    evidence = gather(folder)
    told, memory = json.loads((folder / "soak.json").read_text()), _lines(folder / "memory.jsonl")
    faults = _lines(folder / "faults.jsonl")
    return {
        **told,
        "counts": _counts(evidence) | {"cells_lost": failures(folder)},
        "cores_used": round(memory[-1].get("cpu_s", 0.0) / told["seconds"], 2),
        "faults": faults,
        "memory": _memory(memory),
        "audit": audit(evidence),
    }


def _counts(evidence: Evidence) -> dict[str, Any]:
    ends = Counter(end or "at work" for ends in evidence.groups.values() for end in ends)
    return {
        "replies_acknowledged": len(evidence.replies),
        "calls_recorded": len(evidence.calls),
        "calls_moved": sum(len(call.attempts) > 1 for call in evidence.calls),
        "tokens_sampled": sum(call.num_ids for call in evidence.calls),
        "executions_trained": len({execution for _, execution, _ in evidence.trained}),
        "steps": len(evidence.applied),
        "groups": len(evidence.groups),
        "groups_dropped": evidence.dropped,
        "execution_ends": dict(sorted(ends.items())),
    }


def _memory(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each process, by the first and the last third of the soak: mean MiB, their ratio, and the slope of a line."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("at_s", "cpu_s") and value:
                series.setdefault(name.replace("train c0", "core").replace("train", "satellite"), []).append(
                    (line["at_s"], value)
                )
    found = {}
    for name, points in sorted(series.items()):
        third = max(1, len(points) // 3)
        first, last = (sum(value for _, value in part) / third for part in (points[:third], points[-third:]))
        found[name] = {
            "samples": len(points), "first_mib": round(first, 1), "last_mib": round(last, 1),
            "ratio": round(last / first, 3), "slope_mib_per_h": round(_slope(points) * 3600, 1),
        }  # fmt: skip
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    mean_t, mean_v = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (v - mean_v) for t, v in points) / spread if spread else 0.0


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wrong(told: Mapping[str, Any]) -> list[str]:
    """Everything in a report that should not be."""
    found = [f"{KINDS[kind]}: {one}" for kind, some in told["audit"].items() for one in some]
    return found + [
        f"memory of {name} grew by {figures['ratio']:.2f} from the first to the last third"
        for name, figures in told["memory"].items()
        if figures["ratio"] > _GROWTH and figures["samples"] >= 30
    ]


def show(told: Mapping[str, Any]) -> str:
    """The report for people."""
    counts = told["counts"]
    lines = [
        f"soak of {told['seconds'] / 60:.0f} minutes, seed {told['seed']}, {told['jobs']} harnesses at once "
        f"({', '.join(('loop', *told['clients']))}), {told['cores_used']:.2f} cores used",
        "",
        *(f"{name.replace('_', ' '):24} {value}" for name, value in counts.items() if name != "execution_ends"),
        *(f"executions {name:13} {value}" for name, value in counts["execution_ends"].items()),
        "",
        "faults:",
        *(f"  {1 + n:3}  {_fault(fault)}" for n, fault in enumerate(told["faults"])),
        "",
        "memory, MiB                first third  last third   ratio    MiB/h",
        *(
            f"  {name:24} {one['first_mib']:11.1f} {one['last_mib']:11.1f} {one['ratio']:7.2f} "
            f"{one['slope_mib_per_h']:8.1f}"
            for name, one in told["memory"].items()
        ),
        "",
        *(f"{len(told['audit'][kind]):5}  {what}" for kind, what in KINDS.items()),
        *(f"WRONG: {one}" for one in wrong(told)),
    ]
    return "\n".join(lines)


def _fault(fault: Mapping[str, Any]) -> str:
    when = f"{fault['at_s'] / 60:5.1f} min  {fault['kind']:16}"
    if fault["pid"] is None:
        return f"{when} there was none to be hit"
    flight = fault["in_flight"]
    cells = " ".join(f"{name}:{what or '-'}" for name, what in flight["cells"].items())
    calls = f"{flight['calls']} calls" if "calls" in flight else "proxy silent"
    return f"{when} {fault.get('cell', ''):3} {fault['pause_s']:4.1f} s  {calls:12} {cells}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder that soak.json is written to")
    parser.add_argument("--keep", type=Path, help="folder for what is recorded; left there (default: a temporary one)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only report on a soak that was kept")
    options = parser.parse_args()
    folder = options.report or options.keep or Path(tempfile.mkdtemp(prefix="gyre-soak-"))
    if not options.report:
        soak(folder, options.minutes * 60, options.seed)
    told = report(folder)
    if options.out:
        (options.out / "soak.json").write_text(json.dumps(told, indent=1) + "\n")
    print(show(told))
    if not (options.report or options.keep) and not wrong(told):
        shutil.rmtree(folder)
    return 1 if wrong(told) else 0


if __name__ == "__main__":
    sys.exit(main())
