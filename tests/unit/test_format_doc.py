"""docs/format.md is true: its program reads real runs, with pyarrow alone, and its tables match the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gyre_data
from gyre_data.arrays import from_table
from gyre_data.compact import compact
from gyre_data.pins import tag
from gyre_data.removal import remove
from gyre_data.store import RunWriter
from gyre_data.types import TopLogprobs
from tests.support.rows import one_call, one_execution

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "format.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


def names_of(program: str) -> dict:
    found: dict = {}
    exec(compile(program, "docs/format.md", "exec"), found)
    return found


def test_the_program_needs_pyarrow_alone():
    code = PROGRAM + "\nimport sys\nprint(sorted(m for m in sys.modules if m.startswith('gyre')))"
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_program_reads_a_live_and_a_finished_run(tmp_path):
    read_table, prompt_ids = (names_of(PROGRAM)[name] for name in ("read_table", "prompt_ids"))
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.put_blob(b"text " * 100)
        writer.write(one_execution())
        writer.seal()
        writer.write(one_call(0, execution_id="e_2"))
        check_same(read_table, path)
        nodes = {node.node_id: node for node in from_table("nodes", gyre_data.open(path).table("nodes"))}
        wanted: list[int] = []
        for node_id in ("e_1_p0", "e_1_o0", "e_1_p1"):
            wanted += nodes[node_id].token_ids.tolist()
        assert prompt_ids(read_table(path, "nodes"), "e_1_p1") == wanted
        (data,) = (path / "nodes").glob("*.open")
        writer._release()
        data.write_bytes(data.read_bytes() + b"\0" * 64)
        check_same(read_table, path)
    RunWriter(path).close()
    check_same(read_table, path)


def test_the_program_reads_compacted_cold_tagged_and_removed_ones(tmp_path):
    read_table, path = names_of(PROGRAM)["read_table"], tmp_path / "run"
    with RunWriter(path) as writer:
        for number in range(3):
            rows = one_execution(f"e_{number}")
            node = next(row for row in rows if getattr(row, "logprobs", None) is not None)
            top = TopLogprobs(node_id=node.node_id, k=1, token_ids=node.token_ids, logprobs=node.logprobs)
            writer.write([*rows, top])
            writer.seal()
    version = tag(path, "v1")
    compact(path)
    check_same(read_table, path)
    remove(path, ["e_1"])
    check_same(read_table, path)
    assert read_table(path, "top_logprobs").num_rows == 2
    compact(path, cold=True)
    check_same(read_table, path)
    assert read_table(path, "top_logprobs", version.manifest).num_rows == 3
    assert read_table(path, "nodes", version.manifest).equals(gyre_data.open(f"{path}@v1").table("nodes"))
    older = PROGRAM.replace('(2 if manifest.get("removed") else 1)', "1")
    with pytest.raises(AssertionError):
        names_of(older)["read_table"](path, "nodes")


def check_same(read_table, path: Path) -> None:
    run = gyre_data.open(path)
    for name in ("nodes", "calls", "blobs", "deliveries", "executions", "scores", "top_logprobs"):
        if run.table(name).num_rows:
            assert read_table(path, name).equals(run.table(name)), name


def test_the_doc_names_what_the_code_does():
    keys = re.findall(r"^\| `([^|]*)` \|", DOC, re.MULTILINE)
    assert {"number", "tables", "sha256", "used", "removed"} <= set(keys)
    for word in ("256 MiB", "after an hour", "mode 0600", "quarantine/", "20 bytes, little-endian"):
        assert word in DOC
    assert max(len(line) for line in DOC.splitlines() if not line.startswith("|")) < 160
