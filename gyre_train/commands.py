"""Commands of this package; each is a few lines over a library call. Heavy imports stand inside the functions."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre_data.errors import ConfigError

if TYPE_CHECKING:
    from .config import TrainingConfig
    from .exactness import TrainingReport
    from .folder import TrainSummary
    from .forecast import Forecast, Memory

__all__ = ["demo", "engine", "receive", "train", "verify_training"]


def engine(
    model_dir: Annotated[str, typer.Argument(help="A Hugging Face causal LM: Llama, Qwen2, Qwen3 or Qwen3-MoE.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    weight_version: Annotated[
        str | None, typer.Option(help="Version the weights start as (default: a checkpoint's own, else base:0).")
    ] = None,
    max_running: Annotated[int, typer.Option(help="Requests computed at the same time.")] = 16,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; one more is refused.")] = 256,
    context_length: Annotated[
        int | None, typer.Option(help="Prompt and reply together (default: the model's).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Torch threads (default: cores - 1).")] = None,
) -> None:
    """Serve a Hugging Face causal LM as a small engine with SGLang's native HTTP contract."""
    from .engine.serve import EngineSettings, serve
    from .lineage import lineage_of

    if weight_version is None:
        weight_version = str(lineage_of(model_dir).version) if (Path(model_dir) / "state.json").is_file() else "base:0"
    settings = EngineSettings(
        model_dir=model_dir,
        weight_version=weight_version,
        max_running=max_running,
        max_queued=max_queued,
        context_length=context_length,
        threads=threads,
    )
    told = f"engine: {model_dir} as {weight_version} on http://{host}:{port}, Ctrl-C stops it"
    serve(settings, host=host, port=port, on_bound=lambda: typer.echo(told))


