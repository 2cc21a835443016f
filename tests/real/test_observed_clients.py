"""Unmodified clients observed by `gyre record`, against a stand-in for their hosted API.

Each client runs twice over the same deterministic stand-in, from the same HOME and folder: once straight, once through
Gyre, with a wire tap in front of it. What reaches the provider and what reaches the client must be the same bytes. The
two runs differ by what `NORMALISED` names and by nothing else.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gyre_data import open as open_run
from gyre_data.child import free_port, gyre_child
from gyre_data.execution import executions
from gyre_data.hosted import hosted
from gyre_data.verify import verify
from gyre_proxy.launch.client import serves
from gyre_proxy.launch.clients import plan_watch
from tests.support.clients import CLAUDE, CODEX, PI, client_path
from tests.support.engines import ROOT
from tests.support.observing import Got
from tests.support.provider import (
    Answer,
    Provider,
    Sent,
    anthropic_stream,
    chat_stream,
    json_answer,
    responses_stream,
    sse,
    sse_answer,
)
from tests.support.tap import Tap

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

KEY = "sk-ant-observed-0123456789abcdef"
SESSION = "0b5e6ac1-6c6b-4f6e-9f5e-0123456789ab"
NORMALISED = (
    # ids that a client draws for each run, in the order in which they appear
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UUID"),
    # times of Codex
    (re.compile(r'(create_time|turn_started_at_unix_ms)[\\\\"]*: ?[\d.]+'), "time"),
)


def jwt(claims: dict[str, Any]) -> str:
    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature"))


def claude_home(home: Path) -> None:
    (home / ".claude.json").write_text(json.dumps({"userID": "0" * 64, "hasCompletedOnboarding": True}))


def codex_key(home: Path) -> None:
    (home / ".codex").mkdir()
    (home / ".codex" / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": KEY}))


def codex_login(home: Path) -> None:
    account = {"chatgpt_account_id": "acct-0123456789", "chatgpt_plan_type": "pro", "chatgpt_user_id": "user"}
    token = jwt({"https://api.openai.com/auth": account, "email": "a@b.c", "exp": 4102444800, "sub": "x"})
    tokens = {"id_token": token, "access_token": token, "refresh_token": "rt-0123", "account_id": "acct-0123456789"}
    login = {"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens}
    (home / ".codex").mkdir()
    (home / ".codex" / "auth.json").write_text(
        json.dumps({**login, "last_refresh": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")})
    )


def claude_answers(sent: Sent, number: int) -> Answer:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "echo seen > seen.txt"}}
    thought = {"type": "thinking", "thinking": "A file.", "signature": "c2ln"}
    blocks = [[thought, call], [{"type": "text", "text": "Done."}]][min(number, 1)]
    return sse_answer(sse(*anthropic_stream(*blocks, number=number)), encoding="gzip" if number else None)


def pi_answers(sent: Sent, number: int) -> Answer:
    arguments = json.dumps({"command": "echo seen > seen.txt"})
    if "/messages" in sent.target:
        call = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": json.loads(arguments)}
        return sse_answer(sse(*anthropic_stream([call, {"type": "text", "text": "Done."}][min(number, 1)])))
    if "/responses" in sent.target:
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "bash", "arguments": arguments}
        return sse_answer(sse(*responses_stream(call if not number else message_item("Done."))))
    return sse_answer(sse(*chat_stream("Done." if number else "", None if number else ("call_1", "bash", arguments))))


def message_item(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content}


def codex_answers(sent: Sent, number: int) -> Answer:
    return sse_answer(sse(*responses_stream(message_item(f"Answer {number}."))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    package: str
    commands: tuple[tuple[str, ...], ...]
    """Each is a run of the client; they share HOME, folder and stand-in."""
    answers: Callable[[Sent, int], Answer]
    prepare: Callable[[Path], None] = lambda home: None
    env: dict[str, str] = field(default_factory=dict)
    path: str = ""
    """Path of the upstream's base URL: Gyre puts it where the client has /v1."""
    calls: int = 2
    wire: str = "anthropic"


