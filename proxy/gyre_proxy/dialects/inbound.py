"""Rules of the history that all wires share: how texts join, which messages are one turn, what cannot be accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from gyre_proxy.dialects.base import BadRequest, node_of
from gyre_proxy.json_text import read_object
from gyre_proxy.message import Message

__all__ = [
    "arguments_of",
    "as_blocks",
    "check_results",
    "hint_of",
    "join_lines",
    "join_turns",
    "refuse_engine_fields",
    "refuse_media",
    "schema_text",
    "settled",
    "shown_block",
    "stops_of",
    "without_cache_marks",
]

# What only an engine's own API takes: it would stand beside the messages, or in place of them.
_ENGINE_FIELDS = ("input_ids", "input_embeds", "prompt", "prompt_token_ids", "rid")
_IMAGES = {"image", "image_url", "input_image"}
_FILES = {"document", "file", "input_file", "container_upload", "search_result"}
_MEDIA = _IMAGES | _FILES | {"audio", "input_audio", "video", "video_url"}


def as_blocks(content: Any) -> Any:
    """String content is one text block, null is none; anything else is left to the model of the wire."""
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def join_lines(texts: Iterable[str]) -> str:
    """Blocks of a system, user or tool message: a line break where neither neighbour has one."""
    joined = ""
    for text in texts:
        gap = "" if not joined or not text or joined.endswith("\n") or text.startswith("\n") else "\n"
        joined += gap + text
    return joined


def arguments_of(value: Any) -> Mapping[str, Any] | str:
    """Arguments of an echoed call: the object, or the raw text of what is none."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        return orjson.dumps(value).decode()
    if not value.strip():
        return {}
    parsed = read_object(value)
    return value if parsed is None else parsed


def hint_of(echoed: Iterable[str | None]) -> str | None:
    """The first node that ids and signatures of one turn name."""
    return next((node for value in echoed if (node := node_of(value)) is not None), None)


def stops_of(sent: str | Sequence[str] | None, path: str) -> tuple[str, ...]:
    """Stop sequences. An empty one would end every reply before it begins."""
    stops = (sent,) if isinstance(sent, str) else tuple(sent or ())
    if "" in stops:
        raise BadRequest(f"{path}: a stop sequence must hold a character, got an empty one: leave it out.", path)
    return stops


def schema_text(schema: Any, path: str, has_tools: bool) -> str:
    """The JSON schema that a client wants the reply held to, as engines take it."""
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{path}: must be a JSON schema, got {type(schema).__name__}: send an object.", path)
    if has_tools:
        raise BadRequest(
            f"{path}: the schema holds the whole reply here, so that no tool could be called beside it: leave out the "
            "schema or the tools, or send the tool choice 'none'.",
            path,
        )
    return orjson.dumps(schema).decode()


def refuse_engine_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuses what would replace the rendered prompt unheard."""
    for name in _ENGINE_FIELDS:
        if (extra or {}).get(name) is not None:
            raise BadRequest(
                f"{name}: must be absent, got a value: the prompt is made of the messages alone, leave it out.", name
            )


def shown_block(block: Mapping[str, Any]) -> str:
    """An unknown block of a client's message as the model is given it: its JSON, so that nothing goes unheard."""
    return orjson.dumps(without_cache_marks(block)).decode()


def without_cache_marks(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields that no model of ours knows; cache marks move with every request and say nothing about the message."""
    return {name: value for name, value in (fields or {}).items() if name != "cache_control"}


def refuse_media(kind: str, path: str) -> None:
    """Refuses content that has no tokens in a text model: dropping it would change what the model is asked."""
    if kind in _MEDIA:
        raise BadRequest(
            f"{path}: content of type {kind!r} cannot be given to this text model; only text is supported. "
            "Send its text, or use a harness setting without images and files.",
            path,
        )


def check_results(messages: Sequence[Message], param: str = "messages") -> None:
    """One id for each call of a turn and one result for each: else refused, before anything is planned or recorded."""
    seen: set[str] = set()
    for message in messages:
        if message.role == "assistant":
            seen.clear()
            ids = [call.id for call in message.tool_calls if call.id is not None]
            if twice := next((one for one in ids if ids.count(one) > 1), None):
                raise BadRequest(
                    f"{param}: the calls of a turn must have ids of their own, got two with the id {twice!r}: "
                    "their results could not be told apart.",
                    param,
                )
        elif message.role == "tool" and message.tool_call_id is not None:
            if message.tool_call_id in seen:
                raise BadRequest(
                    f"{param}: each tool call must have one result, got two for the id {message.tool_call_id!r}: "
                    "send one of them.",
                    param,
                )
            seen.add(message.tool_call_id)


def join_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Joins neighbouring assistant messages that are pieces of one turn.

    They are when both name the same node of ours, or when calls that a client split off follow a text that names none.
    Other neighbours stay apart: some clients drop the user message between two turns, and each was sampled by itself.
    """
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and _one_turn(last, message):
            joined[-1] = replace(
                last,
                content=last.content + message.content,
                reasoning=(last.reasoning or "") + (message.reasoning or "") or None,
                tool_calls=last.tool_calls + message.tool_calls,
                node_hint=last.node_hint or message.node_hint,
                raw=_joined_raw(last.raw, message.raw),
            )
        else:
            joined.append(message)
    return tuple(joined)


def settled(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages whose results are checked, joined to turns."""
    check_results(messages)
    return join_turns(messages)


def _joined_raw(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not first or not second:
        return dict(first or second or {}) or None
    blocks = [*first.get("blocks", ()), *second.get("blocks", ())]
    fields = {**first.get("fields", {}), **second.get("fields", {})}
    return {**({"blocks": blocks} if blocks else {}), **({"fields": fields} if fields else {})}


def _one_turn(first: Message, second: Message) -> bool:
    if first.role != "assistant" or second.role != "assistant":
        return False
    if first.node_hint is not None and second.node_hint is not None:
        return first.node_hint == second.node_hint
    return first.node_hint is None and not first.tool_calls and bool(second.tool_calls)
