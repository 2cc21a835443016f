"""Claude Code sessions become executions: each reply once, branches where they are, sub-agents at their calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_data import RunWriter, admit, import_sessions
from gyre_data import open as open_run
from gyre_data.eligible import Reason
from gyre_data.errors import ConfigError
from gyre_data.hosted import hosted
from gyre_data.links import compactions, sub_agents
from gyre_data.schema import AgentRole, Author, BranchReason, CallStatus, Extension, NodeKind
from tests.support.importing import DATA, attributes, conversation, imported, only_execution, said, write_lines

SAMPLE = DATA / "claude-code" / "f9cbc123-b4dc-4c2c-98d5-003acd99ffd6.jsonl"
SESSION = "0b5e6ac1-6c6b-4f6e-9f5e-0123456789ab"


SPOTTER = DATA / "claude-code-spotter" / "ae4a77f8-aedd-4bc1-888f-c94edc91af04.jsonl"


def test_a_public_session_whose_lines_hang_on_progress_lines(tmp_path: Path) -> None:
    done = imported(SPOTTER, tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    tree = execution.tree
    assert [one.num_calls for one in done.sessions] == [10]
    (agent,) = sub_agents(tree)
    assert (agent.agent_id, len(agent.calls)) == ("aac57f5", 3)
    starter = tree.calls[[c.call_id for c in tree.calls].index(agent.spawned_by_call)]
    assert starter.agent_role == AgentRole.MAIN
    (compaction,) = compactions(tree)
    output = tree.call(compaction.call_id).output_node
    assert output is not None
    first, *_ = conversation(execution, output)
    assert first[1].startswith("This session is being continued from a previous conversation")
    # Every other call of an agent goes on from the one before it.
    assert [c.extension for c in tree.calls].count(Extension.FORK) == 0
    assert sum(c.extension == Extension.ROOT for c in tree.calls) == 3


class Log:
    """A session file in the making."""

    def __init__(self, **common: Any) -> None:
        self.records: list[Any] = []
        self.common = {"sessionId": SESSION, "version": "2.1.220", "isSidechain": False, **common}

    def add(self, uuid: str, parent: str | None, kind: str, **more: Any) -> str:
        at = f"2026-01-02T03:04:{len(self.records):02d}.000Z"
        self.records.append({**self.common, "uuid": uuid, "parentUuid": parent, "type": kind, "timestamp": at, **more})
        return uuid

    def user(self, uuid: str, parent: str | None, content: Any, **more: Any) -> str:
        return self.add(uuid, parent, "user", message={"role": "user", "content": content}, **more)

    def result(self, uuid: str, parent: str, tool: str, text: str, **more: Any) -> str:
        return self.user(uuid, parent, [{"type": "tool_result", "tool_use_id": tool, "content": text}], **more)

    def reply(
        self, uuid: str, parent: str, key: str, block: dict, *, stop: str | None = "end_turn", **more: Any
    ) -> str:
        usage = {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 7}
        body = {"id": key, "role": "assistant", "model": "claude-opus-4-5", "content": [block], "usage": usage}
        return self.add(
            uuid, parent, "assistant", message={**body, "stop_reason": stop, **more.pop("body", {})}, **more
        )


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def use(tool: str, name: str = "Bash", **arguments: Any) -> dict:
    return {"type": "tool_use", "id": tool, "name": name, "input": arguments}


def test_the_sample_of_the_real_client(tmp_path: Path) -> None:
    """14 replies: main 6, its sub-agent 6, that one's 2. Two compactions kept 2 replies and 1."""
    done = imported(SAMPLE, tmp_path / "run")
    assert [(s.num_calls, s.num_nodes, s.num_files, s.num_failed) for s in done.sessions] == [(14, 33, 3, 0)]
    execution = only_execution(tmp_path / "run")
    tree = execution.tree
    roles = [str(call.agent_role) for call in tree.calls]
    assert (roles.count("main"), roles.count("sub_agent")) == (6, 8)
    child, leaf = sub_agents(tree)
    assert (len(child.calls), len(leaf.calls)) == (6, 2)
    assert leaf.parent_agent_id == child.agent_id
    calls = said(execution)
    assert child.spawned_by_call == calls["I start."].call_id
    assert leaf.spawned_by_call == child.calls[0]
    assert [c.continues_from for c in compactions(tree)] == [child.calls[4], calls["Bash"].call_id]
    assert [c.copied_tokens > 0 for c in compactions(tree)] == [True, True]
    copies = [i for i in range(len(tree)) if tree.copy_of_N[i]]
    assert [tree.author_N[i] for i in copies] == [Author.CLIENT] * 3
    assert calls["MAIN-DONE"].branch_reason is BranchReason.COMPACTION
    assert [call.extension for call in tree.calls if call.branch_reason is None] == [
        Extension.ROOT,
        *[Extension.BRIDGE] * 9,
    ]
    assert calls["MAIN-DONE"].extension is Extension.FORK, "both compactions left the same summary"
    assert execution.info.harness_version == "2.1.220"
    assert attributes(execution)["source"] == SAMPLE.name


