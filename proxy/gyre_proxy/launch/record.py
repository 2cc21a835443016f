"""`gyre record`: start one client through the proxy, with what it needs to be recorded, and say how it ended."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError
from gyre_proxy.executions import new_execution_id

from .client import ProxyClient
from .clients import Launch, plan_launch, plan_watch, settings_base_url
from .harness import environment

__all__ = ["OUR_OPTIONS", "Recorded", "client_words", "fresh_run", "record", "shown_command", "tell", "user_upstreams"]

_SILENT_S = 20.0
_SECRET_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password|auth)[\w-]*", re.IGNORECASE)
_SECRET = re.compile(r"(sk|rk|pk)-[\w-]{8,}")

OUR_OPTIONS = (
    "--run",
    "--engine",
    "--tokenizer",
    "--key",
    "--upstream-anthropic",
    "--upstream-openai",
    "--upstream-chatgpt",
    "--no-open",
)
"""What `gyre record` takes itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """How a recording ended. `remarks` say what went wrong and what to do, in whole sentences."""

    execution_id: str
    status: int
    num_calls: int
    remarks: tuple[str, ...]


def fresh_run(root: Path = Path("runs"), today: date | None = None) -> Path:
    """A run folder of today that is not there yet: runs/2026-11-29a, then b."""
    day, number = (today or date.today()).isoformat(), 0
    while True:
        letters, rest = "", number + 1
        while rest:
            rest, digit = divmod(rest - 1, 26)
            letters = chr(ord("a") + digit) + letters
        if not (path := root / f"{day}{letters}").exists():
            return path
        number += 1


def client_words(words: Sequence[str]) -> list[str]:
    """The client's command line; `claude -p x` and `claude -- -p x` are the same.

    Raises ConfigError for an option of ours after the client, which would get it, unless that stands after a `--`.
    """
    name, *rest = words
    if rest[:1] == ["--"]:
        return [name, *rest[1:]]
    ours = [word for word in rest if word.partition("=")[0] in OUR_OPTIONS]
    if ours:
        option = ours[0].partition("=")[0]
        raise ConfigError(
            f"wanted {option} before the client, got it after {name}, which would be given it; write "
            f"`gyre record {option} ... {name}`, or `gyre record {name} -- ...` if it is {name}'s own"
        )
    return [name, *rest]


def user_upstreams(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Where the user's own settings send this client, when that is not the provider itself: a gateway, say."""
    found = {"anthropic": environ.get("ANTHROPIC_BASE_URL"), "openai": environ.get("OPENAI_BASE_URL")}
    if words[0] == "claude" and (told := settings_base_url()) is not None:
        found["anthropic"] = told
    return {name: url.rstrip("/").removesuffix("/v1") for name, url in found.items() if url}


async def record(
    client: ProxyClient,
    run: Path,
    words: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
    *,
    page: str | None = None,
) -> Recorded:
    """Create an execution and run the client on the terminal until it ends; `say` is told how it goes.

    `page` is the address of the live page, to be named.
    """
    status = await client.status()
    observing = status.get("mode") == "observe"
    mode = "observe mode, your own login passes through" if observing else "policy mode"
    say(f"recording to {run}   {mode}   {f'page {page}' if page else f'proxy {client.endpoint}'}")
    execution_id = new_execution_id()
    base_url = f"{client.endpoint}/x/{execution_id}"
    if observing:
        launch = plan_watch(words, base_url, run / "clients")
    else:
        launch = plan_launch(words, base_url, run / "clients", status.get("context_window"))
    made = await client.create_execution(
        id=execution_id,
        task="record",
        sample_index=0,
        harness=launch.harness,
        launcher={"mode": status.get("mode"), "environment": dict(launch.env)},
        command=[*shown_command(launch.command)],
        queue=False,
    )
    if launch.files or not observing:  # what a client keeps there holds the conversation
        (run / "clients").mkdir(mode=0o700, exist_ok=True)
    for path, text in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    told = {"GYRE_EXECUTION": execution_id, **launch.env}
    env = {**os.environ, **told} if observing else environment(base_url, made["key"], None, told)
    code, reason = await _run(client, launch, env, execution_id, say)
    await client.end(execution_id, reason)
    events, calls = await _events(client, execution_id), (await client.show(execution_id))["calls"]
    remarks = _remarks(words[0], events, calls, observing)
    if unwritten := (await client.status()).get("unwritten"):
        remarks += (
            f"{unwritten} calls could not be written to {run}: free the disk before this ends, or they are lost",
        )
    return Recorded(execution_id=execution_id, status=code, num_calls=calls, remarks=remarks)


async def _run(
    client: ProxyClient, launch: Launch, env: Mapping[str, str], execution_id: str, say: Callable[[str], None]
) -> tuple[int, str]:
    """Exit status and end reason."""
    silent = asyncio.create_task(_warn_when_silent(client, launch, execution_id, say))
    try:
        child = await asyncio.to_thread(subprocess.run, list(launch.command), env=dict(env), check=False)
    except FileNotFoundError:
        await client.end(execution_id, "infra_fault")
        raise ConfigError(f"wanted the program {launch.command[0]}, found none on PATH; install it first") from None
    except asyncio.CancelledError:
        await asyncio.shield(client.end(execution_id, "cancelled"))
        raise
    finally:
        silent.cancel()
    return child.returncode, "finished" if child.returncode == 0 else "crashed"


async def _warn_when_silent(client: ProxyClient, launch: Launch, execution_id: str, say: Callable[[str], None]) -> None:
    await asyncio.sleep(_SILENT_S)
    if not await _events(client, execution_id):
        say(f"{launch.command[0]} is up {_SILENT_S:.0f} s with 0 requests: {_elsewhere(launch.command[0])}")


async def _events(client: ProxyClient, execution_id: str) -> list[dict[str, Any]]:
    """What is known of this execution's requests; the log is kept in memory only, so it is what this proxy saw."""
    found, start = [], 0
    while True:
        events, following = await client.events(start)
        found += [e for e in events if e.get("execution_id") == execution_id and e["type"] in ("call", "passed")]
        if not events:
            return found
        start = following


def _elsewhere(name: str) -> str:
    if name == "claude":
        return (
            "fine while nothing was asked; else something sends it elsewhere: a settings file with another "
            "ANTHROPIC_BASE_URL that --settings keeps, or CLAUDE_CODE_USE_BEDROCK or _VERTEX"
        )
    return "fine while nothing was asked; else its own settings name another provider or base URL than the one led here"


def _remarks(name: str, events: Sequence[Mapping[str, Any]], calls: int, observing: bool) -> tuple[str, ...]:
    found = []
    if not calls:
        found.append(f"0 calls were recorded: {_elsewhere(name)}")
    refused = Counter(event.get("http_status") for event in events if event["type"] == "call")
    if observing and refused[401]:
        found.append(
            f"upstream 401 on {refused[401]} calls; your own credential went through unchanged: log in again "
            "(this is not a Gyre key error)"
        )
    if observing and refused[None]:
        found.append(f"{refused[None]} calls never reached the hosted API; see `gyre tree` for why")
    return tuple(found)


def shown_command(command: Sequence[str]) -> list[str]:
    """The command as it is recorded, without what looks like a key or follows a flag that names a secret."""
    shown, hide = [], False
    for word in command:
        flag, sep, _ = word.partition("=")
        if _SECRET_FLAG.fullmatch(flag):
            shown.append(f"{flag}=..." if sep else flag)
            hide = not sep
            continue
        shown.append("..." if hide else _SECRET.sub("...", word))
        hide = False
    return shown


def tell(text: str) -> None:
    """Write a line to the terminal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
