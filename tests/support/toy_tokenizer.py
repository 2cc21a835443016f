"""A toy byte-level tokenizer and four toy chat templates, so that the outside cases run without a download.

Ids 0..255 are bytes; `SPECIAL` has one id for each marker; `MERGES` make text to ids many-to-one: `encode` is greedy
longest match, so [97, 301] decodes to "abc" but encode("abc") == [302].
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPECIAL = {
    "<|im_start|>": 256,
    "<|im_end|>": 257,
    "<think>": 258,
    "</think>": 259,
    "<tool_call>": 260,
    "</tool_call>": 261,
    "<|observation|>": 262,
    "<|user|>": 263,
    "<|assistant|>": 264,
    "<|system|>": 265,
    "<|endoftext|>": 266,
    "<tool_response>": 267,
    "</tool_response>": 268,
}
MERGES = {
    "ab": 300,
    "bc": 301,
    "abc": 302,
    " the": 303,
    "\n\n": 304,
    '": "': 305,
    '":"': 306,
    "ing": 307,
    "12": 308,
    "123": 309,
}
_TEXT_OF = {token: text for text, token in {**SPECIAL, **MERGES}.items()}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")")
_LONGEST_FIRST = sorted(MERGES, key=len, reverse=True)


def encode(text: str) -> list[int]:
    out: list[int] = []
    for part in _SPLIT.split(text):
        out += [SPECIAL[part]] if part in SPECIAL else encode_plain(part)
    return out


def encode_plain(text: str) -> list[int]:
    """Ids of a text in which nothing is a control token."""
    out: list[int] = []
    at = 0
    while at < len(text):
        merge = next((m for m in _LONGEST_FIRST if text.startswith(m, at)), None)
        if merge is None:
            out.extend(text[at].encode("utf-8"))
            at += 1
        else:
            out.append(MERGES[merge])
            at += len(merge)
    return out


def starts_of(ids: Iterable[int]) -> list[int]:
    """First character of each token."""
    starts, at, partial = [], 0, b""
    for token in ids:
        starts.append(at)
        if token in _TEXT_OF:
            at += len(_TEXT_OF[token])
            continue
        partial += bytes([token])
        try:
            at += len(partial.decode())
        except UnicodeDecodeError:
            continue
        partial = b""
    return starts


def decode(ids: Iterable[int]) -> str:
    buffer = bytearray()
    for token in ids:
        buffer += _TEXT_OF[token].encode() if token in _TEXT_OF else bytes([token])
    return buffer.decode("utf-8", "replace")


class ToyTokenizer:
    """The same as an object, for what wants `decode(ids)`."""

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _assistant(message: Mapping[str, Any], keep_reasoning: bool) -> str:
    out = ""
    if keep_reasoning and message.get("reasoning_content"):
        out += "<think>" + message["reasoning_content"] + "</think>"
    out += message.get("content") or ""
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
        out += f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    return out


def render(messages: Sequence[Mapping[str, Any]], template: str = "chatml", add_generation_prompt: bool = True) -> str:
    """chatml: append-only. chatml_strip: reasoning of turns before the last user message is dropped.
    chatml_group: runs of tool messages share one user turn. glm: no end token, the next role marker closes the turn."""
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    out = ""
    for i, message in enumerate(messages):
        role, body = message["role"], message.get("content") or ""
        if template == "glm":
            markers = {
                "system": "<|system|>",
                "user": "<|user|>",
                "tool": "<|observation|>",
                "assistant": "<|assistant|>",
            }
            out += markers[role] + (_assistant(message, True) if role == "assistant" else body)
            continue
        if role == "assistant":
            body = _assistant(message, template != "chatml_strip" or i > last_user)
        if role == "tool" and template == "chatml_group":
            if i == 0 or messages[i - 1]["role"] != "tool":
                out += "<|im_start|>user\n"
            out += "<tool_response>" + body + "</tool_response>"
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                out += "<|im_end|>\n"
            continue
        out += f"<|im_start|>{role}\n{body}<|im_end|>\n"
    if add_generation_prompt:
        out += "<|assistant|>" if template == "glm" else "<|im_start|>assistant\n"
    return out
