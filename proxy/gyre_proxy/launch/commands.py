"""The `gyre run` and `gyre record` commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_data.child import free_port, gyre_child
from gyre_data.errors import ConfigError

from .client import ProxyClient, endpoint_of, serves
from .harbor import load_harbor
from .page import can_open, live_page
from .record import Recorded, client_words, fresh_run, tell, user_upstreams
from .record import record as record_client
from .show import Board, described
from .split import split_command
from .supervisor import RunResult, Supervisor
from .tasks import Task, load_tasks

__all__ = ["record", "run"]

_PATIENCE_S = 60.0
"""How long a launcher that serves waits for its proxy before it gives up."""

RunOption = Annotated[Path, typer.Option("--run", help="Run folder; its run.json names the proxy.")]
EngineOption = Annotated[
    list[str] | None, typer.Option("--engine", metavar="URL", help="Engine URL; starts a proxy for this run.")
]
TokenizerOption = Annotated[Path | None, typer.Option(help="Folder of the served model; else it only counts.")]
UpstreamOption = Annotated[str | None, typer.Option(help="Where such calls go, if not to the provider itself.")]
KeyOption = Annotated[str | None, typer.Option(envvar="GYRE_KEY", help="Key of the proxy, when it has one.")]


@contextmanager
def proxy_for(
    run: Path,
    engines: list[str] | None,
    tokenizer: Path | None,
    key: str | None = None,
    upstreams: Mapping[str, str] | None = None,
    patience_s: float = 0.0,
) -> Iterator[str]:
    """Give the address of the run's proxy: the one that is up, else one started for the block.

    One that the run names and that is down is waited for `patience_s` seconds: it may be on its way back.
    Without engines it observes hosted APIs, when `upstreams` says which (an empty mapping takes the usual ones).
    """
    deadline = time.monotonic() + patience_s
    while (found := endpoint_of(run)) is not None:
        if serves(found, run, key):
            yield found
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    observe = upstreams is not None and not engines
    if not observe and (not engines or tokenizer is None):
        raise ConfigError(
            f"no proxy is up for {run}, and to start one wanted --engine and --tokenizer, got no "
            f"{'--tokenizer' if engines else '--engine'}; give both here, or start "
            f"`gyre proxy --run {run} --engine URL --tokenizer DIR`"
        )
    made, came_up = not run.exists(), False
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "proxy.log").touch(0o600)
    except OSError as error:
        raise ConfigError(
            f"wanted to record to {run}, got {error.strerror}; give a run folder that can be written"
        ) from error
    port = free_port(int(found.rsplit(":", 1)[1]) if found else 8765)
    address = f"http://127.0.0.1:{port}"
    arguments = ["proxy", "--run", str(run), "--port", str(port), *(["--observe"] if observe else [])]
    arguments += ["--tokenizer", str(tokenizer)] if tokenizer is not None else []
    for engine in engines or ():
        arguments += ["--engine", engine]
    for name, url in upstreams.items() if upstreams is not None and observe else ():
        arguments += [f"--upstream-{name}", url]
    env = {"GYRE_KEY": key} if key else None
    try:
        with gyre_child(arguments, run / "proxy.log", address, is_ready=lambda url: serves(url, run, key), env=env):
            came_up = True
            yield address
    finally:
        if made and not came_up:  # the end of its log is in the error
            shutil.rmtree(run, ignore_errors=True)


def run(
    tasks: Annotated[Path, typer.Option("-p", "--tasks", help="tasks.toml or .jsonl, or a folder of Harbor tasks.")],
    run: RunOption = Path("runs/default"),
    harness: Annotated[str | None, typer.Option("-a", "--harness", help="Harness command for every task.")] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", help="Long-lived harness for every task: started once, fed by lines.")
    ] = None,
    attempts: Annotated[int, typer.Option("-k", "--attempts", min=1, help="Executions of each task.")] = 1,
    concurrency: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Harnesses at once.")] = 4,
    judges: Annotated[int | None, typer.Option(min=1, help="Evaluators at once (default: as -j).")] = None,
    replace: Annotated[
        int, typer.Option(min=0, help="Members of a group replaced after a fault; then the group shrinks.")
    ] = 3,
    states_every: Annotated[int, typer.Option(min=0, help="Capture the workspace every N calls; 0 = ends only.")] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Run what others queue for these tasks, until stopped.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the tasks as they are understood; run none.")
    ] = False,
    engine: EngineOption = None,
    tokenizer: TokenizerOption = None,
    key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Run a harness on tasks, several executions each. The same command goes on where it was stopped."""
    loaded = load_harbor(tasks) if tasks.is_dir() and not (tasks / "tasks.toml").exists() else ()
    loaded = loaded or load_tasks(tasks)
    if harness and worker:
        raise ConfigError("wanted --harness or --worker, got both; the one that runs the executions is enough")
    words = harness or worker
    command = split_command(words, "--worker" if worker else "--harness") if words else None
    if dry_run:
        sys.stdout.write(described(loaded, as_json))
        return
    total = None if serve else attempts * len(loaded)
    patience_s = _PATIENCE_S if serve else 0.0
    with (
        proxy_for(run, engine, tokenizer, key, patience_s=patience_s) as endpoint,
        Board(quiet=as_json, total=total) as board,
    ):
        options = {
            "worker": worker is not None, "attempts": attempts, "concurrency": concurrency, "judges": judges,
            "states_every": states_every, "replacements": replace, "serve": serve,
        }  # fmt: skip
        board.about(f"proxy {endpoint.removeprefix('http://')}  {len(loaded)} tasks x {attempts}", concurrency)
        try:
            result = asyncio.run(_run(endpoint, key, run, loaded, command, options, board))
        except KeyboardInterrupt:
            sys.stderr.write("stopped; nothing acknowledged is lost: the same command goes on\n")
            raise
    _tell_result(result, run, as_json)


