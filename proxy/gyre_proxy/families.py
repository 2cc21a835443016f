"""How each model family marks reasoning and tool calls in the text it samples: declarations only.

`gyre_proxy.parse` holds the machine that reads them. A new family is a new value here and, when its calls are not
JSON, a function from the text between the markers to calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gyre_data.errors import ConfigError
from gyre_proxy.json_text import read_object
from gyre_proxy.message import ToolCall

__all__ = ["FAMILY_NAMES", "Family", "Region", "family"]

CallReader = Callable[[str], tuple[ToolCall, ...] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A span between two literal markers: reasoning, or with `read` a call; that gives None for a malformed body."""

    open: str
    close: str
    read: CallReader | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The marks of one family. `turn_opener` starts the assistant's turn in a rendered prompt."""

    name: str
    turn_opener: str
    regions: tuple[Region, ...]

    @property
    def markers(self) -> frozenset[str]:
        """Every marker, which the detokenizer must let through although they are special tokens."""
        return frozenset(marker for region in self.regions for marker in (region.open, region.close))


def _read_hermes(body: str) -> tuple[ToolCall, ...] | None:
    """`{"name": ..., "arguments": {...}}`; arguments may be absent, or a string that holds the object."""
    value = read_object(body)
    if value is None or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if not isinstance(arguments, Mapping):
        return None
    return (ToolCall(name=name, arguments=arguments),)


_HERMES = Family(
    name="hermes",
    turn_opener="<|im_start|>assistant\n",
    regions=(
        Region(open="<think>", close="</think>"),
        Region(open="<tool_call>", close="</tool_call>", read=_read_hermes),
    ),
)

FAMILY_NAMES = ("hermes",)


def family(name: str) -> Family:
    """The declaration of the family `name`."""
    match name:
        case "hermes":
            return _HERMES
        case _:
            raise ConfigError(
                f"Reply format must be one of {', '.join(FAMILY_NAMES)}, got {name!r}: choose one of them."
            )
