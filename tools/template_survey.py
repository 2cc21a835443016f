"""What public chat templates accept of exact extension: measured with the product's own code, as docs/templates.md.

Usage: template_survey.py FOLDER [PAGE] writes the page (default docs/templates.md) for the templates in FOLDER
(tools/tokenizers/install.sh fetches them). Texts are the templates' own; the tokenizer is a toy that knows each
template's control tokens, since acceptance depends on texts alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_data.errors import ConfigError
from gyre_data.schema import Extension
from gyre_data.types import Ints
from gyre_proxy.borders import marker_for
from gyre_proxy.history import History, PromptPlan
from gyre_proxy.late_system import Placer, SystemForm, system_form
from gyre_proxy.locality import Locality
from gyre_proxy.message import Message, Reply, Request, Text, ToolCall
from gyre_proxy.reply_format import choose_family
from gyre_proxy.roles import AgentLabel
from gyre_proxy.template import ChatTemplate, RenderError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPECIAL = {"bos_token": "<|toy_bos|>", "eos_token": "<|toy_eos|>", "pad_token": "<|toy_pad|>"}
CONTROL = re.compile(r"\s*(<[^<>\s]{1,48}>|\[[^\[\]\s]{1,24}[\[\]]|\][^\s\[\]]{1,8}\[)")
PROBE = "GyreSurveyProbe"
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "stat_bay",
            "description": "How full a bay is.",
            "parameters": {
                "type": "object",
                "properties": {"bay": {"type": "integer", "description": "Which bay."}},
                "required": ["bay"],
            },
        },
    },
)
CASES = ("user turn", "one result", "two results", "late system")


def user(text: str = "Go on.") -> Message:
    return Message(role="user", content=text)


def call(i: int) -> ToolCall:
    return ToolCall(name="stat_bay", arguments={"bay": i}, id=f"call_{i:020x}")


def result(i: int) -> Message:
    return Message(role="tool", content=f"bay {i} is full", tool_call_id=call(i).id, name="stat_bay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A sampled turn, and the messages that come after it."""

    turn: Message
    new: tuple[Message, ...]


def cases() -> dict[str, Case]:
    plain = Message(role="assistant", content="It is full.")
    one = Message(role="assistant", content="", tool_calls=(call(1),))
    two = Message(role="assistant", content="", tool_calls=(call(1), call(2)))
    new = (
        (plain, (user(),)),
        (one, (result(1),)),
        (two, (result(1), result(2))),
        (plain, (Message(role="system", content="Be brief."), user())),
    )
    return {name: Case(turn=turn, new=more) for name, (turn, more) in zip(CASES, new, strict=True)}


