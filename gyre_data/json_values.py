"""JSON values as every part of Gyre takes them, whoever wrote them: the recorder and the importers must agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["object_of", "parsed", "plain_numbers", "without_surrogates"]


def parsed(data: bytes | str | None) -> Any:
    """The value of a JSON text; None for no text, one that is no JSON, and one that is nested too deep to be read.

    For recorded texts: one that cannot be read must not keep the others from being read.
    """
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None


def object_of(data: bytes | str | None) -> dict[str, Any]:
    """As `parsed`, for texts that should hold an object: empty for anything else."""
    found = parsed(data)
    return found if isinstance(found, dict) else {}


def plain_numbers(value: Any) -> Any:
    """The value with integral floats as integers and keys as text, so that equal values are written alike."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    return value


def without_surrogates(value: Any) -> Any:
    """The value with pairs of surrogates joined and lone ones replaced: what UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value
