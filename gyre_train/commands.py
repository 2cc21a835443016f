"""Commands of this package; each is a few lines over a library call. Heavy imports stand inside the functions."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["engine"]


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
