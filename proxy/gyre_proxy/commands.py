"""Commands of this package that serve; each is a few lines over a library call."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .observe.settings import ObserveSettings

__all__ = ["proxy"]

_AWAITED_S = 3600.0
"""How long a call waits for an engine where engines come and go: between two, all of them may train."""
_MOVES = 1000
"""How often its reply may go on at another."""

AwaitOption = Annotated[
    bool, typer.Option("--await-engines", help="Start without an engine; calls wait for those that are added.")
]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Port (default: that of run.json, else 8765).")]
TemperatureOption = Annotated[float, typer.Option(min=0, help="Temperature of every call, whatever the client asks.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Output limit of every call (default: the client's).")]


def proxy(
    run: Annotated[Path, typer.Option("--run", help="Run folder to record to; an old one is continued.")],
    engine: Annotated[list[str] | None, typer.Option(metavar="URL", help="URL of an engine; may be repeated.")] = None,
    await_engines: AwaitOption = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the served checkpoint, or its tokenizer files; with --observe it only counts."),
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Pass everything on to hosted APIs, unchanged, and record it.")
    ] = False,
    upstream_anthropic: Annotated[str | None, typer.Option(help="With --observe: where Anthropic calls go.")] = None,
    upstream_openai: Annotated[str | None, typer.Option(help="With --observe: where OpenAI calls go.")] = None,
    upstream_chatgpt: Annotated[
        str | None, typer.Option(help="With --observe: where Codex goes with a ChatGPT login.")
    ] = None,
    template: Annotated[Path | None, typer.Option(help="Chat template instead of the tokenizer's own.")] = None,
    parser: Annotated[str, typer.Option(help="Reply format of the model; auto: as the template writes it.")] = "auto",
    thinking: Annotated[str, typer.Option(help="keep | fork, for templates that strip earlier thinking.")] = "keep",
    context_window: Annotated[
        int | None, typer.Option(min=1, help="Prompt and reply together (default: the engine's).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --key.")] = "127.0.0.1",
    port: PortOption = None,
    key: Annotated[str | None, typer.Option(help="Key that clients must present.", envvar="GYRE_KEY")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain: serve HTTPS (with --tls-key).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key of --tls-cert.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that serve calls; executions are shared out.")] = 1,
    policy: Annotated[str | None, typer.Option(help="Name for the weights of an engine that says `default`.")] = None,
    temperature: TemperatureOption = 1.0,
    max_tokens: MaxTokensOption = None,
) -> None:
    """Serve the recording proxy, in front of inference engines or (--observe) of hosted APIs.

    Point a client at http://HOST:PORT/x/NAME (OpenAI clients: .../x/NAME/v1); NAME is the execution that it records to.
    """
    from .serve import serve
    from .settings import ProxySettings, RunSampling

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listening: dict[str, Any] = {"host": host, "port": port, "key": key, "tls_cert": tls_cert, "tls_key": tls_key}
    upstreams = {"anthropic": upstream_anthropic, "openai": upstream_openai, "chatgpt": upstream_chatgpt}
    _refuse_idle(
        observe,
        engines={"--engine": engine, "--await-engines": await_engines, "--template": template, "--policy": policy}
        | {"--workers": workers > 1},
        upstreams={f"--upstream-{name}": url for name, url in upstreams.items()},
    )
    if observe:
        serve(_observe(run, tokenizer, upstreams, listening), lambda url, how: _ready(url, run, how))
        return
    settings = ProxySettings(
        run=run,
        **_engines(engine, await_engines, tokenizer),
        template=template,
        parser=parser,
        thinking=thinking,
        context_window=context_window,
        workers=workers,
        policy=policy,
        sampling=RunSampling(temperature=temperature, max_tokens=max_tokens),
        **listening,
    )
    serve(settings, lambda url, how: _ready(url, run, how))


def _engines(engine: list[str] | None, await_engines: bool, tokenizer: Path | None) -> dict[str, Any]:
    """Settings of what the proxy stands in front of."""
    from gyre_data.errors import ConfigError

    from .sampler import SamplerLimits

    if not (engine or await_engines) or tokenizer is None:
        raise ConfigError(
            "wanted --engine URL and --tokenizer DIR for a proxy in front of engines, got "
            f"{'no --tokenizer' if engine or await_engines else 'no --engine'}; or record hosted APIs with --observe"
        )
    limits = SamplerLimits(attempts=_MOVES, recovery_s=_AWAITED_S) if await_engines else SamplerLimits()
    return {"engines": tuple(engine or ()), "await_engines": await_engines, "tokenizer": tokenizer, "limits": limits}


def _refuse_idle(observe: bool, engines: dict[str, Any], upstreams: dict[str, Any]) -> None:
    """Refuse a setting that would have no effect in this mode."""
    from gyre_data.errors import ConfigError

    idle = [name for name, value in (engines if observe else upstreams).items() if value]
    if idle:
        with_or_without = "with" if observe else "without"
        raise ConfigError(f"{' and '.join(idle)} has no effect {with_or_without} --observe; leave it out")


def _observe(
    run: Path, tokenizer: Path | None, upstreams: dict[str, str | None], listening: dict[str, Any]
) -> ObserveSettings:
    from .observe.settings import ObserveSettings, Upstreams

    chosen = Upstreams(**{name: url for name, url in upstreams.items() if url is not None})
    return ObserveSettings(run=run, upstreams=chosen, tokenizer=tokenizer, **listening)


def _ready(url: str, run: Path, how: str) -> None:
    sys.stderr.write(f"recording to {run}   {how}   base URL {url}/x/NAME   ^C to stop\n")
    sys.stderr.flush()
