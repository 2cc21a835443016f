"""Anthropic Messages, inbound: a tolerant reading of what Claude Code and other clients really send.

Unknown fields and block types are kept in `Message.raw`; what would change the model's task and cannot be honoured is
refused. System messages stay where they stand. Results of tools come before the text of the same user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from gyre_proxy.dialects import anthropic_reply
from gyre_proxy.dialects.base import BadRequest, ReplyContext, StreamEncoder, validated
from gyre_proxy.dialects.inbound import (
    arguments_of,
    as_blocks,
    hint_of,
    join_lines,
    refuse_engine_fields,
    refuse_media,
    schema_text,
    settled,
    shown_block,
    stops_of,
    without_cache_marks,
)
from gyre_proxy.dialects.reading import Reader
from gyre_proxy.message import Message, Reply, Request, Sampling, ToolCall, Usage

__all__ = ["ANTHROPIC", "Anthropic"]

_BILLING = "x-anthropic-billing-header:"


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Text(_Loose):
    type: Literal["text"]
    text: str


class _Thinking(_Loose):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _ToolUse(_Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(default_factory=dict)


class _ToolResult(_Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Block], BeforeValidator(as_blocks)] = Field(default_factory=list)


class _Other(_Loose):
    type: str


_KNOWN = {"text", "thinking", "tool_use", "tool_result"}


def _label(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"[{kind}]" if isinstance(kind, str) and kind in _KNOWN else "[other]"


_Block = Annotated[
    Annotated[_Text, Tag("[text]")]
    | Annotated[_Thinking, Tag("[thinking]")]
    | Annotated[_ToolUse, Tag("[tool_use]")]
    | Annotated[_ToolResult, Tag("[tool_result]")]
    | Annotated[_Other, Tag("[other]")],
    Discriminator(_label),
]
_Blocks = Annotated[list[_Block], BeforeValidator(as_blocks)]


class _Message(_Loose):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _Tool(_Loose):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class _Body(_Loose):
    model: str
    messages: list[Any] = Field(min_length=1)
    system: _Blocks = Field(default_factory=list)
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None


for _model in (_ToolResult, _Message, _Body):
    _model.model_rebuild()


class Anthropic:
    """The dialect of `/v1/messages`."""

    name = "anthropic"
    statuses: Mapping[str, int] = anthropic_reply.STATUSES

    def parse(self, body: bytes, headers: Mapping[str, str], reader: Reader | None = None) -> Request:
        """The canonical request; `headers` change nothing on this wire."""
        opened = (reader or Reader()).open(body, "messages")
        sent = opened.once("rest", lambda: validated(_Body, opened.fields))
        _refuse(sent)
        tools, definitions = opened.once("tools", lambda: _read_tools(sent.tools or ()))
        messages = list(opened.led_by(opened.once("system", lambda: _system(sent.system))))
        for read in opened.each(
            lambda value, index: _messages(value, f"messages.{index}", definitions), definitions, b"tool_reference"
        ):
            messages += read
        if messages[-1].role == "assistant":
            raise BadRequest(
                "messages: assistant message prefill is not supported. The conversation must end with a user message.",
                "messages",
            )
        offered = () if (sent.tool_choice or {}).get("type") == "none" else tools
        return Request(
            wire=self.name,
            model=sent.model,
            messages=opened.finish(messages, settled),
            tools=offered,
            sampling=Sampling(
                max_tokens=sent.max_tokens,
                temperature=sent.temperature,
                top_p=sent.top_p,
                top_k=sent.top_k,
                stop=stops_of(sent.stop_sequences, "stop_sequences"),
                json_schema=_schema(sent, bool(offered)),
            ),
            stream=bool(sent.stream),
            body=opened.parts,
        )

    def stream(self, call: ReplyContext) -> StreamEncoder:
        """A fresh encoder for one streamed reply."""
        return anthropic_reply.AnthropicStream(call)

    def batch(self, call: ReplyContext, reply: Reply, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """The whole reply as one message."""
        return anthropic_reply.batch(call, reply, usage, stop_sequence)

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> bytes:
        """An error body; this wire has no place for `param`, so messages name the field."""
        return anthropic_reply.error_body(kind, message)

    def too_long(self, num_tokens: int, maximum: int) -> str:
        """The words at which Claude Code compacts."""
        return f"prompt is too long: {num_tokens} tokens > {maximum} maximum"


ANTHROPIC = Anthropic()


def _schema(sent: _Body, has_tools: bool) -> str | None:
    """The schema of `output_config.format`, or of `output_format`, its older name."""
    path = "output_config.format" if sent.output_format is None else "output_format"
    wanted = (sent.output_config or {}).get("format") if sent.output_format is None else sent.output_format
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        raise BadRequest(f"{path}.type: must be 'json_schema', got {wanted!r:.80}: leave it out.", path)
    return schema_text(wanted.get("schema"), f"{path}.schema", has_tools)


def _refuse(sent: _Body) -> None:
    refuse_engine_fields(sent.model_extra)
    choice = sent.tool_choice or {}
    kind = choice.get("type", "auto")
    if kind not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice: 'auto' and 'none' are supported, got {kind!r}: the policy cannot be forced to call a tool.",
            "tool_choice",
        )
    if sent.tools and choice.get("disable_parallel_tool_use"):
        raise BadRequest(
            "tool_choice.disable_parallel_tool_use: the policy cannot be kept from several calls a turn: leave it out.",
            "tool_choice",
        )
    edits = (sent.context_management or {}).get("edits") or ()
    for edit in edits if isinstance(edits, list | tuple) else (edits,):
        edit_type = str(edit.get("type", "")) if isinstance(edit, Mapping) else ""
        if not edit_type.startswith("clear_thinking") or edit.get("keep") != "all":
            raise BadRequest(
                f"context_management: only clear_thinking with keep 'all' is supported, got {edit_type!r}: "
                "the history is used as it is sent.",
                "context_management",
            )
    for name in ("mcp_servers", "container"):
        if getattr(sent, name):
            raise BadRequest(f"{name}: tools that the server runs are not supported: leave it out.", name)


def _read_tools(tools: Sequence[_Tool]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Tools to render, and the definitions that a message may refer to."""
    return _tools(tools), {tool.name: _function(tool) for tool in tools if tool.type in (None, "custom")}


