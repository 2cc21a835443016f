"""`gyre view`: a few lines over the server and the report."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_data.scores import known_weights
from gyre_data.show.target import split_run, targets

from .report import write_report
from .server import ViewServer
from .training import Training, open_training

__all__ = ["view"]


def view(
    run: Annotated[str | None, typer.Argument(help="Run folder, or sample; left out, the run made last.")] = None,
    execution: Annotated[
        str | None, typer.Argument(help="Start of an id, or EXECUTION:CALL: the page opens there.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write one HTML file that needs no network; serve nothing.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, open no browser.")] = False,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.")] = 0,
    remote: Annotated[
        bool, typer.Option("--remote", help="Allow a --host that others reach; each browser needs the printed token.")
    ] = False,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=WEIGHT]", help="Evaluator of the reward; may repeat. Left out, the only one."),
    ] = None,
    j_max: Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")] = 5,
    training: Annotated[
        Path | None, typer.Option(help="output.dir of training on the run; left out, one that lies beside it.")
    ] = None,
    cells: Annotated[Path | None, typer.Option(help="Ledger of the scheduler; left out, ledger.jsonl there.")] = None,
) -> None:
    """Look at a run in the browser: trees, lanes over time, conversations, tokens. Follows a run being recorded.

    Training beside it is shown on the first screen; RUN may be the trainer's folder too. With -o, one file that anyone
    can open: the whole run, or the one execution that is named.
    """
    opened, rest = split_run([word for word in (run, execution) if word is not None], 1)
    opened, beside = open_training(opened, training, cells=cells)
    found = targets(opened, rest)[0] if rest else None
    weights = known_weights(evaluator, [opened])
    judged: dict[str, Any] = {"j_max": j_max or None, "evaluators": weights, "training": beside}
    if out is not None:
        only = found.execution.execution_id if found else None
        written = write_report(opened, out, execution=only, **judged)
        size = f"{written.stat().st_size / 1e6:.1f} MB"
        typer.echo(f"{written}: {size}, opens in any browser without network; it holds every text of the run")
        return
    token = os.environ.get("GYRE_VIEW_TOKEN")

    def look() -> Training | None:
        return open_training(opened, None)[1]

    with ViewServer(opened, host=host, port=port, remote=remote, token=token, look=look, **judged) as server:
        url = (
            server.url_of(found.execution.execution_id, found.call.call_id if found.number else None)
            if found
            else server.url
        )
        typer.echo(f"{opened.path} at {url}\n^C stops")
        if not no_open:
            webbrowser.open(url)
        server.serve_forever()
