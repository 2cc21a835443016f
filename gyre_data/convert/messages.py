"""Messages in the form in which a run stores them, made from what sources hold.

A message is the JSON object that lies in the run's blobs: role, content (texts joined), reasoning, tool_calls
(name, arguments, id), tool_call_id, name, and `raw` for what this form leaves out, so that nothing is lost. The proxy
writes the same form; `identity` is its rule for when two messages say the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gyre_data.json_values import plain_numbers

__all__ = [
    "Message",
    "arguments_of",
    "canonical",
    "identity",
    "join_lines",
    "list_of",
    "message",
    "message_json",
    "objects_of",
    "said_anything",
    "text_of",
    "tool_call",
    "without_reasoning",
]

Message = dict[str, Any]

# Blocks whose content the canonical text leaves out although it is part of what was said.
_TEXT_BLOCKS = frozenset(
    {"text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "redacted_thinking", "message"}
    | {"function", "function_call", "function_call_output", "reasoning", "ephemeral"}
)


def message(
    role: str,
    content: str = "",
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
    tool_call_id: str | None = None,
    name: str | None = None,
    blocks: Sequence[Any] = (),
    fields: Mapping[str, Any] | None = None,
) -> Message:
    """A message; what is empty is left out. `blocks` and `fields` are what the form has no place for."""
    made: Message = {"role": role, "content": content}
    if reasoning:
        made["reasoning"] = reasoning
    if tool_calls:
        made["tool_calls"] = [dict(call) for call in tool_calls]
    if tool_call_id:
        made["tool_call_id"] = tool_call_id
    if name:
        made["name"] = name
    if raw := {**({"blocks": list(blocks)} if blocks else {}), **({"fields": dict(fields)} if fields else {})}:
        made["raw"] = raw
    return made


def tool_call(name: Any, arguments: Any, id_: Any = None) -> dict[str, Any]:
    """One call of a message."""
    call = {"name": text_of(name), "arguments": arguments_of(arguments)}
    return {**call, "id": id_} if isinstance(id_, str) and id_ else call


def arguments_of(value: Any) -> Any:
    """Arguments as an object; the raw text of what is none."""
    if isinstance(value, Mapping):
        return dict(value)
    if value is None:
        return {}
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not value.strip():
        return {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def text_of(value: Any) -> str:
    """Text in a place where text is usual; everything else gives none."""
    return value if isinstance(value, str) else ""


def list_of(value: Any) -> list[Any]:
    """A list in a place where one is usual; everything else gives none."""
    return list(value) if isinstance(value, list | tuple) else []


def objects_of(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [one for one in list_of(value) if isinstance(one, Mapping)]


def join_lines(texts: Iterable[str]) -> str:
    """Blocks of a system, user or tool message: a line break where neither neighbour has one."""
    joined = ""
    for text in texts:
        gap = "" if not joined or not text or joined.endswith("\n") or text.startswith("\n") else "\n"
        joined += gap + text
    return joined


def said_anything(made: Message) -> bool:
    """Whether a reply holds anything at all."""
    return bool(made["content"] or made.get("reasoning") or made.get("tool_calls") or made.get("raw"))


def message_json(made: Message) -> bytes:
    """The bytes that are stored: argument order and number form stay."""
    return json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def canonical(value: Any) -> bytes:
    """JSON bytes that are equal for equal values: sorted keys, no blanks, integral floats written as integers."""
    text = json.dumps(plain_numbers(value), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode("utf-8", "replace")


def identity(made: Message) -> bytes:
    """Bytes that are equal for messages that say the same, whatever their JSON form.

    Ids of calls are left out; outer blanks count, except in assistant text; blocks that are no text enter by digest.
    """
    assistant = made["role"] == "assistant"
    value: dict[str, Any] = {
        "role": made["role"],
        "content": made["content"].strip() if assistant else made["content"],
    }
    if assistant and (thought := (made.get("reasoning") or "").strip()):
        value["reasoning"] = thought
    if calls := made.get("tool_calls"):
        value["calls"] = [[call["name"], arguments_of(call["arguments"])] for call in calls]
    if answers := made.get("tool_call_id"):
        value["answers"] = answers
    if name := made.get("name"):
        value["name"] = name
    if blocks := _foreign(made.get("raw")):
        value["blocks"] = blocks
    return canonical(value)


def without_reasoning(made: Message) -> bytes:
    """Identity of a turn as clients echo it: they may leave its reasoning out."""
    return identity({name: value for name, value in made.items() if name != "reasoning"})


def _foreign(raw: Any) -> list[str]:
    """Digests of the blocks that are neither text nor calls, in order."""
    if isinstance(raw, Mapping):
        kind = raw.get("type")
        if isinstance(kind, str) and kind not in _TEXT_BLOCKS:
            plain = {key: value for key, value in raw.items() if key != "cache_control"}
            return [hashlib.sha256(canonical(plain)).hexdigest()[:32]]
        return _foreign(raw.get("blocks")) + _foreign(raw.get("content"))
    if isinstance(raw, list | tuple):
        return [found for item in raw for found in _foreign(item)]
    return []
