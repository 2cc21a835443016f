"""The shape of one long agent run: 636 calls in a tree of prompts, outputs, sub-agents, compactions, forks and retries.

Only structure and sizes; `_made` fills in ids, tokens and texts. Node and call numbers are places in the lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

__all__ = ["CallShape", "NodeShape", "Shape", "long_shape"]

GENERATION_PROMPT = 3
SAMPLED_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShape:
    parent: int
    call: int
    kind: str
    author: str
    message_role: str | None
    num_tokens: int
    copy_of: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    role: str
    agent: str | None
    prompt: int
    output: int | None
    extension: str
    reason: str | None = None
    status: str = "ok"
    delivery: str | None = "delivered"
    spawned_by: int | None = None
    continues_from: int | None = None
    tokens_lost: int | None = None


@dataclass
class Shape:
    """Nodes and calls in the order in which they are recorded."""

    rng: np.random.Generator
    nodes: list[NodeShape] = field(default_factory=list)
    calls: list[CallShape] = field(default_factory=list)

    @property
    def start_pos(self) -> npt.NDArray[np.int64]:
        """Tokens before each node on its path."""
        out = np.zeros(len(self.nodes), np.int64)
        for i, node in enumerate(self.nodes):
            if node.parent >= 0:
                out[i] = out[node.parent] + self.nodes[node.parent].num_tokens
        return out

    def add(
        self, parent: int, kind: str, author: str, role: str | None, tokens: int, copy_of: int | None = None
    ) -> int:
        node = NodeShape(
            parent=parent,
            call=len(self.calls),
            kind=kind,
            author=author,
            message_role=role,
            num_tokens=max(1, tokens),
            copy_of=copy_of,
        )
        self.nodes.append(node)
        return len(self.nodes) - 1

    def call(self, after: int, new: list[tuple[str, int]], *, output: bool = True, **more: object) -> int:
        """One call; returns its number."""
        at = after
        for role, tokens in new:
            at = self.add(at, "prompt", "client", role, tokens)
        at = self.add(at, "generation_prompt", "template", None, GENERATION_PROMPT)
        return self.sample(at, output=output, **({"extension": "root" if after < 0 else "bridge"} | more))

    def sample(self, prompt: int, *, output: bool = True, role: str = "main", agent: str | None = None,
               **more: object) -> int:  # fmt: skip
        out = self.add(prompt, "output", "policy", "assistant", int(self.rng.lognormal(5.3, 0.9))) if output else None
        made = CallShape(role=role, agent=agent, prompt=prompt, output=out, **more)  # type: ignore[arg-type]
        self.calls.append(made)
        return len(self.calls) - 1

    def turns(self, after: int, count: int, **more: object) -> int:
        """A conversation that goes on for `count` calls; one in 60 fails and is tried again. Returns the last call."""
        last = after
        for _ in range(count):
            at, new = self.calls[last].output, [("tool", int(self.rng.lognormal(5.9, 1.2)))]
            assert at is not None
            if self.rng.random() < 1 / 60:
                lost = self.call(at, new, output=False, **({"status": "failed", "delivery": None} | more))
                retry = {"extension": "retry", "reason": "retry"}
                last = self.sample(self.calls[lost].prompt, **(retry | more))
            else:
                last = self.call(at, new, **more)
        return last

    def scaled(self, num_tokens: int) -> Shape:
        """The same with `num_tokens` tokens in all, a quarter of them sampled."""
        fixed = [node.num_tokens if node.kind == "generation_prompt" else 0 for node in self.nodes]
        left, sampled = num_tokens - sum(fixed), int(SAMPLED_SHARE * num_tokens)
        nodes = list(self.nodes)
        for wanted, kind in ((sampled, "output"), (left - sampled, "prompt")):
            rows = [i for i, node in enumerate(nodes) if node.kind == kind]
            sizes = np.array([nodes[i].num_tokens for i in rows], np.float64)
            cuts = np.maximum(1, np.floor(sizes * (wanted / sizes.sum()))).astype(int)
            cuts[np.argmax(cuts)] += wanted - int(cuts.sum())
            for i, size in zip(rows, cuts.tolist(), strict=True):
                nodes[i] = replace(nodes[i], num_tokens=size)
        return Shape(rng=self.rng, nodes=nodes, calls=self.calls)


def long_shape(seed: int, num_tokens: int) -> Shape:
    """636 calls or a few more, as the published case has them: a main agent compacted twice, three sub-agents."""
    rng = np.random.default_rng(seed)
    made = Shape(rng=rng)
    first = made.call(-1, [("system", 9000), ("user", 400)])
    last = made.turns(first, 127)
    last = _compacted(made, first, last, "main", None)
    middle = made.turns(last, 60)
    _fork(made, middle - 30, 58, "rewind")
    for name in ("a91", "b20", "c33"):
        spawn = {"role": "sub_agent", "agent": name}
        opened = made.call(
            -1, [("system", 4000), ("user", 300)], reason="sub_agent", spawned_by=made.calls[40].output, **spawn
        )
        ended = made.turns(opened, 48, **spawn)
        if name == "b20":
            made.turns(_compacted(made, opened, ended, "sub_agent", name), 39, **spawn)
        made.call(-1, [("system", 300), ("user", 200)], role="side", agent=None)
    last = made.turns(middle, 66)
    last = made.turns(_compacted(made, first, last, "main", None), 60)
    _fork(made, last - 45, 25, "context_rewrite")
    made.turns(last, max(0, 634 - len(made.calls)))
    undelivered = made.call(made.calls[last].output or 0, [("tool", 200)])
    made.calls[undelivered] = replace(made.calls[undelivered], delivery="undelivered")
    return made.scaled(num_tokens)


def _fork(made: Shape, at: int, count: int, reason: str) -> None:
    node = made.calls[at].prompt
    forked = made.call(node, [("user", 150)], extension="fork", reason=reason, tokens_lost=5000)
    made.turns(forked, count - 1)


def _compacted(made: Shape, first: int, last: int, role: str, agent: str | None) -> int:
    """A summary call, and the conversation that goes on from it with a kept tail."""
    end = made.calls[last].output
    assert end is not None
    summary = made.call(end, [("user", 400)], role=f"{role}_summary", agent=agent)
    root = next(i for i, node in enumerate(made.nodes) if node.call == first)
    tail = [i for i in range(len(made.nodes)) if made.nodes[i].call in (last - 1, last) and made.nodes[i].message_role]
    at = made.add(root, "prompt", "client", "user", 900)
    for i in tail:
        node = made.nodes[i]
        copy_of = i if node.kind == "output" else None
        at = made.add(at, "prompt", "client", node.message_role, node.num_tokens, copy_of=copy_of)
    at = made.add(at, "generation_prompt", "template", None, GENERATION_PROMPT)
    return made.sample(
        at,
        role=role,
        agent=agent,
        extension="fork",
        reason="compaction",
        continues_from=summary,
        tokens_lost=60_000,
    )
