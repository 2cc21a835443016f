"""The `gyre run` and `gyre record` commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gyre_data.child import free_port, gyre_child
from gyre_data.errors import ConfigError

from .client import ProxyClient, endpoint_of, serves
from .page import can_open, live_page
from .record import Recorded, client_words, fresh_run, tell, user_upstreams
from .record import record as record_client
from .show import Board
from .supervisor import RunResult, Supervisor
from .tasks import Task, load_tasks, split_command

__all__ = ["record", "run"]

RunOption = Annotated[Path, typer.Option("--run", help="Run folder; its run.json names the proxy.")]
EngineOption = Annotated[list[str] | None, typer.Option("--engine", help="Engine URL; starts a proxy for this run.")]
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
) -> Iterator[str]:
    """Give the address of the run's proxy: the one that is up, else one started for the block.

    Without engines it observes hosted APIs, when `upstreams` says which (an empty mapping takes the usual ones).
    """
    found = endpoint_of(run)
    if found and serves(found, run, key):
        yield found
        return
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
    tasks: Annotated[Path, typer.Option("-p", "--tasks", help="tasks.toml, or the folder that holds it.")],
    run: RunOption = Path("runs/default"),
    harness: Annotated[str | None, typer.Option("-a", "--harness", help="Harness command for every task.")] = None,
    attempts: Annotated[int, typer.Option("-k", "--attempts", min=1, help="Executions of each task.")] = 1,
    concurrency: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Executions at once.")] = 4,
    states_every: Annotated[int, typer.Option(min=0, help="Capture the workspace every N calls; 0 = ends only.")] = 0,
    engine: EngineOption = None,
    tokenizer: TokenizerOption = None,
    key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Run a harness on tasks, several executions each. The same command goes on where it was stopped."""
    loaded = load_tasks(tasks)
    command = split_command(harness, "--harness") if harness else None
    with (
        proxy_for(run, engine, tokenizer, key) as endpoint,
        Board(quiet=as_json, total=attempts * len(loaded)) as board,
    ):
        options = {"attempts": attempts, "concurrency": concurrency, "states_every": states_every}
        try:
            result = asyncio.run(_run(endpoint, key, run, loaded, command, options, board))
        except KeyboardInterrupt:
            sys.stderr.write("stopped; nothing acknowledged is lost: the same command goes on\n")
            raise
    ended, verdicts = dict(result.ended), dict(result.verdicts)
    if as_json:
        sys.stdout.write(json.dumps({"ended": ended, "verdicts": verdicts}) + "\n")
    else:
        counted = (
            ", ".join(f"{count} {name}" for name, count in {**ended, **verdicts}.items()) or "nothing was left to do"
        )
        sys.stderr.write(f"{counted}   next: gyre tree {run} | gyre stats {run}\n")
    if ended and set(ended) == {"infra_fault"}:
        raise typer.Exit(1)


async def _run(
    endpoint: str,
    key: str | None,
    run: Path,
    tasks: Sequence[Task],
    command: tuple[str, ...] | None,
    options: Mapping[str, int],
    board: Board,
) -> RunResult:
    async with ProxyClient(endpoint, key) as client:
        return await Supervisor(client, run, tasks, harness=command, on_change=board.update, **options).run()


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