def _tell_result(result: RunResult, run: Path, as_json: bool) -> None:
    ended, verdicts = dict(result.ended), dict(result.verdicts)
    if as_json:
        found = {"ended": ended, "verdicts": verdicts, "shrunk": list(result.shrunk)}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        counted = (
            ", ".join(f"{count} {name}" for name, count in {**ended, **verdicts}.items()) or "nothing was left to do"
        )
        for group in result.shrunk:
            told = f"{group}: members fell out more often than --replace allows; the group is smaller now"
            typer.secho(told, fg=typer.colors.RED, err=True)
        sys.stderr.write(f"{counted}   next: gyre tree {run} | gyre stats {run}\n")
    if ended and set(ended) == {"infra_fault"}:
        raise typer.Exit(1)


async def _run(
    endpoint: str,
    key: str | None,
    run: Path,
    tasks: Sequence[Task],
    command: tuple[str, ...] | None,
    options: Mapping[str, Any],
    board: Board,
) -> RunResult:
    """Run until all is done; SIGTERM stops it as Ctrl-C does, one that serves with what it has done."""
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    async with ProxyClient(endpoint, key) as client:
        supervisor = Supervisor(client, run, tasks, harness=command, on_change=board.update, **options)
        try:
            return await supervisor.run()
        except asyncio.CancelledError:
            if not options["serve"]:
                raise KeyboardInterrupt from None
            return supervisor.result()


def record(
    words: Annotated[
        list[str], typer.Argument(help="claude, codex, opencode, pi, or any command, with what belongs to it.")
    ],
    run: Annotated[Path | None, typer.Option("--run", help="Run folder (default: a fresh one in runs/).")] = None,
    engine: EngineOption = None,
    tokenizer: TokenizerOption = None,
    upstream_anthropic: UpstreamOption = None,
    upstream_openai: UpstreamOption = None,
    upstream_chatgpt: UpstreamOption = None,
    key: KeyOption = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Name the live page, open no browser (nor without a terminal or display).")
    ] = False,
) -> None:
    """Start one client through the proxy and record it: `gyre record claude -p "..."`.

    What comes after the client is its own; options of `gyre record` stand before it.

    Without --engine it is observed: it talks to its own hosted API with its own login, and nothing of that is changed.
    """
    words = client_words(words)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"wanted the program {words[0]}, found none on PATH; install it first, or mend its name")
    folder = run or fresh_run()
    given = {"anthropic": upstream_anthropic, "openai": upstream_openai, "chatgpt": upstream_chatgpt}
    upstreams = {**user_upstreams(words, os.environ), **{name: url for name, url in given.items() if url}}
    with (
        proxy_for(folder, engine, tokenizer, key, upstreams=upstreams) as endpoint,
        live_page(folder, open_it=not no_open and can_open()) as page,
    ):
        ended = asyncio.run(_record(endpoint, key, folder, words, page))
    for remark in ended.remarks:
        typer.secho(remark, fg=typer.colors.RED, err=True)
    calls = "1 call" if ended.num_calls == 1 else f"{ended.num_calls} calls"
    tell(f"recorded {ended.execution_id} in {folder}: {calls}   next: gyre tree {folder} | gyre view {folder}")
    raise typer.Exit(ended.status)


record.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]


async def _record(endpoint: str, key: str | None, run: Path, words: list[str], page: str) -> Recorded:
    async with ProxyClient(endpoint, key) as client:
        return await record_client(client, run, words, tell, page=page)