def receive(
    folder: Annotated[Path, typer.Argument(help="Where weights arrive; /dev/shm/... keeps them in memory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 30100,
    host: Annotated[
        str, typer.Option(help="Address that the trainer reaches; GYRE_PUBLISH_KEY guards it.")
    ] = "127.0.0.1",
    protocol: Annotated[str, typer.Option(help="tcp, or rdma (not yet verified).")] = "tcp",
    device: Annotated[str, typer.Option(help="RDMA device; empty: Mooncake chooses.")] = "",
) -> None:
    """Fetch published weights beside an engine (publish.method = mooncake)."""
    from .publish.receiver import receive as run

    told = f"receiving weights into {folder} on http://{host}:%d, Ctrl-C stops it"
    run(
        folder, host=host, port=port, protocol=protocol, device=device,
        on_bound=lambda server: typer.echo(told % server.server_address[1]),
    )  # fmt: skip


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


def train(
    ctx: typer.Context,
    config: Annotated[str | None, typer.Argument(help="TOML file; see docs/training.md for its keys.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and the plan only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train on recorded runs, or on chats and runs (loss.kind = "sft"); any key as --section.key=value.

    Runs again with the same output.dir: resumes where it stopped.
    """
    from .config import load_config

    if config is None:
        raise ConfigError("wanted a TOML file, got none; docs/training.md, On a laptop, has one to begin with")
    settings = load_config(config, ctx.args)
    if dry_run and settings.scheduler.cells:
        _show_cells(settings, as_json)
        return
    if dry_run and settings.rollout.tasks and not (Path(settings.rollout.run) / "run.json").exists():
        from .config import to_toml

        told = f"nothing is recorded in {settings.rollout.run} yet; what a step costs shows after its first groups"
        told += "\nnext: the same without --dry-run"
        typer.echo(json.dumps({"config": to_toml(settings), "steps": 0}) if as_json else f"{to_toml(settings)}\n{told}")
        return
    if dry_run:
        from .forecast import forecast

        _show_forecast(forecast(settings), as_json)
        return
    from .folder import finished

    if done := finished(settings):  # before torch and megatron are loaded, which takes longer than to say it
        _show_summary(done, as_json)
        return
    # On a machine with nvcc and no GPU torch warns of that while megatron is imported; a CPU run wants neither.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if settings.scheduler.cells:
        from .elastic.command import train_on_cells as run_training
    else:
        from .loop import train as run_training
    from .memory import keep_memory

    if not settings.model.on_gpu:
        keep_memory()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "megatron", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _show_summary(run_training(settings, show_progress=not as_json), as_json)


# Everything that is no option here is an override, which load_config checks.
train.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _show_cells(settings: TrainingConfig, as_json: bool) -> None:
    from .config import to_toml
    from .elastic.plan import cells_plan

    plan = cells_plan(settings)
    if as_json:
        typer.echo(json.dumps({"config": to_toml(settings), **plan}))
        return
    typer.echo(to_toml(settings))
    typer.echo("would keep up")
    for name, command in plan["services"].items():
        typer.echo(f"  {name:<10}  {shlex.join(command)}")
    cells = ", ".join(plan["cells"])
    typer.echo(f"cells {cells} (the first is the core), {settings.scheduler.capacity} executions each")
    for name, command in plan["programs"].items():
        typer.echo(f"  {name:<10}  {shlex.join(command)}")
    typer.echo(
        f"a step is {plan['groups']} groups of {settings.rollout.attempts} and {plan['recorded']} recorded executions, "
        f"policy {settings.scheduler.policy}; logs and ledger in {plan['folder']}"
    )
    typer.echo("next: the same without --dry-run; what a policy would take: gyre simulate")


def _show_forecast(found: Forecast, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(found), "fits": found.memory.fits}))
        return
    saved = found.unpacked_tokens / max(found.packed_tokens, 1)
    typer.echo(found.config)
    typer.echo(f"steps      {found.steps:,}   executions {found.executions:,}   trained tokens {found.edges:,}")
    typer.echo(
        f"tokens     packed {found.packed_tokens:,}  unpacked {found.unpacked_tokens:,}  ({saved:.2f}x)  "
        f"packs {found.packs:,}"
    )
    typer.echo(f"compute    {found.flops:.3g} FLOPs, forward and backward{_parameters(found)}")
    _show_memory(found.memory)
    for level, reasons in found.excluded.items():
        if told := ", ".join(f"{reason} {n:,}" for reason, n in reasons.items() if n):
            typer.echo(f"left out   {level}: {told}")
    typer.echo("next: the same without --dry-run")


def _parameters(found: Forecast) -> str:
    if found.active_parameters == found.parameters:
        return f" of {found.parameters:,} parameters"
    return f";\n           a token passes {found.active_parameters:,} of {found.parameters:,} parameters"


def _show_memory(memory: Memory) -> None:
    from gyre_data.show.numbers import file_size

    whole = file_size(memory.total_bytes)
    device = "unknown" if memory.device_bytes is None else file_size(memory.device_bytes)
    typer.echo(
        f"memory     about {whole}, device {device}: state {file_size(memory.state_bytes)},\n"
        f"           a pack of {memory.pack_tokens:,} takes {file_size(memory.activation_bytes)}"
    )
    if memory.fits is False:
        mend = f"set pack.tokens = {memory.fitting_tokens}" if memory.fitting_tokens else "raise parallel.tp"
        told = f"A pack of {memory.pack_tokens:,} needs about {whole}, the device has {device}; {mend}"
        typer.secho(told, fg="red")


def verify_training(run: Path, model: str, *, dtype: str, limit: int, as_json: bool) -> None:
    """`gyre verify --training`: print what `gyre_train.verify_training` found; exit status 1 over the bound."""
    from .exactness import verify_training as check

    report = check(run, model, dtype=dtype, limit=limit or None)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "worst": report.worst, "exact": report.exact}))
    else:
        _show_report(report)
    raise typer.Exit(0 if report.exact else 1)


_SHOWN = 3  # of each kind on a screen; --json has more
_KINDS = {
    "loss": "loss", "logprob": "log-prob of a token", "derivative": "d loss / d log-prob of a token",
    "gradient": "gradient of a parameter",
}  # fmt: skip


def _show_report(report: TrainingReport) -> None:
    typer.echo(
        f"{report.executions} of {report.of_executions} executions, loss {report.kind}, {report.dtype}: "
        f"{report.trained_tokens:,} trained tokens, {report.parameters} parameter tensors"
    )
    saved = report.row_tokens / max(report.tree_tokens, 1)
    typer.echo(f"tokens run  tree {report.tree_tokens:,}  rows {report.row_tokens:,}  ({saved:.2f}x)")
    for field, told in _KINDS.items():
        typer.echo(f"largest relative differences: {told}")
        for one in getattr(report, field)[:_SHOWN]:
            over = not one.relative <= report.bound
            values = f"tree {one.tree:.9g}  rows {one.rows:.9g}"
            typer.secho(f"  {one.relative:.2e}  {one.name}", fg="red" if over else None)
            typer.echo(f"            {values}")
    verdict = "exact" if report.exact else "NOT EXACT"
    told = f"{verdict}: largest difference {report.worst:.2e}, bound {report.bound:.0e}"
    typer.secho(told, fg=None if report.exact else "red")
    if report.exact:
        typer.echo("next: gyre train CONFIG.toml --dry-run")
    else:
        typer.echo(f"next: gyre verify {report.run} --training --model {report.model} --dtype float64")


def _show_summary(done: TrainSummary, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    from gyre_data.show.numbers import plural

    from .metrics import read_metrics

    if done.steps_done:
        typer.echo(
            f"{plural(done.steps_done, 'step')}, {done.trained_tokens:,} trained tokens, loss {done.loss:z.4f}; "
            f"{done.version} is in {done.checkpoint}"
        )
    elif not done.stopped:
        typer.echo(f"nothing to do: step {done.step} is reached or the data is used up; {done.checkpoint or ''}")
    passes = [row for row in read_metrics(Path(done.output) / "evals.jsonl") if row["score"] is not None]
    if passes:
        ends = dict.fromkeys(f"{row['score']:.3f} after step {row['step']}" for row in (passes[0], passes[-1]))
        typer.echo(f"held-out tasks scored {', '.join(ends)}; every pass is in {done.output}/evals.jsonl")
    if done.stopped:
        typer.echo(f"stopped after step {done.step}, as asked; the same command goes on")
    for error in done.publish_errors:
        typer.secho(f"not published  {error}", fg="red", err=True)
    typer.echo(f"next: gyre view {done.output}")
