"""ATIF: a JSON file for each execution, with sub-agents in it, and one more for each compaction of the main agent.

A trajectory of ATIF is one line of steps. So of each agent the conversation that ends with its newest reply is written,
and the conversations that compactions cut off before it; replies on other branches are counted as left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np

from gyre_data.errors import DataError
from gyre_data.execution import Execution
from gyre_data.path import Path, PathCall, PathMessage
from gyre_data.schema import AgentRole, BranchReason
from gyre_data.types import Call

from .export_job import Job, TextMissing, Usage, finite
from .to_chat import chat_message

__all__ = ["atif_files"]

_VERSION = "ATIF-v1.7"
_MOST_CHARS = 200  # of a file's name, without what tells the files of one execution apart
_OF_SUB_AGENTS = (AgentRole.SUB_AGENT, AgentRole.SUB_AGENT_SUMMARY)
_OF_MAIN = (AgentRole.MAIN, AgentRole.MAIN_SUMMARY)


def atif_files(job: Job) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file."""
    for execution_id in job.infos:
        if execution_id not in job.forest:
            job.left_out["executions"]["no_calls"] += 1
            continue
        try:
            files = list(_execution(job, job.execution(execution_id)))
        except TextMissing:
            job.left_out["executions"]["text_missing"] += 1
            continue
        except DataError:
            job.left_out["executions"]["inconsistent"] += 1
            continue
        if not files:
            job.left_out["executions"]["no_output"] += 1
            continue
        job.num_rows["executions"] += 1
        for name, document in files:
            job.num_rows["files"] += 1
            yield name, json.dumps(document, ensure_ascii=False, indent=1).encode("utf-8", "replace")


@dataclass(kw_only=True, slots=True, eq=False)
class _Agent:
    """The conversations of one agent, oldest first, and what they became."""

    name: str | None
    paths: list[Path]
    spawned_by: str | None = None
    documents: list[dict[str, Any]] = field(default_factory=list)


def _execution(job: Job, execution: Execution) -> Iterator[tuple[str, dict[str, Any]]]:
    agents = _agents(execution)
    for agent in agents:
        for path in agent.paths:
            agent.documents.append(_trajectory(job, execution, path))
    main = agents[0] if agents and agents[0].name is None else None
    documents = main.documents if main else [_empty(job, execution)] if agents else []
    for agent in agents[bool(main) :]:
        _embed(job, agent, documents, [one for other in agents for one in other.documents])
    _count_left(job, execution, agents)
    name = _file_name(execution.execution_id)
    names = [f"{name}.json", *(f"{name}.cont-{number}.json" for number in range(1, len(documents)))]
    for number, document in enumerate(documents):
        document["trajectory_id"] = names[number].removesuffix(".json")
        if number + 1 < len(documents):
            document["continued_trajectory_ref"] = names[number + 1]
        yield names[number], document


def _file_name(execution_id: str) -> str:
    """The id where it can be a file's name; ids are a recorder's words, and must not lead anywhere else."""
    name = quote(execution_id, safe="")
    if len(name) <= _MOST_CHARS:
        return name
    return f"{name[:_MOST_CHARS]}-{hashlib.sha256(execution_id.encode()).hexdigest()[:16]}"


def _agents(execution: Execution) -> list[_Agent]:
    """The main agent first (if it said anything), then sub-agents in the order in which they began."""
    tree = execution.tree
    newest: dict[str | None, tuple[Call, int]] = {}
    spawned: dict[str | None, str | None] = {}
    for call, leaf in zip(tree.calls, tree.output_C.tolist(), strict=True):
        role = call.agent_role
        if leaf < 0 or role not in (*_OF_MAIN, *_OF_SUB_AGENTS):
            continue
        key = None if role in _OF_MAIN else call.agent_id or f"sub_agent of {tree.node_id[int(tree.path(leaf)[0])]}"
        spawned[key] = spawned.get(key) or call.spawned_by_tool_call
        # A summary ends a conversation; while it has no successor the agent's own newest reply is what counts.
        if key not in newest or role in (AgentRole.MAIN, AgentRole.SUB_AGENT):
            newest[key] = (call, leaf)
    made = [
        _Agent(name=key, paths=_chain(execution, leaf), spawned_by=spawned[key]) for key, (_, leaf) in newest.items()
    ]
    return sorted(made, key=lambda agent: agent.name is not None)


