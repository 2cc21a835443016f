"""Disks that are full or read-only, clocks that jump, starts that fail: what was acknowledged stays, faults show."""

import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import ClassVar

import pytest

from gyre_data.errors import ConfigError, EngineError
from gyre_data.store import RunWriter
from gyre_proxy.serve import _serve
from gyre_proxy.settings import ProxySettings
from tests.support.proxy_server import calls_of, check_run, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
NEXT = [*REQUEST["messages"], {"role": "assistant", "content": "Oh"}, {"role": "user", "content": "next"}]


@contextmanager
def no_file_grows():
    """What a full disk does to a write, by the limit on file sizes of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder):
    """As a disk is after a fault."""
    mount = ["mount", "-o", "remount,ro", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run([*mount[:2], "remount,rw", str(folder)], check=True)


@pytest.fixture
def mounted(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root can mount a disk to make it read-only")
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def refused(http, path, body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 500
    return answer.json()["error"]["message"]


async def test_a_disk_that_is_really_full_fails_calls_and_the_next_try_succeeds(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        assert (await http.post("/x/e1/v1/messages", json=REQUEST)).status_code == 200
        with no_file_grows():
            for name in ("e1", "new"):
                assert "free" in await refused(http, f"/x/{name}/v1/messages", {**REQUEST, "messages": NEXT})
            assert "free" in await refused(http, "/api/executions", {"id": "made", "task": "t"})
        assert (len(calls_of(run)), len(list(served.proxy.executions))) == (1, 1)
        assert (await http.post("/x/e1/v1/messages", json={**REQUEST, "messages": NEXT})).status_code == 200
    first, second = check_run(run)
    assert (second.extension, second.continues_from) == ("bridge", first.call_id)


async def test_a_disk_that_turns_read_only(mounted):
    engine, run = ScriptedEngine([OTHER]), mounted / "run"
    async with engine.serving():
        async with serve_proxy(run, engine) as served, served.http() as http:
            assert (await http.post("/x/e1/v1/messages", json=REQUEST)).status_code == 200
        # With files open for writing it could not be made read-only: to a running proxy it is as a full disk.
        with read_only(mounted), pytest.raises(ConfigError, match="give a run folder that can be written"):
            async with serve_proxy(run, engine):
                pass
        with read_only(mounted), pytest.raises(ConfigError, match="give a run folder that can be written"):
            RunWriter(mounted / "fresh")
        async with serve_proxy(run, engine) as served, served.http() as http:
            assert (await http.post("/x/e1/v1/messages", json={**REQUEST, "messages": NEXT})).status_code == 200
    assert [call.extension for call in check_run(run, engine)] == ["root", "bridge"]


def test_a_run_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a run folder that can be written"):
        RunWriter(tmp_path / "file" / "run")


class JumpyDatetime(datetime):
    """A wall clock that is set an hour ahead and back again with every look at it."""

    told: ClassVar[list[datetime]] = []

    @classmethod
    def now(cls, tz=None):
        cls.told.append(datetime.now(tz) + timedelta(hours=(1, -1, 0)[len(cls.told) % 3]))
        return cls.told[-1]


async def test_a_clock_that_jumps_changes_nothing_but_the_stamps(tmp_path, monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith(("gyre_proxy", "gyre_data")) and getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", JumpyDatetime)
    offset = iter(range(10**9))
    real = __import__("time").time
    monkeypatch.setattr("time.time", lambda: real() + (3600, -3600, 0)[next(offset) % 3])
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving():
        async with serve_proxy(run, engine, keep_alive_s=0.05, grace_s=0.2) as served, served.http() as http:
            engine.hold(0)
            body = json.dumps({**REQUEST, "stream": True})
            async with http.stream("POST", "/x/e1/v1/messages", content=body) as answer:
                lines = answer.aiter_lines()
                seen = []
                while sum('"stop_reason":null' in line for line in seen) < 4:
                    seen.append(await anext(lines))
                engine.release()
                rest = [line async for line in lines]
            assert any("message_stop" in line for line in rest)
            assert (await http.post("/x/e1/v1/messages", json={**REQUEST, "messages": NEXT})).status_code == 200
            waited = await http.get("/api/events", params={"from": 0, "wait": 1})
            assert waited.json()["events"]
        async with serve_proxy(run, engine) as served, served.http() as http:
            more = [*NEXT, {"role": "assistant", "content": "Oh"}, {"role": "user", "content": "more"}]
            assert (await http.post("/x/e1/v1/messages", json={**REQUEST, "messages": more})).status_code == 200
    assert len(JumpyDatetime.told) > 9
    calls = check_run(run, engine)
    assert [call.extension for call in calls] == ["root", "bridge", "bridge"]
    stamps = {stamp for call in calls for stamp in (call.started_at, call.first_token_at, call.ended_at)}
    assert len(stamps) == 9
    assert stamps <= set(JumpyDatetime.told)  # the stamps say what the clock said


async def test_a_follower_keeps_up_although_the_clock_was_set_back_over_a_restart(tmp_path, monkeypatch):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    real = __import__("time").time
    async with engine.serving():
        async with serve_proxy(run, engine) as served, served.http() as http:
            place = (await http.get("/api/events")).json()["next"]
        monkeypatch.setattr("time.time", lambda: real() - 3600)
        async with serve_proxy(run, engine) as served, served.http() as http:
            await http.post("/api/executions", json={"id": "e", "task": "t"})
            found = (await http.get("/api/events", params={"from": place})).json()
            assert "execution.queued" in [event["type"] for event in found["events"]]
            assert (await http.get("/api/events", params={"from": found["next"]})).json()["events"] == []


async def test_a_start_that_fails_leaves_no_run_behind(tmp_path):
    engine, small = ScriptedEngine([OTHER]), ScriptedEngine([OTHER], vocab=300)
    async with engine.serving(), small.serving():
        with pytest.raises(ConfigError, match="300"):
            async with serve_proxy(tmp_path / "run", small):
                pass
        with socket.create_server(("127.0.0.1", 0)) as taken:
            settings = ProxySettings(
                run=tmp_path / "run", engines=(engine.url,), tokenizer=tmp_path, port=taken.getsockname()[1]
            )
            with pytest.raises(ConfigError, match="give another --port"):
                await _serve(settings, lambda url, mode: None)
        assert list(tmp_path.iterdir()) == []
        async with serve_proxy(tmp_path / "run", engine) as served:
            await served.anthropic().messages.create(**REQUEST)
        with pytest.raises((ConfigError, EngineError)):
            async with serve_proxy(tmp_path / "run", small):
                pass
    assert len(check_run(tmp_path / "run", engine)) == 1
