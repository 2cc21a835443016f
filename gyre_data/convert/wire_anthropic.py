"""Content blocks of Anthropic Messages as messages: what Claude Code's sessions and captures of its requests hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .calls import Opening
from .messages import Message, join_lines, list_of, message, objects_of, text_of, tool_call

__all__ = ["assistant", "blocks_of", "conversation", "opening", "spoken"]

_BILLING = "x-anthropic-billing-header:"  # changes in the middle of a session


def blocks_of(content: Any) -> list[Any]:
    """Content as blocks, without marks that move from request to request."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        return []
    return [
        {name: item for name, item in block.items() if name != "cache_control"} if isinstance(block, Mapping) else block
        for block in content
    ]


def assistant(blocks: Sequence[Any]) -> Message:
    """One turn of the model. Texts join without a gap; signatures and blocks of server tools stay in `raw`."""
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
    left: list[Any] = []
    for block in blocks:
        match _kind(block):
            case "text":
                text += text_of(block.get("text"))
                if block.get("citations"):
                    left.append({"type": "text", "citations": block["citations"]})
            case "thinking":
                reasoning += text_of(block.get("thinking"))
                left.append({"type": "thinking", "signature": block.get("signature")})
            case "tool_use":
                calls.append(tool_call(block.get("name"), block.get("input"), block.get("id")))
            case _:
                left.append(block)
    return message("assistant", text, reasoning=reasoning, tool_calls=calls, blocks=left)


def spoken(role: str, blocks: Sequence[Any]) -> list[Message]:
    """A message of the client: each result of a tool is a message of its own, before what else it says."""
    results = [block for block in blocks if _kind(block) == "tool_result"]
    rest = [block for block in blocks if _kind(block) != "tool_result"]
    found = [_result(block) for block in results]
    return [*found, _plain(role, rest)] if rest or not results else found


def opening(body: Mapping[str, Any]) -> Opening:
    """System text and tools of a request; deferred tools come and go without changing what was said."""
    system = [block for block in blocks_of(body.get("system")) if not _text(block).startswith(_BILLING)]
    tools = blocks_of(list_of(body.get("tools")))
    shown = tuple(tool for tool in tools if not (isinstance(tool, Mapping) and tool.get("defer_loading")))
    return Opening(system=(_plain("system", system),) if system else (), tools=shown)


def conversation(body: Mapping[str, Any]) -> list[Message]:
    """The messages of a request."""
    found: list[Message] = []
    for one in objects_of(body.get("messages")):
        role, blocks = text_of(one.get("role")) or "user", blocks_of(one.get("content"))
        found += [assistant(blocks)] if role == "assistant" else spoken(role, blocks)
    return found


def _kind(block: Any) -> str:
    return text_of(block.get("type")) if isinstance(block, Mapping) else ""


def _text(block: Any) -> str:
    return text_of(block.get("text")) if _kind(block) == "text" else ""


def _plain(role: str, blocks: Sequence[Any]) -> Message:
    texts = [_text(block) for block in blocks if _kind(block) == "text"]
    return message(role, join_lines(texts), blocks=[block for block in blocks if _kind(block) != "text"])


def _result(block: Mapping[str, Any]) -> Message:
    inner = blocks_of(block.get("content"))
    left: list[Any] = [item for item in inner if _kind(item) != "text"]
    if block.get("is_error"):
        left.append({"type": "tool_result", "is_error": True})
    said = join_lines(_text(item) for item in inner if _kind(item) == "text")
    return message("tool", said, tool_call_id=text_of(block.get("tool_use_id")), blocks=left)
