"""A small run in which nearly everything happens once: what `gyre tree` and `gyre stats` must show."""

from __future__ import annotations

from tests.support.forest import Forest

__all__ = ["busy_case"]


def busy_case() -> Forest:
    """Retry, nested sub-agents, compaction, rewrite, false fork, lost, side and unknown calls, two versions."""
    run = Forest()
    run.execution("e_0aaa00000001", group="g", task="swe-412", sample_index=0, score=1.0, harness="pi").call()
    e = run.execution(
        "e_0bbb00000002",
        group="g",
        task="swe-412",
        sample_index=1,
        end=None,
        harness="claude-code",
        harness_version="2.1.220",
    )
    e.call(new=[("user", 20)], output=5, role="side")
    a = e.call(new=[("system", 400), ("user", 30)], output=40, version=("run", 4))
    lost = e.call(after=a, new=[("tool", 90)], output=25, delivery="undelivered", version=("run", 4))
    b = e.retry(lost, output=30, version=("run", 4))
    sub = e.call(
        new=[("system", 300), ("user", 25)],
        output=50,
        role="sub_agent",
        agent_id="a91",
        spawned_by_node=b.output,
        branch_reason="sub_agent",
        version=("run", 4),
    )
    nested = e.call(
        new=[("system", 100), ("user", 9)],
        output=11,
        role="sub_agent",
        agent_id="n2",
        parent_agent_id="a91",
        spawned_by_node=sub.output,
        branch_reason="sub_agent",
        version=("run", 5),
    )
    e.call(after=nested, new=[("tool", 7)], output=12, role="sub_agent", agent_id="n2", version=("run", 5))
    e.call(after=sub, new=[("tool", 60)], output=20, role="sub_agent", agent_id="a91", version=("run", 5))
    c = e.call(after=b, new=[("tool", 70)], output=35, version=("run", 5))
    e.call(
        after=c,
        new=[("tool", 10)],
        output=None,
        delivery=None,
        status="failed",
        error="engine 2 lost",
        temperature=None,
    )
    summary = e.call(after=c, new=[("user", 15)], output=60, role="main_summary", version=("run", 5))
    system = next(node.node_id for node in e.nodes.values() if node.message_role == "system")
    d = e.call(
        after=system,
        new=[("user", 80), ("assistant", 35, {"copy_of": c.output})],
        output=45,
        extension="fork",
        branch_reason="compaction",
        continues_from=summary.id,
        tokens_lost=300,
        version=("run", 5),
    )
    f = e.call(after=d, new=[("tool", 55)], output=22, version=("run", 5))
    rewrite = {
        "extension": "fork",
        "branch_reason": "context_rewrite",
        "first_difference_message": 7,
        "tokens_lost": 79,
    }
    e.call(after=d, new=[("user", 33)], output=18, version=("run", 5), **rewrite)
    false = {"extension": "fork", "fork_check": "sentinel render differs", "tokens_lost": 22}
    e.call(after=d, new=[("tool", 55), ("assistant", 22), ("tool", 8)], output=9, version=("run", 5), **false)
    e.call(after=f, new=[("tool", 4)], output=6, status="aborted", delivery="abandoned", version=("run", 5))
    e.call(new=[("user", 14)], output=3, role="unknown", delivery="delivered")
    e.end("harness_timeout")
    e.score(0.5, evaluator="pytest", version="3", partial=True)
    e.score(None, evaluator="style", status="failed", detail="timed out")
    run.execution("e_0ccc00000003", group="g", task="swe-412", sample_index=2, end=None).call(logprobs=False)
    return run
