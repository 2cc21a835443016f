"""Where a request is addressed: `/x/<execution>[/a/<agent>]/v1/...`.

The execution lives in the path because every harness takes a base URL and few take headers. A wrong address is answered
with the address to use instead, since the harness's own message will say nothing useful.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Address", "AddressError", "checked_name", "endpoint_wire", "parse_address"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_COUNT = "messages/count_tokens"
_ENDPOINTS = {
    "messages": "anthropic",
    _COUNT: "anthropic",
    "chat/completions": "openai_chat",
    "responses": "openai_responses",
}


class AddressError(ValueError):
    """The path names no endpoint of an execution; the message says which base URL to use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """One addressed request. `rest` is the path below the execution's base URL, without a leading slash."""

    execution: str
    agent: str | None
    rest: str

    @property
    def base(self) -> str:
        """Path of the base URL: what a client should be given in front of `/v1`."""
        return f"/x/{self.execution}" + (f"/a/{self.agent}" if self.agent else "")

    @property
    def wire(self) -> str | None:
        """The wire that this address speaks, or None when it is no model call."""
        return endpoint_wire(self.rest.removeprefix("v1/")) if self.rest.startswith("v1/") else None

    @property
    def only_counts(self) -> bool:
        """Whether the client asks how long a prompt is, and for no reply."""
        return self.rest == f"v1/{_COUNT}"


def endpoint_wire(endpoint: str) -> str | None:
    """The wire of an endpoint below `/v1/`; None when it is not a model call."""
    return _ENDPOINTS.get(endpoint)


def parse_address(path: str) -> Address:
    """Split `path`; raise AddressError with the mend when it is not below an execution.

    The rest of the path is not judged here, except for a doubled or missing `/v1`, which no client could mean.
    """
    parts = path.strip("/").split("/")
    if parts[0] != "x" or len(parts) < 2:
        raise AddressError(
            f"wanted /x/<execution>/v1/..., got {path}: a base URL names the execution it records; "
            "use http://HOST:PORT/x/<any name> (OpenAI clients: .../x/<any name>/v1)"
        )
    execution, rest, agent = checked_name(parts[1], "execution"), parts[2:], None
    if len(rest) >= 2 and rest[0] == "a":
        agent, rest = checked_name(rest[1], "agent"), rest[2:]
    address = Address(execution=execution, agent=agent, rest="/".join(rest))
    if rest[:2] == ["v1", "v1"]:
        raise AddressError(
            f"{path}: the base URL ends in /v1 and this client adds it; use .../{address.base.lstrip('/')}"
        )
    if endpoint_wire(address.rest) or address.rest == "models":
        raise AddressError(
            f"{path}: this client does not add /v1 to its base URL; use .../{address.base.lstrip('/')}/v1"
        )
    return address


def checked_name(text: str, what: str) -> str:
    """`text`, when it may stand in a base URL (and be the name of a folder); else AddressError."""
    if not _NAME.fullmatch(text):
        raise AddressError(
            f"wanted an {what} name of letters, digits, '.', '_' and '-' (at most 128), got {text!r}; "
            f"choose another {what} name in the base URL"
        )
    return text