CLAUDE_WORDS = ("-p", "Make a file.", "--session-id", SESSION, "--dangerously-skip-permissions", "--tools", "Bash")
CODEX_WORDS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CODEX_RUNS = (("codex", "exec", *CODEX_WORDS, "Hi."), ("codex", "exec", "resume", "--last", *CODEX_WORDS, "Again."))
PI_WORDS = ("--no-session", "-p", "Make a file.")
PI_ENV = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
CLAUDE_ENV = {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_API_KEY": KEY}
CASES = {
    "claude": Case(
        package=CLAUDE,
        commands=(("claude", *CLAUDE_WORDS),),
        answers=claude_answers,
        prepare=claude_home,
        env=CLAUDE_ENV,
    ),
    "codex-key": Case(
        package=CODEX, commands=CODEX_RUNS, answers=codex_answers, prepare=codex_key, wire="openai_responses"
    ),
    "codex-login": Case(
        package=CODEX,
        commands=CODEX_RUNS,
        answers=codex_answers,
        prepare=codex_login,
        path="/backend-api/codex",
        wire="openai_responses",
    ),
    "pi-anthropic": Case(
        package=PI,
        commands=(("pi", "--provider", "anthropic", "--model", "claude-sonnet-4-5", *PI_WORDS),),
        answers=pi_answers,
        env={**PI_ENV, "ANTHROPIC_API_KEY": KEY},
    ),
    "pi-openai": Case(
        package=PI,
        commands=(("pi", "--provider", "openai", "--model", "gpt-4.1", *PI_WORDS),),
        answers=pi_answers,
        env={**PI_ENV, "OPENAI_API_KEY": KEY},
        wire="openai_responses",
    ),
}


MODEL_CALLS = ("/messages", "/completions", "/responses")


def answering(case: Case) -> Callable[[Sent], Answer]:
    seen: list[Sent] = []

    def answer(sent: Sent) -> Answer:
        if sent.header("upgrade"):
            return json_answer({"error": {"message": "no WebSocket"}}, 426)
        if sent.method != "POST" or not sent.target.partition("?")[0].endswith(MODEL_CALLS):
            return json_answer({"error": {"message": "not here"}}, 404)
        seen.append(sent)
        return case.answers(sent, len(seen) - 1)

    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`arrived` at the provider, `passed` at the client."""

    arrived: list[Sent]
    passed: list[tuple[Sent, Got]]
    printed: list[str]


def start(case: Case, folder: Path, command: tuple[str, ...], env: dict[str, str]) -> str:
    path = client_path(case.package)
    base = {"PATH": path, "HOME": str(folder / "home"), "TERM": "dumb", **case.env, **env}
    done = subprocess.run(
        command,
        env=base,
        cwd=folder / "work",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def prepared(case: Case, folder: Path) -> None:
    for name in ("home", "work"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    case.prepare(folder / "home")


def straight(case: Case, folder: Path) -> Outcome:
    """The client as `gyre record` starts it, but with the provider's address in the place of Gyre's."""
    prepared(case, folder)
    provider = Provider(answering(case))
    with provider.in_a_thread(), Tap("127.0.0.1", urlsplit(provider.url).port or 0).in_a_thread() as tap:
        printed = []
        for command in case.commands:
            launch = plan_watch(command, tap.url, folder / "clients")
            for path, text in launch.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            printed.append(start(case, folder, launch.command, dict(launch.env)))
    return Outcome(arrived=provider.sent, passed=tap.exchanges(), printed=printed)


def observed(case: Case, folder: Path, run: Path) -> Outcome:
    """The client by `gyre record`; the tap stands in front of Gyre, since run.json is made to name it."""
    prepared(case, folder)
    provider = Provider(answering(case))
    with ExitStack() as stack:
        stack.enter_context(provider.in_a_thread())
        url = f"http://127.0.0.1:{free_port()}"
        words = ["proxy", "--run", str(run), "--observe", "--port", url.rpartition(":")[2]]
        words += [f"--upstream-{name}={provider.url}" for name in ("anthropic", "openai")]
        words.append(f"--upstream-chatgpt={provider.url}{case.path}")
        up = stack.enter_context
        up(gyre_child(words, folder / "proxy.log", url, is_ready=lambda url: serves(url, run, None)))
        tap = up(Tap("127.0.0.1", urlsplit(url).port or 0).in_a_thread())
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**info, "endpoints": {"proxy": tap.url}}))
        gyre = (sys.executable, "-m", "gyre_data", "record", "--run", str(run))
        python = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proxy")])}
        printed = [start(case, folder, (*gyre, word, "--", *rest), python) for word, *rest in case.commands]
    passed = [(sent, got) for sent, got in tap.exchanges() if sent.target.startswith("/x/")]
    return Outcome(arrived=provider.sent, passed=passed, printed=printed)


def plain(text: str) -> str:
    for pattern, name in NORMALISED:
        seen: dict[str, str] = {}
        text = pattern.sub(lambda found, n=name, s=seen: s.setdefault(found[0], f"{n}-{len(s)}"), text)
    return text


_LATE_AGENT = " (codex_exec; 0.171.0)"


def request_form(sent: Sent, case: Case) -> tuple[Any, ...]:
    """A request as it is compared: everything but Host, with the ids of the run put in order."""
    names = sorted((name.lower(), value) for name, value in sent.headers if name.lower() not in ("host", "connection"))
    body = sent.body
    if case.package == CODEX and body:
        # It draws ids and times and shuffles the keys of its metadata: what is left to compare is the value. That any
        # bytes pass as they came, packed ones too, is tested without it.
        body = json.dumps(sent.json(), sort_keys=True).encode()
        names = [(name, value) for name, value in names if name != "content-length"]
    # Codex's first request may or may not have this yet, as its start-up goes.
    names = [(name, value.removesuffix(_LATE_AGENT) if name == "user-agent" else value) for name, value in names]
    target = sent.target.replace(case.path, "/v1", 1) if case.path else sent.target
    whole = json.dumps([sent.method, target, names, body.decode()])
    return (plain(whole),)


def difference(one: str, two: str) -> str:
    at = next((i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), 0)
    return f"{one[max(at - 200, 0) : at + 100]}\n{two[max(at - 200, 0) : at + 100]}"


def replies(outcome: Outcome) -> list[tuple[Any, ...]]:
    """What the client got, byte for byte but the number of its request, which is the reply's own.

    It may hang up once it has the last event. WebSockets are refused anyway.
    """
    hop = ("connection", "keep-alive", "request-id", "x-request-id")
    return sorted(
        (sent.method, got.status, sorted(pair for pair in got.headers if pair[0] not in hop), got.body)
        for sent, got in outcome.passed
        if not sent.header("upgrade")
    )


@pytest.mark.parametrize("name", list(CASES))
def test_requests_and_replies_are_those_of_a_client_without_gyre(tmp_path: Path, name: str) -> None:
    case, run = CASES[name], tmp_path / "run"
    client_path(case.package)
    one, two = straight(case, tmp_path), observed(case, tmp_path, run)
    assert len(one.arrived) >= case.calls
    kept = [sorted(request_form(s, case) for s in o.arrived if not s.header("upgrade")) for o in (one, two)]
    for before, after in zip(*kept, strict=True):
        assert before == after, difference(before[0], after[0])
    assert replies(one) == replies(two)
    assert [plain(text) for text in one.printed] == [plain(text) for text in two.printed]
    assert verify(run).problems == ()
    opened = open_run(run)
    calls = [call for execution_id in executions(opened) for call in opened[execution_id].tree.calls]
    assert [call.status for call in calls] == ["ok"] * case.calls
    assert {call.wire for call in calls} == {case.wire}
    assert all(call.note is None for call in calls), [call.note for call in calls]
    assert hosted(opened).usage.output > 0
    files = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    files += b"".join(opened.blob(blob) for blob in opened.table("blobs").column("blob_id").to_pylist())
    for secret in (KEY, "acct-0123456789", "rt-0123"):
        assert secret.encode() not in files
