"""Write a small run of the format of today: make_golden.py FOLDER. Done once for each released version, then kept.

Sealed segments, cold ones, open ones beside them, a removed execution, a tag, and FOLDER.json with the rows that every
later release must read from it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import gyre_data
from gyre_data.compact import compact
from gyre_data.pins import tag
from gyre_data.removal import remove
from gyre_data.schema import TABLES, Extension, NodeKind
from gyre_data.types import EnvironmentState, TopLogprobs
from tests.support.rows import START, call_row, one_execution, output_node, prompt_node


def write(folder: Path) -> None:
    writer = gyre_data.RunWriter(folder)
    blob = writer.put_blob(b'{"role": "user", "content": "Hallo"}' * 8)
    writer.write(
        [
            *one_execution("e_0123456789ab", 2),
            EnvironmentState(
                state_id="st_1", execution_id="e_0123456789ab", captured_at=START, kind="git_tree", digest="9f1c"
            ),
        ]
    )
    writer.write(one_execution("e_removed", 1))
    writer.close()
    tag(folder, "v1")
    remove(folder, ["e_removed"])
    compact(folder, cold=True)
    writer = gyre_data.RunWriter(folder)
    root = prompt_node("n_root", "c_fork", execution_id="e_2", message_blobs=(blob,), message_role="user")
    added = prompt_node("n_gen", "c_fork", root, 1, kind=NodeKind.GENERATION_PROMPT)
    output = output_node("n_out", "c_fork", added, 4)
    call = call_row("c_fork", added, output, "e_2", extension=Extension.FORK, request_blobs=(blob,), temperature=1.0)
    top = TopLogprobs(node_id="n_out", k=1, token_ids=output.token_ids, logprobs=output.logprobs)
    writer.write([root, added, output, replace(call, sampling_used='{"temperature": 1.0}'), top])
    writer._release()  # left open, as by a crash: the golden run shows both states
    (folder / "lock").unlink()


def rows(folder: Path) -> str:
    run = gyre_data.open(folder)
    found = {name: run.table(name).to_pylist() for name in TABLES if run.table(name).num_rows}
    return json.dumps(found, default=lambda v: v.hex() if isinstance(v, bytes) else str(v), indent=1) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    if folder.exists():
        raise SystemExit(f"wanted a new folder, {folder} exists; a golden run is never written again")
    write(folder)
    folder.with_suffix(".json").write_text(rows(folder))


if __name__ == "__main__":
    main()
