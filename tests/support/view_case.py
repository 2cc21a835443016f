"""A run for people to look at: a coding agent on one task, twice, with a sub-agent, a compaction, a retry, a fork.

Texts, tool calls and token ids belong together (ids are the texts' by the sample's tokenizer), log-probs are made up.
Some texts are hostile: they would run as script if a page ever took one for markup.
"""

# ruff: noqa: E501  what is said stands on one line

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from gyre_data.schema import AgentRole
from gyre_data.types import Blob, EnvironmentState, TeacherLogprobs
from tests.support.forest import ExecutionBuilder, Forest, Made
from tests.support.published_case import published_case

__all__ = ["HOSTILE", "TOKENIZER", "Talk", "large_case", "tokens_of", "view_case"]

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">${alert(1)}"
TOKENIZER = Path(__file__).parents[2] / "gyre_data" / "sample" / "tokenizer.json"

Message = dict[str, Any]
_SYSTEM = (
    "You are a software engineer working in a checkout of a repository. Find the cause before you change anything, "
    "make the smallest change that mends it, and run the tests that cover it. Use the tools you are given; do not ask "
    "the user. When you are done, say in two sentences what was wrong and what you changed."
)


def tokens_of(text: str, tokenizer: Path = TOKENIZER) -> np.ndarray:
    """Ids of a text by a tokenizer file."""
    return np.array(_loaded(tokenizer).encode(text, add_special_tokens=False).ids, np.int32)


_TOKENIZERS: dict[Path, Any] = {}


def _loaded(path: Path) -> Any:
    if path not in _TOKENIZERS:
        from tokenizers import Tokenizer

        _TOKENIZERS[path] = Tokenizer.from_file(str(path))
    return _TOKENIZERS[path]


def system(text: str = _SYSTEM) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str, call_id: str = "toolu_1") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def says(text: str = "", *tools: tuple[str, dict[str, Any]], think: str | None = None, ids: str = "toolu_1") -> Message:
    made: Message = {"role": "assistant", "content": text}
    if think:
        made["reasoning"] = think
    if tools:
        made["tool_calls"] = [{"name": name, "arguments": arguments, "id": ids} for name, arguments in tools]
    return made


@dataclass
class Talk:
    """Adds calls that say something to an execution."""

    e: ExecutionBuilder
    tokenizer: Path = TOKENIZER
    more: dict[str, Any] = field(default_factory=dict)
    """Columns of every call."""
    seconds: float = 9.0

    def call(self, after: Made | str | None, new: Sequence[Message], reply: Message | None, **more: Any) -> Made:
        """One call: `new` messages after a call's output or a node, and what was sampled."""
        parts = [(m, tokens_of(_rendered(m), self.tokenizer)) for m in new]
        copies = more.pop("copies", {})
        nodes = [(m["role"], len(ids), {"ids": ids, "copy_of": copies.get(n)}) for n, (m, ids) in enumerate(parts)]
        output = None if reply is None else tokens_of(_rendered(reply), self.tokenizer)
        took = 1.5 + (0 if output is None else len(output) / 60)
        columns = {**_COLUMNS, **self.more, **more}
        made = self.e.call(
            after=after,
            new=nodes,
            output=None if output is None else len(output),
            seconds=self.seconds + took,
            **columns,
        )
        return self._told(made, [m for m, _ in parts], reply, output, took)

    def retry(self, first: Made, reply: Message, **more: Any) -> Made:
        """The same request again, answered."""
        output = tokens_of(_rendered(reply), self.tokenizer)
        made = self.e.retry(first, output=len(output), seconds=4.0, **{**_COLUMNS, **self.more, **more})
        return self._told(made, [], reply, output, 2.0)

    def _told(
        self, made: Made, new: Sequence[Message], reply: Message | None, output: np.ndarray | None, took: float
    ) -> Made:
        mine = [n for n in self.e.nodes.values() if n.call_id == made.id and n.kind == "prompt"]
        for node, message in zip(mine, new, strict=True):
            self.e.say(node.node_id, message)
        if reply is not None and output is not None:
            self.e.say(made.output, reply)
            self._replace_node(made.output, token_ids=output, logprobs=_logprobs(output))
        return Made(call=self._replace_call(made, took))

    def _replace_node(self, node_id: str, **columns: Any) -> None:
        row = replace(self.e.nodes[node_id], **columns)
        self.e.nodes[node_id] = row
        self.e.run.rows["nodes"][:] = [row if old.node_id == node_id else old for old in self.e.run.rows["nodes"]]

    def _replace_call(self, made: Made, took: float) -> Any:
        call, started = made.call, made.call.started_at
        body = json.dumps({"model": "policy", "max_tokens": 4096, "stream": True, "temperature": 0.6}, indent=1)
        blob = hashlib.sha256(body.encode()).hexdigest()
        if blob not in {row.blob_id for row in self.e.run.rows["blobs"]}:
            self.e.run.add("blobs", Blob(blob_id=blob, num_bytes=len(body), codec="none", data=body.encode()))
        row = replace(
            call,
            first_token_at=None if call.output_node is None else started + timedelta(seconds=0.4),
            ended_at=started + timedelta(seconds=took),
            request_blobs=(blob,),
            cached_tokens=max(0, (call.prompt_tokens or 0) - 60),
        )
        self.e.calls[call.call_id] = row
        self.e.run.rows["calls"][:] = [row if old.call_id == call.call_id else old for old in self.e.run.rows["calls"]]
        return row


