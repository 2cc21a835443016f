"""`gyre explain` as text: a run's verdicts by group, one execution, one call, one token. Red is what is not trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten

from rich.text import Text

from gyre_data.eligible import Reason
from gyre_data.explain import RULES, ExecutionExplained, GroupExplained, RunExplained, Verdict
from gyre_data.types import Score

from .layout import flow, hints, wrapped
from .numbers import DASH, amount, count, counted

__all__ = ["execution_lines", "labelled", "run_lines"]

_WRONG, _QUIET, _GOOD = "bold red", "dim", "green"
_LABEL = 11
_MOST_ROWS = 40
_NEVER_RL = (Reason.TEXT_ONLY, Reason.HOSTED, Reason.NO_LOGPROBS)
_AS_CHAT = (Reason.TEXT_ONLY, Reason.HOSTED)
_BY = {"rl": "", "sft": " by SFT"}
_LEVELS = (("executions", "executions"), ("calls", "calls"), ("trajectories", "trajectories"))


def labelled(label: str, parts: Sequence[str | Text], width: int) -> Iterator[Text]:
    """`label      part  part`, going on under its own text when the line is full."""
    head = Text.assemble((f"{label:<{_LABEL}}", "bold"))
    told = [Text(part) if isinstance(part, str) else part for part in parts]
    if told:
        told[0] = head + told[0]
    yield from flow(told or [head], width, indent=_LABEL)


def run_lines(found: RunExplained, *, shorts: dict[str, str], where: str, width: int = 80) -> Iterator[Text]:
    """Every execution with reward, advantage and tokens, or the reason why it is left out; group by group."""
    trained = [v for v in found.verdicts if v.trained]
    tokens, paths = sum(v.num_owned for v in trained), sum(v.num_trajectories for v in trained)
    would = "would" if found.note is None else "could"
    head = Text(
        f"{count(len(trained))} of {count(len(found.verdicts))} executions {would} be trained on{_BY[found.loss]}",
        style="bold" if trained else _WRONG,
    )
    cap = "no J_max" if found.j_max is None else f"J_max {found.j_max}"
    yield from flow([head, Text(f"{amount(tokens)} tok in {count(paths)} trajectories ({cap})")], width)
    if found.note is not None:
        yield from wrapped(Text(f"no reward chosen: {found.note}", style=_WRONG), width, indent=2)
    if not tokens and (why := _untrainable(found)):
        by = "RL" if found.loss == "rl" else "SFT"
        yield from wrapped(Text(f"{by} can train on no token of it: {why}", style=_WRONG), width, indent=2)
    groups = {group.group_id: group for group in found.groups}
    members: dict[str | None, list[Verdict]] = {}
    for verdict in found.verdicts:
        members.setdefault(verdict.group_id, []).append(verdict)
    room = _MOST_ROWS
    for group_id, verdicts in members.items():
        if room <= 0:
            break
        yield from flow(_group_head(group_id, groups.get(group_id or ""), verdicts), width)
        for verdict in verdicts[:room]:
            yield from _verdict_lines(verdict, shorts[verdict.execution_id], width)
        room -= len(verdicts)
    if room < 0:
        yield Text(f"... {count(-room)} executions more: --json has all", style=_QUIET)
    yield from _reasons(found.counts, width)
    left = next((v for v in found.verdicts if not v.trained), None) or next(iter(found.verdicts), None)
    if left is not None:
        yield Text(f"one of them: gyre explain {where} {shorts[left.execution_id]}", style=_QUIET)
    if any(found.counts["calls"].get(reason) for reason in _AS_CHAT):
        yield Text(_chat_hint(where), style=_QUIET)


def _chat_hint(where: str) -> str:
    return f"its text, for SFT: gyre export {where} -o chat.jsonl"


def _untrainable(found: RunExplained) -> str | None:
    """What no score and no other setting would mend: how the run was recorded."""
    named = [(found.counts["calls"].get(reason, 0), reason) for reason in _NEVER_RL]
    number, reason = max(named)
    return f"{RULES[reason]} ({counted(number, 'call')})" if number else None


def _group_head(group_id: str | None, group: GroupExplained | None, verdicts: Sequence[Verdict]) -> list[Text]:
    if group_id is None:
        return [Text("no group", style="bold yellow"), Text(counted(len(verdicts), "execution"))]
    told = [Text.assemble(("group ", "bold"), (group_id, "bold cyan"), f" {verdicts[0].task_id or ''}".rstrip())]
    return told + ([] if group is None else group_parts(group))


def group_parts(group: GroupExplained) -> list[Text]:
    """Mean, deviation and valid members of a group; the reason when it was dropped."""
    told = [
        Text(f"mean {_number(group.mean)}, deviation {_number(group.std)}"),
        Text(f"{group.num_valid} of {group.num_executions} executions count"),
    ]
    if group.reason is not None:
        told.append(Text(f"dropped, {group.reason}: {RULES.get(group.reason, '')}", style=_WRONG))
    elif group.std == 0:
        told.append(Text("equal scores: every advantage is 0", style="bold yellow"))
    return told


def _verdict_lines(v: Verdict, short: str, width: int) -> Iterator[Text]:
    line = Text.assemble("  ", (short, "cyan"), f" {'' if v.sample_index is None else f'#{v.sample_index}':<4}")
    line.append(f"{_number(v.reward):>5}{' partial' if v.partial else ''}")
    if v.trained:
        line.append("" if v.advantage is None else f"  A {_signed(v.advantage)}", style=_GOOD)
        line.append(f"  {amount(v.num_owned)} tok in {v.num_trajectories} trajectories")
    else:
        line.append(f"  {v.reason}", style=_WRONG)
        line.append(f": {v.detail or RULES.get(v.reason, '') if v.reason else ''}")
    yield from wrapped(line, width, indent=8)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return DASH if value is None else f"{value:+.2f}"


def _reasons(counts: dict[str, dict[str, int]], width: int) -> Iterator[Text]:
    for name, level in _LEVELS:
        if found := counts.get(level):
            told = ", ".join(f"{number} {reason}" for reason, number in sorted(found.items(), key=lambda x: -x[1]))
            yield from wrapped(Text(f"left out: {name}: {told}"), width, indent=2)


# --- one execution ----------------------------------------------------------------------------------------------------


def execution_lines(found: ExecutionExplained, *, short: str, where: str, width: int = 80) -> Iterator[Text]:
    """The verdict and what it rests on: reward, group, trajectories kept and left out, calls not trained."""
    v, info = found.verdict, found.info
    end = "running" if info.running else str(info.end_reason or "ended")
    head = Text.assemble((short, "bold cyan"), f" {info.task_id or DASH}")
    head.append(f" #{info.sample_index}" if info.sample_index is not None else "")
    yield from flow([head, Text(info.execution_id, style=_QUIET), Text(info.harness or DASH), Text(end)], width)
    yield from labelled("training", _answer(found), width)
    if found.loss == "rl":
        yield from labelled("reward", _reward(found), width)
    for row in found.scores:
        yield from labelled("score", _score(row, v), width)
    if found.group is not None:
        yield from labelled("group", [found.group.group_id, *group_parts(found.group)], width)
    if found.loss == "rl":
        yield from labelled("advantage", [_advantage(found)], width)
    yield from labelled("weight", weight_parts(found), width)
    if found.consumed == ():
        yield from labelled("consumed", ["by no step of this trainer"], width)
    for step in found.consumed or ():
        told = (
            f"step {step.step}, which made {step.version}: trajectory {step.trajectory}, {count(step.owned_tokens)} tok"
        )
        figures = (
            f"R {_number(step.reward)}, A {_signed(step.advantage)}, E {step.num_executions}, manifest {step.manifest}"
        )
        yield from labelled("consumed", [told, figures], width)
    yield from _trajectories(found, width)
    yield from _calls(found, width)
    target = f"{where} {short}"
    named = [t.leaf_call for t in found.trajectories] + [one.number for one in found.left_out]
    next_ = [f"one call: gyre explain {target}:c{named[0]}", f"as a tree: gyre tree {target}"] if named else []
    if any(one.reason in _AS_CHAT for one in found.left_out):
        next_.append(_chat_hint(where))
    yield from hints(next_, width)


def _answer(found: ExecutionExplained) -> list[Text]:
    v = found.verdict
    if v.trained:
        once = "" if found.note is None else ", once a reward is named"
        return [
            Text(f"yes{once}", style=_GOOD),
            Text(f"{amount(v.num_owned)} tok would be trained through {v.num_trajectories} trajectories"),
        ]
    rule = RULES.get(v.reason, "") if v.reason else ""
    never = Counter(one.reason for one in found.left_out if one.reason in _NEVER_RL)
    if never and found.loss == "rl" and not any(t.num_owned for t in found.trajectories):
        rule = f"nor would a verdict do: {RULES[never.most_common(1)[0][0]]}"
    return [Text("no", style=_WRONG), Text(f"admit.{v.reason}", style=_WRONG), Text(v.detail), Text(rule, style=_QUIET)]


def _reward(found: ExecutionExplained) -> list[Text]:
    v = found.verdict
    if found.note is not None:
        return [Text(f"not chosen: {found.note}", style=_WRONG)]
    if v.reward is None:
        return [Text(DASH), Text("no verdict that counts")]
    return [Text(f"R {v.reward:.4g}{' partial' if v.partial else ''}", style="bold"), Text(", ".join(v.score_ids))]


def _score(row: Score, v: Verdict) -> list[Text]:
    name = row.evaluator + (f"@{row.evaluator_version}" if row.evaluator_version else "")
    told = f"{row.value:.4g}{' partial' if row.partial else ''}" if row.value is not None else str(row.status)
    parts = [Text(f"{told} by {name}", style=_WRONG if row.status == "failed" else "")]
    if row.score_id in v.score_ids:
        parts.append(Text("counts", style=_GOOD))
    if row.detail:
        parts.append(Text(shorten(row.detail, 120, placeholder=" ..."), style=_QUIET))
    return [*parts, Text(row.score_id, style=_QUIET)]


def _advantage(found: ExecutionExplained) -> str:
    v, group = found.verdict, found.group
    if v.advantage is None or group is None or group.mean is None or group.std is None or v.reward is None:
        return DASH
    return f"A {v.advantage:+.4g} = ({v.reward:.4g} - {group.mean:.4g}) / ({group.std:.4g} + 1e-6)"


def weight_parts(found: ExecutionExplained) -> list[Text]:
    """The factors of a token's weight in the loss, with what the record does not tell named."""
    v = found.verdict
    if not v.trained:
        return [Text(DASH)]
    if found.loss == "sft":
        return [Text(f"1/E * 1/{v.num_owned}"), Text("(E: executions of its optimiser step)", style=_QUIET)]
    steps = sorted({step.num_executions for step in found.consumed or ()})
    cap = "min(e^(old - behaviour), 5)"
    if len(steps) == 1:
        value = 1 / steps[0] / v.num_owned
        known = f"1/{steps[0]} * 1/{v.num_owned} * {cap} = {value:.2g} while old = behaviour"
        return [Text(known), Text("(old: the trainer's own log-probs, in no file)", style=_QUIET)]
    told = f"1/E * 1/{v.num_owned} * {cap}"
    return [
        Text(told),
        Text("(E: executions of its optimiser step, told by --trainer; old: the trainer's)", style=_QUIET),
    ]


