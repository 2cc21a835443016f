"""`gyre explain`: a few lines over `explain` and `provenance`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gyre_data.decode import decoder
from gyre_data.execution import short_id
from gyre_data.explain import ExecutionExplained, Loss, RunExplained, explain_execution, explain_run
from gyre_data.printable import printable
from gyre_data.provenance import explain_call, explain_token, request_body
from gyre_data.reader import Run
from gyre_data.scores import known_weights

from .explain_text import execution_lines, run_lines
from .layout import print_json, screen, show
from .provenance_text import call_lines, token_lines
from .target import Target, split_run, targets, where_of

__all__ = ["Objective", "explain"]


class Objective(StrEnum):
    """What a training is for."""

    RL = "rl"
    SFT = "sft"


def explain(
    run: Annotated[str | None, typer.Argument(help="Run folder, or sample; left out, the run made last.")] = None,
    target: Annotated[
        str | None, typer.Argument(help="EXECUTION[:CALL[:TOKEN]]; left out, every execution of the run.")
    ] = None,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=WEIGHT]", help="Evaluator of the reward; may repeat. Left out, the only one."),
    ] = None,
    loss: Annotated[
        Objective, typer.Option(help="What would be trained: sft needs no scores and log-probs.")
    ] = Objective.RL,
    trainer: Annotated[Path | None, typer.Option(help="A trainer's folder: which of its steps consumed it.")] = None,
    request: Annotated[
        bool,
        typer.Option(
            "--request",
            help="Print the call's request body: in a pipe byte for byte, control characters as signs on a terminal.",
        ),
    ] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Decode ids with this tokenizer's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    j_max: Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")] = 5,
) -> None:
    """Explain what would be trained on and why not the rest: of a run, an execution, a call, or a token.

    `gyre explain RUN` is the admission report. `gyre explain RUN e7f3:c12:57` tells where token 57 of call 12 comes
    from, which trajectory owns it, and with which weight it enters the loss.
    """
    opened, rest = split_run([word for word in (run, target) if word is not None], 1)
    kind: Loss = "sft" if loss is Objective.SFT else "rl"
    weights, cap = known_weights(evaluator, [opened]), j_max or None
    if not rest:
        _run(opened, explain_run(opened, loss=kind, j_max=cap, evaluators=weights), as_json)
        return
    (found,) = targets(opened, rest)
    if request:
        body = request_body(found.execution, found.call)
        if sys.stdout.isatty():
            typer.echo(printable(body.decode("utf-8", "replace")))
        else:
            sys.stdout.buffer.write(body)
        return
    of = explain_execution(found.execution, loss=kind, j_max=cap, evaluators=weights, trainer=trainer)
    if found.number is None:
        _execution(found, of, as_json)
    else:
        _call(found, of, tokenizer, as_json)


def _run(run: Run, found: RunExplained, as_json: bool) -> None:
    console = screen()
    if as_json:
        print_json(found)
        return
    known = [v.execution_id for v in found.verdicts]
    shorts = {v.execution_id: short_id(known, v.execution_id) for v in found.verdicts}
    show(run_lines(found, shorts=shorts, where=where_of(run), width=console.width), console)


def _execution(found: Target, of: ExecutionExplained, as_json: bool) -> None:
    console = screen()
    if as_json:
        print_json(of)
        return
    show(execution_lines(of, short=found.short, where=found.where, width=console.width), console)


def _call(found: Target, of: ExecutionExplained, tokenizer: str | None, as_json: bool) -> None:
    console, number = screen(), found.number or 1
    call = explain_call(found.execution, number, loss=of.loss, j_max=of.j_max)
    token = None if found.token is None else explain_token(found.execution, number, found.token)
    if as_json:
        print_json({"execution": of, "call": call, "token": token})
    elif token is None:
        show(call_lines(call, of, short=found.short, where=found.where, width=console.width), console)
    else:
        decode = decoder(found.run, tokenizer)
        lines = token_lines(token, call, of, short=found.short, where=found.where, width=console.width, decode=decode)
        show(lines, console)
