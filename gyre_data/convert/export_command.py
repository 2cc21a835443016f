"""`gyre export`: a few lines over `exporting.export`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from gyre_data.eligible import ROLE_ORDER
from gyre_data.run_copy import Exported
from gyre_data.schema import AgentRole
from gyre_data.scores import known_weights
from gyre_data.show.layout import show
from gyre_data.store import find_run, open

from .exporting import EXPORT_FORMATS
from .exporting import export as export_to

__all__ = ["export"]


class Role(StrEnum):
    """Whose trajectories `--role` takes: the roles that are ever trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT = "sub_agent"
    SUB_AGENT_SUMMARY = "sub_agent_summary"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or RUN@TAG.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="New file or folder to write.")],
    format: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(EXPORT_FORMATS)}; left out, what the name's suffix says."),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="SQL condition on executions, such as 'score > 0.5'; see docs/convert.md.")
    ] = None,
    redact: Annotated[bool, typer.Option(help="Take secrets out.")] = True,
    pattern: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Regular expression of another secret; may repeat.")
    ] = None,
    role: Annotated[
        list[Role] | None,
        typer.Option(metavar="ROLE", help=f"Only trajectories of this role: {', '.join(Role)}; may repeat."),
    ] = None,
    j_max: Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")] = 5,
    evaluator: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=WEIGHT]", help="Evaluator of the reward; may repeat.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Write a run for other tools or other people, without its secrets.

    Without a suffix the target is a copy of the run, which may be given away. Secrets of known forms are found (keys
    with a prefix, PEM blocks, Authorization headers, passwords in URLs and environment files); for others give
    --pattern. Where token ids would tell a secret, they are left out with what was sampled after it.
    """
    opened = open(find_run(run))
    done = export_to(
        opened,
        out,
        format=format,
        where=where,
        redact=redact,
        patterns=pattern or (),
        force=force,
        j_max=j_max or None,
        roles=[AgentRole(one.value) for one in role] if role else ROLE_ORDER,
        evaluators=known_weights(evaluator, [opened]),
    )
    if as_json:
        typer.echo(json.dumps({**asdict(done), "path": str(done.path)}, indent=1))
    else:
        show(_lines(done, redact))


def _lines(done: Exported, redact: bool) -> Iterator[Text]:
    rows = ", ".join(f"{count:,} {name}" for name, count in done.num_rows.items() if count) or "nothing"
    yield Text(f"{done.path}: {rows}", style="" if rows != "nothing" else "red")
    for level, reasons in done.left_out.items():
        told = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
        yield Text(f"  left out {level}: {told}")
    yield _secrets(done, redact)
    yield Text(_next(done), style="dim")


def _next(done: Exported) -> str:
    """What one does with it."""
    if done.format == "run":
        return f"look at it: gyre tree {done.path}   whole: gyre verify {done.path}"
    if done.format in ("chat", "atif"):
        return f"read it back: gyre import {done.path} -o RUN"
    if done.format == "parquet":
        return f"read it: python -c 'import pyarrow.parquet as p; print(p.read_table(\"{done.path}\").schema)'"
    return f"what a row holds, and what is lost: docs/convert.md, {done.format}"


def _secrets(done: Exported, redact: bool) -> Text:
    if not redact:
        return Text("secrets were left in it", style="red")
    if not done.secrets:
        return Text("no secret of a known form found, others need --pattern")
    found = ", ".join(f"{kind} {count}" for kind, count in sorted(done.secrets.items()))
    nodes = f" ({done.num_nodes_redacted:,} nodes lost their token ids)" if done.num_nodes_redacted else ""
    return Text(f"taken out: {found}{nodes}")
