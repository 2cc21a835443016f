"""`gyre record`: start one client through the proxy, with what it needs to be recorded, and say how it ended."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre_data.errors import ConfigError

from .client import ProxyClient
from .harness import environment

__all__ = ["CLIENTS", "Launch", "plan_launch", "record"]

CLIENTS = ("claude", "codex", "pi")
_WINDOW = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is started: the command, environment names added for it, and files written below the run's own folder."""

    harness: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


def plan_launch(words: Sequence[str], base_url: str, settings: Path, window: int | None = None) -> Launch:
    """How to start `words` against `base_url`. The first word names a known client or is any program.

    A known client gets a settings folder of its own below `settings`, so that the user's is neither read nor written.
    `window` is the proxy's context window in tokens, for clients that compact by their own count.
    """
    match words[0]:
        case "claude":
            return _claude(words[1:], settings / "claude")
        case "pi":
            return _pi(words[1:], base_url, settings / "pi", window or _WINDOW)
        case "codex":
            return _codex(words[1:], base_url, settings / "codex", window or _WINDOW)
        case _:
            return Launch(harness=Path(words[0]).name, command=tuple(words))


def _claude(rest: Sequence[str], folder: Path) -> Launch:
    env = {
        "CLAUDE_CONFIG_DIR": str(folder),
        "ANTHROPIC_MODEL": "gyre-policy",
        # Without these it sends traffic that is no part of the run, or a block at token 0 that differs per agent.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return Launch(harness="claude-code", command=("claude", *rest), env=env)


def _codex(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
    # The search would be the provider's to run; it is offered to nobody here.
    config = f"""model = "gyre-policy"
model_provider = "gyre"
model_context_window = {window}
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.gyre]
name = "Gyre"
base_url = {json.dumps(f"{base_url}/v1")}
env_key = "GYRE_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    return Launch(
        harness="codex",
        command=("codex", *rest),
        env={"CODEX_HOME": str(folder)},
        files={folder / "config.toml": config},
    )


def _pi(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
    # The key by the name of its variable: it must not lie in the run folder.
    model = {"id": "gyre-policy", "name": "gyre-policy", "reasoning": True, "input": ["text"]}
    model |= {"contextWindow": window, "maxTokens": 4096}
    model |= {"cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
    provider = {"baseUrl": f"{base_url}/v1", "api": "openai-completions", "apiKey": "GYRE_KEY", "models": [model]}
    return Launch(
        harness="pi",
        command=("pi", "--provider", "gyre", "--model", "gyre-policy", *rest),
        env={"PI_CODING_AGENT_DIR": str(folder), "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={folder / "models.json": json.dumps({"providers": {"gyre": provider}}, indent=2)},
    )


async def record(client: ProxyClient, run: Path, words: Sequence[str]) -> tuple[str, int]:
    """Create an execution, run the client on the terminal until it ends, and return (execution id, exit status)."""
    made = await client.create_execution(task="record", group=None, sample_index=0, harness=Path(words[0]).name)
    window = (await client.status())["context_window"]
    launch = plan_launch(words, made["base_url"], run / "clients", window)
    for path, text in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    env = environment(made["base_url"], made["key"], None, {"GYRE_EXECUTION": made["id"], **launch.env})
    reason = "infra_fault"
    try:
        child = await asyncio.to_thread(subprocess.run, list(launch.command), env=env, check=False)
        reason = "finished" if child.returncode == 0 else "crashed"
    except FileNotFoundError:
        raise ConfigError(f"wanted the program {launch.command[0]}, found none on PATH; install it first") from None
    except asyncio.CancelledError:
        reason = "cancelled"
        raise
    finally:
        await asyncio.shield(client.end(made["id"], reason))
    return made["id"], child.returncode