def _chain(execution: Execution, leaf: int) -> list[Path]:
    """The conversation that ends with `leaf`, after those that compactions cut off before it."""
    tree, found = execution.tree, [Path(execution, leaf)]
    while len(found) <= len(tree.calls):
        began = next((one.call for one in found[0].calls if one.call.branch_reason == BranchReason.COMPACTION), None)
        before = tree.output(tree.call(began.continues_from)) if began and began.continues_from else None
        if before is None:
            break
        found.insert(0, Path(execution, before))
    return found


def _trajectory(job: Job, execution: Execution, path: Path) -> dict[str, Any]:
    steps = _steps(job, path)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    job.num_rows["steps"] += len(steps)
    calls = [one.call for one in path.calls]
    found = _empty(job, execution, calls)
    if tools := path.tools():
        found["agent"]["tool_definitions"] = job.clean(tools)
    return {**found, "steps": steps}


def _empty(job: Job, execution: Execution, calls: Sequence[Call] = ()) -> dict[str, Any]:
    info = execution.info
    names = (info.harness, *(call.client for call in calls))
    agent = {
        "name": next((name for name in names if name), "unknown"),
        "version": info.harness_version or "unknown",
        "model_name": next((call.served_model for call in calls if call.served_model), None),
    }
    told = {
        "task_id": info.task_id,
        "group_id": info.group_id,
        "sample_index": info.sample_index,
        "end_reason": info.end_reason and str(info.end_reason),
        "scores": [
            {"evaluator": s.evaluator, "status": str(s.status), "value": finite(s.value), "partial": s.partial}
            for s in execution.scores
        ],
    }
    return {
        "schema_version": _VERSION,
        "session_id": info.execution_id,
        "agent": job.clean({name: value for name, value in agent.items() if value}),
        "steps": [],
        "extra": {"gyre": job.clean({name: value for name, value in told.items() if value is not None})},
    }


# ---------------------------------------------------------------------- steps


def _steps(job: Job, path: Path) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    calls = {one.node: one for one in path.calls}
    asked: dict[int, dict[str, Any]] = {}
    for one, value in job.messages(path.conversation, path.tree):
        made = chat_message(value, job.left_out["blocks"])
        text = _text(job, made["content"])
        if made["role"] == "tool":
            if one.answers is not None and one.answers.number is not None:
                asked[one.answers.message]["tool_calls"][one.answers.number]["tool_call_id"] = made["tool_call_id"]
            _observe(job, steps, {"source_call_id": made.get("tool_call_id"), "content": text})
            continue
        source = {"assistant": "agent", "system": "system"}.get(made["role"], "user")
        step = {"source": source, "message": text}
        if source == "agent":
            step.update(_said(job, path, one, made, calls.get(one.node)))
        asked[one.index] = step
        steps.append(step)
    return steps


def _text(job: Job, content: Any) -> str:
    """The text of a message; pictures would be files of their own."""
    if isinstance(content, str):
        return content
    job.left_out["blocks"].update(part["type"] for part in content if part["type"] != "text")
    return "".join(part["text"] for part in content if part["type"] == "text")


