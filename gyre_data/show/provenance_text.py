"""`gyre explain EXECUTION:CALL[:TOKEN]` as text: where a call or token comes from and what training makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from rich.text import Text

from gyre_data.decode import Decode
from gyre_data.explain import RULES, ExecutionExplained
from gyre_data.provenance import CallExplained, TokenExplained
from gyre_data.schema import CallStatus
from gyre_data.texts import parts_of
from gyre_data.types import Call, EnvironmentState

from .explain_text import group_parts, labelled, weight_parts
from .layout import flow, hints
from .numbers import DASH, amount, count, duration

__all__ = ["call_lines", "token_lines"]

_WRONG, _QUIET, _GOOD = "bold red", "dim", "green"


def call_lines(
    call: CallExplained, of: ExecutionExplained, *, short: str, where: str, width: int = 80
) -> Iterator[Text]:
    """A call in full: who asked, what was asked and used, what came back, and what training makes of it."""
    row = call.call
    head = Text.assemble((f"{short}:c{call.number}", "bold cyan"), f" {row.call_id}")
    agent = f"{row.agent_role}" + (f" {row.agent_id}" if row.agent_id else "") + f" (known by {row.role_source})"
    yield from flow([head, Text(agent), Text(f"group {of.verdict.group_id or DASH}")], width)
    yield from labelled("protocol", _protocol(row), width)
    yield from labelled("request", _request(call), width)
    yield from labelled("sampling", _sampling(call), width)
    yield from labelled("context", _context(call), width)
    yield from labelled("answer", _answer(call), width)
    for attempt in row.attempts:
        told = f"{attempt.engine}: tokens {attempt.start} to {attempt.end}"
        more = [Text(attempt.error, style=_WRONG)] if attempt.error else []
        yield from labelled("engine", [told, *more], width)
    yield from labelled("weights", [", ".join(f"{v} for {a} to {b}" for v, a, b in call.versions) or DASH], width)
    yield from labelled("time", _times(row), width)
    for note in row.note or ():
        yield from labelled("note", [note], width)
    yield from _training(call, of, width)
    target = f"{where} {short}:c{call.number}"
    next_ = [
        f"request: gyre explain {target} --request",
        f"token: gyre explain {target}:0",
        f"read: gyre tree {target}",
    ]
    yield from hints(next_, width)


def token_lines(
    token: TokenExplained,
    call: CallExplained,
    of: ExecutionExplained,
    *,
    short: str,
    where: str,
    width: int = 80,
    decode: Decode | None = None,
) -> Iterator[Text]:
    """A sampled token: its id and text, the policy that sampled it, its owner, and the factors of its weight."""
    row = call.call
    text = "" if decode is None else f' "{decode([token.token_id])}"'.replace("\n", "\\n")
    head = Text.assemble(f"token {token.index} of {token.num_tokens}  id {token.token_id}", (text, "bold"))
    yield from flow(
        [head, Text(f"{row.agent_role}, call {short}:c{call.number}, group {of.verdict.group_id or DASH}")], width
    )
    logprob = DASH if token.logprob is None else f"{token.logprob:.3g}"
    settings = [f"policy {token.version or DASH}", f"engine {token.engine or DASH}", f"T {_or_dash(row.temperature)}"]
    yield from labelled("sampled", [", ".join([*settings, f"logp {logprob}"])], width)
    if decode is not None:
        pieces = ((token.ids_before, _QUIET), ((token.token_id,), "bold reverse"), (token.ids_after, _QUIET))
        around = Text.assemble(*((decode(ids).replace("\n", "\\n"), style) for ids, style in pieces))
        yield from labelled("around", [around], width)
    if token.alternatives:
        told = [
            f"{id_}{'' if decode is None else repr(decode([id_]))} {value:.3f}" for id_, value in token.alternatives
        ]
        yield from labelled("instead", told, width)
    told_context = f"position {count(token.position)}"
    yield from labelled("context", [told_context, *_context(call)], width)
    yield from _training(call, of, width)
    yield Text(f"the call: gyre explain {where} {short}:c{call.number}", style=_QUIET)


def _or_dash(value: object) -> str:
    return DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _protocol(row: Call) -> list[str]:
    told = [row.wire, row.client or "client unknown", row.request_path or "path unknown"]
    if row.upstream:
        told.append(f"passed to {row.upstream}")
        told += [f"model {row.served_model}"] if row.served_model else []
        told += [f"HTTP {row.http_status}"] if row.http_status else []
        told += [f"request id {row.provider_request_id}"] if row.provider_request_id else []
    return told


def _request(call: CallExplained) -> list[str]:
    size = "not kept" if call.request_bytes is None else f"{count(call.request_bytes)} bytes, exactly as received"
    tools = "no tools" if call.call.tools_digest is None else f"tools {call.call.tools_digest[:12]}"
    return [size, tools]


def _sampling(call: CallExplained) -> list[Text]:
    row = call.call
    used = f"T {_or_dash(row.temperature)}, top_p {_or_dash(row.top_p)}, top_k {_or_dash(row.top_k)}"
    told = [Text(f"used {used}, max_tokens {_or_dash(row.max_tokens)}, seed {_or_dash(row.seed)}")]
    told.append(Text(f"asked {row.sampling_asked or DASH}", style=_QUIET))
    changed = ", ".join(f"{name} {one} > {two}" for name, (one, two) in call.overridden.items())
    return [*told, Text(f"replaced by the run: {changed}", style="bold yellow")] if changed else told


def _context(call: CallExplained) -> list[Text]:
    row = call.call
    whole = call.tokens_reused + call.tokens_new
    told = [
        Text(f"{count(whole)} tok: {count(call.tokens_reused)} reused exactly, {count(call.tokens_new)} rendered new")
    ]
    if row.cached_tokens is not None:
        told.append(Text(f"{count(row.cached_tokens)} from the engine's cache"))
    how = ", ".join(dict.fromkeys(str(told) for told in (row.extension, row.branch_reason) if told is not None))
    told.append(Text(how, style=_WRONG if row.fork_check else ""))
    if row.fork_check:
        told.append(Text(f"FALSE fork: {row.fork_check}", style=_WRONG))
    if row.echo_difference:
        told.append(Text(f"a turn of ours came back with another {row.echo_difference}", style="bold yellow"))
    return told


def _answer(call: CallExplained) -> list[Text]:
    row = call.call
    bad = row.status != CallStatus.OK
    told = [Text(f"{amount(row.output_tokens)} tok, {row.status}", style=_WRONG if bad else "")]
    told.append(Text(f"finish {row.finish_reason or DASH}, told {row.stop_reason or DASH}"))
    told += [Text(row.error, style=_WRONG)] if row.error else []
    state = call.delivery or "delivery unknown"
    told.append(Text(str(state), style="" if state == "delivered" else _WRONG))
    text = " ".join(text for _, text in parts_of(call.reply)) if call.reply is not None else ""
    return [*told, Text(shorten(text, 100, placeholder=" ..."), style=_QUIET)] if text else told


def _times(row: Call) -> list[str]:
    told = [f"from {row.started_at:%Y-%m-%d %H:%M:%S} UTC"]
    if row.first_token_at is not None:
        told.append(f"first token after {(row.first_token_at - row.started_at).total_seconds():.2f} s")
    if row.ended_at is not None:
        told.append(f"took {duration((row.ended_at - row.started_at).total_seconds())}")
    return told


def _training(call: CallExplained, of: ExecutionExplained, width: int) -> Iterator[Text]:
    own = call.ownership
    if own.owner is None:
        rule = RULES.get(own.reason, "") if own.reason else ""
        parts = [Text("none: not trained", style=_WRONG), Text(f"rule {own.rule}", style=_WRONG), Text(rule)]
        yield from labelled("owner", [*parts, *([Text(f"({own.told})", style=_QUIET)] if own.told else [])], width)
    else:
        also = f" (also in {', '.join(map(str, own.also_in))})" if own.also_in else ""
        yield from labelled("owner", [f"trajectory {own.owner}{also}", own.told, f"rule {own.rule}"], width)
    yield from labelled("state", _states(call), width)
    v = of.verdict
    reward = DASH if v.reward is None else f"{v.reward:.4g}{' partial' if v.partial else ''}"
    yield from labelled("score", [Text(reward), *(group_parts(of.group) if of.group else [])], width)
    if not v.trained:
        told = f"the execution is not trained, admit.{v.reason}: {v.detail}"
        yield from labelled("advantage", [Text(told, style=_WRONG)], width)
    else:
        yield from labelled("advantage", [DASH if v.advantage is None else f"{v.advantage:+.4g}"], width)
        yield from labelled("weight", weight_parts(of) if own.owner is not None else ["0: no loss on it"], width)
    for step in of.consumed or ():
        if step.trajectory == own.owner:
            yield from labelled("consumed", [f"step {step.step}, which made {step.version}"], width)


def _states(call: CallExplained) -> list[str]:
    def told(state: EnvironmentState | None) -> str:
        return DASH if state is None else f"{state.kind} {state.digest[:12]}"

    return [f"{told(call.state_before)} before the call", f"{told(call.state_judged)} judged"]
