"""The input of the Responses wire: a flat list of items, read into messages and turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gyre_proxy.dialects.base import BadRequest, validated
from gyre_proxy.dialects.inbound import (
    arguments_of,
    as_blocks,
    check_results,
    hint_of,
    join_lines,
    refuse_media,
    shown_block,
    without_cache_marks,
)
from gyre_proxy.message import Message, ToolCall

__all__ = ["Item", "read_input", "read_item"]

_ELSEWHERE = (
    "item_reference",
    "compaction",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "computer_call",
    "computer_call_output",
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
)
"""Items of tools and of a memory that are not ours: what they say cannot be shown to the policy."""


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str | None = None
    status: str | None = None


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


_Parts = Annotated[list[_Part], BeforeValidator(as_blocks)]


class _Said(_Loose):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts


class _Reasoning(_Loose):
    type: Literal["reasoning"]
    summary: _Parts = Field(default_factory=list)
    content: _Parts = Field(default_factory=list)
    encrypted_content: str | None = None


class _Call(_Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any = ""


class _Result(_Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


_KINDS: Mapping[str, type[_Said] | type[_Reasoning] | type[_Call] | type[_Result]] = {
    "message": _Said,
    "reasoning": _Reasoning,
    "function_call": _Call,
    "function_call_output": _Result,
}


@dataclass(kw_only=True, slots=True)
class _Turn:
    """Assistant items of one reply."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    node: str | None = None
    left: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, node: str | None) -> bool:
        """Whether an item that names `node` may be part of it."""
        return node is None or self.node is None or node == self.node

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self.texts),
            reasoning="".join(self.thoughts) or None,
            tool_calls=tuple(self.calls),
            node_hint=self.node,
            raw={"blocks": self.left} if self.left else None,
        )


Item = _Said | _Reasoning | _Call | _Result


