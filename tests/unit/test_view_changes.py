"""What a page that follows is told: the server's patches, applied by the page's own script, give the new value."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gyre_data
from gyre_data.view.changes import History, patch

SCRIPT = Path(gyre_data.__file__).parent / "view" / "assets" / "changes.js"
PROGRAM = """
import { patched } from "./changes.mjs";
import { readFileSync } from "node:fs";
const cases = JSON.parse(readFileSync("cases.json", "utf8"));
const before = JSON.stringify(cases.map(([old]) => old));
const made = cases.map(([old, change]) => (change === null ? old : patched(old, change)));
if (JSON.stringify(cases.map(([old]) => old)) !== before) throw new Error("the old value was changed");
process.stdout.write(JSON.stringify(made));
"""


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["leaf", "leaf", "rows", "names", "list", "object"]) if depth else "leaf"
    if kind == "rows":
        ids = rng.sample(range(12), rng.randrange(6)) + [0] * (rng.random() < 0.1)
        return [{"node_id": f"n{i}", "x": _value(rng, depth - 1)} for i in ids]
    if kind == "names":
        return [f"n{i}" for i in rng.choices(range(9), k=rng.randrange(6))]
    if kind == "list":
        return [_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == "object":
        return {name: _value(rng, depth - 1) for name in rng.sample("abcd1", rng.randrange(5))}
    return rng.choice([None, True, 2, 2.5, "text", "", {}, []])


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script is JavaScript: apt-get install nodejs")
def test_patches_lead_from_any_value_to_any_other(tmp_path: Path) -> None:
    rng = random.Random(3)
    pairs = [(_value(rng, 4), _value(rng, 4)) for _ in range(400)]
    rows = [(a, [*a[2:], *b[:1], *a[:1]]) for a, b in pairs if isinstance(a, list) and isinstance(b, list)]
    pairs += [(a, a) for a, _ in pairs[:20]] + rows
    assert len(rows) > 20
    (tmp_path / "changes.mjs").write_text(SCRIPT.read_text())
    (tmp_path / "cases.json").write_text(json.dumps([(a, patch(a, b)) for a, b in pairs]))
    command = ["node", "--input-type=module", "-e", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [b for _, b in pairs]


def test_a_row_that_comes_between_others_is_all_that_is_told() -> None:
    rows = [{"node_id": f"n{i}", "kind": "prompt"} for i in range(1000)]
    changed = {**rows[900], "kind": "output"}
    told = patch({"nodes": rows}, {"nodes": [*rows[:5], {"node_id": "new"}, *rows[5:900], changed, *rows[901:]]})
    parts = [{"old": [0, 5]}, {"new": [{"node_id": "new"}]}, {"old": [5, 1000]}]
    wanted = {"parts": parts, "at": {901: {"of": {"kind": ["output"]}, "gone": []}}}
    assert told == {"of": {"nodes": wanted}, "gone": []}


def test_who_is_behind_hears_every_step_and_who_is_too_far_the_whole() -> None:
    history = History()
    for version in range(10, 110):
        history.move(version, {"n": version})
    assert history.since(109) == {"version": 109, "steps": []}
    assert history.since(107)["steps"] == [{"of": {"n": [108]}, "gone": []}, {"of": {"n": [109]}, "gone": []}]
    for unknown in (0, 11, 500):
        assert history.since(unknown) == {"version": 109, "whole": {"n": 109}}
