"""What a run of real cells shows, from its files alone: ledger, recorded run, workspaces, the trainer's folder.

`report(folder)` reads what `_elastic_run.live` left; it asks no process and knows nothing but what is written there.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gyre_data import ledger as trained
from gyre_data.arrays import from_table
from gyre_data.reader import Run
from gyre_data.types import Call, Node
from gyre_data.verify import verify
from gyre_sched.actions import CellFailed, Dispatch, MicrostepDone, StepApplied
from gyre_sched.cells.settings import FleetSettings, load
from gyre_sched.ledger import read, replay
from gyre_sched.state import State
from gyre_sched.switches import Switch, switches

__all__ = ["report"]


def report(folder: Path) -> dict[str, Any]:
    """Figures by name; `wrong` says what was lost, doubled or damaged, and is empty when nothing was."""
    settings = load(folder / "fleet.toml")
    run = Run(folder / "run")
    calls: list[Call] = from_table("calls", run.table("calls"))
    nodes: list[Node] = from_table("nodes", run.table("nodes"))
    ledger = folder / "sched" / "ledger.jsonl"
    return {
        **_time(ledger, settings),
        **_replies(calls),
        "tokens_by_version": _versions(nodes),
        "wrong": [*_ledger_wrong(ledger, settings), *_calls_wrong(folder, calls), *_training_wrong(folder, settings)],
    }


def _time(ledger: Path, settings: FleetSettings) -> dict[str, Any]:
    entries = read(ledger)
    begun = next(at for at, record in entries if isinstance(record, Dispatch))
    steps = [at for at, record in entries if isinstance(record, StepApplied)]
    made = switches(entries)
    seconds = steps[-1] - begun
    return {
        "policy": settings.policy, "cells": len(settings.cells), "steps": len(steps), "seconds": round(seconds, 1),
        "step_ends_s": [round(at - begun, 1) for at in steps],
        "switches": {to: _direction([one for one in made if one.to == to]) for to in ("train", "rollout")},
        "switching_share": round(sum(one.seconds for one in made) / seconds / len(settings.cells), 3),
        "micro_steps": dict(Counter(record.cell for _, record in entries if isinstance(record, MicrostepDone))),
        "cells_lost": sum(isinstance(record, CellFailed) for _, record in entries),
    }  # fmt: skip


def _direction(made: Sequence[Switch]) -> dict[str, Any]:
    """Totals, and each phase over the switches that had it; `told` is what no phase explains.

    One without phases was turned back: the core was called back while this cell was on its way to join it.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for one in made:
        if not one.phases:
            continue
        phases: dict[str, float] = {}
        for name, took in one.phases:
            phases[name] = phases.get(name, 0.0) + took
        for name, took in {**phases, "told": one.seconds - sum(phases.values())}.items():
            seconds[name].append(took)
    return {
        "count": len(made),
        "turned_back": sum(not one.phases for one in made),
        **_spread([one.seconds for one in made]),
        "phases": {name: {"count": len(took), **_spread(took)} for name, took in seconds.items()},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean_s": round(statistics.fmean(values), 2) if values else 0.0,
        "max_s": round(max(values, default=0.0), 2),
    }


def _replies(calls: Iterable[Call]) -> dict[str, Any]:
    """Replies, and those that went on at another engine from what they had, with what that one had to prefill."""
    done = [call for call in calls if str(call.status) == "ok"]
    moves = [
        (call, later)
        for call in done
        for before, later in zip(call.attempts, call.attempts[1:], strict=False)
        if later.engine != before.engine and later.start > 0
    ]
    return {
        "replies": len(done),
        "executions": len({call.execution_id for call in done}),
        "output_tokens": sum(call.output_tokens or 0 for call in done),
        "prompt_tokens": sum(call.prompt_tokens or 0 for call in done),
        "cached_tokens": sum(call.cached_tokens or 0 for call in done),
        "engines": len({attempt.engine for call in done for attempt in call.attempts}),
        "replies_moved": len({call.call_id for call, _ in moves}),
        "moves": len(moves),
        "tokens_kept_by_moves": sum(later.start for _, later in moves),
        "tokens_prefilled_again": sum((call.prompt_tokens or 0) + later.start for call, later in moves),
    }