def test_usage_is_counted_once_per_reply(tmp_path: Path) -> None:
    by_id = {}
    for path in (SAMPLE, *SAMPLE.with_suffix("").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            message = json.loads(line).get("message", {})
            if "usage" in message:
                by_id[message["id"]] = message["usage"]["output_tokens"]
    imported(SAMPLE, tmp_path / "run")
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.output) == (14, sum(by_id.values()))


def test_lines_of_a_reply_are_one_call_and_results_of_parallel_calls_are_all_there(tmp_path: Path) -> None:
    """The second call's line comes after the first one's result; what follows names the last result only."""
    log = Log()
    log.user("u1", None, "go")
    log.reply("a1", "u1", "m1", {"type": "thinking", "thinking": "Hm.", "signature": "s"}, stop=None)
    log.reply("a2", "a1", "m1", use("t1", command="one"), stop=None)
    log.result("r1", "a2", "t1", "ONE")
    log.reply("a3", "a2", "m1", use("t2", command="two"), stop="tool_use")
    log.result("r2", "a3", "t2", "TWO")
    log.reply("a4", "r2", "m2", text("done"))
    imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert len(execution.tree.calls) == 2
    assert conversation(execution, calls["done"].output_node) == [
        ("user", "go"),
        ("assistant", "Bash Bash"),
        ("tool", "ONE"),
        ("tool", "TWO"),
        ("assistant", "done"),
    ]
    assert execution.path(calls["done"].output_node).messages()[1]["reasoning"] == "Hm."
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.output) == (2, 14)


def test_failures_retries_rewinds_and_interruptions(tmp_path: Path) -> None:
    log = Log()
    log.user("u1", None, "go")
    log.add("x1", "u1", "system", subtype="api_error", error={"status": 529, "message": "overloaded"}, retryAttempt=1)
    log.reply("a1", "x1", "m1", text("one"))
    log.user("u2", "a1", "more")
    log.reply("a2", "u2", "m2", text("two"))
    log.user("u3", "a1", "no, other")  # back to the first reply
    log.reply("a3", "u3", "m3", text("half"), stop=None)
    log.user("u4", "a3", [text("[Request interrupted by user]")])
    log.reply("a4", "u4", "e1", text("API Error"), isApiErrorMessage=True)
    log.user("u5", "a4", "never answered")
    done = imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    told = [(str(c.status), str(c.extension), c.branch_reason and str(c.branch_reason)) for c in execution.tree.calls]
    assert told == [
        ("failed", "root", None),
        ("ok", "retry", "retry"),
        ("ok", "bridge", None),
        ("aborted", "fork", "rewind"),
        ("failed", "bridge", None),
    ]
    assert execution.tree.calls[0].http_status == 529
    assert done.sessions[0].num_failed == 3
    assert done.sessions[0].num_unanswered == 1


def test_what_is_copied_from_another_session_is_context_only(tmp_path: Path) -> None:
    first, second = Log(), Log(sessionId="1b5e6ac1-6c6b-4f6e-9f5e-0123456789ab")
    for log in (first, second):
        log.user("u1", None, "go")
        log.reply("a1", "u1", "m1", text("one"))
    second.user("u2", "a1", "and then")
    second.reply("a2", "u2", "m2", text("two"))
    sources = [write_lines(tmp_path / name, log.records) for name, log in (("a.jsonl", first), ("b.jsonl", second))]
    done = imported(sources, tmp_path / "run")
    assert [session.num_calls for session in done.sessions] == [1, 1]
    assert done.sessions[1].notes == ("1 replies are copies from other sessions: context here, counted there",)
    forked = Log()
    forked.user("u1", None, "go", forkedFrom={"sessionId": "x", "messageUuid": "y"})
    forked.reply("a1", "u1", "m1", text("one"), forkedFrom={"sessionId": "x", "messageUuid": "y"})
    forked.user("u2", "a1", "on")
    forked.reply("a2", "u2", "m2", text("two"))
    done = imported(write_lines(tmp_path / "c.jsonl", forked.records), tmp_path / "other")
    assert [session.num_calls for session in done.sessions] == [1]


