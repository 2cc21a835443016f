"""Commands of this package that serve; each is a few lines over a library call."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["proxy"]


def proxy(
    run: Annotated[Path, typer.Option("--run", help="Run folder to record to; an old one is continued.")],
    engine: Annotated[list[str], typer.Option(help="URL of an engine; may be repeated.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the served checkpoint, or its tokenizer files.")],
    template: Annotated[Path | None, typer.Option(help="Chat template instead of the tokenizer's own.")] = None,
    parser: Annotated[str, typer.Option(help="Reply format of the model; auto: as the template writes it.")] = "auto",
    thinking: Annotated[str, typer.Option(help="keep | fork, for templates that strip earlier thinking.")] = "keep",
    context_window: Annotated[
        int | None, typer.Option(help="Prompt and reply together (default: the engine's).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --key.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port (default: that of run.json, else 8765).")] = None,
    key: Annotated[str | None, typer.Option(help="Key that clients must present.", envvar="GYRE_KEY")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain: serve HTTPS (with --tls-key).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key of --tls-cert.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name for the weights of an engine that says `default`.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of every call, whatever the client asks.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Output limit of every call (default: the client's).")] = None,
) -> None:
    """Serve the recording proxy in front of inference engines.

    Point a client at http://HOST:PORT/x/NAME (OpenAI clients: .../x/NAME/v1); NAME is the execution that it records to.
    """
    from .serve import serve
    from .settings import ProxySettings, RunSampling

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = ProxySettings(
        run=run,
        engines=tuple(engine),
        tokenizer=tokenizer,
        template=template,
        parser=parser,
        thinking=thinking,
        context_window=context_window,
        host=host,
        port=port,
        key=key,
        tls_cert=tls_cert,
        tls_key=tls_key,
        policy=policy,
        sampling=RunSampling(temperature=temperature, max_tokens=max_tokens),
    )
    serve(settings, lambda url, replies: _ready(url, run, replies))


def _ready(url: str, run: Path, replies: str) -> None:
    sys.stderr.write(f"recording to {run}   policy mode   {replies} replies   base URL {url}/x/NAME   ^C to stop\n")
    sys.stderr.flush()
