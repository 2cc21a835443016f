"""Unmodified pi, mini-swe-agent, qwen-code and opencode through the proxy, replies scripted in real Qwen3 ids.

pi's third wire is in test_flows_responses.py.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from gyre_data.schema import AgentRole, BranchReason
from gyre_data.types import Call
from tests.support.clients import MINI, OPENCODE, PI, QWEN, Played, client_path, documented, play
from tests.support.flow import Answer, Flow, calling
from tests.support.proxy_server import nodes_of, path_ids
from tests.support.qwen3 import qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
THINKS = "<think>\nA plan.\n</think>\n\nI look."
SUMMARY = "## Goal\nEverything that was said, in few words."


def flow(rules: dict[str, Answer], whole: dict[str, Answer] | None = None) -> Flow:
    return Flow(qwen3_template(), rules, whole)


def shell(tool: str, name: str, upto: int = 0, **more: object) -> str:
    count = f"seq 1 {upto}; " if upto else ""
    return calling(tool, THINKS, command=f"{count}echo {name}-$((1 + 1))", **more)


def extends_exactly(made: Played, calls: list[Call]) -> None:
    """Each call's prompt begins with the whole path of the one before, and none is a false fork."""
    nodes = nodes_of(made.run)
    for before, after in pairwise(calls):
        whole = path_ids(nodes, before.output_node)
        assert path_ids(nodes, after.prompt_node)[: len(whole)] == whole
        assert after.extension in ("bridge", "repair")
    assert {call.fork_check for call in made.calls} == {None}


@pytest.mark.parametrize("api", ["openai-completions", "anthropic-messages"])
async def test_pi_over_two_wires(tmp_path: Path, api: str) -> None:
    rules = {"PI-TASK": shell("bash", "SAW"), "SAW-2": "Seen.", "PI-MORE": shell("bash", "MORE"), "MORE-2": "All done."}
    script = documented("pi") + '\npi --provider gyre --model gyre-policy -c -p "PI-MORE: go on."'
    made = await play(client_path(PI), tmp_path, script, flow(rules), {"PROMPT": "PI-TASK: look.", "PI_API": api})
    assert made.answered == list(rules)
    assert [str(call.agent_role) for call in made.calls] == ["main"] * 4
    assert {call.wire for call in made.calls} == {"anthropic" if api == "anthropic-messages" else "openai_chat"}
    extends_exactly(made, made.calls)


async def test_pi_compacts_what_it_sends_as_text(tmp_path: Path) -> None:
    rules = {
        "PI-TASK": shell("bash", "A", 900),
        "A-2": shell("bash", "B", 900),
        "B-2": shell("bash", "C", 900),
        "C-2": "Seen.",
        "PI-MORE": "All done.",
    }
    whole = {"You are a context summarization assistant.": SUMMARY}
    settings = '{"compaction": {"enabled": true, "reserveTokens": 4000, "keepRecentTokens": 1200}}'
    *setting, start = documented("pi").splitlines()
    again = 'pi --provider gyre --model gyre-policy -c -p "PI-MORE: go on."'
    script = "\n".join([*setting, f"echo '{settings}' > $HOME/.pi/agent/settings.json", start, again])
    env = {"PROMPT": "PI-TASK: look.", "PI_WINDOW": "12000"}
    made = await play(client_path(PI), tmp_path, script, flow(rules, whole), env)
    summaries = [call for call in made.calls if call.agent_role is AgentRole.MAIN_SUMMARY]
    others = [call for call in made.calls if call.agent_role is AgentRole.MAIN]
    assert summaries
    assert len(summaries) + len(others) == len(made.calls)
    after = others[-1]
    assert after.branch_reason is BranchReason.COMPACTION
    assert after.continues_from in {call.call_id for call in summaries}
    assert {call.continues_from for call in summaries} <= {call.call_id for call in others}
    assert {call.fork_check for call in made.calls} == {None}


async def test_mini_swe_agent(tmp_path: Path) -> None:
    submit = calling("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    rules = {"MINI-TASK": "I call nothing.", "No tool calls found": shell("bash", "SAW"), "SAW-2": submit}
    script = documented("mini-swe-agent")
    made = await play(client_path(MINI), tmp_path, script, flow(rules), {"PROMPT": "MINI-TASK: look."})
    assert made.answered == list(rules)
    assert [str(call.agent_role) for call in made.calls] == ["main"] * 3
    assert made.calls[1].continues_from == made.calls[0].call_id, "it leaves out the turn that it could not use"
    extends_exactly(made, made.calls[1:])


async def test_qwen_code_and_its_agent(tmp_path: Path) -> None:
    rules = {
        "QWEN-TASK": shell("run_shell_command", "SAW", description="look", is_background=False),
        "SAW-2": calling("agent", description="help", prompt="KID-TASK: look around", subagent_type="general-purpose"),
        "KID-TASK": shell("run_shell_command", "KID", description="look", is_background=False),
        "KID-2": "KID-DONE",
        "KID-DONE": "All done.",
    }
    script = documented("qwen-code")
    made = await play(client_path(QWEN), tmp_path, script, flow(rules), {"PROMPT": "QWEN-TASK: look."})
    assert made.answered == list(rules)
    main = [call for call in made.calls if call.agent_role is AgentRole.MAIN]
    agent = [call for call in made.calls if call.agent_role is AgentRole.SUB_AGENT]
    assert (len(main), len(agent)) == (3, 2)
    assert agent[0].spawned_by_node == main[1].output_node
    assert {call.agent_id for call in agent} == {agent[0].spawned_by_tool_call}
    extends_exactly(made, main)
    extends_exactly(made, agent)


async def test_opencode_title_agent_and_compaction(tmp_path: Path) -> None:
    rules = {
        "OPEN-TASK": calling("task", THINKS, description="help", prompt="KID-TASK: look", subagent_type="general"),
        "KID-TASK": shell("bash", "KID", description="look"),
        "KID-2": "KID-DONE",
        "KID-DONE": shell("bash", "A", 3000, description="count"),
        "A-2": shell("bash", "B", 3000, description="count"),
        "B-2": "Seen.",
        "Continue if you have next steps": "All done.",
    }
    whole = {"You are a title generator.": "A title", "You are a context summarization agent.": SUMMARY}
    env = {"PROMPT": "OPEN-TASK: look.", "OPENCODE_WINDOW": "24000"}
    made = await play(client_path(OPENCODE), tmp_path, documented("opencode"), flow(rules, whole), env)
    roles = [str(call.agent_role) for call in made.calls]
    assert sorted(roles) == sorted(["side", *["main"] * 5, *["sub_agent"] * 2, "main_summary"])
    kid = next(call for call in made.calls if call.agent_role is AgentRole.SUB_AGENT)
    main = [call for call in made.calls if call.agent_role is AgentRole.MAIN]
    summary = next(call for call in made.calls if call.agent_role is AgentRole.MAIN_SUMMARY)
    assert (kid.parent_agent_id, kid.spawned_by_node) == (main[0].agent_id, main[0].output_node)
    assert summary.continues_from == main[-2].call_id
    assert (main[-1].branch_reason, main[-1].continues_from) == (BranchReason.COMPACTION, summary.call_id)
    extends_exactly(made, main[:-1])
