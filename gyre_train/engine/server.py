"""SGLang's native HTTP routes over an EngineLoop (Starlette).

A stream's chunks are cumulative, as SGLang's are by default. They are sent when there is something new, but no faster
than a small share of the time it takes to write them, so a long reply does not drown in its own repetition.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gyre_data.errors import ConfigError, EngineError

from .loop import EngineLoop
from .receive import WeightGroups
from .sequence import Sequence
from .wire import GenerateRequest, parse_generate, reply, request_object

__all__ = ["build_app"]

_LEAST_GAP_S = 0.004
_WRITING_SHARE = 5
"""A chunk is followed by a pause of this many times the time that writing it took."""

_Handler = Callable[[EngineLoop, Request], Awaitable[Response]]


def build_app(loop: EngineLoop) -> Starlette:
    """The ASGI application; the caller starts and closes the loop."""
    groups = WeightGroups()

    def route(path: str, handler: _Handler, *methods: str) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(loop, request)
            except ConfigError as error:
                return _error(400, error)
            except EngineError as error:
                return _error(503, error)

        return Route(path, guarded, methods=list(methods))

    return Starlette(
        routes=[
            route("/generate", _generate, "POST", "PUT"),
            route("/abort_request", _abort_request, "POST"),
            route("/pause_generation", _pause, "POST"),
            route("/continue_generation", _continue, "POST"),
            route("/update_weights_from_disk", _update_weights, "POST"),
            *(
                route(path, _weight_group(groups, action), "POST")
                for path, action in (
                    ("/init_weights_update_group", _join_group),
                    ("/begin_weight_update", _begin_update),
                    ("/update_weights_from_distributed", _receive_weights),
                    ("/end_weight_update", _end_update),
                    ("/destroy_weights_update_group", _leave_group),
                )
            ),
            route("/flush_cache", _flush, "GET", "POST"),
            route("/weights_checker", _weights_checker, "GET", "POST"),
            route("/health", _health, "GET"),
            route("/health_generate", _health, "GET"),
            route("/ready", _ready, "GET"),
            route("/model_info", _model_info, "GET"),
            route("/server_info", _server_info, "GET"),
            route("/v1/loads", _loads, "GET"),
        ]
    )


def _error(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, status)


async def _await(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


async def _generate(loop: EngineLoop, request: Request) -> Response:
    body = request_object(await request.body())
    try:
        wanted = parse_generate(
            body,
            vocab_size=loop.model.vocab_size,
            context_length=loop.settings.context_length,
            max_prompt=loop.settings.max_prompt_tokens,
            experts=loop.model.top_k > 0,
        )
        changed = asyncio.Event()
        sequence = Sequence(
            rid=wanted.rid,
            prompt_ids=wanted.prompt_ids,
            params=wanted.params,
            extra_key=wanted.extra_key,
            on_change=_notifier(changed),
        )
        await _await(loop.submit(sequence))
    except (ConfigError, EngineError) as error:
        if body.get("stream"):
            return StreamingResponse(_refused(error), media_type="text/event-stream")
        raise
    if wanted.stream:
        return StreamingResponse(_stream(loop, sequence, wanted, changed), media_type="text/event-stream")
    await _until_finished(loop, request, sequence, changed)
    return _whole(loop, sequence, wanted)


def _notifier(changed: asyncio.Event) -> Callable[[], None]:
    """A callback for the loop's thread that sets the event; one wake-up at a time, however many tokens come."""
    events = asyncio.get_running_loop()
    pending = False

    def arrive() -> None:
        nonlocal pending
        pending = False
        changed.set()

    def notify() -> None:
        nonlocal pending
        if not pending:
            pending = True
            try:
                events.call_soon_threadsafe(arrive)
            except RuntimeError:
                # The server's event loop has ended; nobody is left to tell.
                return

    return notify


