"""Claude Code's session files: `<session>.jsonl` and the files of its sub-agents.

A line is a record; records form a tree by `parentUuid`. A reply of the model is several lines with one `message.id`,
each with a block of it and all with the usage of the whole. The system prompt, the tools and the requests of a
compaction are not in these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre_data.schema import AgentRole, BranchReason, CallStatus

from .calls import Report, Session, SourceCall
from .claude_code_tree import Conversations, Group, Record
from .lines import Files, load_json, parse_time
from .messages import text_of
from .wire_anthropic import assistant, blocks_of, spoken

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "claude_code", 1
_WIRE = "anthropic"
_TYPES = ("user", "assistant", "system", "attachment", "progress", "summary", "queue-operation")
# Kinds that are no part of a conversation.
_BESIDE = frozenset(
    {"summary", "file-history-snapshot", "queue-operation", "last-prompt", "progress", "ai-title", "custom-title"}
    | {"tag", "agent-name", "agent-color", "agent-setting", "mode", "permission-mode", "pr-link", "task-summary"}
    | {"content-replacement", "worktree-state", "attribution-snapshot", "speculation-accept", "saved_hook_context"}
)
_INTERRUPTED = "[Request interrupted by user]"


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a line is of this format."""
    kind = text_of(record.get("type"))
    if kind not in _TYPES and kind not in _BESIDE:
        return False
    return any(name in record for name in ("parentUuid", "sessionId", "leafUuid", "messageId"))


def belongs(path: Path) -> bool:
    """Whether a file is read with its session, not by itself."""
    told_beside = path.name.removesuffix(".meta.json") if path.name.endswith(".meta.json") else None
    return _is_agent(path) and _session_of(path.with_name(f"{told_beside}.jsonl") if told_beside else path) is not None


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one session of a file, with its sub-agents. `owners`: which session a reply was found in first."""
    key = path.stem if _is_agent(path) else None
    key = f"{_first_id(path)}/{key}" if key else _first_id(path) or path.stem
    session = Session(key=key, name=path.name, calls=iter(()), harness="claude-code")
    session.calls = _Reader(session, files, owners).calls(path)
    yield session


def _is_agent(path: Path) -> bool:
    return path.name.startswith("agent-")


def _session_of(agent_file: Path) -> Path | None:
    """The session file that a sub-agent's file belongs to, when it lies where the client puts it."""
    if agent_file.parent.name == "subagents":
        main = agent_file.parent.parent.with_suffix(".jsonl")
        return main if main.is_file() else None
    session_id = _first_id(agent_file)
    main = agent_file.with_name(f"{session_id}.jsonl")
    return main if session_id and main.is_file() else None


def _agent_files(path: Path) -> list[Path]:
    if _is_agent(path):
        return []
    found = sorted((path.parent / path.stem / "subagents").rglob("agent-*.jsonl"))
    return found + [one for one in sorted(path.parent.glob("agent-*.jsonl")) if _session_of(one) == path]


