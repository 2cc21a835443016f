"""OpenAI Chat Completions, inbound: a tolerant reading; what would change the model's task unheard is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from gyre_proxy.dialects import openai_chat_reply
from gyre_proxy.dialects.base import BadRequest, ReplyContext, StreamEncoder, validated
from gyre_proxy.dialects.inbound import (
    arguments_of,
    as_blocks,
    hint_of,
    join_lines,
    refuse_engine_fields,
    refuse_media,
    schema_text,
    settled,
    shown_block,
    stops_of,
    without_cache_marks,
)
from gyre_proxy.dialects.reading import Reader
from gyre_proxy.message import Message, Reply, Request, Sampling, ToolCall, Usage

__all__ = ["OPENAI_CHAT", "OpenAIChat"]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
}
"""Fields that would change the reply and are not carried out here: the values, beside null, that ask for nothing."""


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Part(_Loose):
    type: str
    text: str | None = None
    refusal: str | None = None


_Parts = Annotated[list[_Part], BeforeValidator(as_blocks)]


class _CalledFunction(_Loose):
    name: str
    arguments: Any = ""


class _Call(_Loose):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(_Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Parts = Field(default_factory=list)
    reasoning: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Function(_Loose):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Loose):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Loose):
    include_usage: bool | None = None


class _Body(_Loose):
    model: str
    messages: list[Any] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None


class OpenAIChat:
    """The dialect of `/v1/chat/completions`."""

    name = "openai_chat"
    statuses: Mapping[str, int] = openai_chat_reply.STATUSES

    def parse(self, body: bytes, headers: Mapping[str, str], reader: Reader | None = None) -> Request:
        """The canonical request; `headers` change nothing on this wire."""
        opened = (reader or Reader()).open(body, "messages")
        sent = opened.once("rest", lambda: validated(_Body, opened.fields))
        _refuse(sent)
        messages = opened.each(lambda value, index: _message(value, f"messages.{index}"))
        tools = opened.once("tools", lambda: _tools(sent.tools or ()))
        tools = () if sent.tool_choice == "none" else tools
        return Request(
            wire=self.name,
            model=sent.model,
            messages=opened.finish(messages, settled),
            tools=tools,
            sampling=Sampling(
                max_tokens=sent.max_completion_tokens or sent.max_tokens,
                temperature=sent.temperature,
                top_p=sent.top_p,
                top_k=sent.top_k,
                seed=sent.seed,
                stop=stops_of(sent.stop, "stop"),
                json_schema=_schema(sent.response_format or {}, bool(tools)),
            ),
            stream=bool(sent.stream),
            include_usage=bool(sent.stream_options and sent.stream_options.include_usage),
            logprobs=bool(sent.logprobs),
            body=opened.parts,
        )

    def stream(self, call: ReplyContext) -> StreamEncoder:
        """A fresh encoder for one streamed reply."""
        return openai_chat_reply.ChatStream(call)

    def batch(self, call: ReplyContext, reply: Reply, usage: Usage, stop_sequence: str | None = None) -> bytes:
        """The whole reply as one completion; this wire does not name the stop sequence."""
        return openai_chat_reply.batch(call, reply, usage)

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> bytes:
        """An error body in OpenAI's shape."""
        return openai_chat_reply.error_body(kind, message, param)

    def too_long(self, num_tokens: int, maximum: int) -> str:
        """The words of `context_length_exceeded`."""
        return (
            f"This model's maximum context length is {maximum} tokens. However, your messages resulted in "
            f"{num_tokens} tokens. Please reduce the length of the messages."
        )


OPENAI_CHAT = OpenAIChat()


def _schema(wanted: Mapping[str, Any], has_tools: bool) -> str | None:
    """The schema of a `response_format`; `json_object` is one that any object follows."""
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return schema_text({"type": "object"}, "response_format", has_tools)
        case "json_schema":
            told = wanted.get("json_schema")
            schema = told.get("schema") if isinstance(told, Mapping) else None
            return schema_text(schema, "response_format.json_schema.schema", has_tools)
        case other:
            raise BadRequest(
                f"response_format.type: must be 'text', 'json_object' or 'json_schema', got {other!r}: use one.",
                "response_format",
            )


def _refuse(sent: _Body) -> None:
    extra = sent.model_extra or {}
    refuse_engine_fields(extra)
    for field, neutral in _NEUTRAL.items():
        value = extra.get(field)
        if value is not None and value not in neutral:
            wanted = " or ".join(map(repr, neutral)) or "absent"
            raise BadRequest(
                f"{field}: must be {wanted}, got {value!r:.80}: it is not supported here, leave it out.", field
            )
    if sent.tool_choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice: 'auto' and 'none' are supported, got {sent.tool_choice!r}: the policy cannot be forced to "
            "call a tool.",
            "tool_choice",
        )
    if sent.tools and sent.parallel_tool_calls is False:
        raise BadRequest(
            "parallel_tool_calls: the policy cannot be kept from several calls in one turn: leave it out.",
            "parallel_tool_calls",
        )


def _tools(tools: Sequence[_Tool]) -> tuple[dict[str, Any], ...]:
    """Name, description and parameters, so that a tool renders the same whichever wire it came over."""
    rendered = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        rendered.append({"type": "function", "function": function})
    return tuple(rendered)


def _message(value: Any, path: str) -> Message:
    sent = validated(_Message, value, path)
    texts: list[str] = []
    left: list[dict[str, Any]] = []
    for index, part in enumerate(sent.content):
        text = part.text if part.text is not None else part.refusal
        if text is None:
            refuse_media(part.type, f"{path}.content.{index}")
            left.append(part.model_dump(exclude_unset=True, exclude={"cache_control"}))
            if sent.role != "assistant":
                texts.append(shown_block(left[-1]))
            continue
        texts.append(text)
        if extra := without_cache_marks(part.model_extra):
            left.append({"type": part.type, **extra})
    fields = without_cache_marks(sent.model_extra)
    if fields.get("prefix"):
        raise BadRequest(f"{path}.prefix: a reply cannot begin with given words here: leave it out.", f"{path}.prefix")
    raw = {**({"blocks": left} if left else {}), **({"fields": fields} if fields else {})}
    calls = tuple(
        ToolCall(name=call.function.name, arguments=arguments_of(call.function.arguments), id=call.id)
        for call in sent.tool_calls or ()
    )
    assistant = sent.role == "assistant"
    return Message(
        role="system" if sent.role == "developer" else sent.role,
        content="".join(texts) if assistant else join_lines(texts),
        reasoning=(sent.reasoning or None) if assistant else None,
        tool_calls=calls if assistant else (),
        tool_call_id=sent.tool_call_id if sent.role == "tool" else None,
        name=sent.name,
        node_hint=hint_of(call.id for call in calls) if assistant else None,
        raw=raw or None,
    )
