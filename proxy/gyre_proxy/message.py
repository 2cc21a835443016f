"""Canonical requests and replies, independent of the wire they came over.

Data flows one way: a dialect parses a body into a `Request`; the history turns its messages into token ids; the reply
parser turns sampled text into `ReplyEvent`s; the dialect encodes those for the same wire. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gyre_data.json_values import plain_numbers

__all__ = [
    "BodyPart",
    "Message",
    "Reasoning",
    "Reply",
    "ReplyEvent",
    "Request",
    "Sampling",
    "Text",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "canonical",
    "digest",
]


def canonical(value: Any) -> bytes:
    """JSON bytes that are equal for equal values: sorted keys, no blanks, integral floats written as integers."""
    return orjson.dumps(plain_numbers(value), option=orjson.OPT_SORT_KEYS)


def digest(value: Any) -> str:
    """First 32 hex digits of the sha256 of `canonical(value)`."""
    return hashlib.sha256(canonical(value)).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is the parsed JSON object, or the raw text when it does not parse to one."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation, as the template will see it.

    `content` joins the text blocks. `node_hint` is a node id of ours that the client echoed (a tool-call id or a
    thinking signature that we minted); it is a hint, verified before it is believed. `raw` holds what the canonical
    form leaves out (unknown blocks and fields), so that the stored message loses nothing.
    """

    role: str  # system | user | assistant | tool
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    node_hint: str | None = None
    raw: Any = None

    def for_template(self) -> dict[str, Any]:
        """Dictionary in the shape Hugging Face chat templates expect; keys without a value are left out."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": call.id} if call.id else {}),
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        if self.name:
            out["name"] = self.name
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a client asked for. None means that it said nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: str | None = None
    """Schema that the engine holds the whole reply to, as JSON text; such a reply is never trained on by default."""

    def to_json(self) -> dict[str, Any]:
        """Only what was set."""
        pairs = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in pairs.items() if not (value is None or value == ())}


@dataclass(kw_only=True, slots=True, eq=False)
class BodyPart:
    """Bytes of a request body between two cuts; a body is the concatenation of its parts. Requests of one conversation
    share the parts that they have in common."""

    data: bytes
    stored: bool = False
    """The run holds it durably."""
    _blob_id: str = ""

    @property
    def blob_id(self) -> str:
        """Id under which it is stored."""
        self._blob_id = self._blob_id or hashlib.sha256(self.data).hexdigest()
        return self._blob_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One model request. `tools` are in the OpenAI function form that chat templates take."""

    wire: str  # anthropic | openai_chat | openai_responses
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    """The client wants the log-probs of the visible text."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Tools that came in a group: their name here, `group.tool`, and the group (OpenAI Responses)."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the reply repeats as they were sent (OpenAI Responses)."""
    body: tuple[BodyPart, ...] = ()
    """The exact body, cut at message borders."""

    @property
    def body_pieces(self) -> tuple[bytes, ...]:
        """Its bytes, part by part."""
        return tuple(part.data for part in self.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """A piece of reasoning text."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A piece of visible text. `malformed_call` marks a tool call that did not parse and goes out verbatim."""

    text: str
    malformed_call: bool = False


ReplyEvent = Reasoning | Text | ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A sampled token as a client sees it: its text, empty where a character of several tokens is not whole yet."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of a call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A whole reply: the events in order, and why it ended (`stop`, `length`, `abort`)."""

    events: tuple[ReplyEvent, ...]
    finish: str

    @property
    def text(self) -> str:
        """The visible text, joined."""
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def reasoning(self) -> str:
        """The reasoning text, joined."""
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, in order."""
        return tuple(event for event in self.events if isinstance(event, ToolCall))

    def message(self) -> Message:
        """The assistant message that a client is expected to echo."""
        return Message(
            role="assistant", content=self.text, reasoning=self.reasoning or None, tool_calls=self.tool_calls
        )
