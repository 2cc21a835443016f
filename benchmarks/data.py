"""Size and speed of runs on disk: durable commits, counting, scanning, one tree, a live run, bytes a token.

Run: python benchmarks/data.py [--quick] [--json]. In full it makes 300 million tokens (2.5 GB, minutes); quickly, ten
million. Tokens and texts are those of real source files, executions have the shape of long agent runs (`_shape.py`).
Figures named `recorded` are of a run as a proxy leaves it, a batch a call; the others of compacted runs. Exit status 1
when a bound is missed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import _frame
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from _child import Took, gyre
from _live import lags
from _made import TOKENS, Part, link_run, write_part
from _plot import chart
from _source import Source, read_source

import gyre_data
from gyre_data.arrays import offsets_and_values
from gyre_data.schema import AgentRole, Author, CallStatus, Extension, NodeKind
from gyre_data.types import Attempt, Call, Node, VersionSpan

BOUNDS = {
    "stats_100m_s": (None, 10.0),
    "stats_100m_anonymous_mib": (None, 1024.0),
    "recorded_100m_stats_s": (None, 10.0),
    "recorded_100m_stats_anonymous_mib": (None, 1024.0),
    "cold_100m_stats_anonymous_mib": (None, 1024.0),
    "stats_time_growth": (None, 1.5),
    "stats_memory_growth": (None, 1.5),
    "scan_vs_jsonl": (50.0, None),
    "scan_vs_numpy": (0.5, None),
    "scan_allocates_mib": (None, 1.0),
    "tree_open_s": (None, 0.2),
    "follow_lag_p95_ms": (None, 100.0),
    "cold_bytes_a_token_nodes": (None, 2.5),
    "commit_vs_raw": (None, 5.0),
}
"""Figure: (least, most)."""

PLOT = Path(__file__).resolve().parents[1] / "docs" / "data-size.svg"


def rows_of_call(
    number: int, parent: Node | None, num_tokens: int, rng: np.random.Generator
) -> tuple[Node, Node, Call]:
    """One prompt node, one sampled node, and the call that names them."""
    call_id, start = f"c_{number:020x}", 0 if parent is None else parent.start_pos + len(parent.token_ids)
    prompt = Node(
        node_id=f"n_{2 * number:020x}",
        execution_id="e_0123456789ab",
        root_id="n_" + "0" * 20 if parent is None else parent.root_id,
        parent_id=parent and parent.node_id,
        call_id=call_id,
        start_pos=start,
        kind=NodeKind.PROMPT,
        author=Author.CLIENT,
        token_ids=rng.integers(0, 150_000, num_tokens).astype(np.int32),
    )
    output = Node(
        node_id=f"n_{2 * number + 1:020x}",
        execution_id=prompt.execution_id,
        root_id=prompt.root_id,
        parent_id=prompt.node_id,
        call_id=call_id,
        start_pos=start + num_tokens,
        kind=NodeKind.OUTPUT,
        author=Author.POLICY,
        token_ids=rng.integers(0, 150_000, num_tokens // 4).astype(np.int32),
        logprobs=-rng.random(num_tokens // 4).astype(np.float32),
        policy_versions=(VersionSpan(policy_id="base", n=0, start=0, end=num_tokens // 4),),
    )
    call = Call(
        call_id=call_id,
        execution_id=prompt.execution_id,
        agent_role=AgentRole.MAIN,
        role_source="first",
        wire="anthropic",
        prompt_node=prompt.node_id,
        output_node=output.node_id,
        extension=Extension.BRIDGE,
        status=CallStatus.OK,
        attempts=(Attempt(engine="sgl-0", start=0, end=num_tokens // 4),),
        started_at=datetime.now(UTC),
    )
    return prompt, output, call


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some runs: the least disturbed one on a shared machine."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def measure_commits(folder: Path, count: int) -> dict[str, float]:
    """Durable calls one by one, against writing and syncing as many bytes to the same six files without any format."""
    rng = np.random.default_rng(0)
    calls = [rows_of_call(number, None, 400, rng) for number in range(count)]
    bodies = [b'{"role": "user", "content": "%d"}' % number * 30 for number in range(count)]
    with gyre_data.RunWriter(folder / "commits") as writer:
        writer.write(calls[0])
        started = time.perf_counter()
        for body, rows in zip(bodies[1:], calls[1:], strict=True):
            writer.put_blob(body)
            writer.write(rows)
        ours = (time.perf_counter() - started) / (count - 1)
        sizes = [p.stat().st_size // count for p in (folder / "commits").rglob("*-*") if p.is_file()]
    files = [os.open(folder / f"raw{i}", os.O_CREAT | os.O_WRONLY, 0o600) for i in range(len(sizes))]
    pieces = [os.urandom(size) for size in sizes]
    started = time.perf_counter()
    for _ in range(count):
        for fd, piece in zip(files, pieces, strict=True):
            os.write(fd, piece)
            getattr(os, "fdatasync", os.fsync)(fd)
    raw = (time.perf_counter() - started) / count
    for fd in files:
        os.close(fd)
    return {"commits_per_s": 1 / ours, "raw_commits_per_s": 1 / raw, "commit_vs_raw": ours / raw}


def sizes_of(quick: bool) -> list[int]:
    """Millions of tokens of the runs: each holds the segments of the one before it, and more."""
    return [1, 3, 10] if quick else [1, 3, 10, 30, 100, 300]


def make_runs(folder: Path, source: Source, sizes: list[int]) -> dict[int, Path]:
    """Compacted runs by their millions of tokens; segments are shared by hard links, so all take no more than the last.

    Without the texts of messages: they are no part of what is counted, and would fill the disk.
    """
    parts: list[Part] = []
    runs: dict[int, Path] = {}
    last = 0
    for size in sizes:
        parts.append(write_part(folder / f"part-{size}", source, range(last, size), recorded=False))
        runs[size] = link_run(folder / f"run-{size}", parts)
        last = size
    return runs


def measure_counting(runs: dict[int, Path]) -> dict[str, float]:
    """`gyre stats` as a command, at every size; the plot."""
    took: dict[int, Took] = {}
    for size, path in runs.items():
        took[size] = gyre("stats", str(path), "--json")
        counted = json.loads(took[size].out)
        assert counted["distinct_tokens"] == size * TOKENS, counted
    sizes = list(runs)
    figures = {f"stats_{size}m_s": took[size].wall_s for size in sizes}
    figures |= {f"stats_{size}m_cpu_s": took[size].cpu_s for size in sizes}
    figures |= {f"stats_{size}m_anonymous_mib": took[size].anonymous_mib for size in sizes}
    figures |= {f"stats_{size}m_resident_mib": took[size].resident_mib for size in sizes}
    for name, of, floor in (("time", "cpu_s", 0.02), ("memory", "anonymous_mib", 1.0)):
        first, *_, middle, most = (figures[f"stats_{size}m_{of}"] for size in sizes)
        a, *_, b, c = sizes
        # What a million tokens more costs over the whole range, against the range without its last size.
        figures[f"stats_{name}_growth"] = (most - first) / (c - a) / max((middle - first) / (b - a), floor)
    if 100 not in sizes:
        figures |= {f"stats_100m_{of}": at_100m(figures, f"stats_{{}}m_{of}", sizes) for of in ("s", "anonymous_mib")}
    if 300 in sizes:
        panels = {
            "gyre stats, seconds": {
                "CPU": [took[s].cpu_s for s in sizes],
                "wall clock": [took[s].wall_s for s in sizes],
            },
            "gyre stats, MiB": {
                "memory of its own": [took[s].anonymous_mib for s in sizes],
                "with mapped files": [took[s].resident_mib for s in sizes],
            },
        }
        PLOT.write_text(chart(sizes, panels, "million tokens"))
    return figures


def at_100m(figures: dict[str, float], name: str, sizes: list[int]) -> float:
    """What the last two sizes of a figure say about 100 million tokens."""
    (a, before), (b, last) = ((size, figures[name.format(size)]) for size in sizes[-2:])
    return last + max(last - before, 0.0) / (b - a) * (100 - b)


def measure_scan(folder: Path, path: Path, lines_of: Path) -> dict[str, float]:
    """Every token id of a run read, from opening it: against numpy over the same bytes, and against JSON lines."""

    def scan() -> int:
        column = gyre_data.open(path).table("nodes").column("token_ids")
        return sum(pc.sum(chunk.values).as_py() or 0 for chunk in column.chunks)

    column = gyre_data.open(path).table("nodes").column("token_ids")
    before = pa.total_allocated_bytes()
    scan_s = seconds(lambda: sum(pc.sum(chunk.values).as_py() or 0 for chunk in column.chunks), 3)
    allocated = pa.total_allocated_bytes() - before
    with (folder / "plain.bin").open("wb") as file:
        for chunk in column.chunks:
            offsets_and_values(chunk)[1].tofile(file)
    plain = np.memmap(folder / "plain.bin", np.int32, "r")
    numpy_s = seconds(lambda: int(plain.sum(dtype=np.int64)), 3)
    assert scan() == int(plain.sum(dtype=np.int64))
    whole_s = seconds(scan, 2)
    jsonl_tokens, jsonl_s = _scan_jsonl(folder / "nodes.jsonl", lines_of)
    return {
        "scan_mtok_per_s": len(plain) / scan_s / 1e6,
        "open_and_scan_mtok_per_s": len(plain) / whole_s / 1e6,
        "numpy_mtok_per_s": len(plain) / numpy_s / 1e6,
        "jsonl_mtok_per_s": jsonl_tokens / jsonl_s / 1e6,
        "scan_vs_numpy": numpy_s / scan_s,
        "scan_vs_jsonl": (len(plain) / scan_s) / (jsonl_tokens / jsonl_s),
        "open_and_scan_vs_jsonl": (len(plain) / whole_s) / (jsonl_tokens / jsonl_s),
        "scan_allocates_mib": allocated / 2**20,
    }


def _scan_jsonl(file: Path, path: Path) -> tuple[int, float]:
    """The rows of a run's nodes as JSON lines, and the time to read every token of them: (tokens, seconds)."""
    nodes = gyre_data.open(path).table("nodes")
    with file.open("w") as out:
        for batch in nodes.to_batches():
            for row in batch.to_pylist():
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
    count = 0

    def scan() -> None:
        nonlocal count
        count = 0
        with file.open("rb") as lines:
            for line in lines:
                ids = json.loads(line)["token_ids"]
                sum(ids)
                count += len(ids)

    took = seconds(scan, 1)
    return count, took


