"""A harness of the soak: `_soak_harness.py TASK`, started by `gyre run`, keeps its own journal of what it was answered.

TASK `loop` is a conversation over HTTP, paced, that tries again when a connection breaks. The name of a real client
(`pi`, `mini-swe-agent`, `claude`) starts that client as docs/proxy.md says, against a relay in this process that passes
every byte on. Either way a reply that came to its end is a line of the journal, synced before the harness goes on:
{"reply": ID, "execution": ID, "text": TEXT, "tokens": N, "wire": NAME, "at": TIME}.

Standard library only: it is started for every execution.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["CLIENTS", "Journal", "reply_of"]

CLIENTS = {
    "pi": ("pi", 'pi --provider gyre --model gyre-policy -p "$PROMPT"'),
    "mini-swe-agent": ("mini-swe-agent", None),
    "claude": (
        "Claude Code",
        'claude -p "$PROMPT" --tools Bash --system-prompt "You work on files." --dangerously-skip-permissions',
    ),
}
"""Real clients: their block in docs/proxy.md, and what takes the place of its last line."""
_CALLS = (3, 6)
_PAUSE_S = (6.0, 14.0)
_RELAY_PAUSE_S = (2.0, 6.0)
_PATIENCE_S = 240.0
_AGAIN_S = 1.0
_PASSED = ("content-type", "authorization", "x-api-key", "accept", "user-agent", "anthropic-version", "anthropic-beta")


class Journal:
    """What this harness was answered, a synced line each."""

    def __init__(self, folder: Path, execution: str) -> None:
        self._execution = execution
        self._file = (folder / f"{execution}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, reply: dict[str, Any]) -> None:
        """Returns when the line is on the disk."""
        line = {**reply, "execution": self._execution, "at": time.time()}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def reply_of(path: str, content_type: str, body: bytes) -> dict[str, Any] | None:
    """The reply that a whole answer of one of the wires holds; None when it is none, or did not come to its end."""
    stream = "event-stream" in content_type
    try:
        events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
        whole = {} if stream else json.loads(body)
    except ValueError:
        return None
    if path.endswith("/v1/messages"):
        return _anthropic(events, whole)
    if path.endswith("/chat/completions"):
        return _chat(events, whole, ended=not stream or b"data: [DONE]" in body)
    return None


def _anthropic(events: list[dict[str, Any]], whole: dict[str, Any]) -> dict[str, Any] | None:
    if events:
        if events[-1]["type"] != "message_stop":
            return None
        text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
        usage = [e["usage"] for e in events if e["type"] == "message_delta"][-1]
        name = events[0]["message"]["id"]
    else:
        if whole.get("type") != "message":
            return None
        text = "".join(block.get("text", "") for block in whole["content"])
        usage, name = whole["usage"], whole["id"]
    return {"reply": name, "text": text, "tokens": usage["output_tokens"], "wire": "anthropic"}


def _chat(events: list[dict[str, Any]], whole: dict[str, Any], *, ended: bool) -> dict[str, Any] | None:
    if not ended or not (events or whole.get("choices")):
        return None
    if events:
        choices = [choice for event in events for choice in event.get("choices", ())]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
        name = events[0]["id"]
    else:
        text, usage, name = whole["choices"][0]["message"]["content"] or "", whole["usage"], whole["id"]
    return {"reply": name, "text": text, "tokens": usage and usage["completion_tokens"], "wire": "openai_chat"}


def exchange(base: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
    """One request on a connection of its own."""
    url = urlsplit(base)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
    connection.request(method, url.path + path, body or None, headers)
    return connection.getresponse()


def loop(base: str, key: str, journal: Journal, luck: random.Random) -> None:
    """Talk for a few turns; each request is sent until its reply has come to its end."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {luck.random():.6f}: count the files."}]
    headers = {"content-type": "application/json", "x-api-key": key}
    for turn in range(luck.randint(*_CALLS)):
        ask = {"model": "any", "max_tokens": luck.randint(8, 40), "messages": messages, "stream": luck.random() < 0.7}
        reply = _asked(base, json.dumps(ask).encode(), headers)
        journal.write(reply)
        messages += [
            {"role": "assistant", "content": reply["text"] or "(nothing)"},
            {"role": "user", "content": f"There are {luck.randint(2, 90)} files in folder {turn}. Go on."},
        ]
        time.sleep(luck.uniform(*_PAUSE_S))


