"""Messages to token pieces: all of them, or only what comes after a sampled turn.

After a sampled turn its ids stay as they are and only the new messages are rendered: after the real history or, where
the template was proved not to look at it, after a stand-in (see locality.py). A sentinel at the end of the turn splits
that rendering; the part after the turn's stop token is tokenised with it, so that no token can span the seam. Seven
checks guard this; a check that fails raises `CannotExtend`, and a turn further up, or nothing, is kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gyre_data.schema import Author, NodeKind
from gyre_data.types import Ints

from .borders import Marker, Span, locate, marker_for, message_ends, preamble_end, spans_in
from .forest import Piece
from .inert import Defused, Encoded, defused
from .matching import Turn
from .message import Message
from .template import RenderError, Template

_TELLING = 24
"""Characters of a content that no template writes by itself."""

__all__ = ["CannotExtend", "Item", "StripsThinking", "after_turn", "seam", "whole"]


class CannotExtend(Exception):
    """A check failed, so the sampled turn cannot be continued exactly; the text says which."""


class StripsThinking(CannotExtend):
    """The template strips reasoning of earlier turns, and the policy is to follow the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A message to render, with its place in the hash chain and the sampled node that it copies."""

    message: Message
    chain_before: str
    chain: str
    copy_of: str | None = None


def whole(template: Template, tools: Sequence[Mapping[str, Any]], items: Sequence[Item]) -> list[Piece]:
    """Pieces of the whole conversation; leading system messages and tools are one."""
    chat = defused(
        template.guarded,
        [item.message for item in items],
        tools,
        lambda them, tools: template.render(them, tools, True),
    )

    def render(them: Sequence[Message]) -> str:
        try:
            return template.render(them, chat.tools, True)
        except RenderError:  # it takes the plain messages, so it is the marks that it refuses
            return ""

    messages = chat.messages
    text = template.render(messages, chat.tools, True)
    stops = list(template.stop_texts)
    spans = locate(marker_for(text), messages, text, render)
    ends = message_ends(text, spans, stops)
    num_system = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    ends[: max(num_system - 1, 0)] = [None] * max(num_system - 1, 0)
    encoded = template.encode(text, chat.mark)
    head: list[Piece] = []
    begin = 0
    if items and not num_system and (cut := preamble_end(text, spans[0], stops)):
        begin = _tokens_before(encoded, cut)
        chain = items[0].chain_before
        head.append(_piece(encoded.ids[:begin], NodeKind.PROMPT, Author.CLIENT, "system", (), chain, chain))
    return [*head, *_split(encoded, begin, ends, items)]


def after_turn(
    template: Template,
    tools: Sequence[Mapping[str, Any]],
    turn: Turn,
    before: Sequence[Message],
    item: Item,
    new: Sequence[Item],
    *,
    follow_template: bool,
) -> list[Piece]:
    """Pieces that come after `turn`, as which `item` stands between `before` and `new`: a closing token if needed, then
    the new messages and the generation prompt. Raises CannotExtend, with the check that failed.

    `follow_template` refuses when the template would render the turn or what is before it differently now.
    """
    output, at = turn.entry.token_ids, len(before)
    stops_at = [i for i, token in enumerate(output.tolist()) if token in template.stop_ids]
    if not new:
        raise CannotExtend("V1: there is no message after the sampled turn")
    if stops_at and stops_at[0] != len(output) - 1:
        raise CannotExtend("V2: a stop token was sampled before the end of the output")

    def render(them: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return template.render(them, tools, True)
        except RenderError as refusal:
            raise CannotExtend(f"V3: the template refuses the sentinel or the request: {refusal}") from refusal

    messages = [*before, item.message, *(one.message for one in new)]
    chat = defused(template.guarded, messages, tools, render)
    head, after, spans = seam(lambda them: render(them, chat.tools), chat.messages, at)
    if follow_template:
        _check_unstripped(template, chat, at, head)

    texts = template.stop_texts
    if stops_at:
        close_id, close = int(output[-1]), template.decode(output[-1:])
        pos = after.find(close)
    else:
        found = [(p, text) for text in texts if (p := after.find(text)) >= 0]
        pos, close = min(found) if found else (-1, "")
        close_id = texts.get(close, -1)
    if pos < 0 or pos + len(close) > spans[0].begin:  # found in a new message, it closes nothing
        raise CannotExtend("V4: the template does not close the turn the way it was sampled")
    begin = pos
    encoded = template.encode(after[begin:], chat.mark)
    if len(encoded.ids) == 0 or encoded.ids[0] != close_id or _tokens_before(encoded, len(close)) != 1:
        raise CannotExtend("V7: the closing token is not a token of its own")

    shifted = [Span(begin=span.begin - begin, end=span.end - begin) for span in spans]
    ends = message_ends(after[begin:], shifted, list(texts))
    pieces = _split(encoded, 1, ends, new)
    if stops_at:
        return pieces
    lead = [*_think_close(template, turn), close_id]
    chain = item.chain
    ids = np.array(lead, dtype=np.int32)
    return [_piece(ids, NodeKind.PROMPT, Author.TEMPLATE, "assistant", (), chain, chain), *pieces]


def seam(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], at: int
) -> tuple[str, str, list[Span]]:
    """Text before and after the sentinel at the end of messages[at], and the spans of the new contents in the latter.

    Raises CannotExtend where the template does not render the turn once, and after it each new message once, in order.
    """
    marker = _fresh_marker(messages)

    def split(them: Sequence[Message]) -> tuple[str, str]:
        text = render(them)
        cut = marker.end_of(text, at)
        if cut is None:
            raise CannotExtend("V3: the template does not show the end of the sampled turn exactly once")
        return text[: cut[0]], text[cut[1] :]

    kept, new = list(messages[:at]), list(messages[at + 1 :])
    turn = marker.mark_end(messages[at], at)
    head, after = split([*kept, turn, *new])
    if (plain := _verbatim(new, head, after)) is not None:
        return head, after, plain
    probed = [marker.mark(message, at + 1 + i) for i, message in enumerate(new)]
    probed_head, probed_after = split([*kept, turn, *probed])
    if probed_head != head:
        raise CannotExtend("V5: a new message is rendered before the sampled turn")
    spans = spans_in(marker, probed_after, after) or {}
    found = [spans.get(at + 1 + i) for i in range(len(new))]
    known = [span for span in found if span is not None]
    if len(known) != len(new):
        raise CannotExtend("V5: a new message is not rendered once after the sampled turn")
    if any(one.end > two.begin for one, two in pairwise(known)):
        raise CannotExtend("V5: new messages are rendered in another order")
    return head, after, known


def _verbatim(new: Sequence[Message], head: str, after: str) -> list[Span] | None:
    """Spans of contents that stand in the rendering as they are, each once, in order, after the turn: such contents
    need no second rendering with marks to be found. None where one does not, or may stand there by chance."""
    spans: list[Span] = []
    for message in new:
        content = message.content
        if len(content) < _TELLING or content != content.strip() or message.tool_calls or message.reasoning:
            return None
        begin = after.find(content, spans[-1].end if spans else 0)
        if begin < 0 or content in head or after.count(content) != 1:
            return None
        spans.append(Span(begin=begin, end=begin + len(content)))
    return spans


def _fresh_marker(messages: Sequence[Message]) -> Marker:
    return marker_for("\0".join(f"{m.content}\0{m.reasoning}\0{m.tool_calls}" for m in messages))


def _check_unstripped(template: Template, chat: Defused, at: int, head: str) -> None:
    """V6: what was rendered before the turn still stands, and so does the turn's own reasoning."""
    before = template.render(chat.messages[:at], chat.tools, True) if at else ""
    reasoning = (chat.messages[at].reasoning or "").strip()
    if not head.startswith(before) or (reasoning and reasoning not in head[len(before) :]):
        raise StripsThinking("V6: the template strips earlier reasoning")


