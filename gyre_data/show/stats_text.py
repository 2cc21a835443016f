"""`gyre stats` as text: a labelled line per question; what is wrong stands in red."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rich.text import Text

from gyre_data.branch_shapes import BranchShape
from gyre_data.counts import TreeCounts
from gyre_data.distributions import Distributions
from gyre_data.hosted import Hosted
from gyre_data.mismatch import Mismatch
from gyre_data.outages import Outage
from gyre_data.run_stats import EvaluatorCounts, Stats
from gyre_data.staleness import Staleness
from gyre_data.tools import ToolShares

from .forecast_text import forecast_lines
from .layout import flow
from .numbers import amount, count, dollars, duration, latency, plural, ratio, share

__all__ = ["LABEL", "labelled", "stats_lines"]

_WRONG = "bold red"
LABEL = 12
_OUTAGES = 3
"""Outages told of one evaluator; `--by evaluator` has them all."""
_TOOLS = 5
_FAULTS = 3


def stats_lines(found: Stats, *, where: str, width: int = 80) -> Iterator[Text]:
    """The lines of `gyre stats`; `where` names the run for the next command."""
    for label, parts in _sections(found, where):
        yield from labelled(label, parts, width)
    if found.forecast is not None:
        yield from forecast_lines(found.forecast, j_max=found.j_max, width=width)
    next_ = [f"next: gyre tree {where}", f"gyre stats {where} --json"]
    if found.forecast is None and found.trees.calls:
        next_.insert(1, f"gyre stats {where} --model Qwen/Qwen3-8B")
    yield from flow([Text(part, style="dim") for part in next_], width, indent=6)


def labelled(label: str, parts: Sequence[str | Text], width: int) -> Iterator[Text]:
    """Parts behind a label, on as many lines as they need."""
    texts = [Text(part) if isinstance(part, str) else part for part in parts]
    if not texts:
        return
    head = Text(f"{label:<{LABEL}}")
    yield from flow([head.append_text(texts[0]), *texts[1:]], width, indent=LABEL)


def _sections(found: Stats, where: str) -> Iterator[tuple[str, Sequence[str | Text]]]:
    trees = found.trees
    yield "executions", _executions(found)
    yield "faulty", [*_faulty(trees, where)]
    if found.end_reasons:
        yield "ended", [*_named(found.end_reasons, wrong=("crashed", "infra_fault"))]
    yield "nodes", _nodes(found)
    yield "tokens", _tokens(trees)
    yield "roles", _roles(trees)
    yield "authors", _shares(trees.author_tokens)
    yield "tools", _tools(found, where)
    yield "forks", _forks(trees)
    yield "branches", _branches(found.branch_shapes)
    if trees.changed_echoes:
        yield "echoes", ["turns that came back changed:", *_named(dict(trees.changed_echoes.most_common()))]
    yield "lengths", _lengths(found.distributions)
    yield "times", _times(found.distributions)
    for evaluator in found.evaluators:
        yield "evaluator", _evaluator(evaluator, [o for o in found.outages if o.evaluator == evaluator.evaluator])
    if found.hosted is not None:
        yield "hosted", _hosted(found.hosted)
    if trees.version_tokens:
        yield "versions", [f"{name} {amount(n)}" for name, n in sorted(trees.version_tokens.items())]
    if trees.sampled_tokens and found.hosted is None:
        yield "staleness", _staleness(found.staleness)
        yield "mismatch", _mismatch(found.mismatch)
    if trees.not_trained:
        yield "not trained", [*_named(dict(trees.not_trained.most_common())), "(calls)"]


def _named(found: Mapping[str, int], wrong: tuple[str, ...] = ()) -> Iterator[Text]:
    for name, number in found.items():
        yield Text(f"{name.replace('_', ' ')} {count(number)}", style=_WRONG if name in wrong else "")


def _shares(found: Mapping[str, int]) -> list[str | Text]:
    whole = sum(found.values())
    return [f"{name} {share(n, whole)}" for name, n in sorted(found.items(), key=lambda pair: -pair[1]) if n]


def _executions(found: Stats) -> list[str | Text]:
    told = Text(count(found.executions))
    order = ("scored", "evaluator_failed", "unscored", "running")
    states = [name for name in order if found.by_state.get(name)]
    for place, name in enumerate(states):
        told.append(": " if place == 0 else ", ")
        told.append(
            f"{count(found.by_state[name])} {name.replace('_', ' ')}",
            style=_WRONG if name == "evaluator_failed" else "",
        )
    trees = found.trees
    calls = Text(f"calls {count(trees.calls)}")
    pairs = (
        (trees.calls_failed, "failed"),
        (trees.calls_aborted, "aborted"),
        (trees.calls_undelivered, "undelivered"),
        (trees.calls_delivery_unknown, "delivery unknown"),
    )
    wrong = ", ".join(f"{count(number)} {what}" for number, what in pairs if number)
    if wrong:
        calls.append(" (").append(wrong, style=_WRONG).append(")")
    if trees.inconsistent:
        told.append(", ").append(f"{count(trees.inconsistent)} inconsistent: left out", style=_WRONG)
    groups = [f"in {plural(found.groups, 'group')}"] if found.groups else []
    return [told, *groups, calls, f"p50 {duration(found.duration_p50_s)}"]


def _faulty(trees: TreeCounts, where: str) -> Iterator[str | Text]:
    """The inconsistent executions by name."""
    for fault in trees.faults[:_FAULTS]:
        yield Text(fault.execution_id, style=_WRONG)
    if (more := trees.inconsistent - _FAULTS) > 0:
        yield f"and {count(more)} more (--json)"
    if trees.faults:
        yield f"why: gyre verify {where}"


def _nodes(found: Stats) -> list[str | Text]:
    trees = found.trees
    on_paths = trees.trajectory_message_nodes
    cap = "no J_max" if found.j_max is None else f"J_max {found.j_max}"
    return [
        f"{count(trees.message_nodes)} messages",
        *([] if on_paths == trees.message_nodes else [f"on trajectories {count(on_paths)}"]),
        f"{count(trees.occurrences)} if expanded ({plural(trees.repeats, 'repeat')}, {ratio(trees.sharing_messages)})",
        f"{count(trees.trajectories)} trajectories, {count(trees.trajectories_kept)} kept ({cap})",
    ]


def _tokens(trees: TreeCounts) -> list[str | Text]:
    local = ""
    if trees.counted_tokens:
        part = "" if trees.counted_tokens == trees.distinct_tokens else f"{amount(trees.counted_tokens)} by "
        local = f" ({part}local count)"
    parts: list[str | Text] = [f"distinct {amount(trees.distinct_tokens)}{local}"]
    if trees.trajectory_tokens != trees.distinct_tokens:
        parts.append(f"on trajectories {amount(trees.trajectory_tokens)}")
    return [
        *parts,
        f"expanded {amount(trees.expanded_tokens)}",
        f"sharing {ratio(trees.sharing)}",
        f"sampled {amount(trees.sampled_tokens)}",
        Text(f"trainable {amount(trees.trainable_tokens)}", style="" if trees.trainable_tokens else _WRONG),
        f"kept {amount(trees.kept_tokens)}",
    ]


def _roles(trees: TreeCounts) -> list[str | Text]:
    found = trees.role_tokens
    whole = sum(found.values())
    parts = {
        "main": found["main"],
        "sub_agent": found["sub_agent"],
        "summaries": found["main_summary"] + found["sub_agent_summary"],
        "side": found["side"],
    }
    unknown = whole - sum(parts.values())
    told: list[str | Text] = [f"{name} {share(part, whole)}" for name, part in parts.items() if part]
    if unknown:
        told.append(Text(f"unknown {share(unknown, whole)}  <- never trained; look: --by role", style=_WRONG))
    return told or ["-"]


def _tools(found: Stats, where: str) -> list[str | Text]:
    if found.tools is None:
        return [f"left out, {count(found.tool_messages)} messages to read:", f"gyre stats {where} --by tool"]
    return [*_tool_parts(found.tools)]


def _tool_parts(found: ToolShares) -> Iterator[str]:
    shown = found.tools[:_TOOLS]
    for tool in shown:
        yield f"{tool.tool} {share(tool.result_tokens, found.prompt_tokens)}"
    if more := len(found.tools) - len(shown):
        yield f"and {more} more"
    if shown:
        asked = sum(tool.argument_tokens for tool in found.tools)
        yield "of prompt tokens;"
        yield f"their calls ~{share(asked, found.sampled_tokens)} of sampled: --by tool"


def _forks(trees: TreeCounts) -> list[str | Text]:
    real: list[str | Text] = [f"{name} {count(number)}" for name, number in trees.forks.most_common()]
    rate = f" ({share(trees.false_forks, trees.turns)})" if trees.turns else ""
    lost = f", {amount(trees.false_fork_tokens)} tok lost: " if trees.false_forks else ""
    checks = ", ".join(f"{name} {count(number)}" for name, number in trees.false_fork_checks.most_common())
    false = Text(f"FALSE {count(trees.false_forks)} of {count(trees.turns)} turns{rate}{lost}{checks}")
    false.stylize(_WRONG if trees.false_forks else "green")
    return [*real, false]


def _branches(shapes: Sequence[BranchShape]) -> list[str | Text]:
    told: list[str | Text] = []
    for shape in shapes:
        above, below, calls = (d["p50"] for d in (shape.shared_tokens, shape.branch_tokens, shape.branch_calls))
        if above is not None and below is not None and calls is not None:
            told.append(
                f"{shape.reason} after {amount(round(above))}: {amount(round(below))} in {plural(round(calls), 'call')}"
            )
    return [*told, "(median tokens)"] if told else []


def _lengths(found: Distributions) -> list[str | Text]:
    pairs = (("trajectory", found.trajectory_tokens), ("prompt", found.call_prompt_tokens))
    told: list[str | Text] = []
    for name, one in (*pairs, ("reply", found.call_output_tokens)):
        middle, high, top = (None if value is None else round(value) for value in (one["p50"], one["p95"], one.maximum))
        if one.count:
            told.append(f"{name} p50 {amount(middle)} p95 {amount(high)} max {amount(top)}")
    return told


def _times(found: Distributions) -> list[str | Text]:
    told: list[str | Text] = []
    pairs = (("execution", found.execution_s), ("call", found.call_s), ("first token", found.call_first_token_s))
    for name, one in pairs:
        if one.count:
            told.append(f"{name} p50 {latency(one['p50'])} p95 {latency(one['p95'])} max {latency(one.maximum)}")
        elif one.unknown and name != "execution":
            told.append(f"{name} unknown")
    return told


def _evaluator(found: EvaluatorCounts, outages: Sequence[Outage]) -> list[str | Text]:
    parts: list[str | Text] = [found.evaluator, f"scored {count(found.scored)}"]
    if found.mean is not None and found.minimum is not None and found.maximum is not None:
        parts.append(f"mean {found.mean:.2f} ({found.minimum:.2f} to {found.maximum:.2f})")
    if found.partial:
        parts.append(f"partial {count(found.partial)}")
    if found.skipped:
        parts.append(f"skipped {count(found.skipped)}")
    worst = sorted(outages, key=lambda outage: (-outage.excluded, -outage.failures))[:_OUTAGES]
    parts += [outage_text(outage) for outage in worst]
    if more := len(outages) - len(worst):
        failures = sum(outage.failures for outage in outages) - sum(outage.failures for outage in worst)
        parts.append(Text(f"and {count(failures)} failures in {more} more windows: --by evaluator", style=_WRONG))
    return parts


def outage_text(outage: Outage) -> Text:
    """One window of failures, and what it left out."""
    when = _window(outage.first_failed_at, outage.last_failed_at)
    recovered = len(outage.executions) - outage.excluded
    again = f", {count(recovered)} judged again since" if recovered else ""
    kept_out = f"{count(outage.excluded)} excluded, not counted as zero" if outage.excluded else "none excluded"
    return Text(f"failed {when} UTC: {kept_out}{again}", style=_WRONG if outage.excluded else "")


def _window(first: datetime, last: datetime) -> str:
    day, begin, end = f"{first:%m-%d}", f"{first:%H:%M}", f"{last:%H:%M}"
    if first.date() != last.date():
        return f"{day} {begin} to {last:%m-%d} {end}"
    return f"{day} {begin}" if begin == end else f"{day} {begin}-{end}"


def _hosted(found: Hosted) -> list[str | Text]:
    used = found.usage
    parts: list[str | Text] = [f"in {amount(used.input)}", f"cache read {amount(used.cache_read)}"]
    parts += [f"write {amount(used.cache_write + used.cache_write_1h)}", f"out {amount(used.output)}"]
    if found.cost is not None:
        parts.append(f"~ {dollars(found.cost)} list price ({found.prices_day})")
    if found.unpriced:
        names = ", ".join(f"{name} {count(number)}" for name, number in found.unpriced.most_common(3))
        parts.append(Text(f"no price for {names} (calls): give --prices FILE", style=_WRONG))
    if found.unknown_usage:
        parts.append(f"usage unknown {count(found.unknown_usage)} of {count(found.calls)} calls")
    return parts


def _staleness(found: Staleness) -> list[str | Text]:
    against = "when consumed" if found.basis == "consumed" else f"against {found.newest or 'the newest of each run'}"
    if found.basis == "consumed" and not (found.groups or found.executions_unknown or found.tokens):
        return ["none of these executions was consumed by this training run"]
    if found.group_mean is None and found.token_mean is None:
        return ["unknown: no version was recorded that could be compared"]
    parts: list[str | Text] = [against]
    if found.group_mean is not None:
        parts.append(f"by group mean {found.group_mean:.2f} max {found.group_max:.0f}")
    if found.token_mean is not None:
        parts.append(f"by token mean {found.token_mean:.2f} max {found.token_max}")
    missing = [plural(found.executions_unknown, "execution")] if found.executions_unknown else []
    missing += [f"{amount(found.tokens_unknown)} tok"] if found.tokens_unknown else []
    if missing:
        parts.append(f"unknown for {', '.join(missing)}")
    return parts


def _mismatch(found: Mismatch) -> list[str | Text]:
    parts: list[str | Text] = []
    if found.mean is not None and found.maximum is not None:
        parts.append(f"|dlogp| mean {found.mean:.2g} max {found.maximum:.2g} over {plural(found.steps, 'step')}")
    for gap in found.teachers:
        of = "" if gap.same_version else " (another model)"
        parts.append(f"{gap.teacher}{of} |dlogp| mean {gap.mean:.2g} p99 {gap.p99:.2g} max {gap.maximum:.2g}")
    return parts or ["unknown: nobody recomputed the log-probs; give --trainer DIR"]