def _tools(tools: Sequence[_Tool]) -> tuple[dict[str, Any], ...]:
    """Tools to render. Deferred ones are left out: they come and go, and would change the prompt from its start."""
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"tools.{index}: only tools with an own input_schema are supported, got {tool.name!r} of type "
                f"{tool.type!r}: the policy does not know it.",
                f"tools.{index}.type",
            )
    return tuple(_function(tool) for tool in tools if not tool.defer_loading)


def _function(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _system(blocks: Sequence[Any]) -> list[Message]:
    """The leading system message, without the billing block, whose text changes in the middle of a session."""
    billing = [block for block in blocks if isinstance(block, _Text) and block.text.startswith(_BILLING)]
    rest = [block for block in blocks if block not in billing]
    if not rest:
        return []
    text, raw = _plain(rest, "system")
    raw += [block.model_dump(exclude_unset=True, exclude={"cache_control"}) for block in billing]
    return [Message(role="system", content=text, raw={"blocks": raw} if raw else None)]


def _plain(blocks: Sequence[Any], path: str) -> tuple[str, list[dict[str, Any]]]:
    """Text of a message that can only hold text, unknown blocks as their JSON; and what was more than text."""
    texts: list[str] = []
    left: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, _Text):
            texts.append(block.text)
            if extra := without_cache_marks(block.model_extra):
                left.append({"type": "text", **extra})
        else:
            refuse_media(block.type, f"{path}.{index}")
            left.append(block.model_dump(exclude_unset=True, exclude={"cache_control"}))
            texts.append(shown_block(left[-1]))
    return join_lines(texts), left


def _messages(value: Any, path: str, definitions: Mapping[str, Any]) -> list[Message]:
    """The messages that one of the wire's messages is for the template."""
    message = validated(_Message, value, path)
    if message.role == "user":
        return _user(message, f"{path}.content", definitions)
    if message.role == "assistant":
        return [_assistant(message, f"{path}.content")]
    text, raw = _plain(message.content, f"{path}.content")
    return [Message(role="system", content=text, raw=_raw(raw, message))]


def _user(message: _Message, path: str, definitions: Mapping[str, Any]) -> list[Message]:
    """Tool messages in the order sent, then the rest as one user message."""
    results: list[Message] = []
    rest: list[Any] = []
    for index, block in enumerate(message.content):
        if not isinstance(block, _ToolResult):
            rest.append(_expanded(block, definitions))
            continue
        expanded = [_expanded(inner, definitions) for inner in block.content]
        text, raw = _plain(expanded, f"{path}.{index}.content")
        if extra := without_cache_marks(block.model_extra):
            raw.append({"type": "tool_result", **extra})
        results.append(
            Message(role="tool", content=text, tool_call_id=block.tool_use_id, raw={"blocks": raw} if raw else None)
        )
    if results and not rest:
        return results
    text, raw = _plain(rest, path)
    return [*results, Message(role="user", content=text, raw=_raw(raw, message))]


def _expanded(block: Any, definitions: Mapping[str, Any]) -> Any:
    """A reference to a deferred tool becomes its definition, there where the client loaded it."""
    if block.type != "tool_reference":
        return block
    name = str((block.model_extra or {}).get("tool_name", ""))
    definition = definitions.get(name)
    return _Text(type="text", text=orjson.dumps(definition).decode() if definition else name)


def _assistant(message: _Message, path: str) -> Message:
    """One turn. Texts join without a gap, as the reply that they echo did."""
    text = reasoning = ""
    calls: list[ToolCall] = []
    echoed: list[str | None] = []
    left: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        extra = without_cache_marks(block.model_extra)
        if isinstance(block, _Text):
            text += block.text
        elif isinstance(block, _Thinking):
            reasoning += block.thinking
            echoed.append(block.signature)
            if block.signature and hint_of([block.signature]) is None:
                extra["signature"] = block.signature
        elif isinstance(block, _ToolUse):
            calls.append(ToolCall(name=block.name, arguments=arguments_of(block.input), id=block.id))
            echoed.append(block.id)
        else:
            refuse_media(block.type, f"{path}.{index}")
            left.append(block.model_dump(exclude_unset=True, exclude={"cache_control"}))
            continue
        if extra:
            left.append({"type": block.type, **extra})
    return Message(
        role="assistant",
        content=text,
        reasoning=reasoning or None,
        tool_calls=tuple(calls),
        node_hint=hint_of(echoed),
        raw=_raw(left, message),
    )


def _raw(blocks: list[dict[str, Any]], message: _Message) -> dict[str, Any] | None:
    fields = without_cache_marks(message.model_extra)
    raw = {**({"blocks": blocks} if blocks else {}), **({"fields": fields} if fields else {})}
    return raw or None