async def _refused(error: Exception) -> AsyncIterator[bytes]:
    # SGLang answers 200 here, since a stream's status is sent before its request is checked.
    code = 400 if isinstance(error, ConfigError) else 503
    kind = {"message": str(error), "type": "invalid_request_error", "code": code, "retryable": False}
    yield _event({"error": kind})
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _stream(
    loop: EngineLoop, sequence: Sequence, wanted: GenerateRequest, changed: asyncio.Event
) -> AsyncIterator[bytes]:
    num_sent = -1
    try:
        while True:
            await changed.wait()
            changed.clear()
            began = time.perf_counter()
            answer = _reply(loop, sequence, wanted)
            finished = answer["meta_info"]["finish_reason"] is not None
            if finished or answer["meta_info"]["completion_tokens"] > max(num_sent, 0):
                num_sent = answer["meta_info"]["completion_tokens"]
                chunk = _event(answer)
                spent = time.perf_counter() - began
                yield chunk
                if finished:
                    break
                await asyncio.sleep(max(_LEAST_GAP_S, _WRITING_SHARE * spent))
        yield b"data: [DONE]\n\n"
    finally:
        # Reached early only when the client has gone: what nobody reads is not computed.
        if sequence.finish_reason is None:
            loop.drop(sequence)


async def _until_finished(loop: EngineLoop, request: Request, sequence: Sequence, changed: asyncio.Event) -> None:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(gone())
    watcher.add_done_callback(lambda task: None if task.cancelled() else loop.drop(sequence))
    try:
        while sequence.finish_reason is None:
            await changed.wait()
            changed.clear()
    finally:
        watcher.cancel()
        if sequence.finish_reason is None:
            loop.drop(sequence)


def _reply(loop: EngineLoop, sequence: Sequence, wanted: GenerateRequest) -> dict[str, Any]:
    return reply(
        sequence, return_logprob=wanted.return_logprob, weight_version=loop.weight_version,
        routes_from=wanted.routes_from,
    )  # fmt: skip


def _whole(loop: EngineLoop, sequence: Sequence, wanted: GenerateRequest) -> Response:
    answer = _reply(loop, sequence, wanted)
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort" and reason.get("status_code"):
        return JSONResponse({"error": {"message": reason["message"]}}, reason["status_code"])
    return JSONResponse(answer)


async def _abort_request(loop: EngineLoop, request: Request) -> Response:
    body = request_object(await request.body())
    # An empty rid would be a prefix of every rid; it is ignored, as SGLang does.
    if body.get("abort_all") or body.get("rid"):
        await _await(loop.abort(None if body.get("abort_all") else str(body["rid"])))
    return Response(status_code=200)


async def _pause(loop: EngineLoop, request: Request) -> Response:
    mode = request_object(await request.body()).get("mode", "abort")
    if mode not in ("abort", "in_place", "retract"):
        raise ConfigError(f"mode should be 'abort', 'retract' or 'in_place', got {mode!r}")
    await _await(loop.pause(mode))
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(loop: EngineLoop, request: Request) -> Response:
    await _await(loop.resume())
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


async def _update_weights(loop: EngineLoop, request: Request) -> Response:
    body = request_object(await request.body())
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str) or not (version is None or isinstance(version, str)):
        raise ConfigError(
            f"model_path and weight_version must be strings, got {path!r} and {version!r}: name the folder to load"
        )
    future = loop.update_weights(
        path, version, flush=body.get("flush_cache", True), abort_all=bool(body.get("abort_all_requests"))
    )
    try:
        message, status = await _await(future), 200
    except (ConfigError, EngineError) as error:
        message, status = str(error), 400
    return JSONResponse({"success": status == 200, "message": message, "num_paused_requests": 0}, status)


_GroupAction = Callable[[EngineLoop, WeightGroups, dict[str, Any]], Awaitable[str]]


