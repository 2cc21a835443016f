"""`gyre import`: a few lines over `importing.import_sessions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from gyre_data.show.layout import show

from .importing import Imported, ImportedSession, import_sessions, source_bytes

__all__ = ["import_"]

_MAX_SHOWN, _MAX_SESSIONS = 5, 20


def import_(
    sources: Annotated[list[Path], typer.Argument(help="Session files, or folders of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder to import into, new or existing.")],
    format: Annotated[
        str | None, typer.Option(help="Read every source in this format; left out, it is found out.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Count tokens with this tokenizer (folder, file or model name), not with bytes / 4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Import sessions that other tools recorded: Claude Code, Codex, pi, ATIF, SWE-agent, API logs, chat files.

    What is imported is text: it can be looked at, exported and trained on by SFT, never by RL. A session that the run
    holds already is passed over by name.
    """
    with _bar(source_bytes(sources), quiet=as_json) as tick:
        done = import_sessions(sources, out, format=format, tokenizer=tokenizer, progress=tick)
    if as_json:
        typer.echo(json.dumps(asdict(done), default=str, indent=1))
    else:
        show(_lines(done))
    raise typer.Exit(int(any(skipped.failed for skipped in done.skipped)))


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _lines(done: Imported) -> Iterator[Text]:
    for session in done.sessions[:_MAX_SESSIONS]:
        yield from _session(session)
    if (more := len(done.sessions) - _MAX_SESSIONS) > 0:
        yield Text(f"and {more:,} more; --json tells of each")
    for skipped in done.skipped[:_MAX_SESSIONS]:
        where = f" ({skipped.execution_id})" if skipped.execution_id else ""
        yield Text(f"skipped {skipped.name}: {skipped.why}{where}", style="red" if skipped.failed else "yellow")
    if (more := len(done.skipped) - _MAX_SESSIONS) > 0:
        yield Text(f"and {more:,} more skipped; --json tells of each", style="yellow")
    calls = sum(session.num_calls for session in done.sessions)
    count = f"{len(done.sessions):,} imported, {calls:,} calls; text only: for SFT and inspection, not for RL"
    yield Text(count if done.sessions else "nothing imported")
    if done.sessions or any(skipped.execution_id for skipped in done.skipped):
        yield Text(f"next: gyre ls {done.path}   gyre tree {done.path}")


def _session(one: ImportedSession) -> Iterator[Text]:
    files = f", {one.num_files} files" if one.num_files > 1 else ""
    failed = f" ({one.num_failed} failed)" if one.num_failed else ""
    yield Text(
        f"{one.execution_id}  {one.name}  {one.format}  {one.num_calls:,} call{'s' * (one.num_calls != 1)}{failed}  "
        f"{one.num_nodes:,} message nodes{files}"
    )
    beside = ", ".join(f"{count} {kind}" for kind, count in sorted(one.beside.items()))
    if beside:
        yield Text(f"  beside the conversation: {beside}", style="dim")
    for kind, count in sorted(one.not_understood.items()):
        yield Text(f"  {count} record{'s' * (count != 1)} of kind {kind} not understood; kept", style="red")
    for where in one.damaged[:_MAX_SHOWN]:
        yield Text(f"  damaged {where}", style="red")
    if len(one.damaged) > _MAX_SHOWN:
        yield Text(f"  and {len(one.damaged) - _MAX_SHOWN} more damaged lines; --json names them", style="red")
    if one.num_twice:
        yield Text(f"  {one.num_twice} records repeat another one's id; left out")
    if one.num_unanswered:
        yield Text(f"  {one.num_unanswered} message{'s' * (one.num_unanswered != 1)} that no reply follows; left out")
    for note in one.notes:
        yield Text(f"  {note}")
