"""OpenAI Responses, inbound: flat lists of items become turns, as Codex and the official client really send them.

The whole input comes with every request: this wire's server-side memory is refused, never guessed. Reasoning, text and
calls that stand together are one turn. Items that name an output of ours and are followed by no result or message are
what a client kept of a reply that broke off: it asks again from before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gyre_proxy.dialects import openai_chat_reply, openai_responses_reply
from gyre_proxy.dialects.base import BadRequest, ReplyContext, StreamEncoder, validated
from gyre_proxy.dialects.inbound import refuse_engine_fields, schema_text, stops_of
from gyre_proxy.dialects.openai_responses_input import read_input, read_item
from gyre_proxy.dialects.reading import Reader
from gyre_proxy.message import Reply, Request, Sampling, Usage

__all__ = ["OPENAI_RESPONSES", "OpenAIResponses"]

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "no reply is kept to go on from: send the whole input"),
    "conversation": ((), "no conversation is kept here: send the whole input"),
    "prompt": ((), "no prompt templates are kept here: send instructions and input"),
    "background": ((False,), "a reply is given on its own connection: leave it out, and stream it if it is long"),
    "truncation": (("disabled",), "a prompt that is too long is refused, never cut: leave it out"),
    "context_management": (([],), "the input is used as it is sent: leave it out"),
    "generate": ((True,), "a warm-up is not sampled: leave it out"),
    "top_logprobs": ((0,), "log-probs are recorded, not sent: leave it out"),
    "moderation": ((), "nothing is moderated here: leave it out"),
    "presence_penalty": ((0,), "it is not supported here: leave it out"),
    "frequency_penalty": ((0,), "it is not supported here: leave it out"),
    "repetition_penalty": ((1,), "it is not supported here: leave it out"),
    "min_p": ((0,), "it is not supported here: leave it out"),
    "logit_bias": (({},), "it is not supported here: leave it out"),
}
"""Fields that would change the reply and are not carried out: the values, beside null, that ask for nothing; a mend."""
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "top_p",
    "truncation",
)
_OFFERED = ("web_search", "web_search_preview", "image_generation")
"""Tools of the provider that Codex offers by itself in every request."""


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Tool(_Loose):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    defer_loading: bool | None = None


class _TextOptions(_Loose):
    format: dict[str, Any] | None = None


class _Body(_Loose):
    model: str
    input: str | list[Any] = Field(min_length=1)
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    text: _TextOptions | None = None
    include: list[str] | None = None


class OpenAIResponses:
    """The dialect of `/v1/responses`."""

    name = "openai_responses"
    statuses: Mapping[str, int] = openai_chat_reply.STATUSES

    def parse(self, body: bytes, headers: Mapping[str, str], reader: Reader | None = None) -> Request:
        """The canonical request. `headers` say whether Codex sent it, whose unasked offer of a web search goes."""
        opened = (reader or Reader()).open(body, "input")
        value, sent = opened.fields, validated(_Body, opened.fields)
        _refuse(sent)
        sent_tools = _without_offers(sent.tools or (), headers)
        tools, namespaces = opened.once("tools", lambda: _tools(sent_tools), str(sent_tools == (sent.tools or ())))
        tools = () if sent.tool_choice == "none" else tools
        echo = {name: value[name] for name in _ECHOED if value.get(name) is not None}
        if sent_tools:
            echo["tools"] = [tool.model_dump(exclude_unset=True) for tool in sent_tools]
        if isinstance(sent.input, str):
            items = [read_item({"role": "user", "content": sent.input}, "input")]
        else:
            items = opened.each(lambda item, index: read_item(item, f"input.{index}"))
        return Request(
            wire=self.name,
            model=sent.model,
            messages=opened.finish(read_input(sent.instructions, items)),
            tools=tools,
            sampling=Sampling(
                max_tokens=sent.max_output_tokens,
                temperature=sent.temperature,
                top_p=sent.top_p,
                top_k=sent.top_k,
                seed=sent.seed,
                stop=stops_of(sent.stop, "stop"),
                json_schema=_schema((sent.text and sent.text.format) or {}, bool(tools)),
            ),
            stream=bool(sent.stream),
            namespaces=namespaces,
            echo=echo,
            body=opened.parts,
        )

    def stream(self, call: ReplyContext) -> StreamEncoder:
        """A fresh encoder for one streamed reply."""
        return openai_responses_reply.ResponsesStream(call)

    def batch(self, call: ReplyContext, reply: Reply, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """The whole reply as one response; this wire does not name the stop sequence."""
        return openai_responses_reply.batch(call, reply, usage)

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> bytes:
        """An error body in OpenAI's shape."""
        if kind == "prompt_too_long":
            param = param or "input"
        return openai_chat_reply.error_body(kind, message, param)

    def too_long(self, num_tokens: int, maximum: int) -> str:
        """The words of `context_length_exceeded`."""
        return (
            f"Your input exceeds the context window of this model: {num_tokens} tokens, of {maximum} at most. "
            "Please adjust your input and try again."
        )


