"""Sessions that real clients have just written: imported, they hold the calls that the proxy recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients import CLAUDE, CODEX, PI, client_path, documented, play
from tests.support.flow import Flow, calling
from tests.support.importing import imported, only_execution
from tests.support.qwen3 import qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

Tool = Callable[[str], str]
CASES: dict[str, tuple[str, str, Tool, str]] = {
    "claude_code": (
        "Claude Code",
        CLAUDE,
        lambda c: calling("Bash", command=c, description="look"),
        ".claude/projects",
    ),
    "codex": ("Codex", CODEX, lambda c: calling("exec_command", cmd=c), ".codex/sessions"),
    "pi": ("pi", PI, lambda c: calling("bash", command=c), ".pi/agent/sessions"),
}


@pytest.mark.parametrize("format", CASES)
async def test_every_call_and_its_usage_are_there_once(tmp_path: Path, format: str) -> None:
    name, package, tool, where = CASES[format]
    rules = {"THE-TASK": tool("echo SAW-$((1 + 1))"), "SAW-2": tool("echo MORE-$((1 + 1))"), "MORE-2": "All done."}
    env = {"PROMPT": "THE-TASK: look.", "PI_API": "openai-completions"}
    made = await play(client_path(package), tmp_path, documented(name), Flow(qwen3_template(), rules), env)
    done = imported(tmp_path / "home" / where, tmp_path / "imported")
    assert [(one.format, one.num_calls, one.not_understood, one.damaged) for one in done.sessions] == [
        (format, len(made.calls), {}, ())
    ]
    calls = only_execution(tmp_path / "imported").tree.calls
    assert [str(call.agent_role) for call in calls] == ["main"] * 3
    assert [str(call.extension) for call in calls] == ["root", "bridge", "bridge"]