def _think_close(template: Template, turn: Turn) -> list[int]:
    """The id that closes reasoning, when the output was cut inside it."""
    if template.think_ids is None:
        return []
    opening, closing = template.think_ids
    prompt = turn.entry.parent.token_ids.tolist() if turn.entry.parent else []
    ids = [*prompt, *turn.entry.token_ids.tolist()]
    seen = [token for token in ids if token in (opening, closing)]
    return [closing] if seen and seen[-1] == opening else []


def _tokens_before(encoded: Encoded, char: int) -> int:
    """Tokens that begin before character `char`: a token across a cut belongs to the earlier message."""
    return int(np.searchsorted(encoded.starts, char, side="left"))


def _split(encoded: Encoded, begin: int, ends: Sequence[int | None], items: Sequence[Item]) -> list[Piece]:
    """Pieces of encoded.ids[begin:]; a message without an end, or without tokens, joins the next, the last the one
    before. What is left is the generation prompt."""
    groups: list[tuple[int, int, list[Item]]] = []
    waiting: list[Item] = []
    for item, end in zip(items, ends, strict=True):
        waiting.append(item)
        stop = begin if end is None else _tokens_before(encoded, end)
        if stop > begin:
            groups.append((begin, stop, waiting))
            begin, waiting = stop, []
    if groups:
        groups[-1][2].extend(waiting)
    pieces = [_joined(encoded.ids[first:stop], NodeKind.PROMPT, group) for first, stop, group in groups]
    if begin < len(encoded.ids) and not groups and waiting:
        pieces.append(_joined(encoded.ids[begin:], NodeKind.GENERATION_PROMPT, waiting))
    elif begin < len(encoded.ids):
        chain = items[-1].chain
        rest = encoded.ids[begin:]
        pieces.append(_piece(rest, NodeKind.GENERATION_PROMPT, Author.TEMPLATE, "assistant", (), chain, chain))
    return pieces


def _joined(ids: Ints, kind: NodeKind, items: Sequence[Item]) -> Piece:
    copies = [item.copy_of for item in items if item.copy_of]
    author = Author.TEMPLATE if kind is NodeKind.GENERATION_PROMPT else Author.CLIENT
    messages = tuple(item.message for item in items)
    first, last = items[0], items[-1]
    role = last.message.role
    copy_of = copies[-1] if copies else None
    return _piece(ids, kind, author, role, messages, first.chain_before, last.chain, copy_of)


def _piece(
    ids: Ints,
    kind: NodeKind,
    author: Author,
    role: str | None,
    messages: tuple[Message, ...],
    chain_before: str,
    chain: str,
    copy_of: str | None = None,
) -> Piece:
    return Piece(
        ids=ids,
        kind=kind,
        author=author,
        role=role,
        messages=messages,
        chain_before=chain_before,
        chain=chain,
        copy_of=copy_of,
    )
