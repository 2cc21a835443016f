"""Anthropic Messages, outbound: blocks with their own index, as events or as one message, by the official models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import anthropic.types as sdk
import orjson
from anthropic.types.raw_message_delta_event import Delta
from pydantic import BaseModel

from gyre_proxy.dialects.base import ReplyContext, TextFrame, line_safe, mint_call_id
from gyre_proxy.message import Reasoning, Reply, ReplyEvent, Text, ToolCall, Usage
from gyre_proxy.parse import fold

__all__ = ["STATUSES", "AnthropicStream", "batch", "error_body"]

STATUSES: Mapping[str, int] = {
    "invalid_request": 400,
    "prompt_too_long": 400,
    "authentication": 401,
    "not_found": 404,
    "too_large": 413,
    "timeout": 408,
    "rate_limit": 429,
    "overloaded": 529,
    "internal": 500,
}
_TYPES = {
    "invalid_request": "invalid_request_error",
    "prompt_too_long": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "timeout": "timeout_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "internal": "api_error",
}
_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
_FINISH: dict[str, _StopReason] = {"stop": "end_turn", "length": "max_tokens", "refusal": "refusal"}


def error_body(kind: str, message: str) -> bytes:
    """The wire's error object."""
    return orjson.dumps({"type": "error", "error": {"type": _TYPES[kind], "message": message}})


def batch(call: ReplyContext, reply: Reply, usage: Usage, stop_sequence: str | None = None) -> bytes:
    """The whole reply as one message."""
    blocks: list[sdk.ContentBlock] = []
    num_calls = 0
    for event in fold(map(_unmarked, reply.events)):
        if isinstance(event, Text):
            blocks.append(sdk.TextBlock(type="text", text=event.text, citations=None))
        elif isinstance(event, Reasoning):
            blocks.append(sdk.ThinkingBlock(type="thinking", thinking=event.text, signature=call.node_id))
        else:
            blocks.append(_tool_use(call, event, num_calls, _input(event)))
            num_calls += 1
    message = sdk.Message(
        id=f"msg_{call.call_id}",
        type="message",
        role="assistant",
        model=call.model,
        content=blocks,
        stop_reason=_stop_reason(reply.finish, num_calls, stop_sequence),
        stop_sequence=stop_sequence,
        usage=_usage(usage),
    )
    return message.model_dump_json(exclude_unset=True).encode()