OPENAI_RESPONSES = OpenAIResponses()


def _schema(wanted: Mapping[str, Any], has_tools: bool) -> str | None:
    """The schema of a `text.format`; `json_object` is one that any object follows."""
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return schema_text({"type": "object"}, "text.format", has_tools)
        case "json_schema":
            return schema_text(wanted.get("schema"), "text.format.schema", has_tools)
        case other:
            raise BadRequest(
                f"text.format.type: must be 'text', 'json_object' or 'json_schema', got {other!r}: use one.",
                "text.format",
            )


def _refuse(sent: _Body) -> None:
    extra = sent.model_extra or {}
    for field, (neutral, mend) in _REFUSED.items():
        value = extra.get(field)
        if value is not None and value not in neutral:
            raise BadRequest(f"{field}: {value!r:.80} is not supported: {mend}.", field)
    refuse_engine_fields(extra)
    if "message.output_text.logprobs" in (sent.include or ()):
        raise BadRequest(
            "include: log-probs are recorded, not sent: leave message.output_text.logprobs out.", "include"
        )
    if sent.tool_choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice: 'auto' and 'none' are supported, got {sent.tool_choice!r:.80}: the policy cannot be forced "
            "to call a tool.",
            "tool_choice",
        )
    if sent.tools and sent.parallel_tool_calls is False:
        raise BadRequest(
            "parallel_tool_calls: the policy cannot be kept from several calls in one turn: leave it out.",
            "parallel_tool_calls",
        )


def _without_offers(tools: Sequence[_Tool], headers: Mapping[str, str]) -> list[_Tool]:
    """The tools without those of a provider that Codex adds unasked: it works without, and the reply lists the rest."""
    by_codex = headers.get("originator", "").startswith("codex") or "x-codex-turn-metadata" in headers
    return [tool for tool in tools if not (by_codex and tool.type in _OFFERED)]


def _tools(tools: Sequence[_Tool]) -> tuple[tuple[dict[str, Any], ...], dict[str, str]]:
    """Tools to render, as on the other wires, and the group of each one that came in a group.

    A grouped tool is called `group.tool`, which no name of the wire can be; the group's text precedes its first tool's.
    """
    rendered: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.type != "namespace":
            rendered += _function(tool, tool.name, tool.description, path)
            continue
        about = tool.description
        for number, inner in enumerate(tool.tools or ()):
            text = "\n\n".join(part for part in (about, inner.description) if part) or None
            functions = _function(inner, f"{tool.name}.{inner.name}", text, f"{path}.tools.{number}")
            namespaces |= {function["function"]["name"]: str(tool.name) for function in functions}
            rendered += functions
            about = None if functions else about
    return tuple(rendered), namespaces


def _function(tool: _Tool, name: str | None, description: str | None, path: str) -> list[dict[str, Any]]:
    """None for a deferred tool: such come and go, and would change the prompt from its start."""
    if tool.type != "function":
        raise BadRequest(
            f"{path}: only function tools are supported, alone or in a namespace, got type {tool.type!r}: nobody here "
            "would run it. Leave it out, or turn it off in the harness.",
            f"{path}.type",
        )
    if not tool.name:
        raise BadRequest(f"{path}.name: a tool must have a name.", f"{path}.name")
    if tool.defer_loading:
        return []
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return [{"type": "function", "function": function}]
