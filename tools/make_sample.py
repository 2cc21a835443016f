"""Write the run that comes with gyre: make_sample.py DEMO_FOLDER. DEMO_FOLDER is what `gyre demo --record-only` left.

The recording is kept as it is, in one sealed segment a table; only what names the machine it was made on is taken out:
paths, addresses, process ids, key hashes. The tokenizer comes along, so that `gyre explain` decodes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gyre_data
from gyre_data.arrays import from_table
from gyre_data.schema import RUN_TABLES
from gyre_data.store import SAMPLE
from gyre_data.types import Call, EnvironmentState, ExecutionEvent

KEPT_HEADERS = ("anthropic-version", "content-type", "user-agent", "x-gyre-agent", "x-gyre-role")
KEPT_INFO = ("mode", "policy", "fingerprint", "parser", "thinking", "late_system", "context_window")


def plain(row: Any) -> Any:
    """The row without what is true of one machine only."""
    if isinstance(row, EnvironmentState):
        return replace(row, location=None)
    if isinstance(row, ExecutionEvent) and row.launcher is not None:
        told = json.loads(row.launcher)
        told.pop("key_sha256", None)
        told = {key: ["python", *value[1:]] if isinstance(value, list) else value for key, value in told.items()}
        return replace(row, launcher=json.dumps(told, sort_keys=True))
    if isinstance(row, Call):
        headers = json.loads(row.request_headers or "{}")
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        attempts = tuple(replace(attempt, engine="engine-0") for attempt in row.attempts)
        return replace(row, request_headers=json.dumps(kept, sort_keys=True), attempts=attempts)
    return row


def blobs(run: gyre_data.Run) -> Iterator[bytes]:
    for name in run.table("blobs").column("blob_id").to_pylist():
        yield run.blob(name)


def main() -> None:
    source = gyre_data.open(sys.argv[1])
    shutil.rmtree(SAMPLE, ignore_errors=True)
    with gyre_data.RunWriter(SAMPLE) as writer:
        for data in blobs(source):
            writer.put_blob(data)
        for name in RUN_TABLES:
            if name != "blobs":
                writer.append([plain(row) for row in from_table(name, source.table(name))])
        writer.commit()
        writer.update_info({name: source.info.get(name) for name in KEPT_INFO})
        writer.update_info({"tokenizer": "tokenizer.json", "read_only": True})
    folder = Path(source.info["tokenizer"])
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    (SAMPLE / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n")
    for path in SAMPLE.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (SAMPLE / "lock").unlink()
    newest = max((SAMPLE / "manifest").iterdir())
    for path in (SAMPLE / "manifest").iterdir():
        if path != newest:
            path.unlink()


if __name__ == "__main__":
    main()
