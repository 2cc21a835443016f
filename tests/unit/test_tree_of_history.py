"""What the proxy's history records of a Claude Code session is laid out as its user would tell it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from gyre_data.admission import admit
from gyre_data.execution import Execution
from gyre_data.run_stats import stats
from gyre_data.schema import DeliveryState
from gyre_data.show.outline import outline
from gyre_data.types import Delivery
from gyre_proxy.message import ToolCall
from gyre_proxy.roles import label
from tests.support.driver import Driver, assistant, request, result, said, system, user
from tests.support.forest import Forest
from tests.support.toy_template import ToyTemplate

TOOLS = ({"type": "function", "function": {"name": "Agent"}},)
CLIENT = {"user-agent": "claude-cli/2.1.220 (external, sdk-cli)"}
ASK = user("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.")
PROMPT = "Find the crate with the number 12."


def turn(driver: Driver, chat, text: str, *calls: ToolCall, agent: str | None = None) -> None:
    asked = request(chat, TOOLS, wire="anthropic")
    headers = CLIENT | ({"x-claude-code-agent-id": agent} if agent else {})
    ids = driver.template.encode(text + "<|im_end|>").ids
    driver.call(chat, ids, said(text, *calls), label("anthropic", headers, asked), tools=TOOLS, wire="anthropic")


def session() -> Driver:
    """A sub-agent of two calls, a retry, a summary, the conversation that goes on from it, and a rewritten turn."""
    driver = Driver(ToyTemplate())
    head = [system("s"), user("<system-reminder>x</system-reminder>\nplease do it")]
    turn(driver, head, "", ToolCall(name="Agent", arguments={"prompt": PROMPT}))
    first = driver.output_node
    sub = [system("sub"), user(PROMPT)]
    turn(driver, sub, "found", agent="a1")
    turn(driver, [*sub, assistant("found"), user("sure?")], "yes", agent="a1")
    call = ToolCall(name="Agent", arguments={"prompt": PROMPT}, id=f"toolu_{first}_0")
    chat = [*head, assistant("", call, hint=first), result("files", f"toolu_{first}_0")]
    turn(driver, chat, "seen")
    turn(driver, chat, "seen anew")
    turn(driver, [*chat, ASK], "we did it")
    after = [system("s"), user("This session is being continued: we did it"), *chat[2:]]
    turn(driver, after, "going on")
    turn(driver, [*after, assistant("going on"), user("more")], "yes")
    turn(driver, [*after, assistant("going on"), user("more"), assistant("no"), user("what")], "rewritten")
    return driver


def recorded(driver: Driver, lost: int) -> Forest:
    """The rows as the server writes them; the reply to call `lost` (from 1) did not arrive."""
    run = Forest()
    sizes = {node.node_id: len(node.token_ids) for node in driver.nodes}
    run.rows["nodes"] = [replace(node, policy_versions=None) for node in driver.nodes]
    for number, (plan, call) in enumerate(zip(driver.plans, driver.calls, strict=True), 1):
        row = replace(
            call,
            temperature=1.0,
            fork_check=plan.fork_check,
            tokens_lost=plan.tokens_lost,
            echo_difference=plan.echo_difference,
            first_difference_message=plan.first_difference_message,
            prompt_tokens=len(plan.prompt_ids),
            output_tokens=sizes[call.output_node],
            started_at=call.started_at + timedelta(seconds=number),
        )
        run.add("calls", row)
        state = DeliveryState.UNDELIVERED if number == lost else DeliveryState.DELIVERED
        run.add("deliveries", Delivery(call_id=call.call_id, execution_id="e_1", state=state, at=row.started_at))
    run.blob = driver.blobs.__getitem__
    return run


def test_lanes_segments_and_events() -> None:
    shown = outline(Execution.load(recorded(session(), lost=4), "e_1"), j_max=None)
    (main,) = shown.lanes
    assert main.title == "please do it"
    assert [(s.opening and s.opening["kind"], s.calls) for s in main.segments] == [
        (None, [1, 5]),
        ("summary", [6]),
        ("compaction", [7, 8]),
        ("fork", [9]),
    ]
    (retry,) = main.segments[0].events
    assert (retry["kind"], retry["call"], retry["taken_over_by"]) == ("retry", 4, 5)
    (agent,) = main.segments[0].agents
    assert (agent.agent_id, agent.spawned_at, agent.title, agent.calls) == ("a1", 1, PROMPT, [2, 3])
    compaction = main.segments[2].opening
    assert compaction["at"] == 6
    assert compaction["copied_tokens"] > 0
    assert shown.trained[3] == 0
    assert all(shown.trained[n - 1] > 0 for n in (1, 2, 3, 5, 6, 7, 8, 9))


def test_admission_and_counts() -> None:
    run = recorded(session(), lost=4)
    (e,) = admit(run, need_score=False, need_logprobs=True, include_running=True, j_max=None).executions
    assert [t.role for t in e.trajectories] == ["main"] * 3 + ["main_summary", "sub_agent"]
    sampled = sum(len(n.token_ids) for n in run.rows["nodes"] if n.author == "policy")
    lost = len(next(n.token_ids for n in run.rows["nodes"] if n.node_id == run.rows["calls"][3].output_node))
    assert e.num_owned == sampled - lost
    found = stats(run).trees
    assert found.forks == {"sub_agent": 1, "retry": 1, "summary": 1, "compaction": 1, "context_rewrite": 1}
    assert (found.false_forks, found.calls_undelivered) == (0, 1)
