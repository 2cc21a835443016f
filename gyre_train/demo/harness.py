"""A small agent harness on the official `anthropic` client: a tool loop with sub-agents and compaction.

    python -m gyre_train.demo.harness "Write the stock of all bays to answer.txt."

It is an ordinary client and knows nothing of Gyre except three optional headers that say which agent speaks. Point
ANTHROPIC_BASE_URL anywhere. Its `run` tool starts programs from an allow-list, without a shell, inside the working
folder: a model's text never reaches a shell on the user's machine.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "AGENT",
    "GO_ON",
    "RUN",
    "SUMMARISE",
    "WRITE",
    "Agent",
    "Ask",
    "anthropic_ask",
    "main",
    "run_tool",
    "write_tool",
]

SYSTEM = "You keep the book of a small warehouse. Use the tools. Be brief."
HELPER_SYSTEM = "You help the book keeper of a small warehouse. Use the tools. Be brief."
SUMMARISE = "Summarise what you know so far, so that the work can go on from your summary alone."
GO_ON = "The work so far was cut short. Summary:"
ALLOWED = ("cat", "ls", "head", "wc")
MAX_TURNS = 8


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "input_schema": schema}


RUN = _tool("run", "Run a program.", argv={"type": "array", "items": {"type": "string"}})
WRITE = _tool("write", "Write a file.", path={"type": "string"}, text={"type": "string"})
AGENT = _tool("agent", "Let a helper do a part.", prompt={"type": "string"})

# ask(messages, system, tools, headers) -> content blocks of the reply
Ask = Callable[[list[Any], str, list[Any], dict[str, str]], list[Any]]


def run_tool(workspace: Path, argv: list[str]) -> str:
    """Run an allowed program on files below `workspace` and return what it printed, at most 2,000 characters."""
    here = workspace.resolve()
    if not isinstance(argv, list) or not argv or argv[0] not in ALLOWED:
        return f"refused: the program must be one of {', '.join(ALLOWED)}"
    if any(not (here / str(arg)).resolve().is_relative_to(here) for arg in argv[1:] if not str(arg).startswith("-")):
        return "refused: the path leaves the working folder"
    command = [str(arg) for arg in argv]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr)[:2000].strip() or "(nothing)"


def write_tool(workspace: Path, path: str, text: str) -> str:
    """Write `text` to a file below `workspace`."""
    target = (workspace / str(path)).resolve()
    if not target.is_relative_to(workspace.resolve()):
        return "refused: the path leaves the working folder"
    target.write_text(f"{text}\n")
    return "ok"


class Agent:
    """One conversation: asks, runs the tools it is told to, asks again.

    After `compact_after` rounds (0 = never) it compacts once.
    """

    def __init__(self, ask: Ask, workspace: Path, *, name: str | None = None, compact_after: int = 0) -> None:
        self.ask, self.workspace, self.name, self.compact_after = ask, workspace, name, compact_after
        self.num_helpers = 0

    def headers(self, role: str | None = None) -> dict[str, str]:
        """Which agent speaks, and as what."""
        named = {"X-Gyre-Agent": self.name} if self.name else {}
        return {**named, "X-Gyre-Role": role or ("sub_agent" if self.name else "main")}

    def work(self, prompt: str) -> str:
        """Run the loop on `prompt` and return the last text."""
        system = HELPER_SYSTEM if self.name else SYSTEM
        tools = [RUN] if self.name else [RUN, WRITE, AGENT]
        messages: list[Any] = [{"role": "user", "content": prompt}]
        text = ""
        for turn in range(1, MAX_TURNS + 1):
            blocks = self.ask(messages, system, tools, self.headers())
            messages.append({"role": "assistant", "content": blocks})
            text = "".join(b["text"] for b in blocks if b["type"] == "text")
            results = [self.answer(b) for b in blocks if b["type"] == "tool_use"]
            if not results:
                break
            messages.append({"role": "user", "content": results})
            if turn == self.compact_after:
                messages = self.compact(prompt, messages, system, tools)
        return text

    def answer(self, block: dict[str, Any]) -> dict[str, Any]:
        """Run one tool call; what goes wrong is told to the model."""
        try:
            match block["name"]:
                case "run":
                    out = run_tool(self.workspace, **block["input"])
                case "write":
                    out = write_tool(self.workspace, **block["input"])
                case "agent":
                    self.num_helpers += 1
                    name = f"{self.name or 'helper'}-{self.num_helpers}"
                    out = Agent(self.ask, self.workspace, name=name).work(**block["input"])
                case other:
                    out = f"no such tool: {other}"
        except (TypeError, OSError, subprocess.SubprocessError) as error:
            out = f"failed: {error}"
        return {"type": "tool_result", "tool_use_id": block["id"], "content": out}

    def compact(self, prompt: str, messages: list[Any], system: str, tools: list[Any]) -> list[Any]:
        """Ask for a summary and go on from it, keeping the last round word for word."""
        last = {**messages[-1], "content": [*messages[-1]["content"], {"type": "text", "text": SUMMARISE}]}
        role = "sub_agent_summary" if self.name else "main_summary"
        blocks = self.ask([*messages[:-1], last], system, tools, self.headers(role))
        summary = "".join(b["text"] for b in blocks if b["type"] == "text")
        return [{"role": "user", "content": f"{prompt}\n{GO_ON} {summary}"}, *messages[-2:]]


def anthropic_ask(max_tokens: int, ask_twice: int) -> Ask:
    """Ask over HTTP, streaming. A reply that is cut off is asked for again, as real harnesses do.

    Request number `ask_twice` (from 1; 0 = none) is sent again while it is answered.
    """
    import anthropic
    import httpx2

    client = anthropic.Anthropic(max_retries=0)
    broken = (anthropic.APIConnectionError, anthropic.InternalServerError, httpx2.TransportError)
    count = 0

    def send(request: dict[str, Any]) -> Any:
        for wait_s in (0.5, 1, 2, 4, 8, 16, 16, None):
            try:
                with client.messages.stream(**request) as stream:
                    return stream.get_final_message()
            except broken:
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def ask(messages: list[Any], system: str, tools: list[Any], headers: dict[str, str]) -> list[Any]:
        nonlocal count
        count += 1
        request: dict[str, Any] = {"model": "policy", "max_tokens": max_tokens, "messages": messages}
        request |= {"system": system, "tools": tools, "extra_headers": headers}
        with ExitStack() as first:
            if count == ask_twice:
                with suppress(*broken):
                    first.enter_context(client.messages.stream(**request))
            message = send(request)
        return [block.model_dump(exclude_none=True) for block in message.content]

    return ask


def main(arguments: list[str] | None = None) -> None:
    """Command line of the harness."""
    parser = argparse.ArgumentParser(description="A small agent harness with tools, helpers and compaction.")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--compact-after", type=int, default=0, help="rounds after which it summarises once")
    parser.add_argument("--ask-twice", type=int, default=0, help="fault: send this request again before its reply ends")
    parser.add_argument("--stall", action="store_true", help="fault: never exit")
    options = parser.parse_args(arguments)
    ask = anthropic_ask(options.max_tokens, options.ask_twice)
    agent = Agent(ask, Path.cwd(), compact_after=options.compact_after)
    text = agent.work(options.prompt)
    while options.stall:
        time.sleep(1)
    print(text)


if __name__ == "__main__":
    main()
