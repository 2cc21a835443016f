"""Prefix breaks: calls that did not go on from the newest call of their agent, where they left it, and why, probably.

Two conversations are compared message by message and token by token: what the agent had when its newest call ended, and
what this call sent. A retry (the same prompt) and the first call of an agent break nothing. `likely_cause` is a pure
function of two lists of messages and what the record says of the call; the rest reads trees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from .execution import Execution
from .links import agent_of
from .schema import BranchReason, Extension
from .texts import content_text, node_messages, parts_of, role_of, said, tools_of
from .tree import Tree
from .types import Call

__all__ = ["Break", "Cause", "Side", "Verdict", "breaks", "likely_cause"]

_AROUND_TOKENS = 8
_EXCERPT_BEFORE, _EXCERPT_AFTER = 24, 72
_LOOK_AHEAD = 64
_TAGGED = re.compile(r"<([A-Za-z][\w-]*)(?:\s[^<>]*)?>.*?</\1>", re.DOTALL)
_VOLATILE = re.compile(
    r"\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
    r"|\b(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\b"
    r"|\b[0-9a-f]{7,}\b|\d+",
    re.IGNORECASE,
)
_CLEARED = re.compile(r"clear|remov|omit|truncat|elided|trimm", re.IGNORECASE)


class Cause(StrEnum):
    """Why the prefix broke, as far as the two sides tell."""

    COMPACTION = "compaction"
    REWIND = "rewind"
    TEMPLATE = "template"
    MISSING_THINKING = "missing_thinking"
    TOOLS = "tools"
    SYSTEM_NONCE = "system_nonce"
    SYSTEM = "system"
    REMINDER = "reminder"
    ARGUMENTS = "arguments"
    TURN = "turn"
    TOOL_RESULT = "tool_result"
    TASK = "task"
    USER = "user"
    DROPPED = "dropped"
    INSERTED = "inserted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The likely cause with a sentence, and the index, in the lists compared, of the first message that differs."""

    cause: Cause
    told: str
    index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a break from its first difference on: an excerpt of the text, and the token ids around."""

    role: str | None
    """Role of the first message that differs; None where this side has no message any more, or no text is held."""
    text: str | None
    """Excerpt around the first character that differs."""
    ids_before: tuple[int, ...]
    """The last tokens in common; empty where ids are not known."""
    ids_after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """One call whose prompt left the recorded path."""

    number: int
    call_id: str
    old_number: int
    """The newest call of the same agent before it: what it could have gone on from."""
    old_call_id: str
    reason: BranchReason | None
    check: str | None
    """The technical check that failed: a false fork. None for real ones."""
    message: int | None
    """Index in the conversation of the first message that differs; None when the texts are equal or not held."""
    token: int | None
    """Position of the first token that differs; None where token ids are not known."""
    tokens_lost: int | None
    """Recorded tokens of the old path behind the last common node."""
    cause: Cause
    told: str
    old: Side
    new: Side


def breaks(execution: Execution) -> list[Break]:
    """Every prefix break of the main agent and the sub-agents by time; of other calls only the false forks."""
    tree, newest, found = execution.tree, dict[tuple[str, str | None], tuple[int, Call]](), list[Break]()
    for number, call in enumerate(tree.calls, 1):
        agent = agent_of(tree, call)
        old = newest.get(agent)
        known = agent[0] in ("main", "sub_agent") or call.fork_check is not None
        if old is not None and known and _may_break(call, old[1]):
            found.append(_compare(execution, old, (number, call)))
        if call.prompt_node is not None:
            newest[agent] = (number, call)
    return found


def _may_break(call: Call, old: Call) -> bool:
    if call.prompt_node is None or call.prompt_node == old.prompt_node:
        return False
    return call.extension in (Extension.FORK, Extension.ROOT) and call.branch_reason != BranchReason.RETRY


def _compare(execution: Execution, old: tuple[int, Call], new: tuple[int, Call]) -> Break:
    tree, call = execution.tree, new[1]
    old_path, new_path = _path(tree, tree.leaf(old[1])), _path(tree, tree.leaf(call), prompt=call.prompt_node)
    shared = 0
    while shared < min(len(old_path), len(new_path)) and old_path[shared] == new_path[shared]:
        shared += 1
    before = sum(len(tree.message_blobs(node)) for node in old_path[:shared])
    olds, news = _messages(execution, old_path[shared:]), _messages(execution, new_path[shared:])
    same_turns = _copies(tree, olds, news)
    verdict = likely_cause(
        [message for message, _ in olds],
        [message for message, _ in news],
        same=same_turns,
        first=before,
        reason=call.branch_reason,
        check=call.fork_check,
        echo=call.echo_difference,
        other_tools=old[1].tools_digest != call.tools_digest,
    )
    start = sum(int(tree.num_tokens_N[node]) for node in old_path[:shared])
    token, sides = _tokens(tree, old_path[shared:], new_path[shared:], start)
    at = verdict.index
    pair = (_at(olds, at), _at(news, at))
    texts = _excerpts(*pair)
    return Break(
        number=new[0],
        call_id=call.call_id,
        old_number=old[0],
        old_call_id=old[1].call_id,
        reason=call.branch_reason,
        check=call.fork_check,
        message=None if at is None else before + at,
        token=token,
        tokens_lost=sum(int(tree.num_tokens_N[node]) for node in old_path[shared:]),
        cause=verdict.cause,
        told=verdict.told,
        old=_side(pair[0], texts[0], *sides[0]),
        new=_side(pair[1], texts[1], *sides[1]),
    )


def _path(tree: Tree, leaf: int | None, *, prompt: str | None = None) -> list[int]:
    at = tree.index[prompt] if prompt is not None else leaf
    return [] if at is None else tree.path(at).tolist()


def _messages(execution: Execution, nodes: Sequence[int]) -> list[tuple[Any, int]]:
    return [(message, node) for node in nodes for message in node_messages(execution.run, execution.tree, node)]


def _copies(tree: Tree, olds: Sequence[tuple[Any, int]], news: Sequence[tuple[Any, int]]) -> frozenset[int]:
    """Places at which the new side repeats the very turn of the old side, whatever form its client gave it."""
    return frozenset(
        place
        for place, ((_, old), (_, new)) in enumerate(zip(olds, news, strict=False))
        if tree.copy_of_N[new] is not None and tree.copy_of_N[new] in (tree.node_id[old], tree.copy_of_N[old])
    )


def _at(messages: Sequence[tuple[Any, int]], index: int | None) -> Any:
    return messages[index][0] if index is not None and index < len(messages) else None


def _side(message: Any, text: str | None, ids_before: tuple[int, ...], ids_after: tuple[int, ...]) -> Side:
    role = message.get("role") if isinstance(message, dict) else None
    return Side(role=role, text=text, ids_before=ids_before, ids_after=ids_after)


# --- the cause -----------------------------------------------------------------------------------------------------


def likely_cause(
    old: Sequence[Any],
    new: Sequence[Any],
    *,
    same: frozenset[int] = frozenset(),
    first: int = 0,
    reason: BranchReason | None = None,
    check: str | None = None,
    echo: str | None = None,
    other_tools: bool = False,
) -> Verdict:
    """What most likely broke the prefix between two conversations, from their first different node on.

    `same` are places known to hold the same turn, `first` is how many messages came before both lists; `reason`,
    `check` and `echo` are what the call's row says (branch_reason, fork_check, echo_difference).
    """
    at = _first_difference(old, new, same)
    if check is not None:
        return Verdict(cause=Cause.TEMPLATE, told=f"rendered anew, a check failed: {check}", index=at)
    if reason == BranchReason.COMPACTION:
        return Verdict(cause=Cause.COMPACTION, told="goes on from a summary, or asks for one", index=at)
    if other_tools and at in (None, 0) and not first:
        return Verdict(cause=Cause.TOOLS, told="the list of tools is another one", index=at)
    if reason == BranchReason.TEMPLATE:
        told = "the template renders earlier turns otherwise: it drops their thinking"
        return Verdict(cause=Cause.MISSING_THINKING, told=told, index=at)
    if at is None:
        if not old and not new:
            return Verdict(cause=Cause.UNKNOWN, told="the run holds no text of either side")
        if len(new) < len(old):
            return Verdict(cause=Cause.REWIND, told="goes back to an earlier point", index=len(new))
        return Verdict(cause=Cause.TEMPLATE, told="the same messages, rendered to other tokens")
    if (moved := _moved(old, new, at)) is not None:
        return moved
    one, two = old[at], new[at]
    if role_of(one) != role_of(two) or reason == BranchReason.REWIND:
        return Verdict(cause=Cause.REWIND, told="goes back to an earlier point and says something else", index=at)
    return _edited(one, two, at, first + at, echo)


def _first_difference(old: Sequence[Any], new: Sequence[Any], same: frozenset[int]) -> int | None:
    """Index of the first pair that says something else; where one list ends first, None."""
    for place, (one, two) in enumerate(zip(old, new, strict=False)):
        if place not in same and said(one) != said(two):
            return place
    return None


def _moved(old: Sequence[Any], new: Sequence[Any], at: int) -> Verdict | None:
    """Messages that were left out or put in: the rest goes on as it was."""
    olds, news = ([said(m) for m in side[at : at + _LOOK_AHEAD]] for side in (old, new))
    for k in range(1, max(len(olds), len(news))):
        if k < len(olds) and olds[k : k + 2] == news[: len(olds[k : k + 2])] and news:
            return Verdict(cause=Cause.DROPPED, told=f"{_some(k)} left out, what follows is kept", index=at)
        if k < len(news) and news[k : k + 2] == olds[: len(news[k : k + 2])] and olds:
            put_in = "".join(content_text(m) for m in new[at : at + k])
            if not _TAGGED.sub("", put_in).strip():
                return Verdict(cause=Cause.REMINDER, told="a reminder of the harness was put in", index=at)
            return Verdict(cause=Cause.INSERTED, told=f"{_some(k)} put in, what follows is kept", index=at)
    return None


def _some(number: int) -> str:
    return "a message was" if number == 1 else f"{number} messages were"


def _edited(one: Any, two: Any, at: int, place: int, echo: str | None) -> Verdict:
    """The cause when a message of the same role says something else; `place` is its index in the conversation."""
    role = role_of(one)
    if role == "assistant":
        return _changed_turn(one, two, at, echo)
    before, after = content_text(one), content_text(two)
    if _squeezed(_TAGGED.sub("", before)) == _squeezed(_TAGGED.sub("", after)):
        return Verdict(cause=Cause.REMINDER, told="a tagged block of the harness (a reminder) changed", index=at)
    if role in ("system", "developer"):
        if _VOLATILE.sub("#", before) == _VOLATILE.sub("#", after):
            return Verdict(cause=Cause.SYSTEM_NONCE, told="a date, id or counter in the system prompt", index=at)
        return Verdict(cause=Cause.SYSTEM, told="the system prompt is another one", index=at)
    if role == "tool":
        cleared = len(after) < len(before) and (before.startswith(after) or _CLEARED.search(after) is not None)
        told = "an earlier tool result was cut or cleared" if cleared else "an earlier tool result changed"
        return Verdict(cause=Cause.TOOL_RESULT, told=told, index=at)
    if place <= 1:
        return Verdict(cause=Cause.TASK, told="the task was edited: the first user message is another one", index=at)
    return Verdict(cause=Cause.USER, told="an earlier user message was edited", index=at)


def _changed_turn(one: Any, two: Any, at: int, echo: str | None) -> Verdict:
    (_, *before), (_, *after) = said(one), said(two)
    text, thought, called = (before[k] == after[k] for k in range(3))
    names = [name for name, _ in tools_of(one)] == [name for name, _ in tools_of(two)]
    if text and called and not thought:
        gone = not after[1]
        told = "the turn came back without its thinking" if gone else "the turn came back with other thinking"
        return Verdict(cause=Cause.MISSING_THINKING, told=told, index=at)
    if echo == "arguments" or (text and names and not called):
        return Verdict(cause=Cause.ARGUMENTS, told="arguments of a tool call were re-written", index=at)
    what = echo or ("text" if not text else "tool calls")
    return Verdict(cause=Cause.TURN, told=f"the turn came back with another {what}", index=at)


def _squeezed(text: str) -> str:
    return " ".join(text.split())


# --- excerpts ------------------------------------------------------------------------------------------------------


def _excerpts(one: Any, two: Any) -> tuple[str | None, str | None]:
    """Both sides around the first character that differs, in the first part (thinking, text, call) that does."""
    ones, twos = (list(parts_of(message)) if message is not None else [] for message in (one, two))
    for k in range(max(len(ones), len(twos))):
        left, right = (parts[k][1] if k < len(parts) else "" for parts in (ones, twos))
        if left != right:
            start = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
            start = min(len(left), len(right)) if start is None else start
            return _cut(left, start), _cut(right, start)
    return (ones[0][1][:_EXCERPT_AFTER] if ones else None), (twos[0][1][:_EXCERPT_AFTER] if twos else None)


def _cut(text: str, at: int) -> str:
    begin = max(at - _EXCERPT_BEFORE, 0)
    end = at + _EXCERPT_AFTER
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


_Ids = tuple[tuple[int, ...], tuple[int, ...]]


def _tokens(tree: Tree, old: Sequence[int], new: Sequence[int], start: int) -> tuple[int | None, tuple[_Ids, _Ids]]:
    """Position of the first token that differs, and per side the ids just before and after it."""
    nothing: _Ids = ((), ())
    if any(tree.counted_N[node] for node in (*old, *new)):
        return None, (nothing, nothing)
    olds, news = (np.concatenate([np.empty(0, np.int32), *(tree.ids(n) for n in side)]) for side in (old, new))
    width = min(len(olds), len(news))
    differs = np.flatnonzero(olds[:width] != news[:width])
    at = int(differs[0]) if len(differs) else width

    def around(ids: Any) -> _Ids:
        return tuple(ids[max(at - _AROUND_TOKENS, 0) : at].tolist()), tuple(ids[at : at + _AROUND_TOKENS].tolist())

    return start + at, (around(olds), around(news))
