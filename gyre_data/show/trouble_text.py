"""`gyre tree --breaks` and `--retries` as text: where prefixes broke and why, what was lost, who goes in circles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten

from rich.text import Text

from gyre_data.breaks import Break, Cause, Side
from gyre_data.decode import Decode
from gyre_data.retries import Loop, Lost, LostWhy

from .layout import flow, wrapped
from .numbers import DASH, amount, count, counted, duration

__all__ = ["break_lines", "retry_lines"]

_WRONG, _QUIET = "bold red", "dim"
_MEANT = (Cause.COMPACTION, Cause.REWIND)
"""What a harness does on purpose."""


def break_lines(
    found: Sequence[Break], *, short: str, where: str, width: int = 80, decode: Decode | None = None
) -> Iterator[Text]:
    """A paragraph per break: which calls, first message and token that differ, both sides around it, likely cause."""
    if not found:
        told = "no prefix broke: every call goes on from the one before it, is a retry, or starts an agent"
        yield from wrapped(Text(told), width, indent=2)
    for b in found:
        head = Text.assemble((f"{short}:c{b.number}", "bold cyan"), f" left c{b.old_number}")
        cause = Text(f"{b.cause.replace('_', ' ')}: {b.told}", style=_WRONG if b.check else "bold yellow")
        if b.cause in _MEANT and not b.check:
            cause.style = "bold magenta"
        yield from flow([head, cause], width)
        at = f"first difference: message {DASH if b.message is None else count(b.message)}"
        if b.new.role or b.old.role:
            roles = (b.old.role, b.new.role)
            at += (
                f" ({roles[0] or 'none'})"
                if roles[0] == roles[1]
                else f" ({roles[0] or 'none'} > {roles[1] or 'none'})"
            )
        at += f", token {DASH if b.token is None else count(b.token)}"
        yield from flow([Text(f"  {at}"), Text(f"{amount(b.tokens_lost)} tok not reused")], width, indent=4)
        if b.cause is not Cause.COMPACTION:
            yield from _sides(b, width, decode)
    if found:
        totals = Counter(b.cause.replace("_", " ") for b in found)
        named = ", ".join(f"{name} {number}" for name, number in totals.most_common())
        lost = sum(b.tokens_lost or 0 for b in found)
        yield from wrapped(
            Text(f"{counted(len(found), 'break')}: {named}; {amount(lost)} tok not reused"), width, indent=2
        )
        yield Text(
            f"both sides: gyre diff {where} {short}:c{found[0].old_number} {short}:c{found[0].number}", style=_QUIET
        )


def _sides(b: Break, width: int, decode: Decode | None) -> Iterator[Text]:
    for sign, side, style in (("-", b.old, "red"), ("+", b.new, "green")):
        if side.text is not None:
            text = side.text.replace("\n", "\\n")
            yield Text(f"  {sign} {shorten(text, width - 4, placeholder=' ...')}", style=style)
    if b.new.ids_after or b.old.ids_after:
        for sign, side, style in (("-", b.old, "red"), ("+", b.new, "green")):
            yield Text(f"  {sign} ids {_ids(side, decode)}"[: max(width, 40)], style=style)


def _ids(side: Side, decode: Decode | None) -> str:
    if decode is None:
        return " ".join(map(str, side.ids_before[-2:])) + " | " + " ".join(map(str, side.ids_after[:6]))
    return " | ".join(decode(ids).replace("\n", "\\n") for ids in (side.ids_before[-4:], side.ids_after))


def retry_lines(
    lost: Sequence[Lost], loops: Sequence[Loop], *, short: str, where: str, width: int = 80
) -> Iterator[Text]:
    """A line per lost or repeated call with what replaced it, then the loops, then totals."""
    if not lost:
        yield Text("no call was lost or sent again")
    for one in lost:
        wrong = one.why is not LostWhy.REPEATED
        parts = [
            Text(f"c{one.number:<5}", style="bold"),
            Text(f"{one.why:<12}", style=_WRONG if wrong else ""),
            Text(f"{amount(one.output_tokens)} tok  {duration(one.seconds)}"),
            Text(f"replaced by c{one.replaced_by}" if one.replaced_by else "nothing replaced it", style=""),
        ]
        line = Text("  ").join(parts)
        yield from wrapped(line + Text(f"  {one.told}", style=_QUIET), width, indent=8)
    for loop in loops:
        span = f"c{loop.calls[0]}-c{loop.calls[-1]}"
        told = f"loop {span}: {loop.rounds} times the same {'call' if loop.period == 1 else f'{loop.period} calls'}"
        yield Text(told, style=_WRONG)
        for reply in loop.replies:
            yield Text("  " + shorten(reply, width - 2, placeholder=" ..."), style=_QUIET)
    if lost:
        totals = Counter(str(one.why) for one in lost)
        named = ", ".join(f"{number} {name}" for name, number in totals.most_common())
        cost = sum(one.output_tokens or 0 for one in lost)
        unreplaced = sum(one.replaced_by is None for one in lost)
        yield from wrapped(
            Text(f"{named}; {amount(cost)} tok sampled in them; {unreplaced} without a replacement"), width, indent=2
        )
        yield Text(f"one of them: gyre explain {where} {short}:c{lost[0].number}", style=_QUIET)