def toy_tokenizer(special: Sequence[str]) -> Tokenizer:
    """One token per byte, and `special`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def load(path: Path, special: Sequence[str] = ()) -> ChatTemplate:
    source = path.read_text(encoding="utf-8")
    return ChatTemplate(
        toy_tokenizer([*SPECIAL.values(), "<think>", "</think>", *special]),
        {"default": source},
        special_tokens=SPECIAL,
        kwargs={},
        now=NOW,
        stop_tokens=list(special),
        digest="toy",
    )


def ends_of(template: ChatTemplate) -> dict[str, str]:
    """The control token that a policy samples at the end of the turn of each case, as far as the template tells.

    After text it is the first that the template writes when the turn is the last; where that is none (GLM), the opener
    of what comes next. After a call, one that may end text, else the last of the call's format. Cases that the template
    refuses, or whose turn it does not show, are left out.
    """
    found = {}
    plain = controls(_after(template, cases()["user turn"], ()))
    for name, case in cases().items():
        tail, after = _after(template, case, ()), _after(template, case, case.new)
        if tail is None or after is None:
            continue
        follows = CONTROL.match(after[len(tail.rstrip()) :])
        if not case.turn.tool_calls:
            tokens = plain or controls(after)
        elif follows and not plain:
            tokens = [follows[1]]
        else:
            tokens = [token for token in controls(tail) if token in plain] or controls(tail)[-1:]
        if tokens:
            found[name] = tokens[0]
    return found


def controls(text: str | None) -> list[str]:
    """Control tokens in `text`, in order."""
    return [match[1] for match in CONTROL.finditer(text or "")]


def _after(template: ChatTemplate, case: Case, new: Sequence[Message]) -> str | None:
    """What the template writes after the case's turn."""
    marker = marker_for("")
    try:
        text = template.render([user("Hello."), marker.mark_end(case.turn, 1), *new], TOOLS, bool(new))
    except RenderError:
        return None
    cut = marker.end_of(text, 1)
    return None if cut is None else text[cut[1] :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one template does."""

    name: str
    family: str
    outcomes: dict[str, str] = field(default_factory=dict)
    """`yes`, the check that failed, or `refused`, by case."""
    in_place: str = ""
    """The same of a late system message that is given to the template as it is."""
    form: str = ""
    thinking: str = ""
    local: bool = False


def survey(path: Path) -> Row:
    """What the template in `path` accepts."""
    ends = ends_of(load(path))
    template = load(path, sorted(set(ends.values())))
    text_end = ends.get("user turn")
    outcomes = {
        name: outcome(template, case, ends.get(name, None if case.turn.tool_calls else text_end))
        for name, case in cases().items()
    }
    if set(outcomes.values()) == {"refused"}:
        return Row(name=path.stem, family="-", outcomes=outcomes, in_place="refused", form="-", thinking="-")
    late = cases()["late system"]
    try:
        family = choose_family("auto", template)
    except ConfigError:
        family = "-"
    return Row(
        name=path.stem,
        family=family,
        outcomes=outcomes,
        in_place=outcome(template, late, ends.get("late system", text_end), SystemForm.IN_PLACE),
        form=system_form(template).replace("_", " "),
        thinking=thinking(template),
        local=Locality(template).proved,
    )


def outcome(template: ChatTemplate, case: Case, end: str | None, form: SystemForm | None = None) -> str:
    """`yes` when the new messages extend the sampled turn, else why not."""
    history = History(template, execution_id="e", late_system=form)
    asked = Request(wire="openai_chat", model="m", messages=(user("Hello."),), tools=TOOLS)
    echo = replace(case.turn, node_hint="n_" + "0" * 20)
    try:
        plan = history.plan(asked, AgentLabel())
        history.reserve(plan)
        ids = template.encode("sampled" + (end or "")).ids
        commit(history, plan, case.turn, ids, "stop" if end else "length")
        told = history.plan(replace(asked, messages=(user("Hello."), echo, *case.new)), AgentLabel())
    except RenderError:
        return "refused"
    if told.extension not in (Extension.BRIDGE, Extension.REPAIR):
        return (told.fork_check or "?")[:2]
    chat = Placer(form or system_form(template))((user("Hello."), echo, *case.new))
    whole = template.render(chat, TOOLS, True)
    suffix = template.decode(told.prompt_ids[len(plan.prompt_ids) + len(ids) :])
    assert whole.endswith(suffix), f"a wrong suffix: {suffix!r} is not what the whole conversation ends with"
    return "yes"


def commit(history: History, plan: PromptPlan, turn: Message, ids: Ints, finish: str) -> None:
    words = (Text(text=turn.content),) if turn.content else ()
    history.commit(
        plan,
        call_id="c",
        output_node_id="n_" + "0" * 20,
        output_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=(),
        reply=Reply(events=(*words, *turn.tool_calls), finish=finish),
    )


def thinking(template: ChatTemplate) -> str:
    """What becomes of reasoning: kept for ever, stripped at the next user message, or never written."""
    thought = Message(role="assistant", content="It is full.", reasoning=PROBE)
    calling = Message(role="assistant", reasoning=PROBE, tool_calls=(call(1),))

    def shows(*messages: Message, more: bool = True) -> bool:
        try:
            return PROBE in template.render([user("Hello."), *messages], TOOLS, more)
        except RenderError:
            return False

    if not shows(thought, more=False) and not shows(calling, result(1)):
        return "not written"
    return "kept" if shows(thought, user()) else "stripped"


COLUMNS = ("replies", "user turn", "one result", "two results", "late system", "thinking", "local")


def line(row: Row) -> str:
    """The row of the page's table."""
    late = row.outcomes["late system"] if row.outcomes["late system"] != "yes" else row.form
    accepted = [row.outcomes[name] for name in CASES[:3]]
    cells = [row.name, row.family, *accepted, late, row.thinking, "yes" if row.local else "no"]
    return "| " + " | ".join(cells) + " |"


def page(folder: Path) -> str:
    """docs/templates.md for the templates in `folder`."""
    rows = [survey(path) for path in sorted(folder.glob("*.jinja"), key=lambda path: path.stem.lower())]
    lines = ["| template | " + " | ".join(COLUMNS) + " |", "|" + " --- |" * (1 + len(COLUMNS)), *map(line, rows)]
    counts = ["| case | extended | refused by the template | forks |", "| --- | --- | --- | --- |"]
    told = {name: [row.outcomes[name] for row in rows] for name in CASES}
    for name, found in {**told, "late system, as it is": [row.in_place for row in rows]}.items():
        forks = Counter(one for one in found if one not in ("yes", "refused"))
        why = ", ".join(f"{number} {check}" for check, number in sorted(forks.items())) or "0"
        counts.append(f"| {name} | {found.count('yes')} | {found.count('refused')} | {why} |")
    facts = {
        "rows": len(rows),
        "known": sum(row.family != "-" for row in rows),
        "stripped": sum(row.thinking == "stripped" for row in rows),
        "kept": sum(row.thinking == "kept" for row in rows),
        "local": sum(row.local for row in rows),
    }
    return PAGE.format(counts="\n".join(counts), table="\n".join(lines), **facts)


PAGE = """# Chat templates

What {rows} public chat templates (those that llama.cpp keeps, MIT, out of the source of the PyPI package
llama-cpp-python 0.3.36) accept of exact extension. Written by `tools/template_survey.py` with the proxy's own code; a
test compares. Each case samples one turn and then sends it back with new messages; "extended" means that the next
prompt is the sampled tokens as they were and the new messages after them, as the template writes them after that turn.

{counts}

A fork is never wrong, only longer: the request is rendered as a whole, and the record says which check failed. The
checks that fail here: **V3**, the template does not write the turn, or not the call that ends it, so nothing can be put
after it (it writes no calls, or only the first of several); **V4**, it closes the turn otherwise than the policy does
(gpt-oss samples `<|return|>` where the template writes `<|end|>`; RWKV has no closing token); **V5**, it leaves a new
message out, or writes it before the turn. A refusal comes from the template's own code (roles that must alternate, one
call at a time, values that it changes in place, which the sandbox does not allow); it is an error of the request.

- **replies** is the format that `--parser auto` finds ({known} of {rows}), [replies.md](replies.md). `-`: name one.
- **late system**: how a system message after the first turn is rendered. Where the template refuses it, drops it or
  moves it to the front (the row "as it is"), it goes as user text in its place, and extends.
- **thinking**: what the template does with the reasoning of a turn when a user message follows. {kept} keep it,
  {stripped} strip it: with `--thinking keep` it stays as it was sampled, with `--thinking fork` the turn is left behind
  and the template followed. Inside a tool loop the two agree. Options (`enable_thinking`, ...) stand at their defaults.
- **local** ({local} of {rows}): what follows a turn depends on that turn, the tools and the new messages only, so that
  the cost of a turn does not grow with the conversation. Found out by trial when the proxy starts, checked as it runs.

These templates render byte for byte as transformers renders them, `{{% generation %}}` included. Ids of tool calls are
made what a template takes: nine letters and digits for Mistral's, `functions.NAME:0` for Kimi's. Qwen3 and SmolLM2 are
tested with their own tokenizers, Qwen3 against `renderers` as well.

{table}
"""


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: template_survey.py FOLDER [PAGE], got {len(sys.argv) - 1} arguments")
    target = Path(sys.argv[2] if len(sys.argv) == 3 else Path(__file__).resolve().parents[1] / "docs" / "templates.md")
    target.write_text(page(Path(sys.argv[1])), encoding="utf-8")


if __name__ == "__main__":
    main()
