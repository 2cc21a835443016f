"""Turns that never come back, that were never sampled, or that come back as others: what is said of them."""

from gyre_data.schema import AgentRole, Author, BranchReason, Extension
from gyre_proxy.message import ToolCall
from gyre_proxy.roles import AgentLabel
from tests.support.driver import Driver, assistant, result, said, user
from tests.support.toy_template import ToyTemplate

END = 257
CLAUDE_CODE = AgentLabel(client="claude-code", role=AgentRole.MAIN, source="client")


def test_a_dropped_turn_is_a_dead_end_and_its_nudge_a_fork() -> None:
    """A reply of thoughts alone: Claude Code drops it and edits the user message before it."""
    driver = Driver(ToyTemplate(), label=CLAUDE_CODE)
    driver.call([user("do it")], [97, END], said("", reasoning="hm"))
    dead = driver.output_node
    nudged = driver.call([user("do it\n\nSay something.")], [98, END], said("done"))
    assert (nudged.branch_reason, nudged.fork_check) == (BranchReason.CONTEXT_REWRITE, None)
    assert nudged.first_difference_message == 0
    assert nudged.echo_difference is None, "nothing came back"
    grown = driver.call([user("do it\n\nSay something."), assistant("done"), user("more")], [99, END], said("yes"))
    assert (grown.extension, grown.branch_reason) == (Extension.BRIDGE, None)
    assert not [node for node in driver.nodes if node.parent_id == dead]
    driver.check()


def test_a_nudge_later_on_goes_back_to_the_turn_before() -> None:
    driver = Driver(ToyTemplate())
    driver.call([user("a")], [97, END], said("one"))
    kept = [user("a"), assistant("one")]
    driver.call([*kept, user("b")], [98, END], said("", reasoning="hm"))
    nudged = driver.call([*kept, user("b\n\nSay something.")], [99, END], said("two"))
    assert (nudged.extension, nudged.branch_reason) == (Extension.FORK, BranchReason.REWIND)
    assert (nudged.continues_from, nudged.first_difference_message) == (driver.calls[0].call_id, 2)
    whole = driver.path_ids(driver.calls[0].output_node)
    assert nudged.prompt_ids[: len(whole)].tolist() == whole.tolist()
    driver.check()


def test_turns_that_were_never_sampled_are_context() -> None:
    driver = Driver(ToyTemplate())
    seeded = [user("context"), assistant("Got it. Thanks for the context!"), user("a")]
    first = driver.call(seeded, [97, END], said("one"))
    assert (first.extension, first.branch_reason) == (Extension.ROOT, None)
    second = driver.call([*seeded, assistant("one"), user("b")], [98, END], said("two"))
    assert (second.extension, second.echo_difference) == (Extension.BRIDGE, None)
    authors = [node.author for node in driver.nodes if node.message_role == "assistant" and node.kind == "prompt"]
    assert authors == [Author.CLIENT]


def test_other_thoughts_of_a_turn_that_was_never_sampled_are_another_prompt() -> None:
    driver = Driver(ToyTemplate())
    one = driver.plan([user("a"), assistant("b", reasoning="because"), user("c")])
    two = driver.plan([user("a"), assistant("b", reasoning="although"), user("c")])
    assert one.identity != two.identity
    driver.call([user("a"), assistant("b", reasoning="because"), user("c")], [97, END], said("d"))
    after = driver.plan([user("a"), assistant("b", reasoning="although"), user("c")])
    assert after.extension is Extension.FORK
    assert after.prompt_ids.tolist() == two.prompt_ids.tolist()


def test_a_turn_that_comes_back_as_another_is_told() -> None:
    driver = Driver(ToyTemplate())
    driver.call([user("a")], [97, END], said("", ToolCall(name="f", arguments={"x": 1})))
    node = driver.output_node
    echo = assistant("", ToolCall(name="f", arguments={"x": 2}, id=f"call_{node}_0"), hint=node)
    chat = [user("a"), echo, result("r", f"call_{node}_0")]
    forked = driver.call(chat, [98, END], said("b"))
    assert (forked.extension, forked.branch_reason) == (Extension.FORK, BranchReason.CONTEXT_REWRITE)
    assert (forked.echo_difference, forked.fork_check) == ("arguments", None)
    grown = driver.plan([*chat, assistant("b"), user("c")])
    assert (grown.extension, grown.echo_difference) == (Extension.BRIDGE, None), "said once, where it forked"
