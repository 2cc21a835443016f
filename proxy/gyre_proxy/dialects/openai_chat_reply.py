"""OpenAI Chat Completions, outbound: chunks or one completion, by the official models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import openai.types.chat as sdk
import orjson
from openai.types import CompletionUsage
from openai.types.chat import chat_completion, chat_completion_chunk
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import PromptTokensDetails

from gyre_proxy.dialects.base import ReplyContext, TextFrame, line_safe, mint_call_id
from gyre_proxy.message import Reply, ReplyEvent, Text, TokenLogprob, ToolCall, Usage

__all__ = ["STATUSES", "ChatStream", "batch", "error_body"]

STATUSES: Mapping[str, int] = {
    "invalid_request": 400,
    "prompt_too_long": 400,
    "authentication": 401,
    "not_found": 404,
    "too_large": 413,
    "timeout": 408,
    "rate_limit": 429,
    "overloaded": 503,
    "internal": 500,
}
_TYPES: Mapping[str, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "prompt_too_long": ("invalid_request_error", "context_length_exceeded"),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "timeout": ("invalid_request_error", "request_timeout"),
    "rate_limit": ("rate_limit_error", "rate_limit_exceeded"),
    "overloaded": ("server_error", "server_overloaded"),
    "internal": ("server_error", None),
}
_FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
_FINISH: dict[str, _FinishReason] = {"stop": "stop", "length": "length", "refusal": "content_filter"}


def error_body(kind: str, message: str, param: str | None = None) -> bytes:
    """The wire's error object."""
    error_type, code = _TYPES[kind]
    if kind == "prompt_too_long" and param is None:
        param = "messages"
    return orjson.dumps({"error": {"message": message, "type": error_type, "param": param, "code": code}})


def batch(call: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """The whole reply as one completion. This wire has one text: what follows a call is joined to what came before."""
    calls = [
        sdk.ChatCompletionMessageFunctionToolCall(
            id=event.id or mint_call_id("call", call.node_id, index),
            type="function",
            function=Function(name=event.name, arguments=_arguments(event)),
        )
        for index, event in enumerate(reply.tool_calls)
    ]
    text = reply.text or (None if calls else "")
    fields: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        fields["tool_calls"] = calls
    if reply.reasoning:
        fields["reasoning_content"] = reply.reasoning
    message = sdk.ChatCompletionMessage(**fields)
    choice = chat_completion.Choice(
        index=0,
        message=message,
        finish_reason=_finish_reason(reply.finish, len(calls)),
        logprobs=None if call.logprobs is None else chat_completion.ChoiceLogprobs(**_logprobs(call.logprobs())),
    )
    completion = sdk.ChatCompletion(
        id=f"chatcmpl-{call.call_id}",
        object="chat.completion",
        created=call.created,
        model=call.model,
        choices=[choice],
        usage=_usage(usage),
    )
    return completion.model_dump_json(exclude_unset=True).encode()


class ChatStream:
    """Encodes one streamed reply. A tool call is one whole delta with an index of its own."""

    def __init__(self, call: ReplyContext) -> None:
        self._call = call
        self._num_calls = 0
        self._has_text = False
        self._texts: dict[str, TextFrame] = {}

    def start(self) -> bytes:
        """The chunk that names the role."""
        return self._chunk(chat_completion_chunk.ChoiceDelta(role="assistant", content=None))

    def event(self, event: ReplyEvent) -> bytes:
        """One delta for each event."""
        if isinstance(event, ToolCall):
            index = self._num_calls
            self._num_calls += 1
            called = chat_completion_chunk.ChoiceDeltaToolCall(
                index=index,
                id=event.id or mint_call_id("call", self._call.node_id, index),
                type="function",
                function=chat_completion_chunk.ChoiceDeltaToolCallFunction(
                    name=event.name, arguments=_arguments(event)
                ),
            )
            return self._chunk(chat_completion_chunk.ChoiceDelta(tool_calls=[called]))
        if not event.text:
            return b""
        if isinstance(event, Text):
            self._has_text = True
        name = "content" if isinstance(event, Text) else "reasoning_content"
        if name not in self._texts:
            delta = chat_completion_chunk.ChoiceDelta.model_validate
            self._texts[name] = TextFrame(lambda text: self._chunk(delta({name: text})))
        return self._texts[name].of(event.text)

    def keep_alive(self) -> bytes:
        """A chunk with an empty delta: unlike a comment, every client counts it as an event."""
        return self._chunk(chat_completion_chunk.ChoiceDelta())

    def finish(self, finish: str, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """The finish reason, the usage when asked for, and `[DONE]`."""
        reason = _finish_reason(finish, self._num_calls)
        out = b""
        if not self._has_text and not self._num_calls:
            out += self._chunk(chat_completion_chunk.ChoiceDelta(content=""))
        if self._call.logprobs is not None:  # all of them at once: only now is it certain what is text
            told = chat_completion_chunk.ChoiceLogprobs(**_logprobs(self._call.logprobs()))
            choice = chat_completion_chunk.Choice(
                index=0, delta=chat_completion_chunk.ChoiceDelta(), finish_reason=None, logprobs=told
            )
            out += self._sse([choice], None)
        out += self._chunk(chat_completion_chunk.ChoiceDelta(), reason)
        if self._call.include_usage:
            out += self._sse([], _usage(usage))
        return out + b"data: [DONE]\n\n"

    def error(self, kind: str, message: str) -> bytes:
        """The error object as an event; official clients raise on it. No `[DONE]` follows."""
        return b"data: " + line_safe(error_body(kind, message)) + b"\n\n"

    def _chunk(self, delta: chat_completion_chunk.ChoiceDelta, reason: _FinishReason | None = None) -> bytes:
        return self._sse([chat_completion_chunk.Choice(index=0, delta=delta, finish_reason=reason)], None)

    def _sse(self, choices: list[chat_completion_chunk.Choice], usage: CompletionUsage | None) -> bytes:
        chunk = sdk.ChatCompletionChunk(
            id=f"chatcmpl-{self._call.call_id}",
            object="chat.completion.chunk",
            created=self._call.created,
            model=self._call.model,
            choices=choices,
        )
        if self._call.include_usage:
            chunk.usage = usage
        return b"data: " + line_safe(chunk.model_dump_json(exclude_unset=True).encode()) + b"\n\n"


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        sdk.ChatCompletionTokenLogprob(
            token=token.text, logprob=token.logprob, bytes=list(token.text.encode()), top_logprobs=[]
        )
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _arguments(event: ToolCall) -> str:
    return event.arguments if isinstance(event.arguments, str) else orjson.dumps(dict(event.arguments)).decode()


def _finish_reason(finish: str, num_calls: int) -> _FinishReason:
    """A reply with a call always ends in `tool_calls`, whatever the engine says: clients run tools for nothing else."""
    if finish not in _FINISH:
        raise ValueError(
            f"A complete reply ends in one of {', '.join(_FINISH)}, got {finish!r}: send an error instead."
        )
    return "tool_calls" if num_calls else _FINISH[finish]


def _usage(usage: Usage) -> CompletionUsage:
    """On this wire `prompt_tokens` holds the cached ones too."""
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
