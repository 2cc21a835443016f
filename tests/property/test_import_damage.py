"""Whatever is wrong with a source, its import ends with a whole run or a refusal in words, never with a crash."""

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data import import_sessions
from gyre_data.errors import GyreError
from gyre_data.verify import verify
from tests.support.importing import DATA

AGENT = {
    "source": "agent",
    "message": "x",
    "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {"a": 1}}],
}
RESULT = {"source_call_id": "c", "content": "y", "subagent_trajectory_ref": [{"trajectory_id": "t"}]}
CHILD = {"trajectory_id": "t", "agent": {}, "steps": [{"step_id": 1, "source": "agent", "message": "z"}]}
ATIF = {
    "schema_version": "ATIF-v1.8",
    "agent": {"name": "a", "version": "1", "tool_definitions": [{}]},
    "steps": [{"step_id": 1, "source": "user", "message": "go"}, {**AGENT, "observation": {"results": [RESULT]}}],
    "subagent_trajectories": [CHILD],
}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "r", "tool_call_id": "1"},
    {"role": "assistant", "content": "b"},
]
PAIR = {
    "request_id": "r",
    "timestamp": "2026-01-02T03:04:05Z",
    "request": {
        "path": "/v1/messages",
        "headers": {},
        "body": {"system": "s", "messages": CHAT[1:2], "tools": [{"name": "f"}]},
    },
    "response": {
        "status": 200,
        "body": {"id": "m", "content": [{"type": "text", "text": "b"}], "usage": {"input_tokens": 1}},
    },
}
SOURCES: dict[str, list[Any]] = {
    "claude_code": [json.loads(line) for line in next((DATA / "claude-code").glob("*.jsonl")).read_text().splitlines()],
    "codex": [json.loads(line) for line in sorted((DATA / "codex").rglob("*.jsonl"))[0].read_text().splitlines()],
    "pi": [json.loads(line) for line in next((DATA / "pi").glob("*.jsonl")).read_text().splitlines()],
    "swe_agent": [json.loads((DATA / "mini-swe-agent" / "last_mini_run.traj.json").read_text())],
    "atif": [ATIF],
    "api_log": [PAIR, PAIR],
    "chat": [{"execution_id": "e", "messages": CHAT, "tools": [{}]}, {"messages": CHAT[1:], "agent_role": "main"}],
}
JUNK = [
    None,
    0,
    -1,
    1.5,
    True,
    "",
    "x",
    [],
    {},
    [None],
    {"a": 1},
    "\ud800",
    10**30,
    [[]],
    {"type": "text"},
    ["x"],
    1e300,
]


def damaged(value: Any, random: Random, share: float) -> Any:
    """The value with some of its parts gone, and some others in their place."""
    if random.random() < share:
        return random.choice(JUNK)
    if isinstance(value, dict):
        return {name: damaged(item, random, share) for name, item in value.items() if random.random() > share / 2}
    if isinstance(value, list):
        return [damaged(item, random, share) for item in value if random.random() > share / 2]
    return value


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(SOURCES)), st.integers(0, 2**32), st.sampled_from([0.003, 0.02, 0.1]), st.booleans())
def test_damage_is_told_or_refused(format: str, seed: int, share: float, shuffled: bool) -> None:
    random = Random(seed)
    records = [damaged(record, random, share) for record in SOURCES[format]]
    if shuffled:
        random.shuffle(records)
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "a.jsonl", Path(folder) / "run"
        path.write_text("\n".join(json.dumps(record) for record in records))
        try:
            import_sessions(path, run, format=format)
        except GyreError:
            return
        if run.exists():
            assert not verify(run).problems
