"""Unmodified Claude Code through the proxy, its replies scripted in the ids of the real Qwen3 tokenizer."""

from pathlib import Path

import pytest

from gyre_data.schema import AgentRole, Author, BranchReason, Extension
from gyre_data.types import Call, Node
from tests.support.clients import CLAUDE, Played, client_path, documented, play
from tests.support.flow import Flow, calling
from tests.support.proxy_server import nodes_of, path_ids
from tests.support.qwen3 import qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SUMMARISE = "CRITICAL: Respond with TEXT ONLY"


def count(upto: int, name: str) -> str:
    """A call whose result is long: Qwen3 spends a token on each digit and line break."""
    return calling("Bash", command=f"seq 1 {upto}; echo {name}-$((1 + 1))", description="count")


def agent(prompt: str, text: str = "", **more: object) -> str:
    return calling("Agent", text, description="help", prompt=prompt, subagent_type="general-purpose", **more)


async def played(folder: Path, rules: dict, prompt: str, command: str | None = None, **options: object) -> Played:
    script = documented("Claude Code", command)
    return await play(client_path(CLAUDE), folder, script, Flow(qwen3_template(), rules), {"PROMPT": prompt}, **options)


async def test_agents_in_agents_and_compactions_have_their_roles_and_links(tmp_path: Path) -> None:
    rules = {
        "MAIN-TASK": agent("CHILD-TASK: work", "<think>\nA plan.\n</think>\n\nI start.", run_in_background=False),
        "CHILD-TASK": agent("LEAF-TASK: look", run_in_background=False),
        "LEAF-TASK": calling("Bash", command="echo LOOKED-$((1 + 1))", description="look"),
        "LOOKED-2": "LEAF-DONE",
        "LEAF-DONE": count(1200, "CHILD-A"),
        "CHILD-A-2": count(1200, "CHILD-B"),
        "CHILD-B-2": count(1200, "CHILD-C"),
        "CHILD-C-2": count(1200, "CHILD-D"),
        "CHILD-D-2": "CHILD-DONE",
        SUMMARISE: "<analysis>Read.</analysis><summary>SUMMED-UP</summary>",
        "SUMMED-UP": "never the newest mark: the kept tail follows it",
        "CHILD-DONE": count(700, "MAIN-A"),
        "MAIN-A-2": count(700, "MAIN-B"),
        "MAIN-B-2": count(700, "MAIN-C"),
        "MAIN-C-2": count(700, "MAIN-D"),
        "MAIN-D-2": "MAIN-DONE",
    }
    made = await played(tmp_path, rules, "MAIN-TASK: begin.", context_window=30_000)
    assert "MAIN-DONE" in made.printed
    calls = dict(zip(made.answered, made.calls, strict=True))  # of the two summaries it holds the second, main's
    child_summary = next(call for call in made.calls if call.agent_role is AgentRole.SUB_AGENT_SUMMARY)
    main_summary = calls[SUMMARISE]
    assert [str(call.agent_role) for call in made.calls] == (
        ["main", *["sub_agent"] * 7, "sub_agent_summary", "sub_agent", *["main"] * 4, "main_summary", "main"]
    )

    child, leaf = calls["CHILD-TASK"], calls["LEAF-TASK"]
    assert child.parent_agent_id is None
    assert leaf.parent_agent_id == child.agent_id
    assert calls["LOOKED-2"].agent_id == leaf.agent_id
    assert {child_summary.agent_id, calls["CHILD-D-2"].agent_id} == {child.agent_id}
    assert spawned(child) == (calls["MAIN-TASK"].output_node, f"toolu_{calls['MAIN-TASK'].output_node}_0")
    assert spawned(leaf) == (child.output_node, f"toolu_{child.output_node}_0")

    for summary, after in ((child_summary, calls["CHILD-D-2"]), (main_summary, calls["MAIN-D-2"])):
        assert (summary.branch_reason, after.branch_reason) == (BranchReason.COMPACTION, BranchReason.COMPACTION)
        assert after.continues_from == summary.call_id
        assert by_id(made)[summary.continues_from].agent_id == summary.agent_id
        kept = copies_in_prompt(made, after)
        assert kept, "the verbatim tail is known for what it copies"
        assert {by_output(made)[node.copy_of].agent_id for node in kept} == {after.agent_id}
        assert {node.author for node in kept} == {Author.CLIENT}, "context, not trained twice"
    leaves = [call for call in made.calls if call.extension is Extension.FORK]
    assert leaves == [leaf, child_summary, calls["CHILD-D-2"], main_summary, calls["MAIN-D-2"]], "no false fork"
    assert {call.fork_check for call in made.calls} == {None}


