"""What kind of fault an error is: one table for every wire, for error events in streams, and for the API."""

from __future__ import annotations

from collections.abc import Mapping

from gyre_data.errors import ConfigError, EngineError, GyreError

from .chunks import EngineRefusedError
from .dialects.base import BadRequest

__all__ = ["API_STATUS", "CallError", "kind_of"]

API_STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "prompt_too_long": 400,
    "authentication": 401,
    "not_found": 404,
    "timeout": 408,
    "too_large": 413,
    "rate_limit": 429,
    "internal": 500,
    "overloaded": 503,
}
"""HTTP status of each kind on the API; each wire has its own in `Dialect.statuses`."""


class CallError(GyreError, ValueError):
    """A call that is refused before anything was sampled. `kind` is one of the dialects' error kinds."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])


def kind_of(error: Exception) -> str:
    """The kind of an error: `invalid_request` for what the sender can mend, `overloaded` for what another try may."""
    if isinstance(error, CallError):
        return error.kind
    if isinstance(error, EngineRefusedError | ConfigError | BadRequest):
        return "invalid_request"
    return "overloaded" if isinstance(error, EngineError) else "internal"
