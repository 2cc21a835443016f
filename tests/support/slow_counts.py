"""The counts of a run by their definitions, row by row in plain Python: what the columnar ones are held against."""

from __future__ import annotations

import math
from collections import Counter
from datetime import datetime
from typing import Any

from gyre_data.schema import AgentRole, Author, BranchReason, CallStatus, DeliveryState, NodeKind
from gyre_data.types import Call, Node
from tests.support.forest import Forest

__all__ = ["slow_counts"]

ROLES = (AgentRole.MAIN, AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT, AgentRole.SUB_AGENT_SUMMARY)
SAMPLED = (Author.POLICY, Author.PROVIDER)


def slow_counts(run: Forest, j_max: int | None) -> Counter[Any]:
    """Every figure of `TreeCounts`, summed over executions; counters are spread into (name, key)."""
    total: Counter[Any] = Counter()
    for execution_id in {call.execution_id for call in run.rows["calls"]}:
        total.update(_Execution(run, execution_id).counts(j_max))
    return total


class _Execution:
    def __init__(self, run: Forest, execution_id: str) -> None:
        mine = {name: [r for r in run.rows[name] if r.execution_id == execution_id] for name in ("nodes", "calls")}
        self.calls: list[Call] = sorted(mine["calls"], key=lambda c: (c.started_at, c.call_id))
        every: dict[str, Node] = {node.node_id: node for node in mine["nodes"]}
        self.nodes: dict[str, Node] = {}
        for call in self.calls:
            for end in (call.prompt_node, call.output_node):
                while end is not None:
                    self.nodes[end] = every[end]
                    end = every[end].parent_id
        states: dict[str, tuple[datetime, bool, DeliveryState]] = {}
        for row in run.rows["deliveries"]:
            key = (row.at, row.state == DeliveryState.DELIVERED, row.state)
            states[row.call_id] = max(states.get(row.call_id, key), key)
        self.state = {call_id: key[2] for call_id, key in states.items()}
        self.received = self._received()

    def path(self, node_id: str) -> list[str]:
        above = self.nodes[node_id].parent_id
        return [*(self.path(above) if above is not None else []), node_id]

    def tokens(self, node_id: str) -> int:
        node = self.nodes[node_id]
        return len(node.token_ids) if node.counted_tokens is None else node.counted_tokens

    def _received(self) -> set[str]:
        by_id = {call.call_id: call for call in self.calls}
        ends = [node.copy_of for node in self.nodes.values()]
        for call in self.calls:
            ends += [call.prompt_node, call.spawned_by_node]
            if call.branch_reason == BranchReason.COMPACTION and call.continues_from in by_id:
                ends.append(by_id[call.continues_from].output_node)
        return {above for end in ends if end in self.nodes for above in self.path(end)}

    def not_eligible(self, call: Call) -> str | None:
        if call.status != CallStatus.OK:
            return "call_failed" if call.status == CallStatus.FAILED else "call_aborted"
        node = None if call.output_node is None else self.nodes[call.output_node]
        sampled = node is not None and node.kind == NodeKind.OUTPUT and node.author in SAMPLED
        if node is None or not sampled or not self.tokens(node.node_id):
            return "no_output"
        if call.agent_role not in ROLES:
            return "role_side" if call.agent_role == AgentRole.SIDE else "role_unknown"
        state = self.state.get(call.call_id)
        if state == DeliveryState.DELIVERED or node.node_id in self.received:
            return None
        return "undelivered" if state in (DeliveryState.UNDELIVERED, DeliveryState.ABANDONED) else "delivery_unknown"

    def not_trainable(self, call: Call) -> str | None:
        assert call.output_node is not None
        node = self.nodes[call.output_node]
        if node.author == Author.PROVIDER:
            return "text_only" if call.upstream is None else "hosted"
        if any(self.nodes[above].counted_tokens is not None for above in self.path(node.node_id)):
            return "redacted"
        if node.logprobs is None:
            return "no_logprobs"
        if not all(math.isfinite(value) for value in node.logprobs):
            return "logprob_not_finite"
        if call.temperature is None or not 0 <= call.temperature < math.inf:
            return "temperature_unknown"
        if call.temperature == 0:
            return "greedy"
        if call.top_p is not None and call.top_p < 1:
            return "top_p"
        if call.top_k is not None and call.top_k > 0:
            return "top_k"
        return "constrained" if call.constrained else None

    def kept(self, candidates: dict[str, Call], trainable: set[str], j_max: int | None) -> list[set[str]]:
        """Owned nodes of each kept trajectory."""
        found: list[set[str]] = []
        left, taken = dict(candidates), set[str]()

        def place(leaf: str) -> tuple[int, int, datetime, str]:
            free = sum(self.tokens(n) for n in self.path(leaf) if n in trainable and n not in taken)
            return ROLES.index(left[leaf].agent_role), -free, left[leaf].started_at, leaf

        while left and (j_max is None or len(found) < j_max):
            best = min(left, key=place)
            del left[best]
            if owned := {n for n in self.path(best) if n in trainable - taken}:
                found.append(owned)
                taken.update(owned)
        return found

    def counts(self, j_max: int | None) -> Counter[Any]:
        judged = {call.call_id: self.not_eligible(call) for call in self.calls}
        eligible: dict[str, Call] = {}
        for call in self.calls:
            if judged[call.call_id] is None:
                assert call.output_node is not None
                eligible.setdefault(call.output_node, call)
                judged[call.call_id] = self.not_trainable(call)
        trainable = {c.output_node for c in self.calls if judged[c.call_id] is None and c.output_node is not None}
        inner = {above for leaf in eligible for above in self.path(leaf)[:-1]}
        candidates = {leaf: call for leaf, call in eligible.items() if leaf not in inner}
        paths = [self.path(leaf) for leaf in candidates]
        kept = self.kept(candidates, trainable, j_max)
        out: Counter[Any] = Counter(("not_trained", why) for why in judged.values() if why is not None)
        out.update(trajectories=len(paths), trajectories_kept=len(kept))
        out["kept_tokens"] = sum(self.tokens(n) for owned in kept for n in owned)
        on_paths = Counter(n for path in paths for n in path)
        for node_id, times in on_paths.items():
            tokens, is_message = self.tokens(node_id), self.is_message(node_id)
            out.update(trajectory_tokens=tokens, expanded_tokens=times * tokens)
            out.update(trajectory_message_nodes=is_message, occurrences=is_message * times)
            out.update(trajectory_nodes=1, node_occurrences=times)
        out["trajectory_lengths"] = sum(self.tokens(n) for path in paths for n in path)
        out.update(self.of_nodes(trainable))
        out.update(self.of_calls())
        return out

    def is_message(self, node_id: str) -> int:
        node = self.nodes[node_id]
        return int(node.kind == NodeKind.OUTPUT or (node.kind == NodeKind.PROMPT and node.author != Author.TEMPLATE))

    def of_nodes(self, trainable: set[str]) -> Counter[Any]:
        out: Counter[Any] = Counter()
        role = {call.call_id: str(call.agent_role) for call in self.calls}
        for name, node in self.nodes.items():
            tokens = self.tokens(name)
            out.update(nodes=1, message_nodes=self.is_message(name), distinct_tokens=tokens)
            out["counted_tokens"] += tokens if node.counted_tokens is not None else 0
            out["sampled_tokens"] += tokens if node.author in SAMPLED else 0
            out["trainable_tokens"] += tokens if name in trainable else 0
            out["role_tokens", role.get(node.call_id, "unknown")] += tokens
            out["author_tokens", str(node.author)] += tokens
            if node.author == Author.POLICY and node.policy_versions is None:
                out["version_tokens", "unknown"] += tokens
            for span in node.policy_versions or () if node.author == Author.POLICY else ():
                out["version_tokens", f"{span.policy_id}:{span.n}"] += span.end - span.start
        return out

    def of_calls(self) -> Counter[Any]:
        out: Counter[Any] = Counter(calls=len(self.calls))
        for call in self.calls:
            state, is_false = self.state.get(call.call_id), call.fork_check is not None
            out["calls_failed"] += call.status == CallStatus.FAILED
            out["calls_aborted"] += call.status == CallStatus.ABORTED
            out["calls_undelivered"] += state in (DeliveryState.UNDELIVERED, DeliveryState.ABANDONED)
            out["calls_delivery_unknown"] += state is None and call.status == CallStatus.OK
            out["turns"] += call.prompt_node is not None
            out["prompt_tokens"] += call.prompt_tokens or 0
            out["role_calls", str(call.agent_role)] += 1
            out["false_forks"] += is_false
            out["false_fork_tokens"] += (call.tokens_lost or 0) if is_false else 0
            if is_false:
                out["false_fork_checks", (call.fork_check or "").partition(":")[0]] += 1
            elif call.branch_reason is not None:
                summary = call.branch_reason == BranchReason.COMPACTION and call.agent_role in (ROLES[1], ROLES[3])
                out["forks", "summary" if summary else str(call.branch_reason)] += 1
            if call.echo_difference is not None:
                out["changed_echoes", call.echo_difference] += 1
        return out