def _observe(job: Job, steps: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Add a result to the step before it, unless that one made other calls."""
    known = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())] if steps else []
    if not steps or (known and result["source_call_id"] not in known):
        job.left_out["links"]["result_without_its_call"] += 1
        steps.append({"source": "system", "message": ""})
    if result["source_call_id"] is None:
        del result["source_call_id"]
    steps[-1].setdefault("observation", {"results": []})["results"].append(result)


def _said(job: Job, path: Path, one: PathMessage, made: dict[str, Any], by: PathCall | None) -> dict[str, Any]:
    """What a step of the agent has besides its text; one that no call of this path made is copied context."""
    said: dict[str, Any] = {}
    if made.get("reasoning_content"):
        said["reasoning_content"] = made["reasoning_content"]
    if calls := made.get("tool_calls"):
        said["tool_calls"] = [_tool_call(call) for call in calls]
    if by is None or not one.sampled:
        return {**said, "is_copied_context": True}
    call = by.call
    said["timestamp"] = (call.ended_at or call.started_at).isoformat()
    if call.served_model:
        said["model_name"] = call.served_model
    return {**said, "metrics": _metrics(job, path, by), "llm_call_count": 1}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):  # ATIF wants an object
        arguments = {"arguments": call["function"]["arguments"]}
    return {"tool_call_id": call["id"], "function_name": call["function"]["name"] or "", "arguments": arguments}


def _metrics(job: Job, path: Path, by: PathCall) -> dict[str, Any]:
    """Counts of the call, and the ids that were sampled with their log-probs where they are known."""
    call, tree = by.call, path.tree
    used = Usage.of(call)
    found: dict[str, Any] = (
        {"prompt_tokens": used.prompt, "completion_tokens": used.output, "cached_tokens": used.cached} if used else {}
    )
    if not tree.counted_N[by.node] and not job.holds_secret(tree, by.node):
        found["completion_token_ids"] = tree.ids(by.node).tolist()
        if (values := tree.logprobs(by.node)) is not None and tree.finite_logprobs(np.array([by.node])).all():
            found["logprobs"] = values.tolist()
    return found


# ---------------------------------------------------------------------- agents within agents


def _embed(job: Job, agent: _Agent, roots: list[dict[str, Any]], every: list[dict[str, Any]]) -> None:
    """Put a sub-agent into the document whose step started it, with a reference at that step's result."""
    assert agent.name is not None
    names = [agent.name, *(f"{agent.name}.cont-{number}" for number in range(1, len(agent.documents)))]
    for number, document in enumerate(agent.documents):
        document["trajectory_id"] = names[number]
        if number + 1 < len(names):
            document["continued_trajectory_ref"] = names[number + 1]
    result = None
    for document in every:
        if agent.spawned_by and document not in agent.documents:
            results = [r for step in document["steps"] for r in step.get("observation", {}).get("results", ())]
            result = result or next((r for r in results if r.get("source_call_id") == agent.spawned_by), None)
    if result is None:
        job.left_out["links"]["sub_agent_without_its_start"] += 1
    else:
        result.setdefault("subagent_trajectory_ref", []).append({"trajectory_id": agent.name})
    # Readers look at the top: there every reference of this file is found.
    home = next((root for root in roots if result is not None and _holds(root, result)), roots[0])
    home.setdefault("subagent_trajectories", []).extend(agent.documents)


def _holds(document: dict[str, Any], result: dict[str, Any]) -> bool:
    """Whether the result is in the document or in one embedded in it."""
    own = (r for step in document["steps"] for r in step.get("observation", {}).get("results", ()))
    return any(r is result for r in own) or any(
        _holds(one, result) for one in document.get("subagent_trajectories", ())
    )


def _count_left(job: Job, execution: Execution, agents: list[_Agent]) -> None:
    told = {one.node for agent in agents for path in agent.paths for one in path.calls}
    for call, leaf in zip(execution.tree.calls, execution.tree.output_C.tolist(), strict=True):
        if leaf not in told:
            of_other = call.agent_role in (AgentRole.SIDE, AgentRole.UNKNOWN)
            reason = "no_output" if leaf < 0 else f"role_{call.agent_role}" if of_other else "on_another_branch"
            job.left_out["calls"][reason] += 1
        else:
            job.num_rows["calls"] += 1
