"""Replies as the families write them, and pieces to make broken ones of."""

from gyre_proxy.families import family

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Moves a crate.",
            "parameters": {
                "type": "object",
                "properties": {
                    "crate": {"type": "string", "description": "Which."},
                    "bay": {"type": "integer", "description": "Where to."},
                    "gently": {"type": "boolean", "description": "How."},
                    "weights": {"type": "array", "items": {"type": "number"}, "description": "Kilograms."},
                    "note": {"type": ["object", "null"], "description": "Anything."},
                },
            },
        },
    },
)

CALLS = {
    "hermes": '<tool_call>\n{"name": "move", "arguments": {"crate": "7", "bay": 1}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=move>\n<parameter=crate>\n7\n</parameter>\n"
        "<parameter=bay>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>move\n<arg_key>crate</arg_key>\n<arg_value>7</arg_value>\n"
        "<arg_key>bay</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    ),
    "deepseek": '<｜tool▁call▁begin｜>move<｜tool▁sep｜>{"crate": "7", "bay": 1}<｜tool▁call▁end｜>',
    "deepseek_dsml": (
        '<｜DSML｜invoke name="move">\n'
        '<｜DSML｜parameter name="crate" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="bay" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>'
    ),
    "kimi": '<|tool_call_begin|>functions.move:0<|tool_call_argument_begin|>{"crate": "7", "bay": 1}<|tool_call_end|>',
    "harmony": ('<|channel|>commentary to=functions.move <|constrain|>json<|message|>{"crate": "7", "bay": 1}<|call|>'),
}
"""The same call in each family that has calls."""


def pieces(name: str) -> list[str]:
    """Markers, halves of markers, calls, and what may stand between."""
    markers = sorted(family(name).markers)
    halves = [part for marker in markers for part in (marker[: len(marker) // 2], marker[1:])]
    extra = ["assistant", " to=functions.move", "final", "analysis", '{"crate": "7"}'] if name == "harmony" else []
    whole = [CALLS[name]] * 3 if name in CALLS else []
    return [*markers, *halves, *whole, *extra, " ", "\n\n", "<", "é🚚", "text"]
