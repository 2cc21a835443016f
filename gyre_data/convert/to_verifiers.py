"""Traces of verifiers (its v1 form): an episode for each line, its one trace the whole tree as a graph of messages.

Each message is there once, with the tokens that it adds (a reply's generation prompt with the reply) and, for what the
policy sampled, log-probs and advantages. `prompt`, `completion` and `reward`, the columns of its v0 results, are those
of the main conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from gyre_data.admission import AdmittedExecution
from gyre_data.eligible import eligibility
from gyre_data.errors import DataError
from gyre_data.execution import Execution
from gyre_data.path import Path, PathMessage
from gyre_data.schema import EndReason, ScoreStatus
from gyre_data.types import Call

from .export_job import Job, TextMissing, Usage, finite, json_line
from .to_chat import chat_message

__all__ = ["write_verifiers"]

_ROLES = ("system", "user", "assistant", "tool")


def write_verifiers(job: Job, file: IO[bytes]) -> None:
    """Write a line for every execution that has a reply."""
    admitted = {e.execution_id: e for e in job.admission().executions}
    for execution_id in job.infos:
        if execution_id not in job.forest:
            job.left_out["executions"]["no_calls"] += 1
            continue
        execution = job.execution(execution_id)
        try:
            line = _episode(job, execution, admitted.get(execution_id))
        except TextMissing:
            job.left_out["executions"]["text_missing"] += 1
        except DataError:
            job.left_out["executions"]["inconsistent"] += 1
        else:
            file.write(json_line(line))
            job.num_rows["executions"] += 1
            job.num_rows["messages"] += len(line["traces"][0]["nodes"])
            job.num_rows["calls"] += len(line["traces"][0]["calls"])


def _episode(job: Job, execution: Execution, admitted: AdmittedExecution | None) -> dict[str, Any]:
    info = execution.info
    graph = _Graph(job, execution, admitted)
    task = {"type": "Task", "data": job.clean({"name": info.task_id}), "key": job.clean(info.task_id)}
    ok = info.end_reason == EndReason.FINISHED
    trace = {
        "version": 1,
        "id": info.execution_id,
        "verifiers": {"version": "written by gyre"},
        "task": task,
        "agent": {"config": {}, "name": job.clean(info.harness) or "agent"},
        "tools": graph.tools,
        "nodes": graph.nodes,
        "calls": [_call(job, execution, call, graph) for call in execution.tree.calls],
        "rewards": _rewards(execution),
        "info": job.clean({"execution_id": info.execution_id, "group_id": info.group_id, "gyre": _told(admitted)}),
        "is_completed": not info.running,
        "ok": ok,
        "stop_condition": info.end_reason and str(info.end_reason),
        "timing": _timing(execution),
    }
    return {
        "id": info.execution_id,
        "task": task,
        "group": {"id": info.group_id} if info.group_id else None,
        "ok": ok,
        "traces": [trace],
        "prompt": graph.main[: graph.num_prompt],
        "completion": graph.main[graph.num_prompt :],
        "reward": admitted and admitted.reward,
        "info": trace["info"],
    }


class _Graph:
    """The messages of a tree, each once, in an order in which parents come first."""

    def __init__(self, job: Job, execution: Execution, admitted: AdmittedExecution | None) -> None:
        tree = execution.tree
        self._job, self._tree = job, tree
        self._advantage = admitted and admitted.advantage
        self._trainable_N = eligibility(tree).trainable_N
        self._cut_N = self._without_ids()
        self.nodes: list[dict[str, Any]] = []
        self.place: dict[int, int] = {}
        """Node of the tree -> place of its last message."""
        self._made: dict[tuple[int, int], int] = {}
        self.tools: list[dict[str, Any]] = []
        self.main: list[dict[str, Any]] = []
        self.num_prompt = 0
        leaves = np.flatnonzero(tree.end_N == np.arange(len(tree)) + 1).tolist()
        for leaf in leaves:
            self._add(Path(execution, leaf))
        self._tell_main(execution)

    def _without_ids(self) -> Any:
        """Nodes without ids that can be told, and all below them: their prefix is not exact."""
        tree, cut_N = self._tree, np.zeros(len(self._tree), np.bool_)
        for node in range(len(tree)):
            if not cut_N[node] and (tree.counted_N[node] or self._job.holds_secret(tree, node)):
                cut_N[node : tree.end_N[node]] = True
        return cut_N

    def _add(self, path: Path) -> None:
        before: int | None = None
        told = self._job.messages([one for one in path.conversation if one.node not in self.place], path.tree)
        values = {one.index: value for one, value in told}
        on_path, number, last = path.nodes.tolist(), 0, -1
        for one in path.conversation:
            number = number + 1 if one.node == last else 0
            key, last = (one.node, number), one.node
            if key in self._made:
                before = self._made[key]
            elif one.index in values:
                final = one.index + 1 == len(path.conversation) or path.conversation[one.index + 1].node != one.node
                before = self._node(one, values[one.index], before, on_path, final=final)
                self._made[key] = before
            if one.answers is not None and one.answers.number is not None and before is not None:
                self._name_call(path, one)

    def _node(
        self, one: PathMessage, value: Mapping[str, Any], parent: int | None, on_path: list[int], *, final: bool
    ) -> int:
        """Add a message; the tokens of a node with several belong to its last one."""
        tree, ids, mask = self._tree, list[int](), list[bool]()
        made: dict[str, Any] = {"parent": parent, "message": self._message(value), "sampled": one.sampled}
        self.place[one.node] = len(self.nodes)
        if final and not self._cut_N[one.node]:
            end = on_path.index(one.node)
            begin = end
            while begin and on_path[begin - 1] not in self.place:  # scaffold before the message: no message of its own
                begin -= 1
            for node in on_path[begin : end + 1]:
                ids += tree.ids(node).tolist()
                mask += [node == one.node and bool(self._trainable_N[node])] * int(tree.num_tokens_N[node])
            made.update(token_ids=ids, mask=mask)
            if any(mask):
                logprobs = tree.logprobs(one.node)
                assert logprobs is not None
                made["logprobs"] = logprobs.tolist()
                if self._advantage is not None:
                    made["advantages"] = [self._advantage] * len(logprobs)
        made["timestamp"] = tree.call(one.call_id).started_at.timestamp()
        self.nodes.append(made)
        return len(self.nodes) - 1

    def _message(self, value: Mapping[str, Any]) -> dict[str, Any]:
        chat = chat_message(value, self._job.left_out["blocks"])
        role = chat["role"] if chat["role"] in _ROLES else "user"
        made: dict[str, Any] = {"role": role, "content": _content(self._job, chat["content"])}
        if role == "assistant":
            if chat.get("reasoning_content"):
                made["reasoning_content"] = chat["reasoning_content"]
            if calls := chat.get("tool_calls"):
                made["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
        if role == "tool":
            made["tool_call_id"] = chat.get("tool_call_id") or ""
        return made

    def _name_call(self, path: Path, one: PathMessage) -> None:
        """What the policy sampled has no id for its calls: it is the one by which the result names the call."""
        assert one.answers is not None
        asked = self.nodes[self.place[path.conversation[one.answers.message].node]]["message"]
        asked["tool_calls"][one.answers.number]["id"] = one.value["tool_call_id"]

    def _tell_main(self, execution: Execution) -> None:
        try:
            path = execution.main
        except DataError:
            return
        places = [self.place[one.node] for one in path.conversation if one.node in self.place]
        self.main = [self.nodes[place]["message"] for place in dict.fromkeys(places)]
        sampled = [self.nodes[place]["sampled"] for place in dict.fromkeys(places)]
        self.num_prompt = sampled.index(True) if True in sampled else len(sampled)
        for tool in self._job.clean(path.tools()):
            form = tool.get("function", tool)
            parameters = form.get("parameters") or form.get("input_schema") or {}
            self.tools.append(
                {"name": form.get("name", ""), "description": form.get("description") or "", "parameters": parameters}
            )


def _content(job: Job, content: Any) -> Any:
    """Text, or parts; the form has texts and pictures by URL only."""
    if isinstance(content, str):
        return content
    known = [part for part in content if part["type"] in ("text", "image_url")]
    job.left_out["blocks"].update(part["type"] for part in content if part["type"] not in ("text", "image_url"))
    return known


def _call(job: Job, execution: Execution, call: Call, graph: _Graph) -> dict[str, Any]:
    leaf = execution.tree.output(call)
    place = None if leaf is None else graph.place.get(leaf)
    finish = call.finish_reason if call.finish_reason in ("stop", "length") else None
    if place is not None and graph.nodes[place]["message"].get("tool_calls"):
        finish = "tool_calls"
    told: dict[str, Any] = {
        "node": place,
        "model": call.served_model,
        "sampling": {"temperature": call.temperature, "top_p": call.top_p, "max_tokens": call.max_tokens},
        "endpoint": call.request_path,
        "finish_reason": finish,
        "time": {"start": call.started_at.timestamp(), "end": call.ended_at.timestamp() if call.ended_at else 0.0},
    }
    if (used := Usage.of(call)) is not None:
        told["usage"] = {
            "prompt_tokens": used.prompt - used.cached,
            "completion_tokens": used.output,
            "cached_input_tokens": used.cached,
        }
    if call.error:
        told["error"] = {"type": str(call.status), "message": job.clean(call.error), "status_code": call.http_status}
    return told


def _rewards(execution: Execution) -> dict[str, Any]:
    """Of each evaluator the last scored verdict; None where it gave none, which is no zero."""
    found: dict[str, Any] = {}
    for score in execution.scores:
        if score.status == ScoreStatus.SCORED and finite(score.value) is not None:
            found[score.evaluator] = {"score": score.value, "weight": 1.0}
        else:
            found.setdefault(score.evaluator, None)
    return found


def _told(admitted: AdmittedExecution | None) -> dict[str, Any]:
    return {"admitted": admitted is not None, "advantage": admitted and admitted.advantage}


def _timing(execution: Execution) -> dict[str, Any]:
    info = execution.info
    start = info.started_at or execution.tree.calls[0].started_at
    end = info.ended_at.timestamp() if info.ended_at else 0.0
    return {"start": start.timestamp(), "agent": {"start": start.timestamp(), "end": end}}
