"""What every wire dialect is and shares: the Protocol, refusals, ids that come back to us, and exact JSON reading.

A dialect turns one body into a canonical `Request` and one reply into bytes of the same wire. It does no I/O and keeps
no state between calls; only a `StreamEncoder` has state, that of its own stream.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from gyre_data.errors import GyreError
from gyre_proxy.json_text import load_tolerant
from gyre_proxy.message import Reply, ReplyEvent, Request, TokenLogprob, Usage

if TYPE_CHECKING:
    from gyre_proxy.dialects.reading import Reader

__all__ = [
    "ERROR_KINDS",
    "BadRequest",
    "Dialect",
    "ReplyContext",
    "StreamEncoder",
    "TextFrame",
    "line_safe",
    "load_body",
    "mint_call_id",
    "node_of",
    "validated",
]

ERROR_KINDS = (
    "invalid_request",
    "prompt_too_long",
    "authentication",
    "not_found",
    "too_large",
    "timeout",
    "rate_limit",
    "overloaded",
    "internal",
)

_NODE = re.compile(r"n_[0-9a-f]{20}")
_CALL_ID = re.compile(r"(?:toolu|call|fc|rs|msg)_(n_[0-9a-f]{20})_[0-9]+")
_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
_Model = TypeVar("_Model", bound=BaseModel)


class BadRequest(GyreError, ValueError):
    """A request that cannot be honoured as it stands. `param` is the path of the field at fault, when there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyContext:
    """What a reply says about its call. Ids minted from `node_id`, its output node, come back in the next request."""

    call_id: str
    node_id: str
    model: str
    created: int
    prompt_tokens: int
    include_usage: bool = False
    logprobs: Callable[[], Sequence[TokenLogprob]] | None = None
    """Log-probs of the visible text, once the reply is whole; None when the client asked for none."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    echo: Mapping[str, Any] = field(default_factory=dict)


class StreamEncoder(Protocol):
    """Encodes one streamed reply. Order: `start`, any of `event` and `keep_alive`, then `finish` or `error` once."""

    def start(self) -> bytes:
        """Opens the stream; sent at once, before the engine has answered."""

    def event(self, event: ReplyEvent) -> bytes:
        """Bytes for one event; may be empty."""

    def keep_alive(self) -> bytes:
        """Bytes that clients count as life and that leave no trace in the message."""

    def finish(self, finish: str, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """Ends the stream as complete. Refuses `abort`: an incomplete stream must never look finished."""

    def error(self, kind: str, message: str) -> bytes:
        """An error inside the stream; nothing may follow."""


class Dialect(Protocol):
    """One wire: `anthropic`, `openai_chat`, `openai_responses`. `statuses` gives the HTTP status of each error kind."""

    @property
    def name(self) -> str: ...  # noqa: D102 - said in the class

    @property
    def statuses(self) -> Mapping[str, int]: ...  # noqa: D102 - said in the class

    def parse(self, body: bytes, headers: Mapping[str, str], reader: Reader | None = None) -> Request:
        """The canonical request, or `BadRequest` for what cannot be honoured. `reader` knows the execution's bodies."""

    def stream(self, call: ReplyContext) -> StreamEncoder:
        """A fresh encoder for one streamed reply."""

    def batch(self, call: ReplyContext, reply: Reply, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """The whole reply as one body; says exactly what the stream of the same events says."""

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> bytes:
        """An error body in the wire's own shape."""

    def too_long(self, num_tokens: int, maximum: int) -> str:
        """The wire's own words for a prompt beyond the window; harnesses compact when they read them."""


def mint_call_id(prefix: str, node_id: str, index: int) -> str:
    """Id of the `index`-th tool call of the output node `node_id`: an echo of it names the node."""
    return f"{prefix}_{node_id}_{index}"


def node_of(echoed: str | None) -> str | None:
    """Node named by an id or signature that we minted, else None. Only a hint: anyone can write such a string."""
    if not echoed:
        return None
    if _NODE.fullmatch(echoed):
        return echoed
    match = _CALL_ID.fullmatch(echoed)
    return match.group(1) if match else None


def line_safe(payload: bytes) -> bytes:
    """JSON without the line separators that JSON allows: many clients split an event stream at these too."""
    for separator, escape in _SEPARATORS:
        if separator in payload:
            payload = payload.replace(separator, escape)
    return payload


class TextFrame:
    """One event of a stream with another text each time: the official model writes it once, not for every delta."""

    def __init__(self, write: Callable[[str], bytes]) -> None:
        """`write` gives the event for a text."""
        mark = secrets.token_hex(8)  # nothing that a client sent, which may stand in the event, is equal to it
        self._before, self._after = write(mark).split(orjson.dumps(mark))

    def of(self, text: str) -> bytes:
        """The event for `text`."""
        return self._before + line_safe(orjson.dumps(text)) + self._after


def load_body(body: bytes) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        value = load_tolerant(body)
    except ValueError as error:
        raise BadRequest(f"The request body must be JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BadRequest(f"The request body must be a JSON object, got {type(value).__name__}.")
    return value


def validated(model: type[_Model], value: Any, at: str = "") -> _Model:
    """`value`, which stands at the path `at`, as `model`; the first fault as a `BadRequest` that names the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Labels of unions are written in brackets; clients do not know them.
        path = ".".join(str(part) for part in (*([at] if at else []), *first["loc"]) if "[" not in str(part))
        raise BadRequest(f"{path}: {first['msg']}", path or None) from error
