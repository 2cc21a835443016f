"""Reads JSON that other programs and models wrote, without changing a value on the way."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import orjson

from gyre_data.json_values import without_surrogates

__all__ = ["load_tolerant", "read_exact", "read_object"]


def read_object(text: str) -> dict[str, Any] | None:
    """The object that `text` holds, when every value survives a round trip unchanged; else None."""
    try:
        value = read_exact(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_exact(text: str) -> Any:
    """The JSON value that `text` holds; raises ValueError unless every value in it survives a round trip unchanged.

    Read twice: one reader turns integers beyond 64 bits into floats, the other accepts NaN and lone surrogates.
    """
    try:
        value = orjson.loads(text)
        # Arguments of a call come back six levels down in a body, and that body must be readable too.
        if json.loads(text) != value or _too_deep([[[[[[value]]]]]]):
            raise ValueError("a value that would not survive")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def load_tolerant(body: bytes) -> Any:
    r"""The value of a JSON body; raises ValueError for what is no JSON.

    A lone surrogate escape (`"\ud83d"`, which JavaScript clients send when they cut a text inside an emoji) becomes
    U+FFFD, since no tokenizer takes it.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(body, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)
            value = without_surrogates(value)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
    if _too_deep(value):
        raise ValueError("nested too deeply")
    return value


def _too_deep(value: Any) -> bool:
    """Whether `value` could not be written again: the writer takes 254 levels, and records put a few around it."""
    try:
        orjson.dumps([[[[[[[[value]]]]]]]])
    except orjson.JSONEncodeError:
        return True
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is beyond the range of numbers")
    return value


def _integer(text: str) -> int | float:
    """As the fast reader has it: a float beyond 64 bits."""
    value = int(text)
    return value if -(2**63) <= value < 2**64 else _finite(text)
