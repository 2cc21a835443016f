"""Programs that stand in for engines, trainers and harnesses: real processes and messages, work that only sleeps.

    python -m gyre_sched.cells.emulated rollout --port P --label run:3 --capacity 16 --hour-s 6
    python -m gyre_sched.cells.emulated train --port P --work work.json --core-folder DIR --hour-s 6
    python -m gyre_sched.cells.emulated harness --proxy URL --work work.json --hour-s 6

An engine answers SGLang's native routes. A token stands for a stretch of an execution's time, so that a reply which
goes on at another engine does so where it was. It slows when it has more replies than its capacity, as the simulator's
executions do (`durations.speed`).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gyre_sched.durations import speed

__all__ = ["TOKEN_S", "main"]

TOKEN_S = 36.0
"""Emulated seconds that a token stands for."""
_CHUNK_S = 0.5
"""Real seconds between the events of a reply."""
_VOCABULARY = 1 << 20
_LETTER = 65
_CONTEXT = 1 << 20


class Routes(BaseHTTPRequestHandler):
    """JSON in, JSON out; `server.gyre` has what answers."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        read = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(json.loads(read or b"{}"))

    def _answer(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            if parts.path == "/generate":
                self._stream(body)
                return
            told = self.server.program.answer(parts.path, body, asked)  # type: ignore[attr-defined]
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return
        written = json.dumps({} if told is None else told).encode()
        self.send_response(404 if told is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)
        self.wfile.flush()

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in self.server.program.generate(body):  # type: ignore[attr-defined]
            self.wfile.write(b"data: " + event + b"\n\n")
            self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


class Engine:
    """Replies of an engine that sleeps."""

    def __init__(self, label: str, capacity: int, share: float, hour_s: float) -> None:
        self.label, self.capacity, self.share = label, capacity, share
        self.real_s = TOKEN_S * hour_s / 3600
        self._changed = threading.Condition()
        self._running = 0
        self._aborts = 0
        self._paused = False
        self._progress_s, self._at_s = 0.0, time.monotonic()

    def answer(self, path: str, body: dict[str, Any], asked: dict[str, str]) -> dict[str, Any] | None:
        """A control route; None for one that it does not have."""
        if path == "/model_info":
            facts = {"vocab_size": _VOCABULARY, "context_length": _CONTEXT, "model_path": "emulated"}
            return {"weight_version": self.label, **facts}
        with self._changed:
            self._advance()
            if path == "/abort_request":
                self._aborts += bool(body.get("abort_all"))
            elif path == "/pause_generation":
                self._paused = True
            elif path == "/continue_generation":
                self._paused = False
            elif path == "/update_weights_from_disk":
                self.label = body["weight_version"]
                self._changed.notify_all()
                return {"success": True}
            elif path != "/ready":
                return None
            self._changed.notify_all()
        return {}

    def _speed(self) -> float:
        return 0.0 if self._paused else speed(max(1, self._running), self.capacity, self.share)

    def _advance(self) -> None:
        """Bring the clock of progress to now, at the speed there was."""
        now_s = time.monotonic()
        self._progress_s += (now_s - self._at_s) * self._speed()
        self._at_s = now_s

    def generate(self, body: dict[str, Any]) -> Any:
        """Events of a reply, as SGLang streams them."""
        wanted, sent, began = int(body["sampling_params"]["max_new_tokens"]), 0, self.label
        with self._changed:
            self._advance()
            aborts, start_s = self._aborts, self._progress_s
            self._running += 1
            self._changed.notify_all()
        try:
            while True:
                have, finish = self._until_news(start_s, wanted, aborts)
                yield self._event(body["rid"], sent, have, began, finish)
                sent = have
                if finish is not None:
                    yield b"[DONE]"
                    return
        finally:
            with self._changed:
                self._advance()
                self._running -= 1
                self._changed.notify_all()

    def _until_news(self, start_s: float, wanted: int, aborts: int) -> tuple[int, dict[str, Any] | None]:
        """Tokens so far, after a while or as soon as the reply has ended."""
        until_s = time.monotonic() + _CHUNK_S
        with self._changed:
            while True:
                self._advance()
                left_s = start_s + wanted * self.real_s - self._progress_s
                have = min(wanted, int((self._progress_s - start_s) / self.real_s + 1e-6))
                if left_s <= 1e-4:
                    return wanted, {"type": "length", "length": wanted}
                if self._aborts != aborts:
                    return have, {"type": "abort", "message": "aborted"}
                rest_s = until_s - time.monotonic()
                if rest_s <= 0:
                    return have, None
                now = self._speed()
                self._changed.wait(min(rest_s, left_s / now) if now else rest_s)

    def _event(self, rid: str, sent: int, have: int, began: str, finish: dict[str, Any] | None) -> bytes:
        ids = [_LETTER] * (have - sent)
        meta = {
            "id": rid,
            "prompt_tokens": 1,
            "completion_tokens": have,
            "cached_tokens": 0,
            "finish_reason": finish,
            "output_token_logprobs": [[-1.0, one, None] for one in ids],
            "output_token_logprobs_length": have,
            "weight_version": self.label,
        }
        return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


class Trainer:
    """Micro-steps and optimiser steps that sleep; the core keeps its version in a file."""

    def __init__(self, work: dict[str, Any], hour_s: float, core_folder: Path | None) -> None:
        self._work, self._scale = work, hour_s / 3600
        self._file = core_folder / "version" if core_folder is not None else None
        self._changed = threading.Condition()
        self._done: list[tuple[int, list[Any]]] = []
        self._applied: list[tuple[int, int]] = []
        self._begun: set[str] = set()
        self._seq = 0
        self._version = int(self._file.read_text()) if self._file is not None and self._file.exists() else 0

    def answer(self, path: str, body: dict[str, Any], asked: dict[str, str]) -> dict[str, Any] | None:
        """A route of `gyre_sched.cells.training`."""
        if path == "/state":
            return self._state(int(asked.get("after", -1)), float(asked.get("wait", 0)))
        if path not in ("/run", "/pull", "/optimise"):
            return None
        name = f"{path}{json.dumps(body, sort_keys=True)}"
        with self._changed:
            if name not in self._begun:  # told twice, done once
                self._begun.add(name)
                threading.Thread(target=getattr(self, f"_{path[1:]}"), args=(body,), daemon=True).start()
        return {}

    def _state(self, after: int, wait_s: float) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._seq > after, wait_s)
            return {"seq": self._seq, "version": self._version, "done": self._done, "applied": self._applied}

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._scale)

    def _run(self, body: dict[str, Any]) -> None:
        self._sleep(self._work["microstep_s"][body["key"][1]])
        with self._changed:
            self._done = [one for one in self._done if one[1][0] == body["key"][0]]
            self._done.append((body["epoch"], body["key"]))
            self._news()

    def _pull(self, body: dict[str, Any]) -> None:
        self._sleep(self._work["pull_s"])
        with self._changed:
            self._version = max(self._version, body["version"])
            self._news()

    def _optimise(self, body: dict[str, Any]) -> None:
        if self._version < body["version"]:
            self._sleep(self._work["optimiser_s"])
            assert self._file is not None
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(str(body["version"]))
            new.rename(self._file)
        with self._changed:
            self._version = max(self._version, body["version"])
            self._applied = [*self._applied, (body["version"], body["generation"])][-8:]
            self._news()

    def _news(self) -> None:
        self._seq += 1
        self._changed.notify_all()


def _serve(port: int, program: Engine | Trainer) -> None:
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

    server = Server(("127.0.0.1", port), Routes)
    server.program = program  # type: ignore[attr-defined]
    server.serve_forever(poll_interval=3600)


def main(arguments: list[str]) -> None:
    """Run one of them until it is ended."""
    parser = argparse.ArgumentParser(prog="gyre_sched.cells.emulated")
    parser.add_argument("kind", choices=("rollout", "train", "harness"))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--label", default="base:0")
    parser.add_argument("--capacity", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--hour-s", type=float, default=6.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--core-folder", type=Path)
    parser.add_argument("--proxy", default="")
    options = parser.parse_args(arguments)
    work = json.loads(options.work.read_text()) if options.work else {}
    if options.kind == "rollout":
        _serve(options.port, Engine(options.label, options.capacity, options.share, options.hour_s))
    elif options.kind == "train":
        _serve(options.port, Trainer(work, options.hour_s, options.core_folder))
    else:
        from .emulated_harness import work_through

        work_through(options.proxy, work, options.hour_s)


if __name__ == "__main__":
    main(sys.argv[1:])
