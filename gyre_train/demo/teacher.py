"""Warm-start text for the demo: conversations of the demo harness with a scripted teacher, as chat JSONL.

The harness itself makes the conversations, so that the policy is warmed up on exactly what it will see. The teacher is
right about each number only half of the time: at temperature 1 the policy then produces good and bad answers, and a
group of executions has a signal to learn from.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .harness import GO_ON, Agent
from .tasks import TASKS, DemoTask

__all__ = ["conversations", "write_jsonl"]


def conversations(num_variants: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield `{"messages", "tools"}` records in the chat form: each conversation of each task, `num_variants` times."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            workspace = Path(folder) / task.id
            workspace.mkdir()
            for name, text in task.files.items():
                (workspace / name).write_text(text)
        for _ in range(num_variants):
            for task in TASKS:
                teacher = _Teacher(task, rng)
                Agent(teacher.ask, Path(folder) / task.id, compact_after=task.compact_after).work(task.prompt)
                yield from teacher.records()


def write_jsonl(path: Path, num_variants: int, seed: int = 0) -> int:
    """Write the conversations to `path`, one JSON object a line; return how many."""
    lines = [json.dumps(record) for record in conversations(num_variants, seed)]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


class _Teacher:
    """Answers like a good book keeper with a bad memory for numbers, and remembers the conversations."""

    def __init__(self, task: DemoTask, rng: random.Random) -> None:
        self.task, self.rng = task, rng
        self.calls: list[dict[str, Any]] = []

    def ask(self, messages: list[Any], system: str, tools: list[Any], headers: dict[str, str]) -> list[Any]:
        """Reply to one request of the harness."""
        turn = sum(message["role"] == "assistant" for message in messages)
        script = self.script(messages, headers["X-Gyre-Role"])
        name, value = script[min(turn, len(script) - 1)]
        blocks: list[Any] = [{"type": "text", "text": value}]
        if name != "text":
            blocks = [{"type": "tool_use", "id": f"toolu_{turn}", "name": name, "input": value}]
        whole = [*messages, {"role": "assistant", "content": blocks}]
        self.calls.append({"messages": whole, "system": system, "tools": tools})
        return blocks

    def script(self, messages: list[Any], role: str) -> list[tuple[str, Any]]:
        """Replies by turn for the conversation that these messages belong to."""
        if role == "main_summary":
            return [("text", self.task.summary)]
        if role == "sub_agent":
            return [("run", {"argv": ["cat", next(iter(self.task.files))]}), ("text", self.task.answer)]
        numbers = [n if self.rng.random() < 0.5 else str((int(n) + 5) % 10) for n in self.task.answer.split()]
        finish = [("write", {"path": "answer.txt", "text": " ".join(numbers)}), ("text", "Done.")]
        if self.task.uses_helper:
            return [("agent", {"prompt": "Read the bays."}), *finish]
        reads = [("run", {"argv": ["cat", name]}) for name in self.task.files]
        return [reads[-1], *finish] if GO_ON in str(messages[0]["content"]) else [*reads, *finish]

    def records(self) -> Iterator[dict[str, Any]]:
        """Conversations that no later call extends, in the chat form."""
        for i, call in enumerate(self.calls):
            if not any(later["messages"][: len(call["messages"])] == call["messages"] for later in self.calls[i + 1 :]):
                yield {
                    "messages": _chat(call["system"], call["messages"]),
                    "tools": [_function(t) for t in call["tools"]],
                }


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}


def _chat(system: str, messages: list[Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for message in messages:
        text = "".join(block["text"] for block in _blocks(message) if block["type"] == "text")
        calls = [
            {"type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
            for block in _blocks(message)
            if block["type"] == "tool_use"
        ]
        for block in _blocks(message):
            if block["type"] == "tool_result":
                out.append({"role": "tool", "content": block["content"]})
        if message["role"] == "assistant":
            out.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        elif text:
            out.append({"role": "user", "content": text})
    return out