def measure_tree(folder: Path, one: Path, live: int) -> dict[str, float]:
    """One execution of 636 calls and a million tokens: its tree from the closed folder, and followed while written."""
    open_s = seconds(lambda: gyre_data.open(one)[""].tree.calls[-1], 5)
    late = sorted(lags(one, folder / "live", live))
    return {
        "tree_open_s": open_s,
        "follow_lag_p50_ms": 1e3 * late[len(late) // 2],
        "follow_lag_p95_ms": 1e3 * late[int(0.95 * (len(late) - 1))],
        "follow_missed": float(live - len(late)),
    }


def measure_recorded(runs: dict[int, Path]) -> dict[str, float]:
    """Runs as recorded, then compacted, then compacted cold: `gyre stats`, and bytes a distinct token of ten million.

    `nodes` holds the ids, the log-probs of the sampled quarter and all that names them; messages are in `blobs`.
    """
    figures: dict[str, float] = {}
    for state, command in (("recorded", ()), ("compacted", ("--yes",)), ("cold", ("--yes", "--cold"))):
        for size, path in runs.items():
            if command:
                figures[f"{state}_{size}m_compact_s"] = gyre("compact", str(path), *command).wall_s
            took, name = gyre("stats", str(path), "--json"), f"{state}_{size}m_stats"
            assert json.loads(took.out)["distinct_tokens"] == size * TOKENS
            figures |= {f"{name}_s": took.wall_s, f"{name}_cpu_s": took.cpu_s}
            figures[f"{name}_anonymous_mib"] = took.anonymous_mib
        if 100 not in runs:
            for of in ("s", "cpu_s", "anonymous_mib"):
                figures[f"{state}_100m_stats_{of}"] = at_100m(figures, f"{state}_{{}}m_stats_{of}", list(runs))
        for table in ("nodes", "calls", "blobs"):
            size = sum(file.stat().st_size for file in (runs[10] / table).iterdir())
            figures[f"{state}_bytes_a_token_{table}"] = size / (10 * TOKENS)
    return figures


def measure(folder: Path, quick: bool) -> dict[str, float]:
    source = read_source(1_200_000 if quick else 3_000_000)  # longer than a batch: zstd must not see it twice
    figures = measure_commits(folder, 100 if quick else 1000)
    started = time.perf_counter()
    runs = make_runs(folder, source, sizes_of(quick))
    figures["made_mtok_per_s"] = max(runs) / (time.perf_counter() - started)
    recorded = {}
    for size in (1, 10) if quick else (1, 10, 100):
        part = write_part(folder / f"recorded-part-{size}", source, range(size), recorded=True, blobs=size < 100)
        recorded[size] = link_run(folder / f"recorded-{size}", [part])
    figures |= measure_tree(folder, recorded[1], 40 if quick else 300)
    figures |= measure_recorded(recorded)
    figures |= measure_scan(folder, runs[10 if quick else 100], runs[1 if quick else 10])
    return figures | measure_counting(runs)


if __name__ == "__main__":
    sys.exit(_frame.run("data", __doc__, BOUNDS, measure))
