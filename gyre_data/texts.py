"""Canonical messages as plain text: what was said, what was thought, which tools were called with what.

A canonical message is a JSON object with `role` and maybe `content`, `reasoning`, `tool_calls` (name, arguments, id),
`tool_call_id` and `name`. Whatever else a blob holds reads as its JSON text: nothing is hidden from a search or a diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .errors import GyreError
from .json_values import parsed
from .tree import Tables, Tree

__all__ = ["Said", "arguments_text", "content_text", "node_messages", "parts_of", "role_of", "said", "tools_of"]

Said = tuple[str, str, str, tuple[tuple[str, str], ...]]


def node_messages(run: Tables, tree: Tree, node: int) -> list[Any]:
    """The canonical messages that a node renders; a blob that is missing or damaged is left out (`gyre verify` tells).

    Empty for a run in memory that holds no blobs.
    """
    blob = getattr(run, "blob", None)
    found: list[Any] = []
    if blob is None:
        return []
    for name in tree.message_blobs(node):
        try:
            message = parsed(blob(name))
        except (KeyError, GyreError):
            continue
        if message is not None:
            found.append(message)
    return found


def content_text(message: Any) -> str:
    """What the message says, without reasoning and tool calls."""
    if not isinstance(message, dict):
        return message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    return _text(message.get("content"))


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            _text(block.get("text", block)) if isinstance(block, dict) else _text(block) for block in content
        )
    return json.dumps(content, ensure_ascii=False)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and isinstance(block.get("text"), str)


def tools_of(message: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of each tool call of the message; arguments are an object, or text that does not parse."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return [(str(call.get("name")), call.get("arguments")) for call in calls or () if isinstance(call, dict)]


def arguments_text(arguments: Any) -> str:
    """Arguments of a tool call as JSON with sorted keys, so that equal arguments are equal text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, sort_keys=True)


def parts_of(message: Any) -> Iterator[tuple[str, str]]:
    """(kind, text) of all that a message holds: reasoning, content, and each call as `NAME ARGUMENTS`."""
    if isinstance(message, dict) and message.get("reasoning"):
        yield "reasoning", str(message["reasoning"])
    if text := content_text(message):
        yield "content", text
    for name, arguments in tools_of(message):
        yield "call", f"{name} {arguments_text(arguments)}"


def role_of(message: Any) -> str:
    """Role of the message; `unknown` for what is no message."""
    return str(message.get("role")) if isinstance(message, dict) else "unknown"


def said(message: Any) -> Said:
    """(role, text, reasoning, calls): equal for messages that differ only in ids and in blanks around a reply."""
    role, text = role_of(message), content_text(message)
    reasoning = message.get("reasoning") if isinstance(message, dict) else None
    calls = tuple((name, arguments_text(arguments)) for name, arguments in tools_of(message))
    return role, text.strip() if role == "assistant" else text, str(reasoning or "").strip(), calls
