"""The rows of an observed call, made from what went by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import orjson

from gyre_data.schema import AgentRole, CallStatus, Extension
from gyre_data.types import Call
from gyre_proxy.capture import kept_headers
from gyre_proxy.dialects.base import load_body
from gyre_proxy.dialects.pieces import body_pieces
from gyre_proxy.json_text import load_tolerant
from gyre_proxy.message import BodyPart, Message, Request, Sampling, canonical
from gyre_proxy.observe.bodies import UndecodableError, decoded
from gyre_proxy.observe.events import read_events
from gyre_proxy.observe.exchange import Exchange
from gyre_proxy.observe.said import Said
from gyre_proxy.observe.wires import anthropic, openai_chat, openai_responses
from gyre_proxy.plan import PromptPlan
from gyre_proxy.recorder import blob_id
from gyre_proxy.same_turn import message_from_json, message_json

__all__ = ["Reading", "call_of", "read"]

_WIRES: Mapping[str, ModuleType] = {
    "anthropic": anthropic,
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
}
_REQUEST_IDS = ("request-id", "x-request-id", "x-oai-request-id", "cf-ray")


@dataclass(kw_only=True, slots=True)
class Reading:
    """An exchange as far as it can be read. `notes` say what could not be, in words."""

    request: Request | None
    request_pieces: tuple[bytes, ...]
    said: Said
    raw_reply: bytes | None
    """The reply's body, when it holds what the message does not."""
    notes: list[str] = field(default_factory=list)

    @property
    def output(self) -> Message | None:
        """What the model said; None for nothing at all."""
        message = self.said.message
        if message is None or not (message.content or message.reasoning or message.tool_calls or message.raw):
            return None
        return message


def read(exchange: Exchange, limit: int) -> Reading:
    """Read both bodies. Never raises for what a client or a provider may send."""
    notes: list[str] = []
    body = _plain(exchange, exchange.request.kept, exchange.headers, "request", limit, notes)
    request = _request(exchange, body, notes)
    reply = _plain(exchange, exchange.reply.kept, exchange.reply_headers, "reply", limit, notes)
    said, raw = _said(exchange, reply, notes)
    if said.message is not None:  # a stream may cut a credential in two
        told = message_json(said.message)
        said.message = message_from_json(exchange.secrets.removed(told))
    if exchange.request.cut or exchange.reply.cut:
        notes.append(f"a body is longer than the {limit >> 20} MiB that are kept of each")
    pieces = request.body_pieces if request is not None else (body,) if body else ()
    return Reading(request=request, request_pieces=pieces, said=said, raw_reply=raw, notes=notes)


def _plain(
    exchange: Exchange, body: bytearray, headers: Mapping[str, str], what: str, limit: int, notes: list[str]
) -> bytes:
    try:
        plain = decoded(bytes(body), headers.get("content-encoding", ""), limit)
    except UndecodableError as error:
        notes.append(f"the {what} is kept as it came: {error}")
        plain = bytes(body)
    clean = exchange.secrets.removed(plain)
    if clean is not plain:
        notes.append(f"the {what} held the client's credential; it is left out")
    return clean