def _weight_group(groups: WeightGroups, action: _GroupAction) -> _Handler:
    """A route of the distributed update: what fails is answered as SGLang does, with 400 and success false."""

    async def handle(loop: EngineLoop, request: Request) -> Response:
        body = request_object(await request.body())
        try:
            message, status = await action(loop, groups, body), 200
        except (ConfigError, EngineError, RuntimeError) as error:  # RuntimeError: torch's, of a peer that has gone
            message, status = str(error), 400
        return JSONResponse({"success": status == 200, "message": message}, status)

    return handle


async def _join_group(loop: EngineLoop, groups: WeightGroups, body: dict[str, Any]) -> str:
    await asyncio.to_thread(groups.join, body)
    return "Succeeded to initialize custom process group."


async def _begin_update(loop: EngineLoop, groups: WeightGroups, body: dict[str, Any]) -> str:
    if groups.is_open:
        raise ConfigError("a weight-update session is already open; call end_weight_update() first")
    groups.is_open = True
    return "Success"


async def _receive_weights(loop: EngineLoop, groups: WeightGroups, body: dict[str, Any]) -> str:
    tensors = await asyncio.to_thread(groups.receive, body)
    update = loop.load_tensors(
        tensors,
        body.get("weight_version"),
        flush=body.get("flush_cache", True),
        abort_all=bool(body.get("abort_all_requests")),
    )
    return str(await _await(update))


async def _end_update(loop: EngineLoop, groups: WeightGroups, body: dict[str, Any]) -> str:
    if not groups.is_open:
        raise ConfigError("no weight-update session is open; call begin_weight_update() first")
    groups.is_open = False
    return "Success"


async def _leave_group(loop: EngineLoop, groups: WeightGroups, body: dict[str, Any]) -> str:
    await asyncio.to_thread(groups.leave, str(body.get("group_name")))
    return "Succeeded to destroy custom process group."


async def _flush(loop: EngineLoop, request: Request) -> Response:
    flushed = await _await(loop.flush())
    return Response("Cache flushed.\n" if flushed else "Flush cache failed.\n", 200 if flushed else 400)


async def _weights_checker(loop: EngineLoop, request: Request) -> Response:
    action = request_object(await request.body()).get("action", "checksum")
    if action != "checksum":
        raise ConfigError(f"action must be 'checksum', got {action!r}")
    return JSONResponse(
        {"success": True, "message": "Success.", "ranks": [{"checksums": await _await(loop.checksums())}]}
    )


async def _health(loop: EngineLoop, request: Request) -> Response:
    # The loop answers between two steps; an answer is the proof that it lives.
    try:
        await asyncio.wait_for(_await(loop.ping()), timeout=20)
    except (EngineError, TimeoutError):
        return Response(status_code=503)
    return Response(status_code=200)


async def _ready(loop: EngineLoop, request: Request) -> Response:
    return Response(status_code=503 if loop.paused or loop.failure is not None else 200)


async def _model_info(loop: EngineLoop, request: Request) -> Response:
    model = loop.model
    return JSONResponse(
        {
            "model_path": model.path,
            "served_model_name": model.path,
            "tokenizer_path": model.path,
            "is_generation": True,
            "weight_version": loop.weight_version,
            "model_type": model.model_type,
            "architectures": model.architectures,
        }
    )


async def _server_info(loop: EngineLoop, request: Request) -> Response:
    settings = loop.settings
    return JSONResponse(
        {
            "model_path": loop.model.path,
            "context_length": settings.context_length,
            "max_req_input_len": settings.max_prompt_tokens,
            "vocab_size": loop.model.vocab_size,
            "max_running_requests": settings.max_running,
            "max_queued_requests": settings.max_queued,
            "max_total_num_tokens": settings.max_total_tokens,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": False,
            "weight_version": loop.weight_version,
            "device": "cpu",
            "dtype": "float32",
            "tp_size": 1,
            "enable_return_routed_experts": loop.model.top_k > 0,
            "version": "gyre-embedded",
        }
    )


async def _loads(loop: EngineLoop, request: Request) -> Response:
    return JSONResponse({"timestamp": time.time(), "loads": [{"dp_rank": 0, **loop.loads()}]})
