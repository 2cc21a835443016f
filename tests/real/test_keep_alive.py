"""Claude Code gives up on 300 s of silence; an engine that takes longer must not show. Waits for 310 s without work."""

import asyncio
from pathlib import Path

import pytest

from gyre_data.schema import Extension
from tests.support.clients import CLAUDE, client_path, documented, play
from tests.support.flow import Flow, calling
from tests.support.qwen3 import qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SILENCE_S = 310


async def quiet_run(folder: Path, held_at: int) -> None:
    """A run whose first reply waits before its delta number `held_at`."""
    look = calling("Bash", "<think>\nA long thought, told slowly.\n</think>\n\nI look.", command="echo SAW-$((1 + 1))")
    flow = Flow(qwen3_template(), {"QUIET-TASK": look, "SAW-2": "All done."})
    flow.hold(held_at)

    async def release() -> None:
        await flow.waiting.wait()
        await asyncio.sleep(SILENCE_S)
        flow.release()

    ending = asyncio.create_task(release())
    script = documented("Claude Code")
    made = await play(client_path(CLAUDE), folder, script, flow, {"PROMPT": "QUIET-TASK: go."}, timeout_s=550)
    await ending
    assert "All done." in made.printed
    first, second = made.calls  # nothing was sent twice
    assert (first.extension, second.extension) == (Extension.ROOT, Extension.BRIDGE), "the silence left no trace"


async def test_claude_code_waits_for_a_silent_engine(tmp_path: Path) -> None:
    await asyncio.gather(*(quiet_run(tmp_path / f"at-{held_at}", held_at) for held_at in (0, 1)))
