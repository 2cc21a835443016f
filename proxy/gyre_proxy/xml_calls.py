"""Calls whose arguments stand between tags as bare text: the tool's JSON schema says what is text and what is not.

The rule, one for all families: a value that the schema allows to be a string stays the text that was sampled, and so
does one of which the schema says nothing. Where only other types are allowed, the text is read as JSON (templates
print Python's True, False and None, so those count as true, false and null) and taken when its type is allowed; else
it stays text, for the tool to refuse. Where null is allowed, `null` is null. Nothing is rounded or cast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .json_text import read_exact
from .message import ToolCall

__all__ = ["Schemas", "read_dsml", "read_glm", "read_qwen3_coder", "schemas_of"]

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""

_NAME = r"[^\s<>\"'{}\[\]]+"
_QWEN_CALL = re.compile(rf"\s*<function=({_NAME})>(.*)</function>\s*", re.DOTALL)
# A value ends where another parameter or nothing follows, so that it may hold the closing tag itself.
_QWEN_VALUE = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)",
    re.DOTALL,
)
_GLM_CALL = re.compile(rf"\s*({_NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_VALUE = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)
_DSML_CALL = re.compile(r'([^"]+)">(.*)', re.DOTALL)
_DSML_VALUE = re.compile(
    r'\s*<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>\s*'
    r"(?=<｜DSML｜parameter|\Z)",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The argument schemas of `tools`, which are in the OpenAI function form."""
    functions = [tool.get("function") for tool in tools]
    found = [f for f in functions if isinstance(f, Mapping) and isinstance(f.get("parameters"), Mapping)]
    return {str(function.get("name")): function["parameters"] for function in found}


def read_qwen3_coder(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    r"""`<function=NAME>`, then `<parameter=KEY>\nVALUE\n</parameter>` each, then `</function>`."""
    match = _QWEN_CALL.fullmatch(body)
    return match and _call(match[1], _pairs(_QWEN_VALUE, match[2]), schemas)


def read_glm(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    """`NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` each."""
    match = _GLM_CALL.fullmatch(body)
    return match and _call(match[1], _pairs(_GLM_VALUE, match[2]), schemas)


def read_dsml(body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    """`NAME">`, then parameters that say themselves whether they are strings; the schema has no part in it."""
    match = _DSML_CALL.fullmatch(body)
    pairs = _pairs(_DSML_VALUE, match[2]) if match else None
    if match is None or pairs is None:
        return None
    arguments: dict[str, Any] = {}
    for key, is_string, text in pairs:
        try:
            arguments[key] = text if is_string == "true" else read_exact(text)
        except ValueError:
            return None
    return (ToolCall(name=match[1], arguments=arguments),)


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, ...]] | None:
    """The groups of each parameter; None unless parameters and blanks are all there is."""
    found: list[tuple[str, ...]] = []
    at = 0
    while text[at:].strip():
        match = pattern.match(text, at)
        if match is None:
            return None
        found.append(match.groups())
        at = match.end()
    return found


def _call(name: str, pairs: list[tuple[str, ...]] | None, schemas: Schemas) -> tuple[ToolCall, ...] | None:
    if pairs is None:
        return None
    root = schemas.get(name, {})
    properties = root.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    arguments = {key.strip(): _typed(text, _types(declared.get(key.strip()), root)) for key, text in pairs}
    return (ToolCall(name=name, arguments=arguments),)


def _typed(text: str, types: frozenset[str]) -> Any:
    """`text` as the value that the module's rule makes of it."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    try:
        value = read_exact(_PYTHON_WORDS.get(bare, bare))
    except ValueError:
        return text
    return value if types & _types_of(value) else text


def _types_of(value: Any) -> frozenset[str]:
    """The JSON schema types that `value` has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Every type that `schema` allows; empty when it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset().union(*(_types_of(value) for value in values))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(keyword), list):
            found = [_types(branch, root, depth + 1) for branch in branches]
            # A branch that does not say allows everything, so the whole does not say either.
            return frozenset().union(*found) if keyword == "allOf" or all(found) else frozenset()
    return frozenset()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target