def _trajectories(found: ExecutionExplained, width: int) -> Iterator[Text]:
    trains = "trains" if found.verdict.trained else "would train"
    for t in found.trajectories:
        told = [
            Text(f"{t.role}, ends with c{t.leaf_call}"),
            Text(f"{amount(t.num_tokens)} tok, {amount(t.num_owned)} owned", style="" if t.num_owned else _QUIET),
        ]
        if t.reason is None:
            told.append(Text(f"{trains} {_spans(t.owned_calls)}"))
            rest = [n for n in t.calls if n not in t.owned_calls]
            told.append(Text(f"context only {_spans(rest)}" if rest else "", style=_QUIET))
        else:
            told.append(Text(f"left out, admit.{t.reason}: {t.detail}", style=_WRONG))
        label = f"path {t.index}" if t.index is not None else "path -"
        yield from labelled(label, [part for part in told if part.plain], width)


def _spans(numbers: Sequence[int]) -> str:
    return shorten(spans(numbers), 160, placeholder=" ...")


def spans(numbers: Sequence[int]) -> str:
    """1 2 3 7 -> c1-c3, c7."""
    told: list[list[int]] = []
    for n in sorted(numbers):
        if told and n == told[-1][-1] + 1:
            told[-1].append(n)
        else:
            told.append([n])
    return ", ".join(f"c{part[0]}" if len(part) == 1 else f"c{part[0]}-c{part[-1]}" for part in told) or DASH


def _calls(found: ExecutionExplained, width: int) -> Iterator[Text]:
    """Calls that are not trained: one by one when few, else a line for each reason."""
    by: dict[Reason, list[int]] = {}
    for one in found.left_out:
        by.setdefault(one.reason, []).append(one.number)
    details = Counter((one.reason, one.detail) for one in found.left_out)
    for reason, numbers in sorted(by.items(), key=lambda item: -len(item[1])):
        told = sorted({detail for (r, detail) in details if r == reason})
        parts = [Text(f"{counted(len(numbers), 'call')}: {shorten(spans(numbers), 60, placeholder=' ...')}")]
        parts += [Text(f"admit.{reason}", style=_WRONG), Text(RULES.get(reason, ""))]
        parts += [Text(f"({told[0]})", style=_QUIET)] if len(told) == 1 and told[0] else []
        yield from labelled("left out", parts, width)
