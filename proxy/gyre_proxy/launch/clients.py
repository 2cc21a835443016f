"""The clients that `gyre record` knows: one row each, with what makes it go through the proxy unmodified.

Policy mode gives a client settings of its own, so that it talks to the policy and to nothing else. Observe mode changes
as little as it can: the client keeps its login, its settings and its models, and only its base URLs lead here. No file
of the user's is ever written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CLIENTS", "Client", "Launch", "plan_launch", "plan_watch", "settings_base_url"]

_WINDOW = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is started: the command, environment names added for it, and files written below the run's own folder."""

    harness: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A row: how to start the client against the policy, and how to watch it talk to its hosted API.

    Both are given the words after its name, the base URL of the execution, and a folder for its files; `policy` also
    the context window in tokens, for clients that compact by their own count.
    """

    policy: Callable[[Sequence[str], str, Path, int], Launch]
    observe: Callable[[Sequence[str], str, Path], Launch]


def plan_launch(words: Sequence[str], base_url: str, settings: Path, window: int | None = None) -> Launch:
    """How to start `words` against the policy at `base_url`. The first word names a known client or is any program."""
    client = CLIENTS.get(words[0])
    if client is None:
        return Launch(harness=Path(words[0]).name, command=tuple(words))
    return client.policy(words[1:], base_url, settings / words[0], window or _WINDOW)


def plan_watch(words: Sequence[str], base_url: str, settings: Path) -> Launch:
    """How to start `words` as its user would, with its requests led through `base_url` to where they go anyway."""
    client = CLIENTS.get(words[0])
    if client is None:
        env = {**_anthropic(base_url), **_openai(base_url), "GYRE_BASE_URL": base_url}
        return Launch(harness=Path(words[0]).name, command=tuple(words), env=env)
    return client.observe(words[1:], base_url, settings / words[0])


def _anthropic(base_url: str) -> dict[str, str]:
    return {"ANTHROPIC_BASE_URL": base_url}


def _openai(base_url: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_BASE": f"{base_url}/v1"}


# --- Claude Code ------------------------------------------------------------------------------------------------------


def _claude_policy(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
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


def _claude_observe(rest: Sequence[str], base_url: str, folder: Path) -> Launch:
    # Behind a base URL that is not Anthropic's it would send every tool whole that it otherwise defers.
    env = {**_anthropic(base_url), "ENABLE_TOOL_SEARCH": "true"}
    command = ("claude", *rest)
    if settings_base_url() is not None and "--settings" not in rest:
        # A settings file wins over the environment, and this flag over the file.
        command = ("claude", "--settings", json.dumps({"env": env}), *rest)
    return Launch(harness="claude-code", command=command, env=env)


def settings_base_url(home: Path | None = None, work: Path | None = None) -> str | None:
    """The base URL that a settings file of Claude Code gives it, if one does: it wins over the environment."""
    folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or (home or Path.home()) / ".claude")
    project = (work or Path.cwd()) / ".claude"
    for file in (project / "settings.local.json", project / "settings.json", folder / "settings.json"):
        try:
            found = json.loads(file.read_text())["env"]["ANTHROPIC_BASE_URL"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(found, str) and found:
            return found
    return None


# --- Codex ------------------------------------------------------------------------------------------------------------


def _codex_policy(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
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


def _codex_observe(rest: Sequence[str], base_url: str, folder: Path) -> Launch:
    # The provider stays its own, and so does the login, by key or by ChatGPT account; only its address changes.
    return Launch(harness="codex", command=("codex", "-c", f"openai_base_url={json.dumps(f'{base_url}/v1')}", *rest))


# --- pi ---------------------------------------------------------------------------------------------------------------


def _pi_policy(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
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


def _pi_observe(rest: Sequence[str], base_url: str, folder: Path) -> Launch:
    # Its own models, keys and settings stay; an extension for this run alone moves two of its providers.
    moved = {"anthropic": base_url, "openai": f"{base_url}/v1"}
    lines = [
        f"  pi.registerProvider({json.dumps(name)}, {{ baseUrl: {json.dumps(url)} }});" for name, url in moved.items()
    ]
    text = "\n".join(["export default function (pi) {", *lines, "}", ""])
    return Launch(harness="pi", command=("pi", "-e", str(folder / "gyre.js"), *rest), files={folder / "gyre.js": text})


# --- opencode ---------------------------------------------------------------------------------------------------------


def _opencode_policy(rest: Sequence[str], base_url: str, folder: Path, window: int) -> Launch:
    model = {"limit": {"context": window, "output": 4096}}
    options = {"baseURL": f"{base_url}/v1", "apiKey": "{env:GYRE_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"gyre-policy": model}}
    config: dict[str, Any] = {"provider": {"gyre": provider}, "autoupdate": False, "share": "disabled"}
    config |= {"model": "gyre/gyre-policy", "small_model": "gyre/gyre-policy"}
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return Launch(harness="opencode", command=("opencode", *rest), env={**env, "OPENCODE_DISABLE_MODELS_FETCH": "1"})


def _opencode_observe(rest: Sequence[str], base_url: str, folder: Path) -> Launch:
    moved = {name: {"options": {"baseURL": f"{base_url}/v1"}} for name in ("anthropic", "openai")}
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": moved})}
    return Launch(harness="opencode", command=("opencode", *rest), env=env)


CLIENTS: Mapping[str, Client] = {
    "claude": Client(policy=_claude_policy, observe=_claude_observe),
    "codex": Client(policy=_codex_policy, observe=_codex_observe),
    "opencode": Client(policy=_opencode_policy, observe=_opencode_observe),
    "pi": Client(policy=_pi_policy, observe=_pi_observe),
}
