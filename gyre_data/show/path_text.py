"""`gyre tree EXECUTION:CALL`: the path to a call as a conversation, with only what the call added in the open."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten
from typing import Any

from rich.text import Text

from gyre_data.eligible import eligibility
from gyre_data.links import SubAgent, compactions, sub_agents
from gyre_data.ownership import keep
from gyre_data.path import Path, PathMessage
from gyre_data.schema import BranchReason
from gyre_data.texts import arguments_text, content_text, tools_of
from gyre_data.types import Call

from .layout import RULER, flow, hints
from .numbers import amount, count, counted

__all__ = ["path_json", "path_lines"]

_QUIET, _EDGE = "dim", "bold magenta"
_SHOWN_LINES = 12
"""Lines of a long text that are shown without --full."""
_FIRST, _LAST = 3, 24
"""Messages of a long history that are shown without --full."""
_GUTTER, _ROLE = 6, 10
_STYLES = {"system": "magenta", "user": "green", "assistant": "bold cyan", "tool": "yellow"}


def path_lines(path: Path, this: Call, *, short: str, where: str, width: int = 80, full: bool = False) -> list[Text]:
    """Root to call `this` as a conversation: what came before it short and dim, what it added open; all with `full`.

    The number in front stands where a call begins; `*` marks what was sampled there, `=` a copy of a sampled turn.
    """
    messages = path.conversation
    number = 1 + [call.call_id for call in path.tree.calls].index(this.call_id)
    trained = _trained(path)
    old = [m for m in messages if m.call_id != this.call_id]
    new = [m for m in messages if m.call_id == this.call_id]
    body = _Body(path, trained, width, short)
    hidden = 0 if full or len(old) <= _FIRST + _LAST + 1 else len(old) - _FIRST - _LAST
    edges = _edges(path)
    lines = list(flow(_header(path, short, number, trained), width))
    for place, message in enumerate(old):
        if (edge := edges.pop(message.call_id, None)) is not None and (
            full or place < _FIRST or place >= _FIRST + hidden
        ):
            lines += flow([edge], width, indent=_GUTTER)
        if hidden and place == _FIRST:
            lines.append(Text(f"{'':{_GUTTER}}... {count(hidden)} messages more: --full", style=_QUIET))
        if hidden and _FIRST <= place < _FIRST + hidden:
            continue
        lines += body.whole(message) if full else [body.brief(message)]
    if (edge := edges.pop(this.call_id, None)) is not None:
        lines += flow([edge], width, indent=_GUTTER)
    if old:
        lines.append(Text(f"--- c{number} adds ".ljust(width, "-"), style=_QUIET))
    cut = False
    for message in new:
        told = list(body.whole(message, style=""))
        if not full and len(told) > _SHOWN_LINES:
            rest = len(told) - _SHOWN_LINES
            told = [*told[:_SHOWN_LINES], Text(f"{'':{_GUTTER}}... {count(rest)} lines more: --full", style=_QUIET)]
            cut = True
        lines += told
    if not any(m.value is not None for m in messages):
        lines.append(Text("the run holds no text of these messages", style="bold red"))
    target = f"{where} {short}:c{number}"
    more = [f"all of it: gyre tree {target} --full"] if (cut or old) and not full else []
    next_ = [*more, f"where it comes from: gyre explain {target}"]
    return [*lines, *hints(next_, width)]


def _trained(path: Path) -> dict[int, int]:
    """Node -> kept trajectory that trains it."""
    kept, _ = keep(path.tree, eligibility(path.tree))
    return {node: t.index for t in reversed(kept) for node in t.owned}


def _edges(path: Path) -> dict[str, Text]:
    """What stands before the messages of a call that did not simply go on: a compaction, a fork, a sub-agent."""
    tree = path.tree
    number = {call.call_id: n for n, call in enumerate(tree.calls, 1)}
    found: dict[str, Text] = {}
    for call_id in {m.call_id for m in path.conversation if m.call_id in number}:
        call = tree.call(call_id)
        if call.branch_reason in (None, BranchReason.RETRY):
            continue
        if call.branch_reason == BranchReason.SUB_AGENT:
            by = tree.index.get(call.spawned_by_node or "")
            starters = [] if by is None else [f"c{number[c.call_id]}" for c in tree.outputs.get(by, ())[:1]]
            told = f"c{number[call_id]} sub_agent {call.agent_id or ''}".rstrip()
            found[call_id] = Text(f"{told}, started by {starters[0] if starters else 'an unknown call'}", style=_EDGE)
            continue
        from_ = f" from c{number[call.continues_from]}" if call.continues_from in number else ""
        found[call_id] = Text(f"c{number[call_id]} {call.branch_reason}{from_}", style=_EDGE)
    for made in compactions(tree):
        if made.call_id not in found:
            continue
        told = f": {amount(made.tokens_before)} > {amount(made.tokens_after)} tok"
        if made.summary_call in number:
            told += f", summary written by c{number[made.summary_call]} ({amount(made.summary_tokens)} tok)"
        if made.copied_tokens:
            told += f", {amount(made.copied_tokens)} tok of turns kept word for word"
        found[made.call_id].append(told)
    return found


def _header(path: Path, short: str, number: int, trained: dict[int, int]) -> list[Text]:
    call = path.tree.calls[number - 1]
    tokens = sum(int(path.tree.num_tokens_N[node]) for node in path.nodes.tolist() if node in trained)
    told = Text.assemble((f"{short}:c{number}", "bold cyan"), f" {call.call_id}")
    return [
        told,
        Text(str(call.agent_role) + (f" {call.agent_id}" if call.agent_id else "")),
        Text(f"{counted(len(path.calls), 'call')}, {counted(len(path.conversation), 'message')}"),
        Text(f"{amount(len(path))} tok, {amount(tokens)} of them would be trained"),
    ]


class _Body:
    """Lines of single messages."""

    def __init__(self, path: Path, trained: dict[int, int], width: int, short: str) -> None:
        self.trained, self.width, self.short = trained, width, short
        self.started: dict[int, list[SubAgent]] = {}
        for agent in sub_agents(path.tree):
            if (node := path.tree.index.get(agent.spawned_by_node or "")) is not None:
                self.started.setdefault(node, []).append(agent)
        self.numbers = {call.call_id: n for n, call in enumerate(path.tree.calls, 1)}
        self._last: str | None = None

    def _head(self, message: PathMessage) -> Text:
        begins = message.call_id != self._last
        self._last = message.call_id
        gutter = f"c{self.numbers.get(message.call_id, '?')}" if begins else ""
        mark = "*" if message.sampled else "=" if message.copy_of is not None else " "
        style = _STYLES.get(message.role, "")
        return Text.assemble((f"{gutter:<{_GUTTER}}", "bold"), (f"{message.role[:_ROLE]:<{_ROLE}}{mark} ", style))

    def brief(self, message: PathMessage) -> Text:
        """One dim line."""
        line = self._head(message)
        text = " ".join(text for _, text in _pieces(message)) or "(no text)"
        line.append(shorten(text, max(self.width - len(line), 16), placeholder=" ..."))
        line.stylize(_QUIET)
        return line

    def whole(self, message: PathMessage, style: str = _QUIET) -> Iterator[Text]:
        """Everything that the message says; reasoning is dim."""
        head, tokens = self._head(message), message.end - message.start
        told = f"{count(tokens)} tok"
        if message.node in self.trained:
            told += f", trained by trajectory {self.trained[message.node]}"
        elif message.sampled:
            told += ", not trained"
        if message.answers is not None and message.answers.name:
            told = f"of {message.answers.name}; {told}"
        yield head + Text(f"({told})", style=_QUIET)
        indent, room = " " * _GUTTER, max(self.width - _GUTTER, 20)
        for kind, text in _pieces(message):
            part = Text(text, style=_QUIET if kind == "reasoning" else "bold" if kind == "call" else style)
            for line in part.split("\n", allow_blank=True):
                for row in [line] if len(line) <= room else line.wrap(RULER, room):
                    row.rstrip()
                    yield Text(indent) + row
        for agent in self.started.get(message.node, ()):
            numbers = [self.numbers[call_id] for call_id in agent.calls]
            told = f"starts sub_agent {agent.agent_id}, c{numbers[0]} to c{numbers[-1]}: {self.short}:c{numbers[-1]}"
            yield Text(indent) + Text(told, style=_EDGE)


def _pieces(message: PathMessage) -> Iterator[tuple[str, str]]:
    value = message.value
    if isinstance(value, dict) and value.get("reasoning"):
        yield "reasoning", f"(thinks) {value['reasoning']}"
    if value is not None and (text := content_text(value)):
        yield "content", text
    for name, arguments in tools_of(value):
        yield "call", f"> {name} {arguments_text(arguments)}"


def path_json(path: Path) -> dict[str, Any]:
    """The same as plain values: the calls that end on the path, and every message with its span and full value."""
    tree, trained = path.tree, _trained(path)
    return {
        "execution_id": path.execution.execution_id,
        "leaf": path.node_id,
        "num_tokens": len(path),
        "calls": [
            {
                "number": made.number,
                "call_id": made.call.call_id,
                "output_node": tree.node_id[made.node],
                "begin": made.begin,
                "start": made.start,
                "end": made.end,
            }
            for made in path.calls
        ],
        "messages": [
            {
                "index": m.index,
                "node_id": tree.node_id[m.node],
                "call_id": m.call_id,
                "role": m.role,
                "author": str(m.author),
                "copy_of": m.copy_of,
                "start": m.start,
                "end": m.end,
                "trained_by": trained.get(m.node),
                "message": m.value,
            }
            for m in path.conversation
        ],
    }
