"""A stand-in for a hosted API on loopback: a bare HTTP/1.1 server that keeps what it is sent, byte for byte.

It is no framework on purpose: what reaches it and what it answers are exactly the bytes that tests compare.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import zstandard

from tests.support.threads import held_in_a_thread

__all__ = [
    "Answer",
    "Provider",
    "Sent",
    "anthropic_stream",
    "chat_stream",
    "json_answer",
    "read_request",
    "responses_stream",
    "sse",
    "sse_answer",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A request as it arrived; `headers` in order, names as they came."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def json(self) -> Any:
        encoding = self.header("content-encoding")
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(self.body) if encoding == "zstd" else self.body
        return json.loads(gzip.decompress(plain) if encoding == "gzip" else plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is sent back: each piece as one write. `chunked` False announces the length."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[bytes, ...] = ()
    chunked: bool = False
    dies: bool = False
    """The connection breaks off after the pieces, before the end."""
    hold: bool = False
    """Wait for `Provider.release` before the last piece."""


class Provider:
    """Answers each request by `answer`; `sent` holds what came, `gone` counts connections that the other side cut."""

    def __init__(self, answer: Callable[[Sent], Answer]) -> None:
        self._given: dict[int, int] = {}
        self.answer = answer
        self.sent: list[Sent] = []
        self.gone = 0
        self.url = ""
        self._release = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def release(self) -> None:
        """Let held answers go on."""
        self._release.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Provider]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.add(asyncio.get_running_loop().create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 26)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def in_a_thread(self) -> Iterator[Provider]:
        """The same for tests that wait for processes."""
        with held_in_a_thread(self.serving()):
            yield self

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (sent := await read_request(reader)) is not None:
                self.sent.append(sent)
                if not await self._reply(reader, writer, sent, self.answer(sent)):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone += 1
        finally:
            writer.close()

    async def _reply(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: Sent, answer: Answer
    ) -> bool:
        body = b"".join(answer.pieces)
        # An answer may be given many times, but no provider gives two replies one id.
        self._given[id(answer)] = times = self._given.get(id(answer), 0) + 1
        headers = [
            (name, f"{value}_{times}" if name.endswith("request-id") and times > 1 else value)
            for name, value in answer.headers
        ]
        framing = ("Transfer-Encoding", "chunked") if answer.chunked else ("Content-Length", str(len(body)))
        head = f"HTTP/1.1 {answer.status} X\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in (*headers, framing)
        )
        writer.write(head.encode() + b"\r\n")
        if sent.method == "HEAD":
            await writer.drain()
            return True
        for index, piece in enumerate(answer.pieces):
            if answer.hold and index == len(answer.pieces) - 1 and not await self._held(reader):
                self.gone += 1
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
            await writer.drain()
            await asyncio.sleep(0)
        if answer.dies:
            return False
        writer.write(b"0\r\n\r\n" if answer.chunked else b"")
        await writer.drain()
        return True

    async def _held(self, reader: asyncio.StreamReader) -> bool:
        """Wait for release; False when the other side hung up first."""
        released, closed = asyncio.ensure_future(self._release.wait()), asyncio.ensure_future(reader.read(1))
        await asyncio.wait({released, closed}, return_when=asyncio.FIRST_COMPLETED)
        for wait in (released, closed):
            wait.cancel()
        return self._release.is_set()


async def read_request(reader: asyncio.StreamReader) -> Sent | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = tuple((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
    lower = {name.lower(): value for name, value in headers}
    if lower.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(lower.get("content-length", 0)))
    return Sent(method=method, target=target, headers=headers, body=body)


# --- what providers say -----------------------------------------------------------------------------------------------


_numbers = itertools.count(1)


def _request_id() -> str:
    return f"req_{next(_numbers)}"


def sse(*events: Any) -> tuple[bytes, ...]:
    """One piece for each event; those with a type also name it."""
    lines = []
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        named = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        lines.append(f"{named}data: {data}\n\n".encode())
    return tuple(lines)


def sse_answer(pieces: Sequence[bytes], *, encoding: str | None = None, **more: Any) -> Answer:
    headers = [
        ("Content-Type", "text/event-stream; charset=utf-8"),
        ("request-id", _request_id()),
        ("Set-Cookie", "a=b"),
    ]
    if encoding == "gzip":
        packer = zlib.compressobj(wbits=31)
        packed = [packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
        pieces = [*packed[:-1], packed[-1] + packer.flush()]
        headers.append(("Content-Encoding", "gzip"))
    return Answer(headers=tuple(headers), pieces=tuple(pieces), chunked=True, **more)


def json_answer(value: Any, status: int = 200, *, encoding: str | None = None) -> Answer:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = [("Content-Type", "application/json"), ("x-request-id", _request_id())]
    if encoding is not None:
        data = gzip.compress(data) if encoding == "gzip" else zstandard.compress(data)
        headers.append(("Content-Encoding", encoding))
    return Answer(status=status, headers=tuple(headers), pieces=(data[: len(data) // 2], data[len(data) // 2 :]))


def anthropic_stream(*blocks: dict[str, Any], model: str = "claude-opus-4-5-20251101", number: int = 1) -> list[Any]:
    """Events of a message; a text comes in two pieces, an input in three."""
    usage = {"input_tokens": 9, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 1}
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "content": []}
    events: list[Any] = [{"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}]
    events.append({"type": "ping"})
    for index, block in enumerate(blocks):
        kind = block["type"]
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}.get(kind, {"input": {}})
        events.append({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
        deltas: list[dict[str, Any]] = []
        if kind == "text":
            cut = len(block["text"]) // 2
            deltas = [{"type": "text_delta", "text": part} for part in (block["text"][:cut], block["text"][cut:])]
        elif kind == "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            text = json.dumps(block["input"])
            parts = ("", text[:3], text[3:])
            deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
    delta = {"stop_reason": stop, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})
    return [*events, {"type": "message_stop"}]


def chat_stream(
    text: str = "", call: tuple[str, str, str] | None = None, model: str = "gpt-4o-2024-11-20"
) -> list[Any]:
    """Chunks of a completion; `call` is (id, name, arguments)."""
    base = {"id": "chatcmpl_1", "object": "chat.completion.chunk", "created": 1, "model": model}

    def chunk(delta: Any, finish: str | None = None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": part}) for part in (text[:2], text[2:]) if part]
    if call is not None:
        start = {"index": 0, "id": call[0], "type": "function", "function": {"name": call[1], "arguments": ""}}
        events.append(chunk({"tool_calls": [start]}))
        events += [
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
            for part in (call[2][:4], call[2][4:])
        ]
    usage = {"prompt_tokens": 50, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 40}}
    events.append(chunk({}, "tool_calls" if call else "stop"))
    return [*events, {**base, "choices": [], "usage": usage}, "[DONE]"]


def responses_stream(*items: dict[str, Any], model: str = "gpt-5-2025-08-07") -> list[Any]:
    """Events of a response whose output is `items`."""
    usage = {"input_tokens": 50, "output_tokens": 6, "total_tokens": 56, "input_tokens_details": {"cached_tokens": 40}}
    usage["output_tokens_details"] = {"reasoning_tokens": 0}
    base = {"id": "resp_1", "object": "response", "model": model}
    events: list[Any] = [{"type": "response.created", "response": {**base, "status": "in_progress", "output": []}}]
    for index, item in enumerate(items):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    done = {**base, "status": "completed", "output": list(items), "usage": usage}
    return [*events, {"type": "response.completed", "response": done}]
