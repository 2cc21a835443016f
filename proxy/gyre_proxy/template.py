"""Chat templates: messages to text, text to token ids, exactly as the checkpoint's own files say.

`ChatTemplate` renders byte for byte what transformers' `apply_chat_template` renders, without importing it. Rendering
and encoding are separate steps, because the history renders marked copies of a conversation to find its borders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import numpy as np
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer

from gyre_data.errors import ConfigError
from gyre_data.types import Ints

from .call_ids import IdStyle, id_style, with_ids
from .inert import Encoded, LiteralEncoder, guarded_texts
from .message import Message

__all__ = ["ChatTemplate", "RenderError", "Template"]

_PROBE = "GyreTurnEnd0x"


class RenderError(ConfigError):
    """The chat template refuses this conversation; the client's request cannot be turned into a prompt."""


class Template(Protocol):
    """What the history needs of a tokenizer and its chat template. `encode` splits added tokens first."""

    fingerprint: str
    """Changes whenever the same messages could give other ids."""
    stop_ids: frozenset[int]
    """Ids that end a sampled turn."""
    stop_texts: Mapping[str, int]
    """Text and id of each of them."""
    think_ids: tuple[int, int] | None
    """Ids that open and close reasoning, when each is one token."""
    vocab_size: int
    control_tokens: Mapping[str, int]
    """Text and id of each control token."""
    guarded: frozenset[str]
    """Texts of tokens that only the template may write; in client text they are text."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Text of the conversation; raises RenderError when the template refuses it."""

    def encode(self, text: str, mark: str = "") -> Encoded:
        """Ids of `text`, with nothing added around it; `mark` is taken out, and what held it is no control token."""

    def decode(self, ids: Ints) -> str:
        """Text of `ids`, control tokens included."""


class ChatTemplate:
    """A Hugging Face tokenizer folder with its chat template. Satisfies `Template`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        kwargs: Mapping[str, Any],
        now: datetime,
        stop_tokens: Sequence[str | int],
        digest: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**special_tokens, **kwargs}
        env = _environment(now)
        self._compiled = {name: env.from_string(source) for name, source in sources.items()}
        pinned = now.date().isoformat() if any("strftime_now" in source for source in sources.values()) else ""
        recipe = json.dumps([digest, dict(sources), self._kwargs, pinned], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(recipe.encode()).hexdigest()[:32]
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = tokenizer.get_added_tokens_decoder().items()
        self.control_tokens: Mapping[str, int] = {token.content: i for i, token in added if token.special}
        self.guarded = guarded_texts(tokenizer, sources.values())
        self.think_ids = self._pair("<think>", "</think>")
        ids = {token if isinstance(token, int) else tokenizer.token_to_id(token) for token in stop_tokens}
        self._id_style = IdStyle.AS_SENT
        self._id_style = id_style(self._rendered)
        self.stop_ids = frozenset(i for i in ids if i is not None) | self._turn_ends()
        self.stop_texts: Mapping[str, int] = {
            self.decode(np.array([i], dtype=np.int32)): i for i in sorted(self.stop_ids)
        }

    @classmethod
    def load(
        cls,
        folder: str | Path,
        template_file: str | Path | None = None,
        kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """Read tokenizer.json, tokenizer_config.json, generation_config.json and the chat template from `folder`.

        The template is `template_file`, else chat_template.jinja, else the one in tokenizer_config.json. `kwargs` are
        passed to every rendering; `now` is what a template that prints the date sees, for the whole run.
        """
        folder = Path(folder)
        tokenizer_file = folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ConfigError(
                f"wanted a tokenizer folder with tokenizer.json, {folder} has none; "
                "point --tokenizer at the folder of a Hugging Face checkpoint with a fast tokenizer"
            )
        content = tokenizer_file.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _json(folder / "tokenizer_config.json")
        generation = _json(folder / "generation_config.json")
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        eos = generation.get("eos_token_id")
        stops: list[str | int] = [special["eos_token"]] if "eos_token" in special else []
        stops += eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(
            tokenizer,
            _sources(folder, config, template_file),
            special_tokens=special,
            kwargs=dict(kwargs or {}),
            now=now or datetime.now().astimezone(),
            stop_tokens=stops,
            digest=hashlib.sha256(content).hexdigest(),
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Text of the conversation. Raises RenderError when the template refuses it."""
        source = self._compiled.get("tool_use") if tools else None
        compiled = source or self._compiled["default"]
        chat = [_aliased(message.for_template()) for message in with_ids(messages, self._id_style)]
        try:
            return compiled.render(
                messages=chat,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            roles = ", ".join(message.role for message in messages[:8])
            raise RenderError(
                f"the chat template cannot render this conversation ({roles}{', ...' if len(messages) > 8 else ''}): "
                f"{error}; send roles and contents the model's template takes, or give another with --template"
            ) from error

    def encode(self, text: str, mark: str = "") -> Encoded:
        """Ids of `text` without any added beginning or end, with the first character of each token.

        With a mark (see `inert.defused`), control tokens that hold it are encoded as the text they are.
        """
        if mark and mark in text:
            return self._literal.encode(text, mark)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.fromiter((start for start, _ in encoding.offsets), dtype=np.int32, count=len(encoding.ids))
        return Encoded(ids=np.array(encoding.ids, dtype=np.int32), starts=starts)

    @cached_property
    def _literal(self) -> LiteralEncoder:
        return LiteralEncoder(self._tokenizer, self.guarded)

    def decode(self, ids: Ints) -> str:
        """Text of `ids`, control tokens included."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _pair(self, opening: str, closing: str) -> tuple[int, int] | None:
        first, last = self._tokenizer.token_to_id(opening), self._tokenizer.token_to_id(closing)
        return None if first is None or last is None else (first, last)

    def _turn_ends(self) -> frozenset[int]:
        """Control tokens that this template writes right after an assistant's text."""
        added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        found = set()
        for follow in (
            Message(role="user", content="b"),
            Message(role="tool", content="b", tool_call_id="call_0"),
        ):
            turn = [Message(role="user", content="a"), Message(role="assistant", content=_PROBE), follow]
            after = (self._rendered(turn) or "").rpartition(_PROBE)[2].lstrip()
            found |= {i for text, i in added.items() if after.startswith(text)}
        return frozenset(found)

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.render(messages, (), False)
        except RenderError:
            return None


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"wanted JSON in {path}, it does not parse: {error}; download the file again") from error
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _sources(folder: Path, config: Mapping[str, Any], template_file: str | Path | None) -> dict[str, str]:
    path = Path(template_file) if template_file else folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    if template_file:
        raise ConfigError(f"wanted a Jinja chat template, {path} is not a file; check --template")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, str):
        found = {"default": found}
    if not found or "default" not in found:
        raise ConfigError(f"wanted a chat template in {folder}, it has none; pass one with --template FILE")
    return dict(found)


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning also under the name that gpt-oss templates read, as transformers does."""
    if (reasoning := message.get("reasoning_content")) is None:
        return message
    return {"thinking": reasoning, **message}


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks and renders their body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with the answers at once that it gives after many checks: these attributes are safe, always."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or else an item."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _STR_METHODS) or (
            (kind is LoopContext or kind is Namespace) and not attribute.startswith("_")
        ):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now.strftime(pattern)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env
