"""docs/format.md is true: its program reads real runs, with pyarrow alone, and its tables match the code."""

import re
import subprocess
import sys
from pathlib import Path

import gyre_data
from gyre_data.arrays import from_table
from gyre_data.store import RunWriter
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


def check_same(read_table, path: Path) -> None:
    run = gyre_data.open(path)
    for name in ("nodes", "calls", "blobs", "deliveries", "executions", "scores"):
        assert read_table(path, name).equals(run.table(name)), name


def test_the_doc_names_what_the_code_does():
    keys = re.findall(r"^\| `([^|]*)` \|", DOC, re.MULTILINE)
    assert {"number", "tables", "sha256"} <= set(keys)
    for word in ("256 MiB", "after an hour", "mode 0600", "quarantine/", "20 bytes, little-endian"):
        assert word in DOC
    assert max(len(line) for line in DOC.splitlines() if not line.startswith("|")) < 160
