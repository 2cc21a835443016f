"""Local token counts: what stands for token ids that nobody told us (hosted APIs, imported sessions)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import ConfigError
from .installing import pip_install

__all__ = ["ByteCounter", "TokenCounter", "TokenizerCounter", "count_tools", "count_turn", "load_counter"]

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
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--tokenizer: counting with a tokenizer needs the package tokenizers; run: {pip_install('proxy')}"
            ) from error
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


def count_turn(
    counter: TokenCounter,
    *,
    content: str,
    reasoning: str | None = None,
    calls: Iterable[tuple[str, Any]] = (),
    blocks: Any = None,
) -> int:
    """Tokens of a message: its texts, calls (name, arguments) and other blocks; at least 1.

    Pictures and files count nothing.
    """
    total = counter.count(content) + counter.count(reasoning or "")
    for name, arguments in calls:
        total += counter.count(name) + counter.count(arguments if isinstance(arguments, str) else _json(arguments))
    return max(total + sum(counter.count(text) for text in _texts(blocks)), 1)


def count_tools(counter: TokenCounter, tools: Sequence[Any]) -> int:
    """Tokens of the tool list as JSON."""
    return counter.count(_json(list(tools))) if tools else 0


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=dict)


def _texts(value: Any, name: str = "") -> list[str]:
    if isinstance(value, str):
        return [] if name in _SEALED or name == "type" else [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in _texts(item, key)]
    if isinstance(value, Sequence):
        return [text for item in value for text in _texts(item, name)]
    return []