def test_a_client_of_old_keeps_its_sub_agents_in_the_session(tmp_path: Path) -> None:
    log = Log(version="1.0.44")
    log.user("u1", None, "go")
    log.reply("a1", "u1", "m1", use("t1", "Task", prompt="look around", description="look"), stop="tool_use")
    log.user("s1", None, "look around", isSidechain=True)
    log.reply("s2", "s1", "m2", text("seen"), isSidechain=True)
    log.result("r1", "a1", "t1", "seen")
    log.reply("a2", "r1", "m3", text("done"))
    imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    (agent,) = sub_agents(execution.tree)
    calls = said(execution)
    assert agent.calls == (calls["seen"].call_id,)
    assert (agent.spawned_by_call, agent.spawned_by_tool_call) == (calls["Task"].call_id, "t1")
    assert calls["done"].extension is Extension.BRIDGE


def test_a_compaction_without_a_kept_tail(tmp_path: Path) -> None:
    log = Log()
    log.user("u1", None, "go")
    log.reply("a1", "u1", "m1", text("one"))
    log.add("b", None, "system", subtype="compact_boundary", logicalParentUuid="a1", compactMetadata={"preTokens": 9})
    log.user("c", "b", "Summary: went", isCompactSummary=True)
    log.user("u2", "c", "on")
    log.reply("a2", "u2", "m2", text("two"))
    imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert calls["two"].branch_reason is BranchReason.COMPACTION
    assert calls["two"].continues_from == calls["one"].call_id
    assert conversation(execution, calls["two"].prompt_node) == [("user", "Summary: went"), ("user", "on")]


def test_a_kept_tail_that_hangs_on_the_summary(tmp_path: Path) -> None:
    """The last kept reply is in the file after the summary, whose child it is; what follows is its own child."""
    log = Log()
    log.user("u1", None, "go")
    log.reply("a1", "u1", "m1", text("one"))
    log.user("u2", "a1", "more")
    kept = {"anchorUuid": "c", "uuids": ["a1", "u2", "a2"]}
    log.add("b", None, "system", subtype="compact_boundary", compactMetadata={"preservedMessages": kept})
    log.user("c", "b", "Summary", isCompactSummary=True)
    log.reply("a2", "c", "m2", text("two"))
    log.user("u3", "a2", "on")
    log.reply("a3", "u3", "m3", text("three"))
    imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert [words for _, words in conversation(execution, calls["two"].prompt_node)] == ["go", "one", "more"]
    prompt = ["Summary", "one", "more", "two", "on"]
    assert [words for _, words in conversation(execution, calls["three"].prompt_node)] == prompt
    assert calls["three"].branch_reason is BranchReason.COMPACTION
    assert calls["three"].continues_from == calls["two"].call_id


def test_records_in_any_order_and_in_circles_are_read(tmp_path: Path) -> None:
    log = Log()
    log.user("u0", None, "go")
    for i in range(1500):
        log.reply(f"a{i}", f"u{i}", f"m{i}", text(f"said {i}"))
        log.user(f"u{i + 1}", f"a{i}", f"more {i}")
    path = write_lines(tmp_path / "s.jsonl", [{**one, "timestamp": None} for one in reversed(log.records)])
    (done,) = import_sessions(path, tmp_path / "run").sessions
    assert (done.num_calls, done.num_nodes) == (1500, 3000)
    log = Log()
    log.user("u1", "u2", "go")
    log.user("u2", "u1", "round")
    log.reply("a1", "u1", "m1", text("one"))
    log.reply("a2", "a3", "m2", text("two"))
    log.reply("a3", "a2", "m3", text("three"))
    done = imported(write_lines(tmp_path / "t.jsonl", log.records), tmp_path / "other").sessions[0]
    assert done.num_calls == 3


def test_damaged_lines_unknown_kinds_and_repeated_records_are_told(tmp_path: Path) -> None:
    log = Log()
    log.user("u1", None, "go")
    log.records += ['{"type": "user", "uui', "[1]", "", {"type": "hologram", "sessionId": SESSION, "beam": 1}]
    log.records.append(log.records[0])
    log.records.append({"type": "summary", "leafUuid": "a1", "summary": "A title"})
    log.reply("a1", "u1", "m1", text("one"))
    done = imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run").sessions[0]
    assert [line.split(": ")[0] for line in done.damaged] == ["s.jsonl:2", "s.jsonl:3"]
    assert (done.num_calls, done.num_twice) == (1, 1)
    assert done.not_understood == {"hologram": 1}
    assert done.beside == {"summary": 1}
    told = attributes(only_execution(tmp_path / "run"))
    assert told["kept"] == [{"type": "hologram", "sessionId": SESSION, "beam": 1}]
    assert told["damaged"] == list(done.damaged)