def read_input(instructions: str | None, items: Sequence[Item | Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages of a request; what stands first for the system, in `instructions` and in items, is one message."""
    entries: list[Message | _Turn] = [Message(role="system", content=instructions)] if instructions else []
    for index, item in enumerate(items):
        if isinstance(item, Mapping):
            entries.append(Message(role="user", content=shown_block(item)))
        elif isinstance(item, _Reasoning | _Call) or (isinstance(item, _Said) and item.role == "assistant"):
            _into_turn(entries, item, f"input.{index}")
        else:
            entries.append(_message(item, f"input.{index}"))
    messages = _led([entry.message() if isinstance(entry, _Turn) else entry for entry in _without_leftovers(entries)])
    if not messages or messages[-1].role == "assistant":
        raise BadRequest(
            "input: must end with a message to the model or a tool result, got an assistant item.", "input"
        )
    check_results(messages, "input")
    return tuple(messages)


def read_item(value: Any, path: str) -> Item | Mapping[str, Any]:
    """The item; as it came when it is of a kind that nobody knows, which is shown to the model as it is."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{path}: must be an object, got {value!r:.80}.", path)
    kind = value.get("type") or "message"
    if kind == "additional_tools":
        raise BadRequest(
            f"{path}: tools inside the input are not supported: send them as `tools`. Codex does so for a model name "
            "that it does not know, such as gyre-policy.",
            path,
        )
    if kind in _ELSEWHERE:
        raise BadRequest(
            f"{path}: an item of type {kind!r} cannot be given to this text model: only messages, reasoning, function "
            "calls and their outputs are supported. Turn the tool behind it off in the harness.",
            path,
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        refuse_media(str(kind), path)
        return value
    try:
        return validated(_KINDS[kind], value)
    except BadRequest as bad:
        raise BadRequest(f"{path}.{bad.message}", f"{path}.{bad.param}" if bad.param else path) from bad


def _into_turn(entries: list[Message | _Turn], item: _Said | _Reasoning | _Call, path: str) -> None:
    """Adds an assistant item to the turn it belongs to: the last one, across results when both name one node."""
    echoed = [item.id, getattr(item, "encrypted_content", None), getattr(item, "call_id", None)]
    node = hint_of(echoed)
    turn = entries[-1] if entries else None
    if isinstance(turn, Message) and turn.role == "tool" and node is not None:
        earlier = next((entry for entry in reversed(entries) if isinstance(entry, _Turn)), None)
        turn = earlier if earlier is not None and earlier.node == node else None
    if not isinstance(turn, _Turn) or not turn.takes(node):
        turn = _Turn()
        entries.append(turn)
    turn.node = turn.node or node
    name = item.call_id if isinstance(item, _Call) else item.id
    if name is not None and hint_of([name]) is not None:
        if name in turn.ids:  # a reply of ours that broke off and was sent again from its start
            return
        turn.ids.add(name)
    _add(turn, item, path)


def _add(turn: _Turn, item: _Said | _Reasoning | _Call, path: str) -> None:
    extra = without_cache_marks(item.model_extra)
    if isinstance(item, _Call):
        called = f"{item.namespace}.{item.name}" if item.namespace else item.name
        turn.calls.append(ToolCall(name=called, arguments=arguments_of(item.arguments), id=item.call_id))
    elif isinstance(item, _Reasoning):
        turn.thoughts += [part.text or "" for part in item.content or item.summary]
        if item.encrypted_content and hint_of([item.encrypted_content]) is None:
            extra["encrypted_content"] = item.encrypted_content
    else:
        texts, left = _texts(item.content, f"{path}.content", show=False)
        turn.texts += texts
        turn.left += left
    if extra:
        turn.left.append({"type": item.type, **extra})


def _message(item: _Said | _Result, path: str) -> Message:
    if isinstance(item, _Result):
        texts, left = _texts(item.output, f"{path}.output")
    else:
        texts, left = _texts(item.content, f"{path}.content")
    fields = without_cache_marks(item.model_extra)
    raw = {**({"blocks": left} if left else {}), **({"fields": fields} if fields else {})}
    role = "tool" if isinstance(item, _Result) else "system" if item.role == "developer" else item.role
    return Message(
        role=role,
        content=join_lines(texts),
        tool_call_id=item.call_id if isinstance(item, _Result) else None,
        raw=raw or None,
    )


def _texts(parts: Sequence[_Part], path: str, *, show: bool = True) -> tuple[list[str], list[dict[str, Any]]]:
    """Texts of an item's parts, unknown parts as their JSON if `show`; and what was more than text."""
    texts: list[str] = []
    left: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        text = part.text if part.text is not None else part.refusal
        if text is None:
            refuse_media(part.type, f"{path}.{index}")
            left.append(part.model_dump(exclude_unset=True))
            if show:
                texts.append(shown_block(left[-1]))
            continue
        texts.append(text)
        extra = without_cache_marks(part.model_extra)
        extra |= {name: value for name in ("annotations", "logprobs") if (value := getattr(part, name))}
        if extra:
            left.append({"type": part.type, **extra})
    return texts, left


def _without_leftovers(entries: Sequence[Message | _Turn]) -> list[Message | _Turn]:
    """Without the turns that name a node and are followed by another turn or by nothing: their reply broke off."""
    following = [*entries[1:], _Turn()]
    return [
        entry
        for entry, after in zip(entries, following, strict=False)
        if not (isinstance(entry, _Turn) and entry.node is not None and isinstance(after, _Turn))
    ]


def _led(messages: list[Message]) -> list[Message]:
    """Joins the system messages at the front: templates take one."""
    count = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    if count < 2:
        return messages
    blocks: list[dict[str, Any]] = []
    for raw in (message.raw or {} for message in messages[:count]):
        blocks += raw.get("blocks", ())
        blocks += [{"type": "message", **raw["fields"]}] if "fields" in raw else []
    text = join_lines(message.content for message in messages[:count])
    return [Message(role="system", content=text, raw={"blocks": blocks} if blocks else None), *messages[count:]]
