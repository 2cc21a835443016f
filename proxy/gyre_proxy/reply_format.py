"""Which family a checkpoint's replies belong to, found out from its own chat template.

A template shows how the model writes its calls, because it writes them into the history that the model was trained on.
So it renders a probe conversation with calls, and the family whose parser reads those very calls back is the one. A
template that shows neither calls nor tools has replies without calls (`plain`). In every other case nothing is guessed.
"""

from __future__ import annotations

from gyre_data.errors import ConfigError

from .families import FAMILY_NAMES, family
from .message import Message, ToolCall
from .parse import parse_reply
from .template import RenderError, Template

__all__ = ["AUTO", "choose_family"]

AUTO = "auto"
_NAME = "gyre_probe"
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "Some text."},
                    "count": {"type": "integer", "description": "A number."},
                },
            },
        },
    },
)
_TEXT = "GyreProbeText"
_USER = Message(role="user", content="Go.")


def choose_family(name: str, template: Template) -> str:
    """The family `name`, or for `auto` the one that `template` writes; raises ConfigError when it writes none known."""
    if name != AUTO:
        return family(name).name
    rendered = _rendered_calls(template)
    for candidate in FAMILY_NAMES:
        for calls, text in rendered:
            got = parse_reply(text, "stop", candidate, tools=_TOOLS).tool_calls
            if got and got == calls[: len(got)]:
                return candidate
    shown = [text for _, text in rendered if _NAME in text]
    if rendered and not shown and not _shows_tools(template):
        return "plain"
    came = f"writes {shown[-1][:200]!r}" if shown else "shows no calls" if rendered else "refuses calls"
    raise ConfigError(
        f"wanted a chat template that writes tool calls in a known format, this one {came}; "
        f"name the format of the model's replies with --parser, one of {', '.join(FAMILY_NAMES)}"
    )


def _rendered_calls(template: Template) -> list[tuple[tuple[ToolCall, ...], str]]:
    """Probe calls, and the text that the template writes for the turn that makes them: two calls, then one."""
    found = []
    for num_calls in (2, 1):
        calls = tuple(
            ToolCall(name=_NAME, arguments={"text": f"{_TEXT}{i}", "count": i}, id=f"call_{i}")
            for i in range(num_calls)
        )
        turn = Message(role="assistant", tool_calls=calls)
        try:
            before = template.render([_USER], _TOOLS, False)
            text = template.render([_USER, turn], _TOOLS, False)
        except RenderError:
            continue
        found.append((tuple(ToolCall(name=c.name, arguments=c.arguments) for c in calls), text[_same(before, text) :]))
    return found


def _same(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shows_tools(template: Template) -> bool:
    """Whether the model is told of the tools that it may call."""
    try:
        return template.render([_USER], _TOOLS, True) != template.render([_USER], (), True)
    except RenderError:
        return True