def test_a_run_in_use_is_left_alone(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"), pytest.raises(ConfigError, match="is being written by pid"):
        import_sessions(SAMPLE, tmp_path / "run")
    imported(SAMPLE, tmp_path / "run")


def test_the_same_source_again_changes_nothing(tmp_path: Path) -> None:
    imported(SAMPLE, tmp_path / "run")
    before = {
        name: open_run(tmp_path / "run").table(name).num_rows for name in ("nodes", "calls", "executions", "blobs")
    }
    again = imported(SAMPLE, tmp_path / "run")
    assert (again.sessions, [one.why for one in again.skipped]) == ((), ["the run holds it already"])
    assert before == {name: open_run(tmp_path / "run").table(name).num_rows for name in before}
    imported(SAMPLE, tmp_path / "other")
    one, other = (open_run(tmp_path / name).table("nodes").column("node_id").to_pylist() for name in ("run", "other"))
    assert one == other, "ids follow from the source"


def test_a_session_that_went_on_is_not_mixed_with_its_beginning(tmp_path: Path) -> None:
    log = Log()
    log.user("u1", None, "go")
    log.reply("a1", "u1", "m1", text("one"))
    path = write_lines(tmp_path / "s.jsonl", log.records)
    imported(path, tmp_path / "run")
    log.user("u2", "a1", "on")
    write_lines(path, log.records)
    (skipped,) = imported(path, tmp_path / "run").skipped
    assert "from a file that was different then; import it into another run" in skipped.why


def test_nothing_that_is_imported_is_trained_by_rl(tmp_path: Path) -> None:
    imported(SAMPLE, tmp_path / "run")
    run = open_run(tmp_path / "run")
    for need_score in (True, False):
        found = admit(run, need_score=need_score)
        assert not found.executions
        reasons = {one.reason for one in found.excluded if one.call_id is not None}
        assert reasons == {Reason.TEXT_ONLY}
    tree = only_execution(tmp_path / "run").tree
    assert {len(tree.ids(i)) for i in range(len(tree))} == {0}
    assert tree.counted_N.all()
    outputs = [i for i in range(len(tree)) if tree.kind_N[i] == NodeKind.OUTPUT]
    assert {tree.author_N[i] for i in outputs} == {Author.PROVIDER}


def test_a_folder_reads_agents_with_their_session(tmp_path: Path) -> None:
    done = imported(SAMPLE.parent, tmp_path / "run")
    assert [(session.num_calls, session.num_files) for session in done.sessions] == [(14, 3)]
    assert not done.skipped
    alone = imported(next(SAMPLE.with_suffix("").rglob("agent-ad8d*.jsonl")), tmp_path / "alone")
    assert [session.num_calls for session in alone.sessions] == [2]
    assert {call.agent_role for call in only_execution(tmp_path / "alone").tree.calls} == {AgentRole.SUB_AGENT}


@pytest.mark.parametrize("content", ["", "hello\n", '{"a": 1}\n'])
def test_a_file_of_no_known_format_is_refused_and_leaves_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="looks like none of them; --format forces one"):
        imported(tmp_path / "s.jsonl", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="found nothing at"):
        imported(tmp_path / "nothing.jsonl", tmp_path / "run")
    with pytest.raises(ConfigError, match="--format: wanted one of claude_code"):
        imported(SAMPLE, tmp_path / "run", format="bogus")


def test_tokens_are_counted_by_a_tokenizer_of_choice(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    log = Log()
    log.user("u1", None, "one two three")
    log.reply("a1", "u1", "m1", text("four five"))
    imported(write_lines(tmp_path / "s.jsonl", log.records), tmp_path / "run", tokenizer=tmp_path)
    (call,) = only_execution(tmp_path / "run").tree.calls
    assert (call.prompt_tokens, call.output_tokens) == (3, 2)
    assert call.status is CallStatus.OK
    with pytest.raises(ConfigError, match="--tokenizer: wanted a folder"):
        imported(SAMPLE, tmp_path / "other", tokenizer="no/such/thing/at-all")
