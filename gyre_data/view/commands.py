"""`gyre view`: a few lines over the server and the report."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gyre_data.execution import executions, find
from gyre_data.show.commands import _run_and_execution

from .report import write_report
from .server import ViewServer

__all__ = ["view"]


def view(
    run: Annotated[str | None, typer.Argument(help="Run folder; left out, the run made last.")] = None,
    execution: Annotated[str | None, typer.Argument(help="Start of an execution's id: the page opens there.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write one HTML file that needs no network, and serve nothing.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, open no browser.")] = False,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.")] = 0,
    remote: Annotated[
        bool, typer.Option("--remote", help="Allow a --host that others can reach; asks each browser for a token.")
    ] = False,
    j_max: Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")] = 5,
) -> None:
    """Look at a run in the browser: trees, lanes over time, conversations, tokens; follows it while it is recorded."""
    opened, prefix = _run_and_execution(run, execution)
    if out is not None:
        written = write_report(opened, out, execution=prefix, j_max=j_max or None)
        typer.echo(f"{written}: {written.stat().st_size / 1e6:.1f} MB, opens in any browser, needs no network")
        return
    token = os.environ.get("GYRE_VIEW_TOKEN")
    with ViewServer(opened, host=host, port=port, remote=remote, token=token, j_max=j_max or None) as server:
        url = server.url + (f"#e={find(executions(opened), prefix)}" if prefix else "")
        typer.echo(f"{opened.path} at {url}   ^C stops")
        if not no_open:
            webbrowser.open(url)
        server.serve_forever()


