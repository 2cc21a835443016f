"""Chat files for SFT: a line for each kept trajectory, {"messages": [...], "tools": [...]} in OpenAI's form.

Lines of one execution share its `execution_id`. A reply that is trained through another line, or that was not sampled
where it stands (a copy that a compaction kept, a turn that the client wrote), has `"weight": 0`: it is context. So
every reply is trained once, and `gyre import` makes one tree of the lines again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import IO, Any

from gyre_data.admission import AdmittedExecution, AdmittedTrajectory
from gyre_data.execution import Execution
from gyre_data.path import Path

from .export_job import Job, TextMissing, json_line

__all__ = ["chat_message", "write_chat"]

_MEDIA = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "document",
        "file",
        "input_file",
        "input_audio",
        "audio",
        "video",
        "video_url",
    }
)


def write_chat(job: Job, file: IO[bytes]) -> None:
    """Write a line for every kept trajectory that has its texts."""
    for admitted, execution in job.admitted(need_score=False, need_ids=False):
        lines = list(_lines(job, admitted, execution))
        for line in lines:
            file.write(json_line(line))
        job.num_rows["conversations"] += len(lines)
        job.num_rows["executions"] += bool(lines)


def _lines(job: Job, admitted: AdmittedExecution, execution: Execution) -> Iterator[dict[str, Any]]:
    info = execution.info
    for trajectory in admitted.trajectories:
        path = Path(execution, trajectory.leaf)
        try:
            messages = _messages(job, path, trajectory)
        except TextMissing:
            job.left_out["trajectories"]["text_missing"] += 1
            continue
        num_replies = sum(one["role"] == "assistant" and "weight" not in one for one in messages)
        if not num_replies:
            job.left_out["trajectories"]["text_missing"] += 1
            continue
        job.num_rows["replies"] += num_replies
        call = path.call
        told = {
            "messages": messages,
            "tools": job.clean(path.tools()) or None,
            "execution_id": info.execution_id,
            "task_id": info.task_id,
            "group_id": info.group_id,
            "agent_id": call.agent_id if call else None,
            "agent_role": str(trajectory.role),
        }
        yield {name: value for name, value in told.items() if value is not None}


def _messages(job: Job, path: Path, trajectory: AdmittedTrajectory) -> list[dict[str, Any]]:
    owned = set(trajectory.owned)
    found: dict[int, dict[str, Any]] = {}
    for one, value in job.messages(path.conversation, path.tree):
        made = found[one.index] = chat_message(value, job.left_out["blocks"])
        if made["role"] == "assistant" and not (one.sampled and one.node in owned):
            made["weight"] = 0
        if one.answers is not None and one.answers.number is not None:
            # What the policy sampled has no id for its calls: it is the one by which the result names the call.
            asked = found[one.answers.message]["tool_calls"][one.answers.number]
            asked["id"] = made["tool_call_id"]
    return list(found.values())


def chat_message(value: Mapping[str, Any], left: Counter[str]) -> dict[str, Any]:
    """A canonical message in the form of chat APIs; kinds of blocks that this form has no place for are counted."""
    blocks = [block for block in (value.get("raw") or {}).get("blocks", ()) if isinstance(block, Mapping)]
    media = [block for block in blocks if block.get("type") in _MEDIA]
    left.update(str(block.get("type")) for block in blocks if block.get("type") not in _MEDIA)
    text: str = value.get("content") or ""
    made: dict[str, Any] = {
        "role": value.get("role", "user"),
        "content": [*([{"type": "text", "text": text}] if text else []), *media] if media else text,
    }
    if value.get("reasoning"):
        made["reasoning_content"] = value["reasoning"]
    if calls := value.get("tool_calls"):
        made["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if value.get(name):
            made[name] = value[name]
    return made


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    given = call.get("arguments")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    # What was not answered may have no id; OpenAI's form wants one.
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": call.get("name"), "arguments": text},
    }