class AnthropicStream:
    """Encodes one streamed reply. Each block has one start, one stop and an index of its own; a call goes out whole."""

    def __init__(self, call: ReplyContext) -> None:
        self._call = call
        self._index = -1
        self._open: Literal["text", "thinking"] | None = None
        self._text: TextFrame
        """Writes the deltas of the open block."""
        self._num_calls = 0

    def start(self) -> bytes:
        """`message_start`; the prompt's tokens are known, how many of them were cached is not."""
        message = sdk.Message(
            id=f"msg_{self._call.call_id}",
            type="message",
            role="assistant",
            model=self._call.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(Usage(prompt_tokens=self._call.prompt_tokens, output_tokens=0)),
        )
        return _sse(sdk.RawMessageStartEvent(type="message_start", message=message))

    def event(self, event: ReplyEvent) -> bytes:
        """Bytes of one event; the block before it is closed when it is of another kind."""
        if isinstance(event, ToolCall):
            return self._tool_call(event)
        if not event.text:
            return b""
        start = self._switch("text" if isinstance(event, Text) else "thinking")
        return start + self._text.of(event.text)

    def keep_alive(self) -> bytes:
        """A `message_delta` without a stop reason: the one event that Claude Code counts as life and nobody keeps."""
        return _sse(
            sdk.RawMessageDeltaEvent(
                type="message_delta",
                delta=Delta(stop_reason=None, stop_sequence=None),
                usage=sdk.MessageDeltaUsage(output_tokens=0),
            )
        )

    def finish(self, finish: str, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """Closes the open block and the message."""
        reason = _stop_reason(finish, self._num_calls, stop_sequence)
        counts = _usage(usage)
        end = sdk.RawMessageDeltaEvent(
            type="message_delta",
            delta=Delta(stop_reason=reason, stop_sequence=stop_sequence),
            usage=sdk.MessageDeltaUsage(
                input_tokens=counts.input_tokens,
                cache_creation_input_tokens=counts.cache_creation_input_tokens,
                cache_read_input_tokens=counts.cache_read_input_tokens,
                output_tokens=counts.output_tokens,
            ),
        )
        return self._close() + _sse(end) + _sse(sdk.RawMessageStopEvent(type="message_stop"))

    def error(self, kind: str, message: str) -> bytes:
        """`event: error`; every client takes the reply as failed."""
        return b"event: error\ndata: " + line_safe(error_body(kind, message)) + b"\n\n"

    def _tool_call(self, event: ToolCall) -> bytes:
        out = self._close()
        self._index += 1
        out += self._begin(_tool_use(self._call, event, self._num_calls, {}))
        self._num_calls += 1
        arguments = orjson.dumps(_input(event)).decode()
        out += self._delta(sdk.InputJSONDelta(type="input_json_delta", partial_json=arguments))
        return out + self._stop()

    def _switch(self, kind: Literal["text", "thinking"]) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._index += 1
        self._open = kind
        if kind == "text":
            self._text = TextFrame(lambda text: self._delta(sdk.TextDelta(type="text_delta", text=text)))
            return out + self._begin(sdk.TextBlock(type="text", text="", citations=None))
        self._text = TextFrame(lambda text: self._delta(sdk.ThinkingDelta(type="thinking_delta", thinking=text)))
        return out + self._begin(sdk.ThinkingBlock(type="thinking", thinking="", signature=""))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta(sdk.SignatureDelta(type="signature_delta", signature=self._call.node_id))
        self._open = None
        return signature + self._stop()

    def _begin(self, block: sdk.TextBlock | sdk.ThinkingBlock | sdk.ToolUseBlock) -> bytes:
        return _sse(sdk.RawContentBlockStartEvent(type="content_block_start", index=self._index, content_block=block))

    def _delta(self, delta: sdk.RawContentBlockDelta) -> bytes:
        return _sse(sdk.RawContentBlockDeltaEvent(type="content_block_delta", index=self._index, delta=delta))

    def _stop(self) -> bytes:
        return _sse(sdk.RawContentBlockStopEvent(type="content_block_stop", index=self._index))


def _sse(event: BaseModel) -> bytes:
    payload = line_safe(event.model_dump_json(exclude_unset=True).encode())
    kind = str(cast(Any, event).type).encode()
    return b"event: " + kind + b"\ndata: " + payload + b"\n\n"


def _tool_use(call: ReplyContext, event: ToolCall, index: int, arguments: dict[str, object]) -> sdk.ToolUseBlock:
    minted = event.id or mint_call_id("toolu", call.node_id, index)
    return sdk.ToolUseBlock(type="tool_use", id=minted, name=event.name, input=arguments)


def _input(event: ToolCall) -> dict[str, object]:
    assert isinstance(event.arguments, Mapping), "the reply parser gives a call without an object as text"
    return dict(event.arguments)


def _stop_reason(finish: str, num_calls: int, stop_sequence: str | None) -> _StopReason:
    """A reply with a call always ends in `tool_use`, whatever the engine says: clients run tools for nothing else."""
    if finish not in _FINISH:
        raise ValueError(
            f"A complete reply ends in one of {', '.join(_FINISH)}, got {finish!r}: send an error instead."
        )
    if num_calls:
        return "tool_use"
    if finish == "stop" and stop_sequence is not None:
        return "stop_sequence"
    return _FINISH[finish]


def _usage(usage: Usage) -> sdk.Usage:
    """On this wire `input_tokens` leaves out the cached ones."""
    return sdk.Usage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


def _unmarked(event: ReplyEvent) -> ReplyEvent:
    """A malformed call is text like any other on the wire, in the same block."""
    return Text(text=event.text) if isinstance(event, Text) else event
