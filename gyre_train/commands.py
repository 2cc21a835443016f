"""Commands of this package; each is a few lines over a library call. Heavy imports stand inside the functions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo", "engine"]


def engine(
    model_dir: Annotated[str, typer.Argument(help="A Hugging Face causal LM: Llama, Qwen2 or Qwen3.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    weight_version: Annotated[str, typer.Option(help="Version the weights start as.")] = "base:0",
    max_running: Annotated[int, typer.Option(help="Requests computed at the same time.")] = 16,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; one more is refused.")] = 256,
    context_length: Annotated[
        int | None, typer.Option(help="Prompt and reply together (default: the model's).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Torch threads (default: cores - 1).")] = None,
) -> None:
    """Serve a Hugging Face causal LM as a small engine with SGLang's native HTTP contract."""
    from .engine.serve import EngineSettings, serve

    settings = EngineSettings(
        model_dir=model_dir,
        weight_version=weight_version,
        max_running=max_running,
        max_queued=max_queued,
        context_length=context_length,
        threads=threads,
    )
    serve(settings, host=host, port=port)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Folder to make; it is a run that every command opens.")] = Path(
        "gyre-demo"
    ),
    model: Annotated[
        Path | None, typer.Option(help="Start from this Hugging Face folder instead of a tiny one.")
    ] = None,
    record_only: Annotated[bool, typer.Option("--record-only", help="Stop after the tree is shown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON and nothing else.")] = False,
) -> None:
    """Record, inspect, train and publish on this machine: two tasks, eight executions, two steps, no key, no GPU."""
    from .demo.steps import demo as run_demo

    summary = run_demo(folder, model=model, record_only=record_only, quiet=as_json)
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
