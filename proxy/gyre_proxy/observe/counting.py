"""Local token counts: what stands for token ids that a hosted API does not tell."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer

from gyre_data.errors import ConfigError
from gyre_proxy.message import Message

__all__ = ["ByteCounter", "TokenCounter", "TokenizerCounter", "count_message", "count_tools", "load_counter"]

# Strings under these names are no text that a model reads as such: pictures, files, sealed reasoning.
_SEALED = frozenset({"data", "url", "file_data", "image_url", "encrypted_content", "signature"})


class TokenCounter(Protocol):
    """Counts the tokens of a text. `name` is recorded with every count."""

    name: str

    def count(self, text: str) -> int:
        """Tokens of `text`, 0 for none."""


class ByteCounter:
    """A quarter of the UTF-8 bytes, rounded up: right within a third for English and code."""

    name = "local count: bytes/4"

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return -(-len(text.encode("utf-8", "replace")) // 4)


class TokenizerCounter:
    """A tokenizer of the user's choice, without any chat template."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise ConfigError(f"wanted a tokenizer.json to count with, {folder} has none; check --tokenizer")
        content = file.read_bytes()
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"local count: tokenizer {hashlib.sha256(content).hexdigest()[:16]}"

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def load_counter(tokenizer: Path | None) -> TokenCounter:
    """The counter of a run."""
    return ByteCounter() if tokenizer is None else TokenizerCounter(tokenizer)


def count_message(counter: TokenCounter, message: Message) -> int:
    """Tokens of a message: its texts, calls and other blocks; at least 1. Pictures and files count nothing."""
    total = counter.count(message.content) + counter.count(message.reasoning or "")
    for call in message.tool_calls:
        given = call.arguments if isinstance(call.arguments, str) else orjson.dumps(dict(call.arguments)).decode()
        total += counter.count(call.name) + counter.count(given)
    blocks = message.raw.get("blocks") if isinstance(message.raw, Mapping) else None
    return max(total + sum(counter.count(text) for text in _texts(blocks)), 1)


def count_tools(counter: TokenCounter, tools: Sequence[Any]) -> int:
    """Tokens of the tool list as JSON."""
    return counter.count(orjson.dumps(list(tools)).decode()) if tools else 0


def _texts(value: Any, name: str = "") -> list[str]:
    if isinstance(value, str):
        return [] if name in _SEALED or name == "type" else [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in _texts(item, key)]
    if isinstance(value, Sequence):
        return [text for item in value for text in _texts(item, name)]
    return []