async def test_what_claude_code_rewrites_is_spliced_as_it_was_sampled(tmp_path: Path) -> None:
    write = {"content": "print(1)  \nprint(2)\n", "file_path": str(tmp_path / "work" / "a.py")}
    edit = {"new_string": "print(3)  \n", "old_string": "print(2)\n", "file_path": write["file_path"]}
    both = calling("Read", "First.", limit=5000.0, file_path=write["file_path"])
    rules = {
        "REWRITE-TASK": calling("Write", "<think>\nHm.\n</think>\n\nI write.", **write),
        "File created successfully": both + "\nThis text comes after the call.",
        "1\tprint(1)": calling("Edit", **edit),
        "has been updated": "All done.",
    }
    made = await played(tmp_path, rules, "REWRITE-TASK: begin.")
    assert (tmp_path / "work" / "a.py").read_text().splitlines()[1].rstrip() == "print(3)"
    first, *later = made.calls
    assert first.extension is Extension.ROOT
    assert [str(call.extension) for call in later] == ["repair", "repair", "repair"], "changed in form, the same turns"
    nodes = nodes_of(made.run)
    for before, after in zip(made.calls, later, strict=False):
        sampled = path_ids(nodes, before.output_node)
        assert path_ids(nodes, after.prompt_node)[: len(sampled)] == sampled


async def test_an_agent_in_the_background_is_linked_to_its_call(tmp_path: Path) -> None:
    rules = {
        "MAIN-TASK": agent("CHILD-TASK: work"),
        "launched": "I wait for it.",
        "CHILD-TASK": "CHILD-DONE",
        "CHILD-DONE": "MAIN-DONE",
    }
    made = await played(tmp_path, rules, "MAIN-TASK: begin.")
    assert "MAIN-DONE" in made.printed
    child = next(call for call in made.calls if call.agent_role is AgentRole.SUB_AGENT)
    first = next(call for call in made.calls if call.agent_role is AgentRole.MAIN)
    assert spawned(child) == (first.output_node, f"toolu_{first.output_node}_0")
    assert {str(call.extension) for call in made.calls if call.agent_role is AgentRole.MAIN} == {"root", "bridge"}
    assert {call.fork_check for call in made.calls} == {None}


async def test_the_classifier_of_auto_mode_is_a_side_call(tmp_path: Path) -> None:
    rules = {
        "AUTO-TASK": calling("Bash", command=f"rm -rf {tmp_path}/gone; echo SAW-$((1 + 1))", description="clean"),
        "</transcript>": "<block>no</block>",
        "SAW-2": "All done.",
    }
    made = await played(tmp_path, rules, "AUTO-TASK: clean.", 'claude -p "$PROMPT" --permission-mode auto')
    assert "All done." in made.printed
    assert [str(call.agent_role) for call in made.calls] == ["main", "side", "main"]
    first, _, last = made.calls
    assert (last.extension, last.continues_from) == (Extension.BRIDGE, first.call_id)


def spawned(call: Call) -> tuple[str | None, str | None]:
    return call.spawned_by_node, call.spawned_by_tool_call


def by_id(made: Played) -> dict[str, Call]:
    return {call.call_id: call for call in made.calls}


def by_output(made: Played) -> dict[str, Call]:
    return {call.output_node: call for call in made.calls if call.output_node}


def copies_in_prompt(made: Played, call: Call) -> list[Node]:
    """Nodes on the way to a call's prompt that repeat a sampled turn elsewhere."""
    nodes, found, at = nodes_of(made.run), [], call.prompt_node
    while at is not None:
        found += [nodes[at]] if nodes[at].copy_of else []
        at = nodes[at].parent_id
    return found