def _asked(base: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    deadline, told = time.monotonic() + _PATIENCE_S, ""
    while time.monotonic() < deadline:
        try:
            answer = exchange(base, "POST", "/v1/messages", body, headers)
            read = answer.read()
            reply = reply_of("/v1/messages", answer.headers.get("content-type", ""), read)
            if answer.status == 200 and reply is not None:
                return reply
            told = f"{answer.status} {read[-300:]!r}"
            if 400 <= answer.status < 500 and answer.status != 429:
                break
        except (OSError, http.client.HTTPException) as error:
            told = repr(error)
        time.sleep(_AGAIN_S)
    sys.exit(f"wanted a reply within {_PATIENCE_S:.0f} s, got {told}")


class Relay(BaseHTTPRequestHandler):
    """Passes a client's requests on, and their answers back byte by byte; one that breaks off breaks off here too."""

    protocol_version = "HTTP/1.1"
    base: str
    journal: Journal

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        time.sleep(random.uniform(*_RELAY_PAUSE_S))
        self._pass_on()

    def _pass_on(self) -> None:
        self.close_connection = True
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        passed = _PASSED + tuple(name for name in self.headers if name.lower().startswith(("x-", "anthropic-")))
        headers = {name: self.headers[name] for name in passed if name in self.headers}
        got = b""
        try:
            answer = exchange(self.base, self.command, self.path, sent, headers)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            length = answer.headers.get("content-length")
            self.send_header("connection", "close")
            self.send_header(*(("content-length", length) if length else ("transfer-encoding", "chunked")))
            self.end_headers()
            while self.command != "HEAD" and (piece := answer.read1(65536)):
                got += piece
                self.wfile.write(piece if length else b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            reply = reply_of(urlsplit(self.path).path, answer.headers.get("content-type", ""), got)
            if answer.status == 200 and reply is not None:
                self.journal.write(reply)  # before the end of the answer is passed on: the client acts on it after that
            if not length and self.command != "HEAD":
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            return

    def log_message(self, *of: object) -> None:
        """Say nothing."""


def client(name: str, prompt: str, base: str, journal: Journal) -> int:
    """Run a real client against a relay of its own."""
    page = (Path(__file__).parents[1] / "docs" / "proxy.md").read_text()
    title, start = CLIENTS[name]
    found = re.search(rf"^### {re.escape(title)}\n\n```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/proxy.md has no block for {title}"
    *setting, last = found[1].strip().splitlines()
    relay = type("OwnRelay", (Relay,), {"base": base, "journal": journal})
    server = ThreadingHTTPServer(("127.0.0.1", 0), relay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    more = {"GYRE_BASE_URL": f"http://127.0.0.1:{server.server_port}", "PROMPT": prompt, "TERM": "dumb"}
    more |= {"CLAUDE_CODE_MAX_RETRIES": "30", "PATH": os.environ["SOAK_PATH"]}
    script = "\n".join(["set -eu", *setting, start or last])
    return subprocess.run(["sh", "-c", script], env={**os.environ, **more}, stdin=subprocess.DEVNULL).returncode


def main(task: str, prompt: str = "") -> int:
    """Returns the exit status. `judge` is the evaluator: the odd members of a group are the better ones."""
    if task == "judge":
        verdict = {"value": int(os.environ["GYRE_SAMPLE_INDEX"]) % 2, "partial": False, "detail": None}
        Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))
        return 0
    execution = os.environ["GYRE_EXECUTION"]
    journal = Journal(Path(os.environ["SOAK_JOURNAL"]), execution)
    base, key = os.environ["GYRE_BASE_URL"], os.environ["GYRE_KEY"]
    if task == "loop":
        loop(base, key, journal, random.Random(execution))
        return 0
    return client(task, prompt, base, journal)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
