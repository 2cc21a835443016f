"""The harness: asks the model over HTTP, runs the tool it calls, tells it the result, until there are no calls left.

It is started once and gets an execution a line (docs/tasks.md, long-lived workers). Standard library only.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workshop import TOOLS, Workshop, is_jammed, parts_of

__all__ = ["work"]

MAX_TOKENS = 40
JAMMED_AFTER = 1

Ask = Callable[[list[Any]], dict[str, Any]]
"""Messages so far -> the assistant's message, in the form of OpenAI's chat completions."""


def work(ask: Ask, workshop: Workshop, told: Callable[[int], None] = lambda _: None) -> list[Any]:
    """Run the loop and return its messages; `told` gets the number of the call after each that was run."""
    messages: list[Any] = [{"role": "user", "content": workshop.prompt()}]
    for number in range(1, len(workshop.parts) + 1):
        reply = ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            result = run(workshop, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        told(number)
    return messages


def run(workshop: Workshop, function: dict[str, Any]) -> str:
    """The result of a tool call; arguments that are no JSON are a call like any other that does nothing."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    return workshop.call(function["name"], arguments)


def http_ask(base_url: str, key: str) -> Ask:
    """Ask an OpenAI-compatible API."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def ask(messages: list[Any]) -> dict[str, Any]:
        body = {"model": "policy", "max_tokens": MAX_TOKENS, "temperature": 1.0, "messages": messages, "tools": TOOLS}
        request = urllib.request.Request(f"{base_url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["message"]

    return ask


def execution(order: dict[str, Any]) -> None:
    """One execution: how many parts were right stands in its workspace after each call, so that a timeout leaves it."""
    task, sample = order["task"], order["sample_index"]
    workshop = Workshop(parts_of(task))
    right = Path(order["workspace"]) / "right.json"

    def told(number: int) -> None:
        right.write_text(json.dumps(workshop.num_right))
        if number == JAMMED_AFTER:
            jam()

    def jam() -> None:
        while is_jammed(task, sample):
            time.sleep(1)

    work(http_ask(order["base_url"], order["key"]), workshop, told)
    jam()  # of an execution that had no call


if __name__ == "__main__":
    for line in sys.stdin:
        one = json.loads(line)
        execution(one)
        print(json.dumps({"execution": one["execution"], "ok": True}), flush=True)