def _request(exchange: Exchange, body: bytes, notes: list[str]) -> Request | None:
    assert exchange.wire is not None, "only calls are read"
    wire = _WIRES[exchange.wire]
    try:
        sent = load_body(body)
        return Request(
            wire=exchange.wire,
            model=str(sent.get("model") or ""),
            messages=tuple(wire.messages_of(sent)),
            tools=tuple(tool if isinstance(tool, dict) else {"tool": tool} for tool in wire.tools_of(sent)),
            sampling=_sampling(sent),
            stream=bool(sent.get("stream")),
            body=tuple(BodyPart(data=piece) for piece in body_pieces(body)),
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        notes.append(f"the request is kept as it came, it is of no known shape: {error!s:.300}")
        return None


def _sampling(sent: Mapping[str, Any]) -> Sampling:
    def number(*names: str) -> Any:
        found = (sent.get(name) for name in names)
        return next((v for v in found if isinstance(v, int | float) and not isinstance(v, bool)), None)

    stop = sent.get("stop_sequences") or sent.get("stop") or ()
    return Sampling(
        max_tokens=number("max_tokens", "max_completion_tokens", "max_output_tokens"),
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=number("top_k"),
        seed=number("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(str(one) for one in stop),
    )


def _said(exchange: Exchange, body: bytes, notes: list[str]) -> tuple[Said, bytes | None]:
    """What was said, and the body when it could not be read whole."""
    assert exchange.wire is not None, "only calls are read"
    wire = _WIRES[exchange.wire]
    if exchange.status is None or not body:
        return Said(whole=exchange.status is not None), None
    kind = exchange.reply_headers.get("content-type", "")
    try:
        if exchange.status >= 400:
            return Said(error=_refusal(wire, body)), None
        if "event-stream" in kind or body.lstrip()[:6] in (b"event:", b"data: "):
            events, odd = read_events(body)
            said: Said = wire.streamed(events)
            said.odd += odd
        else:
            value = load_tolerant(body)
            said = wire.reply(value)
            if said.message is None and said.error is None:
                said.odd.append("the reply holds no message")
        orjson.dumps(said.form)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        if exchange.fault is None and not exchange.left:
            notes.append(f"the reply is kept as it came, it is of no known shape: {error!s:.300}")
        return Said(whole=False), body
    notes += said.odd
    return said, body if said.odd else None


def _refusal(wire: ModuleType, body: bytes) -> str:
    try:
        return str(wire.error_text(load_tolerant(body)))
    except ValueError:
        return body[:500].decode("utf-8", "replace")


def call_of(exchange: Exchange, reading: Reading, plan: PromptPlan | None, output: str | None, tokens: int) -> Call:
    """The call's row. `plan` is None when the request could not be read; `tokens` counts what was said."""
    said, request, told = reading.said, reading.request, exchange.reply_headers
    status, error = _outcome(exchange, reading)
    tools = canonical(list(request.tools)) if request is not None and request.tools else None
    bare = Call(
        call_id=exchange.call_id,
        execution_id=exchange.execution_id,
        agent_role=AgentRole.UNKNOWN,
        role_source="none",
        wire=exchange.wire or "",
        client=exchange.headers.get("user-agent"),
        extension=Extension.ROOT,
        tools_blob=blob_id(tools) if tools else None,
        sampling_asked=json.dumps(request.sampling.to_json(), sort_keys=True) if request else None,
        finish_reason=None if status is not CallStatus.OK else "length" if said.at_limit else "stop",
        stop_reason=said.stop_reason,
        status=status,
        error=error,
        attempts=(),
        started_at=exchange.started_at,
        first_token_at=exchange.first_byte_at,
        ended_at=exchange.ended_at or datetime.now(UTC),
        request_blobs=tuple(blob_id(piece) for piece in reading.request_pieces),
        request_path=exchange.path,
        request_headers=_headers(exchange),
        provider_usage=json.dumps(said.usage) if said.usage is not None else None,
        upstream=exchange.upstream,
        http_status=exchange.status,
        served_model=said.model,
        provider_request_id=next((told[name] for name in _REQUEST_IDS if name in told), None),
        response_blobs=(blob_id(reading.raw_reply),) if reading.raw_reply else None,
        note="; ".join(reading.notes) or None,
    )
    if plan is None:
        return bare
    return replace(
        bare,
        agent_role=plan.agent_role,
        role_source=plan.role_source,
        agent_id=plan.agent_id,
        parent_agent_id=plan.parent_agent_id,
        spawned_by_node=plan.spawned_by_node,
        spawned_by_tool_call=plan.spawned_by_tool_call,
        continues_from=plan.continues_from,
        prompt_node=plan.node_ids[-1],
        output_node=output,
        extension=plan.extension,
        branch_reason=plan.branch_reason,
        first_difference_message=plan.first_difference_message,
        first_difference_token=plan.first_difference_token,
        tokens_lost=plan.tokens_lost,
        tools_digest=plan.tools_digest,
        prompt_tokens=len(plan.prompt_ids),
        output_tokens=tokens,
    )


def _headers(exchange: Exchange) -> str:
    return exchange.secrets.removed(json.dumps(kept_headers(exchange.headers), sort_keys=True).encode()).decode()


def _outcome(exchange: Exchange, reading: Reading) -> tuple[CallStatus, str | None]:
    said = reading.said
    if exchange.left:
        return CallStatus.ABORTED, "the client went away before the reply was complete"
    if exchange.fault is not None:
        return CallStatus.FAILED, exchange.secrets.removed(exchange.fault.encode()).decode()
    if exchange.status is not None and exchange.status >= 400:
        return CallStatus.FAILED, f"upstream {exchange.status}: {said.error or 'no error body'}"
    if said.error is not None:
        return CallStatus.FAILED, said.error
    if not said.whole and reading.raw_reply is None:
        return CallStatus.FAILED, "the upstream ended the reply before it was complete"
    return CallStatus.OK, None
