"""Labels of requests, one client at a time."""

import json

import pytest

from gyre_data.errors import ConfigError
from gyre_data.schema import AgentRole
from gyre_proxy.message import Message, Sampling
from gyre_proxy.roles import AgentLabel, label
from tests.support.driver import request, system, user

CC = {"user-agent": "claude-cli/2.1.220 (external, sdk-cli)", "x-claude-code-session-id": "s"}
TOOLS = ({"type": "function", "function": {"name": "Bash"}},)
ASK = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."


def of(headers, *messages: Message, agent: str | None = None, tools=TOOLS, **changes) -> AgentLabel:
    return label("anthropic", headers, request(messages or (user("hi"),), tools, **changes), agent)


def test_an_unlabelled_client_says_nothing() -> None:
    assert of({"user-agent": "curl/8"}) == AgentLabel()


def test_claude_code_main_and_sub_agents_are_in_the_headers() -> None:
    assert of(CC).role is AgentRole.MAIN
    assert of(CC).client == "claude-code"
    sub = of({**CC, "x-claude-code-agent-id": "a91", "x-claude-code-parent-agent-id": "a7"})
    assert (sub.role, sub.agent_id, sub.parent_agent_id, sub.source) == (AgentRole.SUB_AGENT, "a91", "a7", "client")


@pytest.mark.parametrize("before", ["", "some user text\n"])
def test_claude_code_summary_is_known_by_its_last_block(before: str) -> None:
    found = of(CC, user("hi"), user(before + ASK))
    assert (found.role, found.source, found.summary) == (AgentRole.MAIN_SUMMARY, "shape", True)
    sub = of({**CC, "x-claude-code-agent-id": "a91"}, user("hi"), user(before + ASK))
    assert sub.role is AgentRole.SUB_AGENT_SUMMARY
    assert of(CC, user("hi"), user(before + ASK), system("Available agents: ...")).role is AgentRole.MAIN_SUMMARY
    assert of(CC, user("what does 'CRITICAL: Respond with TEXT ONLY' mean?")).role is AgentRole.MAIN
    assert of(CC, user(ASK), Message(role="tool", content=ASK)).role is AgentRole.MAIN


def test_claude_code_title_and_classifier_are_side_calls() -> None:
    title = of(CC, system("Generate a concise, sentence-case title (3-7 words)"), user("<session>x"), tools=())
    assert (title.role, title.source) == (AgentRole.SIDE, "shape")
    classifier = of(CC, user("<transcript>"), tools=(), sampling=Sampling(stop=("</block>",)))
    assert classifier.role is AgentRole.SIDE
    assert of(CC, user("no tools"), tools=()).role is AgentRole.MAIN


CODEX = {"originator": "codex_exec", "session-id": "root", "thread-id": "root"}


def test_codex_threads_are_agents_and_its_metadata_says_what_a_call_is_for() -> None:
    def of_kind(headers: dict[str, str], **told: str) -> AgentLabel:
        return of({**CODEX, **headers, "x-codex-turn-metadata": json.dumps(told)})

    assert (of(CODEX).client, of(CODEX).role, of(CODEX).agent_id) == ("codex", AgentRole.MAIN, None)
    child = {"thread-id": "t1", "x-codex-parent-thread-id": "root", "x-openai-subagent": "collab_spawn"}
    sub = of_kind(child, request_kind="turn", thread_source="subagent")
    assert (sub.role, sub.agent_id, sub.parent_agent_id, sub.source) == (AgentRole.SUB_AGENT, "t1", None, "client")
    nested = of({**CODEX, **child, "thread-id": "t2", "x-codex-parent-thread-id": "t1"})
    assert (nested.agent_id, nested.parent_agent_id) == ("t2", "t1")
    main_summary, sub_summary = of_kind({}, request_kind="compaction"), of_kind(child, request_kind="compaction")
    assert (main_summary.role, main_summary.summary) == (AgentRole.MAIN_SUMMARY, True)
    assert (sub_summary.role, sub_summary.agent_id) == (AgentRole.SUB_AGENT_SUMMARY, "t1")
    assert of_kind({}, request_kind="prewarm").role is AgentRole.SIDE
    assert of({**CODEX, "thread-id": "t3", "x-openai-subagent": "memory_consolidation"}).role is AgentRole.SIDE
    assert of({**CODEX, "x-codex-turn-metadata": "no json"}).role is AgentRole.MAIN
    assert of({**CODEX, "x-codex-turn-metadata": "[1]"}).role is AgentRole.MAIN


