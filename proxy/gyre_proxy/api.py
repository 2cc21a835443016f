"""The HTTP API of the proxy: for launchers, trainers, controllers and own harnesses.

What an answer says is durable before it is sent. Repeating a request changes nothing: creation is keyed by group and
sample number, an end or a state that is already recorded is answered as it stands.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_data.errors import ConfigError, GyreError
from gyre_data.schema import TABLES
from gyre_data.types import EnvironmentState, ExecutionEvent, GroupEvent

from .address import checked_name
from .api_bodies import body_of, number_in, said_of, score_of, text_in, verdict_of
from .executions import Execution, end_reason, key_hash, new_execution_id, new_key
from .faults import API_STATUS, CallError, kind_of
from .openapi import document
from .service import Proxy

if TYPE_CHECKING:
    from .observe.service import Observer

__all__ = ["Api"]

log = logging.getLogger(__name__)

_SEGMENT = re.compile(r"[A-Za-z0-9_]+(-[0-9]+)?\.(open|commit|arrow|json)")
_PIECE = 8 << 20


def _answer(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


class Api:
    """Handlers, one per endpoint; `routes` lists them."""

    def __init__(self, proxy: Proxy | Observer) -> None:
        self.proxy = proxy

    def routes(self) -> list[Route]:
        """Routes of the API."""
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/api/groups", self.create_group),
            ("GET", "/api/groups", self.list_groups),
            ("POST", "/api/executions", self.create_execution),
            ("GET", "/api/executions", self.list_executions),
            ("POST", "/api/executions/claim", self.claim),
            ("GET", "/api/executions/{id}", self.show_execution),
            ("POST", "/api/executions/{id}/end", self.end),
            ("POST", "/api/executions/{id}/environments", self.environment),
            ("POST", "/api/executions/{id}/scores", self.score),
            ("GET", "/api/events", self.events),
            ("GET", "/api/engines", self.engines),
            ("POST", "/api/engines", self.change_engine),
            ("GET", "/api/segments/{table}/{name}", self.segment),
            ("GET", "/api/status", self.status),
            ("GET", "/api/openapi.json", self.openapi),
            ("GET", "/metrics", self.metrics),
        ]
        return [Route(path, self._guard(handler), methods=[method]) for method, path, handler in table]

    def _guard(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self.proxy.authorize(None, request.headers)
                return await handler(request)
            except (GyreError, ValueError) as error:
                # A plain ValueError is a value of the caller's that no reader took.
                kind = kind_of(error) if isinstance(error, GyreError) else "invalid_request"
                return _answer({"error": {"message": str(error)}}, API_STATUS[kind])
            except Exception as error:
                log.exception("%s %s failed inside the proxy", request.method, request.url.path)
                text = f"the proxy failed on this request: {type(error).__name__}; see its log"
                return _answer({"error": {"message": text}}, API_STATUS["internal"])

        return guarded

    # --- groups and executions ----------------------------------------------------------------------------------------

    async def create_group(self, request: Request) -> Response:
        """{task, size, attributes, id?} -> {id}."""
        body = await body_of(request)
        group_id = text_in(body, "id") or f"g_{secrets.token_hex(6)}"
        known, size = self.proxy.executions.groups.get(group_id), body.get("size")
        if size is not None and (type(size) is not int or not 0 <= size < 2**31):
            raise ConfigError(f"wanted size, a number of executions (0: the group is given up), got {size!r:.80}")
        base = known or GroupEvent(group_id=group_id, at=datetime.now(UTC))
        attributes = json.dumps(body["attributes"], sort_keys=True) if "attributes" in body else base.attributes
        group = replace(
            base,
            task_id=text_in(body, "task") or base.task_id,
            size=base.size if size is None else size,
            attributes=attributes,
        )
        if known is None or said_of(known) != said_of(group):
            await self.proxy.recorder.commit([replace(group, at=datetime.now(UTC))])
            self.proxy.executions.groups[group_id] = group
        return _answer({"id": group_id})

    async def list_groups(self, request: Request) -> Response:
        """-> {groups: [{id, task, size, attributes}]}."""
        found = [
            {
                "id": group.group_id,
                "task": group.task_id,
                "size": group.size,
                "attributes": json.loads(group.attributes) if group.attributes else None,
            }
            for group in self.proxy.executions.groups.values()
        ]
        return _answer({"groups": found})

    async def create_execution(self, request: Request) -> Response:
        """{task, group, sample_index, harness, attributes, launcher?, command?, queue?, id?} -> {id, base_url, key}.

        It waits for a launcher's claim unless `queue` is false: then the creator runs it itself.
        """
        body = await body_of(request)
        group_id, sample_index, launcher = text_in(body, "group"), body.get("sample_index"), body.get("launcher")
        if sample_index is not None and (type(sample_index) is not int or not 0 <= sample_index < 2**31):
            raise ConfigError(f"wanted sample_index as a whole number from 0, got {sample_index!r:.80}")
        if not isinstance(launcher, dict | None):
            raise ConfigError(f"wanted launcher as an object, got {launcher!r:.80}")
        execution_id = text_in(body, "id")
        if execution_id is not None:
            checked_name(execution_id, "execution")
        known = self.proxy.executions.get(execution_id or "")
        if known is None and group_id is not None and sample_index is not None:
            known = self.proxy.executions.of_sample(group_id, sample_index)
        if known is not None:
            key = await self._new_key(known, dispatched=False)  # it is as it was
            return _answer({"id": known.execution_id, "base_url": _base_url(request, known), "key": key})
        launcher = dict(launcher or {})
        if body.get("command") is not None:
            launcher["command"] = body["command"]
        attributes, key = body.get("attributes"), new_key()
        queue = bool(body.get("queue", True))
        execution = Execution(
            execution_id=execution_id or new_execution_id(),
            group_id=group_id,
            task_id=text_in(body, "task") or self._task_of(group_id),
            sample_index=sample_index,
            harness=text_in(body, "harness"),
            launcher=launcher,
            attributes=json.dumps(attributes, sort_keys=True) if attributes is not None else None,
            key_hashes={key_hash(key)},
            state="queued" if queue else "claimed",
            dispatched_at=None if queue else datetime.now(UTC).timestamp(),
        )
        self.proxy.executions.add(execution)
        await self.proxy.record_start(execution, dispatched=not queue)
        return _answer({"id": execution.execution_id, "base_url": _base_url(request, execution), "key": key})

    def _task_of(self, group_id: str | None) -> str | None:
        group = self.proxy.executions.groups.get(group_id or "")
        return group.task_id if group else None

    async def _new_key(self, execution: Execution, *, dispatched: bool) -> str:
        """Another key for an execution, `dispatched` with it or not: of the earlier ones only hashes are left."""
        key = new_key()
        execution.key_hashes.add(key_hash(key))
        await self.proxy.recorder.commit([execution.started(self.proxy.version if dispatched else None)])
        await self.proxy.changed(execution)
        return key

    async def list_executions(self, request: Request) -> Response:
        """?group=&state= -> {executions: [...]}."""
        group, state = request.query_params.get("group"), request.query_params.get("state")
        found = [
            execution.describe()
            for execution in self.proxy.executions
            if group in (None, execution.group_id) and state in (None, execution.state)
        ]
        return _answer({"executions": found})

    async def show_execution(self, request: Request) -> Response:
        """The execution as it stands."""
        return _answer(self._named(request).describe())

    async def claim(self, request: Request) -> Response:
        """{limit, group?, tasks?} -> {executions: [...]}, each with base_url and a key of its own; oldest first."""
        body = await body_of(request)
        limit = body.get("limit", 1)
        if not isinstance(limit, int) or limit < 0:
            raise ConfigError(f"wanted limit, a number of executions, got {limit!r}")
        tasks = body.get("tasks")
        if tasks is not None and not (isinstance(tasks, list) and all(isinstance(task, str) for task in tasks)):
            raise ConfigError(f"wanted tasks as a list of their ids, got {tasks!r:.80}")
        found = self.proxy.executions.queued(limit, text_in(body, "group"), tasks)
        for execution in found:  # all at once, so that no other claim gets one of them meanwhile
            execution.state, execution.dispatched_at = "claimed", datetime.now(UTC).timestamp()
        claimed: list[dict[str, Any]] = []
        for execution in found:
            try:
                key = await self._new_key(execution, dispatched=True)
            except GyreError:
                for late in found[len(claimed) :]:
                    late.state, late.dispatched_at = "queued", None
                raise
            self.proxy.events.add(
                "execution.started",
                execution_id=execution.execution_id,
                group_id=execution.group_id,
                task_id=execution.task_id,
            )
            claimed.append({**execution.describe(), "base_url": _base_url(request, execution), "key": key})
        return _answer({"executions": claimed})

    async def end(self, request: Request) -> Response:
        """{reason} -> the execution. Only the first end counts."""
        execution, body = self._named(request), await body_of(request)
        reason = end_reason(str(body.get("reason")))
        if execution.state != "ended":
            before, execution.state, execution.end_reason = execution.state, "ended", str(reason)
            row = ExecutionEvent(
                execution_id=execution.execution_id,
                event="ended",
                at=datetime.now(UTC),
                end_reason=reason,
                group_id=execution.group_id,
                task_id=execution.task_id,
                sample_index=execution.sample_index,
            )
            try:
                await self.proxy.recorder.commit([row])
            except GyreError:
                execution.state, execution.end_reason = before, None
                raise
            await self.proxy.finish(execution)
            self.proxy.events.add(
                "execution.ended", execution_id=execution.execution_id, group_id=execution.group_id, reason=str(reason)
            )
        return _answer(execution.describe())

    async def environment(self, request: Request) -> Response:
        """{kind, digest, location} -> {state_id}; later calls of the execution carry it."""
        execution, body = self._named(request), await body_of(request)
        kind, digest = text_in(body, "kind"), text_in(body, "digest")
        if kind not in ("digest", "git_tree", "opaque") or not digest:
            raise ConfigError(f"wanted kind (digest, git_tree or opaque) and digest, got {body!r:.200}")
        last = execution.environment
        if last is not None and (last.kind, last.digest, last.location) == (kind, digest, text_in(body, "location")):
            return _answer({"state_id": last.state_id})
        state = EnvironmentState(
            state_id=f"st_{secrets.token_hex(8)}",
            execution_id=execution.execution_id,
            captured_at=datetime.now(UTC),
            kind=kind,
            digest=digest,
            location=text_in(body, "location"),
            parent_id=last.state_id if last else None,
        )
        await self.proxy.recorder.commit([state])
        execution.environment = state
        await self.proxy.changed(execution)
        self.proxy.events.add("environment", execution_id=execution.execution_id, state_id=state.state_id)
        return _answer({"state_id": state.state_id})

    async def score(self, request: Request) -> Response:
        """{evaluator, version, status, value, partial, detail, state_id, config_digest} -> {score_id}."""
        execution, body = self._named(request), await body_of(request)
        score = score_of(execution.execution_id, body)
        last = execution.scores.get(score.evaluator)
        if last is not None and verdict_of(last) == verdict_of(score):
            return _answer({"score_id": last.score_id})
        await self.proxy.recorder.commit([score])
        execution.scores[score.evaluator] = score
        self.proxy.events.add(
            "score",
            execution_id=execution.execution_id,
            group_id=execution.group_id,
            evaluator=score.evaluator,
            status=str(score.status),
            value=score.value,
        )
        return _answer({"score_id": score.score_id})

    def _named(self, request: Request) -> Execution:
        execution = self.proxy.executions.get(request.path_params["id"])
        if execution is None:
            raise CallError(
                "not_found",
                f"wanted an execution of this run, got {request.path_params['id']!r}; see GET /api/executions",
            )
        return execution

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        """?from=seq&limit=&wait=seconds -> {events, next, oldest}."""
        start, limit = number_in(request, "from", 0), number_in(request, "limit", 1000)
        return _answer(await self.proxy.events.wait(start, max(1, limit), min(60, number_in(request, "wait", 0))))

    async def engines(self, request: Request) -> Response:
        """Every engine with its state, version and load."""
        await self.proxy.refresh()
        return _answer({"engines": [engine.describe() for engine in self.proxy.router.engines]})

    async def change_engine(self, request: Request) -> Response:
        """{action: add|drain|remove|version, url, version} -> the engine."""
        body = await body_of(request)
        url, router = text_in(body, "url") or "", self.proxy.router
        match body.get("action"):
            case "add":
                engine = await self.proxy.add_engine(url)
            case "drain":
                engine = router.drain(url)
            case "remove":
                engine = router.remove(url)
            case "version":
                engine = router.set_version(url, text_in(body, "version") or "")
            case other:
                raise ConfigError(f"wanted action add, drain, remove or version, got {other!r}")
        await self.proxy.engine_changed(body["action"], engine.url, text_in(body, "version"))
        return _answer(engine.describe())

    async def segment(self, request: Request) -> Response:
        """?from=offset -> bytes of one file of the run from there, at most 8 MiB; `x-gyre-size` is its length now."""
        table, name = request.path_params["table"], request.path_params["name"]
        if (table not in TABLES and table != "manifest") or not _SEGMENT.fullmatch(name):
            raise CallError(
                "not_found", f"wanted /api/segments/<table>/<file>, got {table}/{name}; the manifest names them"
            )
        start = number_in(request, "from", 0)
        try:
            with open(self.proxy.settings.run / table / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(start)
                data = file.read(_PIECE)
        except FileNotFoundError:
            raise CallError(
                "not_found", f"{table}/{name} is not in this run (any more); read the newest manifest"
            ) from None
        return Response(data, media_type="application/octet-stream", headers={"x-gyre-size": str(size)})

    async def status(self, request: Request) -> Response:
        """What the proxy is and does now."""
        await self.proxy.refresh()
        return _answer(self.proxy.status())

    async def openapi(self, request: Request) -> Response:
        """The API as an OpenAPI document."""
        return _answer(document())

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        await self.proxy.refresh()
        return Response(self.proxy.expose_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _base_url(request: Request, execution: Execution) -> str:
    return f"{str(request.base_url).rstrip('/')}/x/{execution.execution_id}"
