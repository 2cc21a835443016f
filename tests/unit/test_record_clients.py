"""What `gyre record` sets for each client, and what it keeps of a command."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from datetime import date
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from gyre_data.errors import ConfigError
from gyre_proxy.launch.clients import CLIENTS, plan_launch, plan_watch, settings_base_url
from gyre_proxy.launch.commands import record
from gyre_proxy.launch.page import can_open
from gyre_proxy.launch.record import OUR_OPTIONS, client_words, fresh_run, shown_command, user_upstreams


def build_command(function):
    """The command as the command line builds it."""
    app = typer.Typer()
    app.command(context_settings=function.context_settings)(function)
    return get_command(app)


BASE = "http://127.0.0.1:1/x/e"


@pytest.fixture(autouse=True)
def _nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", list(CLIENTS))
def test_watching_leads_a_client_here_and_sets_no_key(tmp_path: Path, name: str) -> None:
    launch = plan_watch([name, "--flag"], BASE, tmp_path / "clients")
    told = json.dumps([launch.command, dict(launch.env), list(launch.files.values())])
    assert BASE in told
    assert "KEY" not in told.upper().replace("ANTHROPIC_BASE_URL", "")
    assert launch.command[0] == name
    assert launch.command[-1] == "--flag"
    assert all(path.is_relative_to(tmp_path / "clients") for path in launch.files)


@pytest.mark.parametrize("name", list(CLIENTS))
def test_the_policy_is_the_only_model_of_a_launched_client(tmp_path: Path, name: str) -> None:
    launch = plan_launch([name, "--flag"], BASE, tmp_path / "clients", 9000)
    told = json.dumps([launch.command, dict(launch.env), list(launch.files.values())])
    assert "gyre-policy" in told
    assert launch.command[0] == name


def test_any_other_command_gets_the_usual_names(tmp_path: Path) -> None:
    launch = plan_watch(["/opt/mini", "-t", "x"], BASE, tmp_path)
    assert launch.command == ("/opt/mini", "-t", "x")
    assert launch.env["ANTHROPIC_BASE_URL"] == launch.env["GYRE_BASE_URL"] == BASE
    assert launch.env["OPENAI_BASE_URL"] == f"{BASE}/v1"


def test_claude_defers_tools_as_it_does_at_home(tmp_path: Path) -> None:
    assert plan_watch(["claude"], BASE, tmp_path).env["ENABLE_TOOL_SEARCH"] == "true"


def test_a_base_url_in_claudes_settings_becomes_the_upstream_and_is_overruled_by_a_flag(tmp_path: Path) -> None:
    assert settings_base_url() is None
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "settings.json").write_text(
        '{"env": {"ANTHROPIC_BASE_URL": "https://gateway.example/v1/"}}'
    )
    assert settings_base_url() == "https://gateway.example/v1/"
    assert user_upstreams(["claude"], {"ANTHROPIC_BASE_URL": "https://other.example"}) == {
        "anthropic": "https://gateway.example"
    }
    command = plan_watch(["claude", "-p", "hi"], BASE, tmp_path).command
    assert command[:2] == ("claude", "--settings")
    assert json.loads(command[2])["env"]["ANTHROPIC_BASE_URL"] == BASE
    own = plan_watch(["claude", "--settings", "mine.json"], BASE, tmp_path).command
    assert own == ("claude", "--settings", "mine.json")


def test_a_gateway_of_the_environment_stays_the_upstream() -> None:
    environ = {"OPENAI_BASE_URL": "https://gateway.example/openai/v1", "ANTHROPIC_BASE_URL": ""}
    assert user_upstreams(["codex"], environ) == {"openai": "https://gateway.example/openai"}
    assert user_upstreams(["pi"], {}) == {}


@pytest.mark.skipif(shutil.which("node") is None, reason="the extension is JavaScript: apt-get install nodejs")
def test_the_extension_for_pi_is_a_module_that_moves_two_providers(tmp_path: Path) -> None:
    ((_, text),) = plan_watch(["pi"], BASE, tmp_path).files.items()
    (tmp_path / "e.mjs").write_text(text)
    program = "import('./e.mjs').then(m => m.default({registerProvider: (n, o) => console.log(n, o.baseUrl)}))"
    done = subprocess.run(["node", "-e", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"anthropic {BASE}", f"openai {BASE}/v1"]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["pi", "--api-key", "abc", "-p", "hi"], ["pi", "--api-key", "...", "-p", "hi"]),
        (["x", "--token=abc", "hi"], ["x", "--token=...", "hi"]),
        (["x", "use sk-ant-0123456789abcdef now"], ["x", "use ... now"]),
        (["x", "-p", "the key is here"], ["x", "-p", "the key is here"]),
    ],
)
def test_a_command_is_recorded_without_its_secrets(command: list[str], shown: list[str]) -> None:
    assert shown_command(command) == shown


def test_what_comes_after_the_client_is_its_own() -> None:
    assert client_words(["claude", "-p", "x"]) == client_words(["claude", "--", "-p", "x"]) == ["claude", "-p", "x"]
    assert client_words(["any", "--", "--run", "x", "--"]) == ["any", "--run", "x", "--"]
    with pytest.raises(ConfigError, match="wanted --run before the client, got it after claude"):
        client_words(["claude", "--run=x"])
    ours = [f"--{name.replace('_', '-')}" for name in inspect.signature(record).parameters if name != "words"]
    assert set(ours) == set(OUR_OPTIONS)


@pytest.mark.parametrize(
    ("terminal", "environ", "kind", "opens"),
    [
        (True, {"DISPLAY": ":0"}, webbrowser.BackgroundBrowser, True),
        (True, {"WAYLAND_DISPLAY": "w"}, webbrowser.BackgroundBrowser, True),
        (False, {"DISPLAY": ":0"}, webbrowser.BackgroundBrowser, False),
        (True, {}, webbrowser.BackgroundBrowser, False),
        (True, {"DISPLAY": ":0"}, webbrowser.GenericBrowser, False),
    ],
)
def test_a_page_opens_only_beside_a_terminal_and_on_a_display(
    terminal: bool, environ: dict[str, str], kind: type, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(webbrowser, "get", lambda: kind("browser"))
    assert can_open(environ) is opens


def test_each_recording_of_a_day_gets_a_folder(tmp_path: Path) -> None:
    day = date(2026, 11, 29)
    for letter in ("a", "b"):
        assert fresh_run(tmp_path, day) == tmp_path / f"2026-11-29{letter}"
        fresh_run(tmp_path, day).mkdir()
    for number in range(ord("c"), ord("z") + 1):
        (tmp_path / f"2026-11-29{chr(number)}").mkdir()
    assert fresh_run(tmp_path, day) == tmp_path / "2026-11-29aa"


def test_the_docs_have_a_block_for_each_client_that_starts_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "record.md").read_text()
    blocks = re.findall(r"^### [^\n]+\n\n```sh\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    started = {}
    for block in blocks:
        words = shlex.split(block)
        assert words[:2] == ["gyre", "record"]
        context = build_command(record).make_context("record", words[2:], resilient_parsing=False)
        started[context.params["words"][0]] = context.params
    assert set(started) == {*CLIENTS, "any-agent"}
    assert all(not params["engine"] and params["run"] is None for params in started.values())
    table = page.partition("| client | observe mode sets")[2]
    assert [name for name in CLIENTS if f"\n| {name} |" not in table] == []