def _first_id(path: Path) -> str | None:
    """The session id of the first line that has one."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    record = load_json(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("sessionId"), str):
                    return str(record["sessionId"])
    except OSError:
        return None
    return None


class _Reader:
    """Reads all files of a session, then gives its calls in the order of their first lines."""

    def __init__(self, session: Session, files: Files, owners: dict[str, str]) -> None:
        self._session, self._files, self._owners = session, files, owners
        self._report: Report = session.report
        self._tree = Conversations()
        self._records = self._tree.records
        self._groups: dict[tuple[str | None, str], Group] = {}
        self._requests: dict[tuple[str | None, str], str] = {}
        """Key by agent and request: the lines of one request are one reply, whatever else they say."""
        self._firsts: dict[str, Group] = {}
        """By key: a reply that several files of the session hold is a call of the first."""
        self._of_tool: dict[tuple[str | None, str], Group] = {}
        """By agent and tool call."""
        self._order = 0
        self._agents: dict[str, dict[str, str | None]] = {}
        """Sub-agent: the tool call that started it, and its parent."""
        self._last_call: dict[str | None, str] = {}
        self._compacted: set[str] = set()
        self._others = 0

    def calls(self, path: Path) -> Iterator[SourceCall]:
        """All calls, the sub-agents' among them."""
        for file in (path, *_agent_files(path)):
            self._read(file)
        self._name_sidechains()
        self._tree.relink_kept()
        ready: list[Group | Record] = [*self._groups.values()]
        ready += [record for record in self._records.values() if record.failure is not None]
        moment: dict[int, float] = {}
        newest: dict[str | None, float] = {}
        for one in sorted(ready, key=lambda one: one.order):  # of an agent it never goes back: its calls stay in order
            newest[one.agent] = moment[id(one)] = max(self._moment(one), newest.get(one.agent, 0.0))
        given: set[int] = set()
        for one in sorted(ready, key=lambda one: (moment[id(one)], one.order)):
            if isinstance(one, Record):
                yield self._failed(one)
                continue
            due = [one]  # replies above it come first, whatever the times say
            while (above := self._tree.above(due[-1])) is not None and id(above) not in given and above not in due:
                due.append(above)
            for group in reversed(due):
                if id(group) not in given:
                    given.add(id(group))
                    yield from self._call(group)
        unused = (record for record in self._records.values() if not record.used)
        self._report.unanswered = sum(len(record.messages) for record in unused)
        if self._others:
            self._report.notes.append(
                f"{self._others} replies are copies from other sessions: context here, counted there"
            )

    # ------------------------------------------------------------------ reading

    def _read(self, path: Path) -> None:
        agent = _meta(path, self._agents)
        for _, record in self._files.records(path, self._report, self._session.files):
            kind = text_of(record.get("type"))
            self._report.records[kind or "without a kind"] += 1
            self._session.harness_version = text_of(record.get("version")) or self._session.harness_version
            if kind in _BESIDE:
                self._report.beside[kind] += 1
                if text_of(record.get("uuid")) and text_of(record.get("parentUuid")):
                    self._placed(record, text_of(record.get("agentId")) or agent)  # what follows may hang on it
            elif kind not in ("user", "assistant", "system", "attachment") or not text_of(record.get("uuid")):
                self._report.unknown(kind, record)
            elif record["uuid"] in self._records:
                self._report.twice += 1
            else:
                self._take(kind, record, text_of(record.get("agentId")) or agent)

    def _placed(self, told: Mapping[str, Any], agent: str | None) -> Record:
        """The record of a line, in its place in the tree."""
        self._order += 1
        if told.get("isSidechain") and agent is None:
            agent = "sidechain"  # of an older client: in the session's own file, unnamed
        record = Record(
            uuid=told["uuid"],
            parent=text_of(told.get("parentUuid")) or None,
            order=self._order,
            agent=agent if told.get("isSidechain") else None,
            at=parse_time(told.get("timestamp")),
        )
        return self._records.setdefault(record.uuid, record)

    def _take(self, kind: str, told: Mapping[str, Any], agent: str | None) -> None:
        record = self._placed(told, agent)
        body = told.get("message")
        if kind == "assistant" and isinstance(body, Mapping):
            self._assistant(record, told, body)
        elif kind == "user" and isinstance(body, Mapping):
            self._user(record, told, body)
        else:
            self._other(kind, record, told)

    def _assistant(self, record: Record, told: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        if told.get("isApiErrorMessage"):
            record.failure = {"error": spoken("user", blocks_of(body.get("content")))[-1]["content"]}
            return
        request = text_of(told.get("requestId"))
        key = text_of(body.get("id")) or request or record.uuid
        key = self._requests.setdefault((record.agent, request), key) if request else key
        group = self._groups.get((record.agent, key))
        if group is None:
            group = self._groups[record.agent, key] = Group(
                key=key, agent=record.agent, order=record.order, parent=record.parent, first_at=record.at
            )
            copied = "forkedFrom" in told or self._owners.setdefault(key, self._session.key) != self._session.key
            copied |= self._firsts.setdefault(key, group) is not group
            self._others += copied
            group.sampled_here = not copied and body.get("model") != "<synthetic>"
        record.group = group
        blocks = blocks_of(body.get("content"))
        group.blocks.append((record.uuid, blocks))
        for block in blocks:
            if isinstance(block, Mapping) and block.get("type") == "tool_use":
                self._of_tool[record.agent, text_of(block.get("id"))] = group
        group.last_at = record.at or group.last_at
        group.request_id = request or group.request_id
        group.version = text_of(told.get("version")) or group.version
        if body.get("stop_reason") or not group.told.get("stop_reason"):
            group.told = {name: body.get(name) for name in ("model", "usage", "stop_reason")}

    def _user(self, record: Record, told: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        record.messages = spoken("user", blocks_of(body.get("content")))
        record.summary = bool(told.get("isCompactSummary"))
        first, parent = record.messages[0], self._records.get(record.parent or "")
        asked = self._of_tool.get((record.agent, first.get("tool_call_id", "")))
        if asked is not None:
            asked.results.append(record)
        elif parent is not None and parent.group is not None and first["content"] == _INTERRUPTED:
            parent.group.interrupted = True
        result = told.get("toolUseResult")
        started = text_of(result.get("agentId")) if isinstance(result, Mapping) else ""
        if started and record.messages[0].get("tool_call_id"):
            known = self._agents.setdefault(started, {})
            known.setdefault("tool", record.messages[0]["tool_call_id"])
            known.setdefault("parent", record.agent)

    def _other(self, kind: str, record: Record, told: Mapping[str, Any]) -> None:
        subtype = text_of(told.get("subtype"))
        attachment = told.get("attachment")
        if subtype == "compact_boundary":
            metadata = told.get("compactMetadata")
            record.boundary = metadata if isinstance(metadata, dict) else {}
            return
        if subtype == "api_error":
            record.failure = told
        elif isinstance(attachment, Mapping) and attachment.get("type") == "queued_command":
            record.messages = spoken("user", blocks_of(attachment.get("prompt")))
            return
        elif isinstance(attachment, Mapping):
            subtype = text_of(attachment.get("type"))
        self._report.beside[f"{kind}: {subtype}" if subtype else kind] += 1

    def _name_sidechains(self) -> None:
        """Sub-agents of older clients: each unnamed chain is one, started by the call whose prompt opens it."""
        loose = [record for record in self._records.values() if record.agent == "sidechain"]
        taken: set[str] = set()
        for record in loose:
            parent = self._records.get(record.parent or "")
            if parent is not None and parent.agent is not None:
                record.agent = parent.agent
            else:
                record.agent = f"sidechain-{record.uuid}"
                tool = self._starter(record, taken)
                self._agents[record.agent] = {"tool": tool, "parent": None}
            if record.group is not None:
                record.group.agent = record.agent

    def _starter(self, record: Record, taken: set[str]) -> str | None:
        prompt = record.messages[-1]["content"] if record.messages else None
        for group in self._groups.values():
            for block in (block for _, blocks in group.blocks for block in blocks):
                if (
                    not isinstance(block, Mapping)
                    or block.get("type") != "tool_use"
                    or text_of(block.get("id")) in taken
                ):
                    continue
                given = block.get("input")
                if group.agent is None and isinstance(given, Mapping) and prompt and given.get("prompt") == prompt:
                    taken.add(str(block.get("id")))
                    return str(block.get("id"))
        return None

    def _moment(self, one: Group | Record) -> float:
        at = one.first_at if isinstance(one, Group) else one.at
        return at.timestamp() if at is not None else 0.0

    # ------------------------------------------------------------------ calls

    def _call(self, group: Group) -> Iterator[SourceCall]:
        line = self._tree.reply(group)
        if not group.sampled_here:
            return
        context, before, summary = self._tree.context(group.parent, group.order)
        compacted = before is None and summary is not None and summary.uuid not in self._compacted
        if compacted and summary is not None:
            self._compacted.add(summary.uuid)
        asked = self._records.get(group.parent or "")
        stop = group.told.get("stop_reason")
        cut = group.interrupted and not stop
        usage = group.told.get("usage")
        yield SourceCall(
            **self._agent(group.agent),
            key=group.key,
            context=context,
            output=line.message or assistant([block for _, found in group.blocks for block in found]),
            wire=_WIRE,
            reason=BranchReason.COMPACTION if compacted else None,
            continues=self._last_call.get(group.agent) if compacted else None,
            started_at=min((at for at in (asked and asked.at, group.first_at) if at), default=None),
            ended_at=group.last_at,
            usage=usage if isinstance(usage, Mapping) else None,
            model=text_of(group.told.get("model")) or None,
            client=f"claude-code/{group.version}" if group.version else None,
            stop_reason=text_of(stop) or None,
            at_limit=stop in ("max_tokens", "model_context_window_exceeded"),
            status=CallStatus.ABORTED if cut else CallStatus.OK,
            error="the user interrupted the reply" if cut else None,
            request_id=group.request_id,
        )
        self._last_call[group.agent] = group.key

    def _failed(self, record: Record) -> SourceCall:
        context, _, _ = self._tree.context(record.parent, record.order)
        told = record.failure or {}
        error = told.get("error")
        status = error.get("status") if isinstance(error, Mapping) else None
        attempt = f" (attempt {told['retryAttempt']})" if told.get("retryAttempt") else ""
        return SourceCall(
            **self._agent(record.agent),
            key=record.uuid,
            context=context,
            output=None,
            wire=_WIRE,
            started_at=record.at,
            ended_at=record.at,
            status=CallStatus.FAILED,
            error=(error if isinstance(error, str) else json.dumps(error))[:2000] + attempt,
            http_status=status if isinstance(status, int) else None,
        )

    def _agent(self, agent: str | None) -> dict[str, Any]:
        """Role and links of an agent's calls. The client names the agents of its own errands by what they do."""
        if agent is None:
            return {"role": AgentRole.MAIN}
        if agent.startswith("acompact"):
            return {"role": AgentRole.MAIN_SUMMARY}
        if agent.startswith(("aprompt_suggestion", "aside_question", "asession_memory", "aextract")):
            return {"role": AgentRole.SIDE}
        known = self._agents.get(agent, {})
        return {
            "role": AgentRole.SUB_AGENT,
            "agent_id": agent,
            "parent_agent_id": known.get("parent"),
            "spawned_by_tool_call": known.get("tool"),
        }


def _meta(path: Path, agents: dict[str, dict[str, str | None]]) -> str | None:
    """The agent that a file is of, and what lies beside it about what started it."""
    if not _is_agent(path):
        return None
    agent = path.stem.removeprefix("agent-")
    try:
        told = load_json(path.with_suffix(".meta.json").read_bytes())
    except (OSError, ValueError):
        return agent
    if isinstance(told, dict) and isinstance(told.get("toolUseId"), str):
        agents[agent] = {"tool": told["toolUseId"], "parent": told.get("parentAgentId")}
    return agent