def _versions(nodes: Iterable[Node]) -> dict[str, int]:
    """Sampled tokens by the weights that sampled them."""
    tokens: Counter[str] = Counter()
    for node in nodes:
        for span in node.policy_versions or ():
            tokens[f"{span.policy_id}:{span.n}"] += span.end - span.start
    return dict(sorted(tokens.items()))


def _ledger_wrong(ledger: Path, settings: FleetSettings) -> list[str]:
    """Groups are dispatched and consumed once, versions made once; replaying checks every record against the state."""
    state = State(settings.params, settings.fresh_cells())
    replay(ledger, state)
    entries, wrong = read(ledger), list[str]()
    dispatched = Counter(query for _, record in entries if isinstance(record, Dispatch) for query in record.queries)
    wrong += [f"group {query} was dispatched {count} times" for query, count in dispatched.items() if count != 1]
    versions = [record.version for _, record in entries if isinstance(record, StepApplied)]
    if versions != list(range(1, settings.steps + 1)):
        wrong.append(f"versions made are {versions}, wanted 1 to {settings.steps}, once each")
    groups, wanted = state.groups, settings.steps * settings.batch_groups
    if (groups.consumed, groups.dropped) != (wanted, 0):
        wrong.append(f"{groups.consumed} groups were consumed and {groups.dropped} dropped, wanted {wanted} and none")
    return wrong


def _calls_wrong(folder: Path, calls: Sequence[Call]) -> list[str]:
    """Each reply that a harness got is recorded once, with all its tokens, whichever engines they came from."""
    by_id: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_id[f"msg_{call.call_id}"].append(call)
    wrong, got = list[str](), Counter[str]()
    for file in sorted((folder / "run" / "workspaces").glob("*/*/replies.jsonl")):
        for told in map(json.loads, file.read_text().splitlines()):
            got[told["id"]] += 1
            found = by_id[told["id"]]
            if [(one.execution_id, str(one.status), one.output_tokens) for one in found] != [
                (file.parent.parent.name, "ok", told["tokens"])
            ]:
                wrong.append(f"reply {told['id']} of {told['tokens']} tokens is recorded as {found}")
    wrong += [f"reply {name} was given out {count} times" for name, count in got.items() if count > 1]
    for name, found in by_id.items():
        for call in found:
            if str(call.status) == "ok" and name not in got:
                wrong.append(f"reply {name} is recorded and no harness got it")
            if str(call.status) == "ok" and not _seamless(call):
                wrong.append(f"reply {name} has attempts {call.attempts} for {call.output_tokens} tokens")
    return wrong


def _seamless(call: Call) -> bool:
    ends = [0, *(attempt.end for attempt in call.attempts)]
    return [attempt.start for attempt in call.attempts] == ends[:-1] and ends[-1] == call.output_tokens


def _training_wrong(folder: Path, settings: FleetSettings) -> list[str]:
    """Each execution is in one step, each step is there once, and no file is damaged."""
    wrong = [f"{place}: {one}" for place in ("run", "out") for one in verify(folder / place).problems]
    steps = [step.step for step in trained.steps(folder / "out")]
    if steps != list(range(1, settings.steps + 1)):
        wrong.append(f"the trainer's steps are {steps}, wanted 1 to {settings.steps}, once each")
    of = defaultdict(set)
    for row in trained.ledger(folder / "out"):
        of[row.execution_id].add(row.step)
    wrong += [f"execution {name} is in steps {sorted(some)}" for name, some in of.items() if len(some) > 1]
    wanted = settings.steps * settings.batch_groups * settings.group_size
    if len(of) != wanted:
        wrong.append(f"{len(of)} executions were trained on, wanted {wanted}")
    return wrong
