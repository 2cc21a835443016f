"""The `gyre` command: one Typer app whose commands load only when they are run.

`gyre --help` must stay instant, so the table below holds each command's place and one-line help, and nothing else is
imported until a command is chosen. The functions are a few lines each over a library call of the same name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import walk_tb
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as build_command

from . import __version__
from .errors import GyreError
from .installing import pip_install
from .printable import printable

__all__ = ["COMMANDS", "app", "run"]

# name: (module, function, one-line help). A function's own docstring is the long help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": (
        "gyre_train.commands",
        "demo",
        "Record, inspect, train and publish on this machine, in minutes.",
    ),
    "run": ("gyre_proxy.launch.commands", "run", "Run a harness on tasks, several executions each."),
    "record": ("gyre_proxy.launch.commands", "record", "Start one harness through the proxy and record it."),
    "proxy": ("gyre_proxy.commands", "proxy", "Serve the recording proxy in front of inference engines."),
    "engine": ("gyre_train.commands", "engine", "Serve a Hugging Face causal LM as a small engine."),
    "receive": ("gyre_train.commands", "receive", "Fetch published weights beside an engine."),
    "ls": ("gyre_data.commands", "ls", "List the executions of a run."),
    "tree": ("gyre_data.show.tree_commands", "tree", "Show an execution as a tree: branches, roles, scores."),
    "explain": (
        "gyre_data.show.explain_commands",
        "explain",
        "Explain what would be trained on, and why not the rest.",
    ),
    "diff": ("gyre_data.show.compare_commands", "diff", "Compare two branches, calls, or rollouts of a task."),
    "search": ("gyre_data.show.compare_commands", "search", "Find a text or a tool's name in a run's messages."),
    "stats": ("gyre_data.show.commands", "stats", "Count what is in runs and how much is shared."),
    "view": ("gyre_data.view.commands", "view", "Look at a run in the browser, live, or write one HTML file."),
    "query": ("gyre_data.show.query_command", "query", "Ask runs anything by SQL."),
    "verify": ("gyre_data.commands", "verify", "Check a run's bytes and its token alignment."),
    "import": ("gyre_data.convert.commands", "import_", "Import sessions that other tools recorded."),
    "export": ("gyre_data.convert.export_command", "export", "Write a run for other tools, without its secrets."),
    "score": ("gyre_data.show.score_command", "score", "Append an evaluator's verdict to an execution."),
    "eval": ("gyre_data.show.eval_command", "eval_", "Tell how often attempts pass, and compare two runs."),
    "compact": ("gyre_data.folder_commands", "compact", "Rewrite a run as few large files, maybe compressed."),
    "merge": ("gyre_data.folder_commands", "merge", "Make one new run of several."),
    "tag": ("gyre_data.folder_commands", "tag", "Name what a run holds now as a dataset version."),
    "rm": ("gyre_data.folder_commands", "rm", "Remove executions from a run, with --purge from the disk."),
    "simulate": ("gyre_data.simulate_command", "simulate", "Forecast a schedule of cells before any GPU is spent."),
    "train": ("gyre_train.commands", "train", "Train on recorded runs, or on runs of its own."),
    "doctor": ("gyre_data.doctor_command", "doctor", "Check this installation and machine, and say what to do."),
}

# Kept beside COMMANDS: the extras that bring what a package imports; where two fit, the longer name counts.
_EXTRA = {
    "gyre_proxy": "proxy",
    "gyre_train": "train",
    "gyre_train.demo": "train,local,proxy",
    "gyre_train.engine": "local",
}


class _Command(TyperCommand):
    """Shows its switches as what they are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _take_nothing(self.get_params(ctx))
        super().format_help(ctx, formatter)


def _take_nothing(params: Iterable[Any]) -> None:
    """For `--help`: Typer says of a switch that it takes a <bool>, which it refuses."""
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = ""


class _LazyGroup(TyperGroup):
    """Lists commands from the table and imports a command's module only to run it or to show its own help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = {name: TyperCommand(name, help=told) for name, (_, _, told) in COMMANDS.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _take_nothing(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return (name, command, rest) if command is None or name is None else (name, _load(name), rest)


def _load(name: str) -> Any:
    module, function, short = COMMANDS[name]
    with _naming_the_extra(name):
        target = getattr(import_module(module), function)
    target = _naming_the_extra(name)(target)  # commands import what is heavy when they run
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    settings = getattr(target, "context_settings", None)
    one.command(name, cls=_Command, short_help=short, context_settings=settings)(target)
    command = build_command(one)
    command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "")  # its lines would break twice on a narrow screen
    return command


@contextmanager
def _naming_the_extra(command: str) -> Iterator[None]:
    """Tell of a missing module which extra brings it: that of our own package whose import needed it."""
    try:
        yield
    except ModuleNotFoundError as error:
        ours = [frame.f_globals.get("__name__", "") + "." for frame, _ in walk_tb(error.__traceback__)]
        needed = [home for home in _EXTRA if any(name.startswith(home + ".") for name in ours)]
        if not needed or not error.name or error.name.startswith("gyre_"):
            raise
        extra = _EXTRA[max(needed, key=len)]
        raise GyreError(
            f"`gyre {command}` needs the module {error.name}, which is not installed; run: {pip_install(extra)}"
        ) from error


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gyre {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Record agent harnesses token-exactly, inspect the trees, and train on them."""


def run() -> None:
    """Entry point of the console script: a GyreError becomes one line on stderr and exit status 2.

    So does what the system says of a file: a folder in its place, no right to it, a full disk.
    """
    try:
        app()
    except GyreError as error:
        _told(str(error))
    except OSError as error:
        where = error.filename if error.filename is not None else "a file"
        _told(f"wanted to use {where}, got: {error.strerror or error}; mend that and try again")
    except KeyboardInterrupt:
        sys.stderr.write("gyre: stopped\n")
        raise SystemExit(130) from None


def _told(text: str) -> NoReturn:
    sys.stderr.write(f"gyre: {printable(text)}\n")
    raise SystemExit(2) from None
