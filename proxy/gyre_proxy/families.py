"""How each model family marks reasoning and tool calls in the text it samples: declarations only.

`gyre_proxy.regions` and `gyre_proxy.harmony` hold the machines that read them. A new family is a new value here and,
when its calls are not JSON, a function from the text between the markers to calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gyre_data.errors import ConfigError

from .json_text import read_object
from .message import ToolCall
from .xml_calls import Schemas, read_dsml, read_glm, read_qwen3_coder

__all__ = ["FAMILY_NAMES", "CallReader", "Family", "Region", "family"]

CallReader = Callable[[str, Schemas], tuple[ToolCall, ...] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A span between two literal markers: reasoning, or with `read` a call; that gives None for a malformed body."""

    open: str
    close: str
    read: CallReader | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The marks of one family."""

    name: str
    turn_opener: str = ""
    """Starts the assistant's turn in a rendered prompt."""
    regions: tuple[Region, ...] = ()
    silent: tuple[str, ...] = ()
    """Markers around a group of calls: they say nothing that the calls do not say, and are never shown."""
    inner: tuple[str, ...] = ()
    """Markers inside a call."""
    channels: bool = False
    """Every part of the reply has a header that names its channel; regions have no part in it."""

    @property
    def markers(self) -> frozenset[str]:
        """Every marker, which the detokenizer must let through although they may be special tokens."""
        pairs = (marker for region in self.regions for marker in (region.open, region.close))
        return frozenset((*pairs, *self.silent, *self.inner))


def _read_hermes(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
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


_FENCED = re.compile(r"\s*(\S+)\s*\n```json\n(.*)\n```\s*", re.DOTALL)


def _read_deepseek(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    """`NAME SEP {...}` (V3.1), or `function SEP NAME` and the object in a fenced block (V3, R1)."""
    left, separator, right = body.partition("<｜tool▁sep｜>")
    fenced = _FENCED.fullmatch(right)
    name, text = (fenced[1], fenced[2]) if fenced else (left.strip(), right)
    arguments = read_object(text) if separator and name else None
    return None if arguments is None else (ToolCall(name=name, arguments=arguments),)


_KIMI_ID = re.compile(r"\s*(?:functions\.)?([\w.\-]+):\d+\s*")


def _read_kimi(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    """`functions.NAME:INDEX`, the argument marker, the object. An id without a name names no call."""
    left, separator, right = body.partition("<|tool_call_argument_begin|>")
    match = _KIMI_ID.fullmatch(left)
    arguments = read_object(right) if separator and match else None
    return None if arguments is None or match is None else (ToolCall(name=match[1], arguments=arguments),)


_THINK = Region(open="<think>", close="</think>")
_CHATML = "<|im_start|>assistant\n"

_FAMILIES = (
    Family(
        name="hermes",
        turn_opener=_CHATML,
        regions=(_THINK, Region(open="<tool_call>", close="</tool_call>", read=_read_hermes)),
    ),
    Family(
        name="qwen3_coder",
        turn_opener=_CHATML,
        regions=(_THINK, Region(open="<tool_call>", close="</tool_call>", read=read_qwen3_coder)),
    ),
    Family(
        name="glm",
        turn_opener="<|assistant|>",
        regions=(_THINK, Region(open="<tool_call>", close="</tool_call>", read=read_glm)),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Family(
        name="deepseek",
        turn_opener="<｜Assistant｜>",
        regions=(_THINK, Region(open="<｜tool▁call▁begin｜>", close="<｜tool▁call▁end｜>", read=_read_deepseek)),
        silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>",),
    ),
    Family(
        name="deepseek_dsml",
        turn_opener="<｜Assistant｜>",
        regions=(_THINK, Region(open='<｜DSML｜invoke name="', close="</｜DSML｜invoke>", read=read_dsml)),
        silent=tuple(f"<{end}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for end in ("", "/")),
        inner=("｜DSML｜",),
    ),
    Family(
        name="kimi",
        turn_opener="<|im_middle|>",
        regions=(_THINK, Region(open="<|tool_call_begin|>", close="<|tool_call_end|>", read=_read_kimi)),
        silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
    ),
    Family(
        name="harmony",
        turn_opener="<|start|>assistant",
        inner=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        channels=True,
    ),
    Family(name="plain", regions=(_THINK,)),
)

FAMILY_NAMES = tuple(declared.name for declared in _FAMILIES)


def family(name: str) -> Family:
    """The declaration of the family `name`."""
    for declared in _FAMILIES:
        if declared.name == name:
            return declared
    raise ConfigError(f"Reply format must be one of {', '.join(FAMILY_NAMES)}, got {name!r}: choose one of them.")
