"""Control tokens in what clients send stay text: a tool result that holds `<|im_end|>` ends nothing.

Before rendering, a mark is put inside each control token's text that a client wrote, so the template cannot tell it
from other text, and what stands whole in the rendering is the template's own. The tokenizer then sees the template's
control tokens under secret names and the client's text without its marks; otherwise it works as ever, so the ids of
everything else are those of the plain text.

Some templates look into contents (Qwen3's takes a user message in `<tool_response>` for no query of its own). Where
marks inside change the rendering, they are tried beside the tokens; where that changes it too, or the template takes
the tokens apart, the marks stay inside: then such a text means nothing to the template either.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from gyre_data.types import Ints

from .message import Message

__all__ = ["Defused", "Encoded", "LiteralEncoder", "defused", "guarded_texts"]

_BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """Token ids of a text, and for each token the index of its first character."""

    ids: Ints
    starts: Ints


def guarded_texts(tokenizer: Tokenizer, sources: Collection[str]) -> frozenset[str]:
    """Texts of the added tokens that structure a conversation.

    Special tokens, bars in angle brackets, reasoning marks, and what the template's source itself writes. Other added
    tokens (runs of blanks, HTML tags of some vocabularies) are ordinary text.
    """
    found = set()
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        written = not text.isalnum() and any(text in source for source in sources)
        structural = token.special or text in ("<think>", "</think>") or _BARRED.fullmatch(text) or written
        if structural and len(text) > 1 and not text.isspace():
            found.add(text)
    return frozenset(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Defused:
    """A conversation to render. `mark` is for the encoder; "" when no control token was written by a client."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    mark: str = ""


def defused(
    guarded: frozenset[str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    render: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str],
) -> Defused:
    """The conversation with a mark at every control token that it writes. Renders only when there is one."""
    pattern = _pattern(guarded)
    texts = [text for message in messages for text in _texts_of(message)]
    texts += [text for tool in tools for text in _texts_in(tool)]
    if pattern is None or not any(pattern.search(text) for text in texts):
        return Defused(messages=messages, tools=tools)
    n = 0
    while any(f"Gyre{n}Inert" in text for text in texts):
        n += 1
    mark = f"Gyre{n}Inert"

    def inside(text: str) -> str:
        while pattern.search(text):  # again where two of them overlap
            text = pattern.sub(lambda found: f"{found[0][0]}{mark}z{found[0][1:]}", text)
        return text

    def beside(text: str) -> str:
        """After each token, before one that ends the text: templates ask how a text begins and ends."""
        end = len(text.rstrip())
        return pattern.sub(lambda found: f"{mark}b{found[0]}" if found.end() == end else f"{found[0]}{mark}a", text)

    plain = render(messages, tools)
    hidden = Defused(
        messages=[_rewritten(m, inside) for m in messages], tools=[_mapped(t, inside) for t in tools], mark=mark
    )
    if _without(mark, render(hidden.messages, hidden.tools)) == plain:
        return hidden
    shown = Defused(
        messages=[_rewritten(m, beside) for m in messages], tools=[_mapped(t, beside) for t in tools], mark=mark
    )
    text = render(shown.messages, shown.tools)
    whole = f"{mark}b(?:{pattern.pattern})|(?:{pattern.pattern}){mark}a"
    taken_apart = len(re.findall(whole, text)) != text.count(mark)
    return shown if _without(mark, text) == plain and not taken_apart else hidden


def _without(mark: str, text: str) -> str:
    return re.sub(f"{mark}[abz]", "", text)


@lru_cache(maxsize=8)
def _pattern(texts: frozenset[str]) -> re.Pattern[str] | None:
    """Any of `texts`, the longest first."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _texts_of(message: Message) -> list[str]:
    texts = [message.content, message.reasoning or "", message.tool_call_id or "", message.name or ""]
    for call in message.tool_calls:
        texts += [call.name, call.id or "", *_texts_in(call.arguments)]
    return texts


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (str(key), *_texts_in(item))]
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list | tuple) else []


def _rewritten(message: Message, write: Callable[[str], str]) -> Message:
    def maybe(text: str | None) -> str | None:
        return None if text is None else write(text)

    calls = tuple(
        replace(call, name=write(call.name), id=maybe(call.id), arguments=_mapped(call.arguments, write))
        for call in message.tool_calls
    )
    return replace(
        message,
        content=write(message.content),
        reasoning=maybe(message.reasoning),
        tool_calls=calls,
        tool_call_id=maybe(message.tool_call_id),
        name=maybe(message.name),
    )


def _mapped(value: Any, write: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return write(value)
    if isinstance(value, Mapping):
        return {write(str(key)): _mapped(item, write) for key, item in value.items()}
    return [_mapped(item, write) for item in value] if isinstance(value, list | tuple) else value


class LiteralEncoder:
    """Encodes rendered text in which marks say which control tokens are none. Made when first needed: it reads the
    whole tokenizer again, with its control tokens renamed to strings that nobody can guess."""

    def __init__(self, tokenizer: Tokenizer, guarded: frozenset[str]) -> None:
        nonce = secrets.token_hex(8)
        self._names = {text: f"<{nonce}:{i}>" for i, text in enumerate(sorted(guarded))}
        self._pattern = _pattern(guarded)
        self._tokenizer = _renamed(tokenizer, self._names)
        ids = {self._tokenizer.token_to_id(name): tokenizer.token_to_id(text) for text, name in self._names.items()}
        self._moved = {one: two for one, two in ids.items() if one != two}

    def encode(self, text: str, mark: str) -> Encoded:
        """Ids of `text` without its marks; `starts` count the characters of `text` as given, marks included."""
        assert self._pattern is not None, "marks are set inside guarded texts only"
        pieces: list[str] = []
        edits, shifts = [0], [0]  # from that character of the edited text on, `text` is that much further
        at = length = 0
        tokens = self._pattern.pattern
        literal = f"({mark}b)({tokens})|({tokens})({mark}a)|{mark}[abz]|{tokens}"
        for found in re.finditer(literal, text):
            if found[2] or found[3]:  # the token beside its mark: only the mark goes
                name, cut = "", found.span(1 if found[2] else 4)
            else:
                name, cut = self._names.get(found[0], ""), found.span()
            pieces += [text[at : cut[0]], name]
            length += cut[0] - at + len(name)
            at = cut[1]
            edits.append(length)
            shifts.append(at - length)
        pieces.append(text[at:])
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = [self._moved.get(token, token) for token in encoding.ids] if self._moved else encoding.ids
        starts = np.fromiter((start for start, _ in encoding.offsets), dtype=np.int32, count=len(encoding.ids))
        starts += np.array(shifts, dtype=np.int32)[np.searchsorted(edits, starts, side="right") - 1]
        return Encoded(ids=np.array(ids, dtype=np.int32), starts=starts)


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with other texts for some added tokens, which then no other way leads to."""
    spec = orjson.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & _involved(merge)]
    return Tokenizer.from_str(orjson.dumps(spec).decode())


def _involved(merge: str | list[str]) -> set[str]:
    """Both sides of a merge, and its result."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return {first, second, first + second}