_COLUMNS: dict[str, Any] = {
    "client": "claude-code 2.1.220",
    "request_path": "/v1/messages?beta=true",
    "request_headers": json.dumps({"user-agent": "claude-cli/2.1.220", "anthropic-version": "2023-06-01"}),
    "sampling_asked": json.dumps({"temperature": 0.6, "top_p": 0.95, "max_tokens": 4096}),
    "sampling_used": json.dumps({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4096}),
    "max_tokens": 4096,
    "logprob_convention": "after_temperature",
}


def _rendered(message: Message) -> str:
    """About what a template makes of a message: ids and text belong together, exactness is not the point here."""
    calls = "".join(
        f"\n<tool_call>\n{json.dumps({'name': c['name'], 'arguments': c['arguments']})}\n</tool_call>"
        for c in message.get("tool_calls", ())
    )
    thought = f"<think>\n{message['reasoning']}\n</think>\n" if "reasoning" in message else ""
    return f"<|im_start|>{message['role']}\n{thought}{message['content']}{calls}<|im_end|>\n"


def _logprobs(ids: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(int(ids.sum()) % 2**32)
    return -np.where(
        rng.random(len(ids)) < 0.7, rng.exponential(0.03, len(ids)), rng.exponential(1.6, len(ids))
    ).astype(np.float32)


def _listing(start: int, count: int) -> str:
    body = [
        "def parse_day(text, zone=UTC):",
        '    """Day of an order, as the shop writes it."""',
        "    day, _, rest = text.partition('T')",
        "    when = datetime.fromisoformat(day)",
        "    return when.replace(tzinfo=zone)",
        "",
        "def window(orders, first, last):",
        "    return [o for o in orders if first <= parse_day(o['at']) < last]",
        "",
    ]
    return "\n".join(f"{n:5d}  {body[n % len(body)]}" for n in range(start, start + count))


def view_case(tokenizer: Path = TOKENIZER) -> Forest:
    """The run; three executions of one group, the last one still running."""
    run = Forest()
    _good(run, tokenizer)
    _busy(run, tokenizer)
    started = run.execution(
        "e_9d1e00000003", group="swe-412", task="swe-412", sample_index=2, end=None, harness="claude-code"
    )
    Talk(started, tokenizer).call(
        None,
        [system(), user("Orders of the last day of a month are missing.")],
        None,
        status="failed",
        error="engine sgl-2 lost: connection reset",
        delivery=None,
        temperature=None,
    )
    return run


def _execution(run: Forest, name: str, index: int) -> ExecutionBuilder:
    return run.execution(
        name,
        group="swe-412",
        task="swe-412",
        sample_index=index,
        end=None,
        harness="claude-code",
        harness_version="2.1.220",
        launcher=json.dumps({"command": "claude -p {prompt}", "timeout_s": 3600}),
    )


_TASK = "Orders of the last day of a month are missing from the monthly report. Find out why and mend it; the tests are in tests/test_report.py."


def _good(run: Forest, tokenizer: Path) -> None:
    """The same task solved at once."""
    e = _execution(run, "e_b02c00000001", 0)
    talk = Talk(e, tokenizer, {"version": ("run", 4)})
    a = talk.call(
        None,
        [system(), user(_TASK)],
        says(
            "I will look at the report first.",
            ("Grep", {"pattern": "def window", "path": "src"}),
            think="The end of the interval may be exclusive.",
        ),
    )
    b = talk.call(
        a,
        [tool("src/report.py:7:def window(orders, first, last):")],
        says("", ("Read", {"file_path": "src/report.py"})),
    )
    c = talk.call(
        b,
        [tool(_listing(1, 12))],
        says(
            "`last` is the first instant of the last day, so that whole day falls out.",
            (
                "Edit",
                {
                    "file_path": "src/report.py",
                    "old_string": "first <= parse_day(o['at']) < last",
                    "new_string": "first <= parse_day(o['at']) < last + DAY",
                },
            ),
        ),
    )
    talk.call(
        c,
        [tool("The file src/report.py has been updated."), tool("3 passed in 0.41s", "toolu_2")],
        says(
            "The upper end was exclusive on a day boundary, so the last day was cut off. `window` now ends a day later; the three tests pass."
        ),
    )
    e.end("finished")
    e.score(1.0, evaluator="pytest", version="3")


def _busy(run: Forest, tokenizer: Path) -> None:
    """Solved halfway, with everything that happens on a long way."""
    e = _execution(run, "e_e7f300000002", 1)
    run.add(
        "environments",
        EnvironmentState(
            state_id="w_start",
            execution_id=e.execution_id,
            captured_at=run.now(),
            kind="git_tree",
            digest="9f1c3a77d20b",
        ),
    )
    talk = Talk(e, tokenizer, {"version": ("run", 4), "environment_state_id": "w_start"})
    talk.call(None, [user("Write a title of five words for: " + _TASK)], says("Mend the monthly report"), role="side")
    a = talk.call(
        None,
        [system(), user(_TASK)],
        says(
            "I will look at the report and at its tests.",
            ("Grep", {"pattern": "window|parse_day", "path": "."}),
            think="Either the interval or the time zone is wrong. Look before changing.",
        ),
    )
    b = talk.call(
        a,
        [
            tool(
                "src/report.py:1:def parse_day(text, zone=UTC):\nsrc/report.py:7:def window(orders, first, last):\ntests/test_report.py:14:    assert window(orders, first, last) == orders\n"
                + HOSTILE
            )
        ],
        says("", ("Read", {"file_path": "src/report.py", "offset": 1, "limit": 90})),
    )
    c = talk.call(
        b,
        [tool(_listing(1, 90))],
        says(
            "A sub-agent can find the tests while I read on.",
            (
                "Task",
                {
                    "description": "find tests",
                    "prompt": "Which tests cover src/report.py? Name the file and what each one asserts.",
                },
            ),
            ids="toolu_task",
        ),
    )
    _sub_agent(talk, c)
    lost = talk.call(
        c,
        [tool("tests/test_report.py has three tests; none has an order on the last day of a month.", "toolu_task")],
        says("So"),
        delivery="undelivered",
    )
    d = talk.retry(
        lost,
        says(
            "None of them covers the last day. I will write that test first.",
            (
                "Edit",
                {
                    "file_path": "tests/test_report.py",
                    "old_string": "def test_window",
                    "new_string": "def test_last_day():\n    orders = [{'at': '2026-01-31T10:00'}]\n    assert window(orders, JANUARY, FEBRUARY) == orders\n\n\ndef test_window",
                },
            ),
        ),
    )
    f = talk.call(
        d,
        [tool("The file tests/test_report.py has been updated.")],
        says("", ("Bash", {"command": "python -m pytest -q tests/test_report.py 2>&1 | tail -20", "timeout": 120000})),
    )
    g = talk.call(
        f,
        [
            tool(
                "F...\n"
                + "\n".join(f"E       AssertionError: window() lost order {n} of 2026-01-31" for n in range(60))
                + "\n1 failed, 3 passed in 0.52s"
            )
        ],
        says(
            "It fails as it should: the day is compared as midnight.",
            ("Edit", {"file_path": "src/report.py", "old_string": "zone=UTC", "new_string": "zone=SHOP_ZONE"}),
        ),
    )
    talk.call(
        g,
        [user("The task was changed: also write a note to CHANGES.")],
        says("I will write the note at the end."),
        extension="fork",
        branch_reason="context_rewrite",
        first_difference_message=7,
        tokens_lost=412,
    )
    _after_compaction(talk, e, a, g)
    e.end("harness_timeout")
    e.score(0.5, evaluator="pytest", version="3", partial=True, detail=json.dumps({"passed": 2, "failed": 2}))
    e.score(None, evaluator="style", status="failed", detail="ruff timed out after 60 s")
    for call in list(e.calls.values())[:6]:
        if call.output_node is not None:
            recorded = e.nodes[call.output_node].logprobs
            assert recorded is not None
            gap = np.random.default_rng(len(recorded)).normal(0, 0.02, len(recorded)).astype(np.float32)
            run.add(
                "teacher_logprobs",
                TeacherLogprobs(node_id=call.output_node, teacher="run:5", logprobs=recorded + gap, at=run.now(0.1)),
            )


def _sub_agent(talk: Talk, parent: Made) -> None:
    agent = Talk(talk.e, talk.tokenizer, {**talk.more, "role": AgentRole.SUB_AGENT, "agent_id": "a91"}, seconds=2.0)
    spawn = {"spawned_by_node": parent.output, "spawned_by_tool_call": "toolu_task", "branch_reason": "sub_agent"}
    a = agent.call(
        None,
        [
            system("You find things in a repository and report what you found, shortly."),
            user("Which tests cover src/report.py? Name the file and what each one asserts."),
        ],
        says("", ("Glob", {"pattern": "tests/**/*.py"})),
        **spawn,
    )
    b = agent.call(
        a, [tool("tests/test_report.py\ntests/test_shop.py")], says("", ("Read", {"file_path": "tests/test_report.py"}))
    )
    agent.call(
        b,
        [tool(_listing(1, 30))],
        says("tests/test_report.py has three tests; none has an order on the last day of a month."),
    )


def _after_compaction(talk: Talk, e: ExecutionBuilder, first: Made, last: Made) -> None:
    summary = talk.call(
        last,
        [
            user(
                "Summarise the conversation so far: task, what was found, what was changed, what is left to do. Another engineer goes on from your note alone."
            )
        ],
        says(
            "Task: orders of the last day of a month are missing from the monthly report.\n\nFound: `window` in src/report.py compares days as midnight and its upper end is exclusive; no test has an order on a last day.\n\nChanged: tests/test_report.py has test_last_day, which fails. In src/report.py `parse_day` now takes SHOP_ZONE.\n\nLeft: check whether the zone alone mends it. If not, move the upper end by one day. Run tests/test_report.py."
        ),
        role="main_summary",
    )
    root = next(n.node_id for n in e.nodes.values() if n.call_id == first.id and n.message_role == "system")
    kept = json.loads(
        next(b.data for b in e.run.rows["blobs"] if b.blob_id == (e.nodes[last.output].message_blobs or ("",))[0])
    )
    note = "This session goes on from a note, since the context was full.\n\nTask: orders of the last day of a month are missing ..."
    talk.more["version"] = ("run", 5)
    a = talk.call(
        root,
        [user(note), kept, tool("The file src/report.py has been updated.")],
        says("", ("Bash", {"command": "python -m pytest -q tests/test_report.py"})),
        copies={1: last.output},
        extension="fork",
        branch_reason="compaction",
        continues_from=summary.id,
        tokens_lost=2400,
    )
    b = talk.call(
        a,
        [tool("F...\n1 failed, 3 passed in 0.48s")],
        says(
            "The zone alone does not mend it; the upper end must move.",
            ("Edit", {"file_path": "src/report.py", "old_string": "< last", "new_string": "<= last"}),
        ),
    )
    talk.call(
        b,
        [tool("The file src/report.py has been updated.")],
        None,
        status="failed",
        error="engine sgl-1 lost: connection reset",
        delivery=None,
        temperature=None,
    )
    talk.call(
        a,
        [user("Look at the changelog before you go on.")],
        says("", ("Read", {"file_path": "CHANGES"})),
        extension="fork",
        branch_reason="rewind",
        tokens_lost=88,
    )
    talk.call(None, [user("ping")], says("pong"), role="unknown", delivery="delivered")


def large_case(num_tokens: int = 1_000_000) -> Forest:
    """The published case (636 calls, 1,347 message nodes) with a million tokens, and a text to each message."""
    made = published_case()
    nodes = made.rows["nodes"]
    wanted = num_tokens / sum(len(n.token_ids) for n in nodes)
    words = [
        f"{a}{b}" for a in ("read", "order", "report", "window", "day") for b in ("", "s", "_at", "_of", "Error", "(x)")
    ]
    rng = np.random.default_rng(0)
    start: dict[str, int] = {}
    rows: dict[str, list[Any]] = {**made.rows, "nodes": [], "blobs": []}
    for node in nodes:
        count = len(node.token_ids)
        count = count if node.kind == "generation_prompt" else max(1, math.ceil(count * wanted))
        begin = start.get(node.parent_id or "", 0)
        start[node.node_id] = begin + count
        text = " ".join(words[w] for w in rng.integers(0, len(words), count))
        data = json.dumps({"role": node.message_role or "assistant", "content": text}).encode()
        name = hashlib.sha256(data).hexdigest()
        spans = node.policy_versions and (replace(node.policy_versions[0], end=count),)
        ids = rng.zipf(1.3, count).clip(1, 150_000).astype(np.int32)
        logprobs = None if node.logprobs is None else -rng.exponential(0.4, count).astype(np.float32)
        more = {"start_pos": begin, "token_ids": ids, "logprobs": logprobs, "policy_versions": spans}
        if node.kind == "generation_prompt":
            rows["nodes"].append(replace(node, **more))
            continue
        rows["nodes"].append(replace(node, **more, message_blobs=(name,)))
        rows["blobs"].append(Blob(blob_id=name, num_bytes=len(data), codec="none", data=data))
    rows["calls"] = [
        replace(
            call,
            prompt_tokens=start.get(call.prompt_node or ""),
            output_tokens=call.output_tokens and start[call.output_node or ""] - start[call.prompt_node or ""],
        )
        for call in made.rows["calls"]
    ]
    return Forest(rows=rows, _count=made._count, _seconds=made._seconds)
