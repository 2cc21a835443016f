"""The proxy's HTTP API as an OpenAPI 3.1 document: declared here once, for `GET /api/openapi.json` and docs/api.md.

A test holds the table to the routes that are served, and every answer of a run of the API to its schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre_data.schema import EndReason, ScoreStatus

__all__ = ["OPERATIONS", "Operation", "document"]

_TEXT, _NUMBER, _WHOLE, _FLAG = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
_OBJECT: Mapping[str, Any] = {"type": "object"}
_ANY: Mapping[str, Any] = {}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _enum(kind: type[EndReason] | type[ScoreStatus]) -> dict[str, Any]:
    return {**_TEXT, "enum": [str(one) for one in kind if one is not kind.UNKNOWN_VALUE]}


def _list(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(item)}


def _record(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_EXECUTION = _record(
    id=_TEXT, group=_or_null(_TEXT), task=_or_null(_TEXT), sample_index=_or_null(_WHOLE), harness=_or_null(_TEXT),
    launcher=_OBJECT, attributes=_ANY, state={**_TEXT, "enum": ["queued", "claimed", "running", "ended"]},
    end_reason=_or_null(_TEXT), dispatched_at=_or_null(_NUMBER), calls=_WHOLE, in_flight=_WHOLE, scored=_FLAG,
)  # fmt: skip
_MADE = _record(id=_TEXT, base_url=_TEXT, key=_TEXT)
_GROUP = _record(id=_TEXT, task=_or_null(_TEXT), size=_or_null(_WHOLE), attributes=_ANY)
_ENGINE = {
    "type": "object",
    "properties": {"url": _TEXT, "state": _TEXT, "version": _TEXT},
    "required": ["url", "state", "version"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One endpoint. `body` and `query` are optional fields unless they are in `required`."""

    method: str
    path: str
    summary: str
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Mapping[str, Any]] | None = None
    required: tuple[str, ...] = ()
    answer: Mapping[str, Any] | None = None
    """Schema of the JSON that comes back; None: it is no JSON."""
    media: str = "application/json"


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST", path="/api/groups",
        summary="Create a group, or change what is given of one; size 0 gives it up, a smaller size shrinks it.",
        body={"id": _TEXT, "task": _TEXT, "size": {**_WHOLE, "minimum": 0}, "attributes": _ANY},
        answer=_record(id=_TEXT),
    ),
    Operation(
        method="GET", path="/api/groups", summary="Every group that was created as one.",
        answer=_record(groups=_list(_GROUP)),
    ),
    Operation(
        method="POST", path="/api/executions",
        summary="Create an execution, or find it again by id or by group and sample_index; each answer has a new key. "
        "It is queued for a launcher unless queue is false: then the creator runs it.",
        body={
            "id": _TEXT, "task": _TEXT, "group": _TEXT, "sample_index": {**_WHOLE, "minimum": 0}, "harness": _TEXT,
            "attributes": _ANY, "launcher": _OBJECT, "command": _list(_TEXT), "queue": _FLAG,
        },
        answer=_MADE,
    ),
    Operation(
        method="GET", path="/api/executions", summary="Executions, of one group or in one state only where given.",
        query={"group": _TEXT, "state": _TEXT}, answer=_record(executions=_list(_EXECUTION)),
    ),
    Operation(
        method="POST", path="/api/executions/claim",
        summary="Take queued executions, the oldest first: whoever claims one runs it.",
        body={"limit": {**_WHOLE, "minimum": 0}, "group": _TEXT, "tasks": _list(_TEXT)},
        answer=_record(executions=_list({"allOf": [_EXECUTION, _MADE]})),
    ),
    Operation(
        method="GET", path="/api/executions/{id}", summary="The execution as it stands.", answer=_EXECUTION,
    ),
    Operation(
        method="POST", path="/api/executions/{id}/end", summary="Say that it ended; only the first end counts.",
        body={"reason": _enum(EndReason)}, required=("reason",), answer=_EXECUTION,
    ),
    Operation(
        method="POST", path="/api/executions/{id}/environments",
        summary="Record a state of the workspace; later calls of the execution carry its id.",
        body={"kind": {**_TEXT, "enum": ["digest", "git_tree", "opaque"]}, "digest": _TEXT, "location": _TEXT},
        required=("kind", "digest"), answer=_record(state_id=_TEXT),
    ),
    Operation(
        method="POST", path="/api/executions/{id}/scores",
        summary="Append a verdict. status scored needs a finite value; failed and skipped have none and count as no "
        "score, never as zero.",
        body={
            "evaluator": _TEXT, "version": _TEXT, "config_digest": _TEXT, "status": _enum(ScoreStatus),
            "value": _or_null(_NUMBER), "partial": _or_null(_FLAG), "state_id": _TEXT, "detail": _ANY,
        },
        required=("evaluator",), answer=_record(score_id=_TEXT),
    ),
    Operation(
        method="GET", path="/api/events",
        summary="What happened, from a sequence number on; with wait, up to so many seconds for the first. oldest "
        "above from tells that some were missed. Events are hints; the record is in the run folder.",
        query={"from": _WHOLE, "limit": _WHOLE, "wait": _WHOLE},
        answer=_record(events=_list(_record(seq=_WHOLE, at=_NUMBER, type=_TEXT)), next=_WHOLE, oldest=_WHOLE),
    ),
    Operation(
        method="GET", path="/api/engines", summary="Engines with their state, weights' version and load.",
        answer=_record(engines=_list(_ENGINE)),
    ),
    Operation(
        method="POST", path="/api/engines",
        summary="Change the engines: drain finishes what runs there, remove hands it on at once, version tells of new "
        "weights.",
        body={"action": {**_TEXT, "enum": ["add", "drain", "remove", "version"]}, "url": _TEXT, "version": _TEXT},
        required=("action", "url"), answer=_ENGINE,
    ),
    Operation(
        method="GET", path="/api/segments/{table}/{name}",
        summary="Bytes of one file of the run from an offset, 8 MiB at most; x-gyre-size is its length now.",
        query={"from": _WHOLE}, media="application/octet-stream",
    ),
    Operation(
        method="GET", path="/api/status", summary="What the proxy is and does now.",
        answer=_record(run=_TEXT, pid=_WHOLE, mode={**_TEXT, "enum": ["policy", "observe"]}, executions=_OBJECT),
    ),
    Operation(method="GET", path="/api/openapi.json", summary="This document.", answer=_record(openapi=_TEXT)),
    Operation(method="GET", path="/metrics", summary="Prometheus text.", media="text/plain"),
)  # fmt: skip


def document() -> dict[str, Any]:
    """The OpenAPI document. It depends on nothing but this table."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Gyre recording proxy",
            "version": "1",
            "description": "What an answer says is durable; repeating a request changes nothing. With a key set, the "
            "API wants it as `Authorization: Bearer KEY` or `x-api-key`.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {"Error": _record(error=_record(message=_TEXT))},
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_" + re.sub(r"\W+", "_", operation.path).strip("_"),
        "summary": operation.summary,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in operation.query.items()]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        schema: dict[str, Any] = {"type": "object", "properties": dict(operation.body)}
        if operation.required:
            schema["required"] = list(operation.required)
        found["requestBody"] = {
            "required": bool(operation.required), "content": {"application/json": {"schema": schema}}
        }  # fmt: skip
    content = {operation.media: {"schema": dict(operation.answer)} if operation.answer is not None else {}}
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found["responses"] = {
        "200": {"description": "Done.", "content": content},
        "4XX": {"description": "Refused: what was wanted, what came, what to do.", "content": refused},
    }
    return found
