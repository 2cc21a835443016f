"""Reading requests of the API: bodies, fields, numbers of the query. A mistake is a ConfigError with what to do."""

from __future__ import annotations

import json
import math
import secrets
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request

from gyre_data.errors import ConfigError
from gyre_data.schema import ScoreStatus
from gyre_data.types import GroupEvent, Score

from .exchange import read_body
from .limits import Bounds

__all__ = ["body_of", "number_in", "said_of", "score_of", "text_in", "verdict_of"]

_BOUNDS = Bounds(body_bytes=4 << 20)


def score_of(execution_id: str, body: dict[str, Any]) -> Score:
    """The score that a body gives; raises ConfigError for one that cannot be recorded."""
    evaluator, status, value = text_in(body, "evaluator"), body.get("status", "scored"), body.get("value")
    known = [str(item) for item in ScoreStatus if item is not ScoreStatus.UNKNOWN_VALUE]
    if not evaluator or status not in known:
        raise ConfigError(f"wanted evaluator and status ({', '.join(known)}), got {evaluator!r} and {status!r}")
    if status == "scored" and (
        not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value)
    ):
        raise ConfigError(
            f"wanted a finite value for status scored, got {value!r}; send status failed when there is none"
        )
    detail, partial = body.get("detail"), body.get("partial")
    if not isinstance(partial, bool | None):
        raise ConfigError(f"wanted partial as true, false or null, got {partial!r:.80}")
    return Score(
        score_id=f"s_{secrets.token_hex(8)}",
        execution_id=execution_id,
        evaluator=evaluator,
        evaluator_version=text_in(body, "version"),
        config_digest=text_in(body, "config_digest"),
        status=ScoreStatus(status),
        value=float(value) if status == "scored" and value is not None else None,
        partial=partial,
        state_id=text_in(body, "state_id"),
        detail=detail if isinstance(detail, str) or detail is None else json.dumps(detail, sort_keys=True),
        at=datetime.now(UTC),
    )


def said_of(group: GroupEvent) -> tuple[object, ...]:
    """What makes two creations of a group the same."""
    return group.task_id, group.size, group.attributes


def verdict_of(score: Score) -> tuple[object, ...]:
    """What makes two scores the same."""
    return (
        score.evaluator_version,
        score.config_digest,
        score.status,
        score.value,
        score.partial,
        score.state_id,
        score.detail,
    )


async def body_of(request: Request) -> dict[str, Any]:
    """The request's JSON object; an empty body is one without fields."""
    raw = await read_body(request.receive, _BOUNDS)
    if raw is None:
        raise ConfigError("wanted a JSON object as body, got a connection that closed before it was whole")
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"wanted a JSON object as body, got {raw[:80]!r} ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"wanted a JSON object as body, got {type(value).__name__}")
    return value


def text_in(body: dict[str, Any], name: str) -> str | None:
    """A field that is text, None where it is left out or empty."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"wanted {name} as a string, got {value!r:.80}")
    return value or None


def number_in(request: Request, name: str, default: int) -> int:
    """A number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigError(f"wanted {name} as a number from 0, got {text!r}")
    return int(text)
