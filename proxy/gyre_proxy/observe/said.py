"""What a hosted model said, and what a client told it: one form for every wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre_proxy.message import Message

__all__ = ["Said", "kept", "text_of"]


@dataclass(kw_only=True, slots=True)
class Said:
    """A reply put together. `form` is its message as the wire gives it whole, never its events."""

    message: Message | None = None
    form: Any = None
    stop_reason: str | None = None
    at_limit: bool = False
    """The reply ended at its length limit."""
    usage: Mapping[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    error: str | None = None
    whole: bool = True
    """The last event came, or the body was not a stream."""
    odd: list[str] = field(default_factory=list)
    """What could not be placed, in words."""


def kept(value: Any) -> Any:
    """A block or item without marks that move from request to request and say nothing about it."""
    if isinstance(value, Mapping):
        return {name: item for name, item in value.items() if name != "cache_control"}
    return value


def text_of(value: Any) -> str:
    """Text in a place where text is usual; everything else gives none."""
    return value if isinstance(value, str) else ""