def test_explicit_headers_and_the_path_come_first() -> None:
    assert of({**CC, "x-gyre-role": "side"}).role is AgentRole.SIDE
    assert of({"x-gyre-agent": "main"}).role is AgentRole.MAIN
    assert of({"x-gyre-agent": "main"}).agent_id is None
    named = of({}, agent="helper")
    assert (named.role, named.agent_id, named.source) == (AgentRole.SUB_AGENT, "helper", "header")
    both = of({"x-gyre-role": "sub_agent_summary", "x-gyre-agent": "helper"})
    assert (both.role, both.agent_id) == (AgentRole.SUB_AGENT_SUMMARY, "helper")


def test_a_role_that_does_not_exist_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"X-Gyre-Role: wanted one of main, .*got 'boss'; send one of these"):
        of({"x-gyre-role": "boss"})


QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "s1"}


@pytest.mark.parametrize("mark", ["[SUGGESTION MODE: Suggest", "Describe your most recent action in 3-5 words using"])
def test_claude_code_forks_for_another_end_are_side_calls(mark: str) -> None:
    for before in ("", "a reminder\n"):
        found = of({**CC, "x-claude-code-agent-id": "a1"}, user("hi"), user(before + mark))
        assert (found.role, found.source) == (AgentRole.SIDE, "shape")
    assert of(CC, user(f"what is `{mark}`?")).role is AgentRole.MAIN
    assert of(CC, user("hi"), Message(role="tool", content=mark)).role is AgentRole.MAIN


def test_claude_code_digest_of_a_page_is_a_side_call() -> None:
    page = user("\nWeb page content:\n---\nwords\n---\n\nWhat is it?")
    assert of({**CC, "x-claude-code-agent-id": "a1"}, page, tools=()).role is AgentRole.SIDE
    assert of(CC, page).role is AgentRole.MAIN


def test_opencode_sessions_are_agents() -> None:
    main, child = of(OPENCODE), of({**OPENCODE, "x-session-id": "s2", "x-parent-session-id": "s1"})
    assert (main.role, main.agent_id, main.parent_agent_id) == (AgentRole.MAIN, "s1", None)
    assert (child.role, child.agent_id, child.parent_agent_id) == (AgentRole.SUB_AGENT, "s2", "s1")
    assert of(OPENCODE, system("You are a title generator. You output"), user("x"), tools=()).role is AgentRole.SIDE
    asked = system("You are a context summarization agent. You are given")
    summary = of({**OPENCODE, "x-parent-session-id": "s0"}, asked, user("as text"), tools=())
    assert (summary.role, summary.summary, summary.evident) == (AgentRole.SUB_AGENT_SUMMARY, True, True)
    assert of({"user-agent": "opencode/1.18.33"}).role is None


def test_qwen_code_requests_beside_the_task_go_by_their_system_prompts() -> None:
    assert of(QWEN) == AgentLabel(client="qwen-code", spawner="agent")
    memory = of(QWEN, system("You are now acting as the managed memory extraction subagent for"), user("hi"))
    assert (memory.role, memory.spawner) == (AgentRole.SIDE, None)
    summary = of(QWEN, system("\nYou are the component that summarizes internal chat history into"), tools=())
    assert (summary.role, summary.summary) == (None, True)


def test_a_system_prompt_may_be_all_that_tells_a_client() -> None:
    pi = of({}, system("You are a context summarization assistant. Your task"), user("<conversation>"), tools=())
    assert (pi.client, pi.role, pi.summary, pi.evident) == ("pi", None, True, True)
    commit = "You are an expert software engineer that generates concise, one-line Git commit messages based on"
    assert (of({}, system(commit), user("diff")).client, of({}, system(commit)).role) == ("aider", AgentRole.SIDE)
    assert of({}, user(commit)) == AgentLabel(), "no user can bring it about"
    assert of({}, system("You help."), system(commit)) == AgentLabel()


def test_openhands_names_its_conversation() -> None:
    found = of({"x-litellm-session-id": "c1"})
    assert (found.client, found.role, found.agent_id) == ("openhands", None, "c1")


def test_a_header_names_the_agent_of_a_request_known_by_its_prompt() -> None:
    asked = system("You are a context summarization assistant. Your task")
    found = of({"x-gyre-agent": "helper"}, asked, user("as text"))
    assert (found.role, found.agent_id, found.summary) == (AgentRole.SUB_AGENT_SUMMARY, "helper", True)
