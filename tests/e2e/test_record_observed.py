"""`gyre record` over an observing proxy: what it sets, what it records of it, and what it says when things go wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_data.child import answers
from gyre_data.errors import ConfigError
from gyre_data.execution import executions
from gyre_data.store import open as open_run
from gyre_proxy.commands import proxy
from gyre_proxy.launch.client import ProxyClient
from gyre_proxy.launch.record import record
from tests.support.engines import ROOT
from tests.support.observing import checked_calls, serve_observer
from tests.support.provider import Answer, Provider, anthropic_stream, json_answer, sse, sse_answer

PROGRAM = """
import os, anthropic
client = anthropic.Anthropic(api_key="sk-ant-0123456789abcdef", max_retries=0)
with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as stream:
    print(stream.get_final_text(), os.environ["GYRE_EXECUTION"])
"""
REFUSED = json_answer({"type": "error", "error": {"type": "authentication_error", "message": "no"}}, 401)


async def _recorded(
    tmp_path: Path, answer: Answer, program: str, heard: Callable[[str], object] = lambda words: None
) -> tuple[list[str], Path, tuple[str, ...], int]:
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        heard(words)

    async with (
        Provider(lambda sent: answer).serving() as provider,
        serve_observer(tmp_path / "run", provider) as proxy,
        ProxyClient(proxy.url) as client,
    ):
        command = [sys.executable, "-c", program, "--api-key", "sk-ant-0123456789abcdef"]
        ended = await record(client, proxy.run, command, say)
    return said, tmp_path / "run", ended.remarks, ended.status


async def test_a_command_is_watched_with_its_own_key(tmp_path: Path) -> None:
    answer = sse_answer(sse(*anthropic_stream({"type": "text", "text": "Hello."})))
    said, run, remarks, status = await _recorded(tmp_path, answer, PROGRAM)
    assert (status, remarks) == (0, ())
    assert "observe mode, your own login passes through" in said[0]
    (call,) = checked_calls(run)
    assert call.status == "ok"
    (info,) = executions(open_run(run)).values()
    launcher = json.loads(info.launcher or "")
    assert (info.end_reason, launcher["mode"]) == ("finished", "observe")
    assert launcher["environment"]["ANTHROPIC_BASE_URL"].endswith(f"/x/{info.execution_id}")
    assert launcher["command"][-2:] == ["--api-key", "..."]
    files = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"sk-ant-0123456789abcdef" not in files


async def test_a_login_that_is_refused_is_told_from_a_key_of_ours(tmp_path: Path) -> None:
    _, _, remarks, status = await _recorded(tmp_path, REFUSED, PROGRAM)
    assert status == 1
    assert remarks == (
        "upstream 401 on 1 calls; your own credential went through unchanged: log in again "
        "(this is not a Gyre key error)",
    )


async def test_a_client_that_goes_elsewhere_is_told(tmp_path: Path) -> None:
    _, _, remarks, _ = await _recorded(tmp_path, REFUSED, "pass")
    assert len(remarks) == 1
    assert remarks[0].startswith("0 calls were recorded: ")


async def test_a_silent_client_is_asked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_proxy.launch.record._SILENT_S", 0.1)
    asked = tmp_path / "asked"
    silent = f"import os, time\nwhile not os.path.exists({str(asked)!r}): time.sleep(0.05)"
    said, *_ = await _recorded(tmp_path, REFUSED, silent, lambda words: "0 requests" in words and asked.touch())
    assert "0 requests" in said[1]


LOOKS = (
    PROGRAM
    + """
import time, urllib.request
for _ in range(600):  # the page comes up beside us
    try:
        told = urllib.request.urlopen(PAGE, timeout=2).read()
        calls = json.load(urllib.request.urlopen(PAGE + "/api/run", timeout=2))["whole"]["calls"]["total"]
    except OSError:
        calls = 0
    if calls:
        break
    time.sleep(0.1)
print(b"gyre view" in told, calls)
"""
)


def test_the_one_word_from_the_command_line(tmp_path: Path) -> None:
    answer = sse_answer(sse(*anthropic_stream({"type": "text", "text": "Hello."})))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proxy")]), "NO_COLOR": "1"}
    # The client of this test looks at the page meanwhile; it finds its address in what `gyre record` said.
    program = f"import json, re; PAGE = re.search(r'page (http://127.0.0.1:[0-9]+)', open('said').read())[1]\n{LOOKS}"
    with Provider(lambda sent: answer).in_a_thread() as provider:
        words = ["record", "--upstream-anthropic", provider.url, "--", sys.executable, "-c", program]
        command = [sys.executable, "-m", "gyre_data", *words]
        with open(tmp_path / "said", "w") as said:
            done = subprocess.run(
                command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=said, text=True, check=False, timeout=120
            )
    told = (tmp_path / "said").read_text()
    assert done.returncode == 0, told
    assert done.stdout.startswith("Hello. e_")
    assert done.stdout.splitlines()[-1] == "True 1"
    (run,) = (tmp_path / "runs").iterdir()
    name = run.relative_to(tmp_path)
    first, last = told.strip().splitlines()
    assert first.startswith(f"recording to {name}   observe mode, your own login passes through   page http://127.")
    assert last.endswith(f"in {name}: 1 call   next: gyre tree {name} | gyre view {name}")
    assert not answers(first.rpartition(" ")[2])  # it ended with the recording
    assert [call.status for call in checked_calls(run)] == ["ok"]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"observe": True, "engine": ["http://127.0.0.1:1"]}, "--engine has no effect with --observe"),
        ({"observe": True, "workers": 2}, "--workers has no effect with --observe"),
        ({"upstream_openai": "https://x"}, "--upstream-openai has no effect without --observe"),
        ({"observe": True, "upstream_openai": "https://x/v1"}, "ends in /v1"),
        ({"observe": True, "upstream_openai": "https://user:secret@x"}, "credentials are the client's own"),
        ({"observe": True, "host": "0.0.0.0"}, "wanted a key"),
        ({}, "or record hosted APIs with --observe"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, options: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        proxy(run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
