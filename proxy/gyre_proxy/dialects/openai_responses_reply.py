"""OpenAI Responses, outbound: output items with their own index and id, as events or as one response.

Items are the official models; the response around them repeats the request's own settings, so it is written as it is.
Every id we mint names the output node, and so does `encrypted_content` of a reasoning item: an echo finds its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import openai.types.responses as sdk
import orjson
from openai.types.responses import response_reasoning_item

from gyre_proxy.dialects.base import ReplyContext, line_safe, mint_call_id
from gyre_proxy.message import Reasoning, Reply, ReplyEvent, Text, ToolCall, Usage
from gyre_proxy.parse import fold

__all__ = ["ResponsesStream", "batch"]

_Item = sdk.ResponseOutputMessage | sdk.ResponseReasoningItem | sdk.ResponseFunctionToolCall
_ItemStatus = Literal["in_progress", "completed", "incomplete"]
_INCOMPLETE = {"length": "max_output_tokens", "refusal": "content_filter"}
_FAILED = {"rate_limit": "rate_limit_exceeded", "prompt_too_long": "context_length_exceeded"}


def batch(call: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """The whole reply as one response."""
    events = fold(map(_unmarked, reply.events))
    status = _status(reply.finish, len(reply.tool_calls))
    output: list[_Item] = []
    for event in events:
        last = event is events[-1]
        output.append(_item(call, event, len(output), _num_calls(output), status if last else "completed"))
    return orjson.dumps(_response(call, status, output, reply.finish, usage))


class ResponsesStream:
    """Encodes one streamed reply. Each item is opened once, closed once, and has an index of its own."""

    def __init__(self, call: ReplyContext) -> None:
        self._call = call
        self._output: list[_Item] = []
        """Finished items."""
        self._open: type[Text] | type[Reasoning] | None = None
        """Kind of the item that is being sent."""
        self._texts: list[str] = []
        """Its text so far."""
        self._sequence = 0

    def start(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        return self._lifecycle("response.created", "in_progress") + self._lifecycle(
            "response.in_progress", "in_progress"
        )

    def event(self, event: ReplyEvent) -> bytes:
        """Bytes of one event; the item before it is closed when it is of another kind."""
        if isinstance(event, ToolCall):
            return self._tool_call(event)
        if not event.text:
            return b""
        out = b""
        if self._open is not type(event):
            out = self._close("completed") + self._begin(type(event))
        self._texts.append(event.text)
        kind = "response.output_text.delta" if isinstance(event, Text) else "response.reasoning_text.delta"
        return out + self._in_item(kind, delta=event.text, **_text_fields(event))

    def keep_alive(self) -> bytes:
        """`response.in_progress` once more: clients count events, not comments, and keep nothing of this one."""
        return self._lifecycle("response.in_progress", "in_progress")

    def finish(self, finish: str, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """Closes the open item and the response; a reply cut at its limit ends in `response.incomplete`."""
        status = _status(finish, _num_calls(self._output))
        return self._close(status) + self._lifecycle(f"response.{status}", status, finish, usage)

    def error(self, kind: str, message: str) -> bytes:
        """`response.failed`, at which Codex asks again, and `error`, which the official client raises."""
        fault = {"code": _FAILED.get(kind, "server_error"), "message": message}
        failed = {**_response(self._call, "failed", self._output), "error": fault}
        told = {**fault, "param": None, "error": {**fault, "type": _FAILED.get(kind, "server_error"), "param": None}}
        return self._sse("response.failed", {"response": failed}) + self._sse("error", told)

    def _lifecycle(self, kind: str, status: str, finish: str = "", usage: Usage | None = None) -> bytes:
        return self._sse(kind, {"response": _response(self._call, status, self._output, finish, usage)})

    def _tool_call(self, event: ToolCall) -> bytes:
        out = self._close("completed")
        item = _item(self._call, event, len(self._output), _num_calls(self._output), "completed")
        assert isinstance(item, sdk.ResponseFunctionToolCall)
        opened = item.model_copy(update={"arguments": "", "status": "in_progress"})
        out += self._of_item("response.output_item.added", item=_plain(opened))
        place = {"item_id": item.id}
        out += self._of_item("response.function_call_arguments.delta", delta=item.arguments, **place)
        out += self._of_item("response.function_call_arguments.done", arguments=item.arguments, name=item.name, **place)
        return out + self._done(item)

    def _begin(self, kind: type[Text] | type[Reasoning]) -> bytes:
        self._open, self._texts = kind, []
        empty = kind(text="")
        item = _item(self._call, empty, len(self._output), 0, "in_progress").model_copy(update={"content": []})
        added = self._of_item("response.output_item.added", item=_plain(item))
        return added + self._in_item("response.content_part.added", part=_part(empty))

    def _close(self, status: _ItemStatus) -> bytes:
        if self._open is None:
            return b""
        event = self._open(text="".join(self._texts))
        kind = "response.output_text.done" if isinstance(event, Text) else "response.reasoning_text.done"
        out = self._in_item(kind, text=event.text, **_text_fields(event))
        out += self._in_item("response.content_part.done", part=_part(event))
        self._open = None
        return out + self._done(_item(self._call, event, len(self._output), 0, status))

    def _done(self, item: _Item) -> bytes:
        out = self._of_item("response.output_item.done", item=_plain(item))
        self._output.append(item)
        return out

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the one content part of the open item."""
        assert self._open is not None, "a text belongs to an item"
        item_id = _item_id("msg" if self._open is Text else "rs", self._call, len(self._output))
        return self._of_item(kind, item_id=item_id, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._sse(kind, {"output_index": len(self._output), **fields})

    def _sse(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        payload = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + line_safe(payload) + b"\n\n"


def _item(call: ReplyContext, event: ReplyEvent, index: int, num_calls: int, status: _ItemStatus) -> _Item:
    """The output item of a whole event. An item has one part: the next text after a call is an item of its own."""
    if isinstance(event, Text):
        text = sdk.ResponseOutputText(type="output_text", text=event.text, annotations=[], logprobs=[])
        return sdk.ResponseOutputMessage(
            id=_item_id("msg", call, index), type="message", role="assistant", status=status, content=[text]
        )
    if isinstance(event, Reasoning):
        thought = response_reasoning_item.Content(type="reasoning_text", text=event.text)
        return sdk.ResponseReasoningItem(
            id=_item_id("rs", call, index),
            type="reasoning",
            summary=[],
            content=[thought],
            encrypted_content=call.node_id,
            status=status,
        )
    fields: dict[str, Any] = {}
    name = event.name
    if (namespace := call.namespaces.get(name)) is not None:
        fields["namespace"], name = namespace, name.removeprefix(f"{namespace}.")
    return sdk.ResponseFunctionToolCall(
        id=_item_id("fc", call, index),
        type="function_call",
        call_id=event.id or mint_call_id("call", call.node_id, num_calls),
        name=name,
        arguments=event.arguments if isinstance(event.arguments, str) else orjson.dumps(dict(event.arguments)).decode(),
        status="completed",
        **fields,
    )


def _response(
    call: ReplyContext, status: str, output: list[_Item], finish: str = "", usage: Usage | None = None
) -> dict[str, Any]:
    """The response object. Nothing is stored for a later request, whatever was asked: it says so."""
    cut = {"reason": _INCOMPLETE[finish]} if status == "incomplete" else None
    return {
        "id": f"resp_{call.call_id}",
        "object": "response",
        "created_at": call.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": cut,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        **call.echo,
        "model": call.model,
        "output": [_plain(item) for item in output],
        "store": False,
        "usage": _usage(usage) if usage is not None else None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    """On this wire `input_tokens` holds the cached ones too. How many tokens were reasoning is not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _status(finish: str, num_calls: int) -> Literal["completed", "incomplete"]:
    """A reply with a call is complete, whatever the engine says: clients run tools for nothing else."""
    if finish not in ("stop", *_INCOMPLETE):
        raise ValueError(
            f"A complete reply ends in one of stop, {', '.join(_INCOMPLETE)}, got {finish!r}: send an error instead."
        )
    return "completed" if finish == "stop" or num_calls else "incomplete"


def _item_id(prefix: str, call: ReplyContext, index: int) -> str:
    return mint_call_id(prefix, call.node_id, index)


def _part(event: Text | Reasoning) -> dict[str, Any]:
    if isinstance(event, Text):
        return {"type": "output_text", "text": event.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": event.text}


def _text_fields(event: Text | Reasoning) -> dict[str, Any]:
    return {"logprobs": []} if isinstance(event, Text) else {}


def _num_calls(output: list[_Item]) -> int:
    return sum(isinstance(item, sdk.ResponseFunctionToolCall) for item in output)


def _plain(item: _Item) -> dict[str, Any]:
    return item.model_dump(exclude_unset=True, by_alias=True)


def _unmarked(event: ReplyEvent) -> ReplyEvent:
    """A malformed call is text like any other on the wire, in the same item."""
    return Text(text=event.text) if isinstance(event, Text) else event
