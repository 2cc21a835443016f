"""A task that a tiny policy can learn from recorded groups: say the kind of token that the question asks for.

An execution is a tree as a coding harness leaves it. The main agent gets a question and answers; four sub-agents get
one question each, in conversations of their own; the main agent gets their answers and answers once more. So there are
five trajectories. Question 0 asks for tokens of even id, question 1 for odd ones. The score is the share of right
tokens among those that count (`Judged`): in all answers, or in the main agent's alone.

Every answer has `ANSWER` tokens, sampled from the policy at temperature 1 and recorded with its own log-probs. At first
the policy does not know what is asked for, so it is right about half of the time. The expected score is computed from
its own probabilities of right tokens, along sampled executions: only what was sampled before a token is chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gyre_data.schema import (
    AgentRole,
    Author,
    BranchReason,
    CallStatus,
    DeliveryState,
    EndReason,
    Extension,
    NodeKind,
    ScoreStatus,
)
from gyre_data.store import RunWriter
from gyre_data.types import Attempt, Call, Delivery, ExecutionEvent, Node, PolicyVersion, Score, VersionSpan
from gyre_train.lineage import base_version
from gyre_train.tiny import make_tiny

__all__ = ["Judged", "expected_score", "make_policy", "record"]

QUESTIONS, HELPERS, ANSWER = 2, 4, 2
_VOCAB = 300
_MAIN_QUESTION, _HELPER_QUESTION = 20, 40
_BEGIN, _RESULT = (1, 2), 3
"""Ids before each answer, and before the sub-agents' answers."""
_SYSTEM = {"main": (5, 6, 7), "helper": (8, 9)}
_START = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
_TEXTS = ("the quick brown fox jumps over the lazy dog and says hello to all of them again and again",) * 4


class Judged(StrEnum):
    """Whose answers count."""

    ALL = "all"
    MAIN = "main"


def make_policy(folder: Path, *, seed: int = 0) -> Path:
    """Two random layers, 32 wide, under a head that knows two kinds of tokens and no more: even ids and odd ids."""
    make_tiny(folder, vocab=_VOCAB, hidden=32, heads=4, kv_heads=2, context=512, texts=_TEXTS, init_std=0.2, seed=seed)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kind_D = 0.05 * torch.randn(32, generator=torch.Generator().manual_seed(seed))
    tensors["lm_head.weight"][0::2] = kind_D
    tensors["lm_head.weight"][1::2] = -kind_D
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One call of B executions side by side."""

    prompt_BP: torch.Tensor
    """Whole prompts, of one length."""
    ids_BA: torch.Tensor
    logp_BA: torch.Tensor
    right_BA: torch.Tensor
    chance_BA: torch.Tensor
    """The policy's probability of a right token at each place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """Executions of one task side by side."""

    first: _Answer
    helpers: tuple[_Answer, ...]
    last: _Answer

    def judged(self, judged: Judged) -> list[_Answer]:
        return [self.first, *(self.helpers if judged is Judged.ALL else ()), self.last]


def _answer(policy: Any, prompt_BP: torch.Tensor, question: int, draw: torch.Generator) -> _Answer:
    """Sample an answer to each prompt."""
    right_V = torch.arange(_VOCAB) % 2 == question % 2
    ids_BS, logps, chances = prompt_BP, [], []
    for _ in range(ANSWER):
        logp_BV = policy(ids_BS).logits[:, -1].float().log_softmax(-1)
        next_B1 = torch.multinomial(logp_BV.exp(), 1, generator=draw)
        logps.append(logp_BV.gather(1, next_B1)[:, 0])
        chances.append(logp_BV.exp()[:, right_V].sum(1))
        ids_BS = torch.cat([ids_BS, next_B1], 1)
    ids_BA = ids_BS[:, -ANSWER:]
    return _Answer(
        prompt_BP=prompt_BP, ids_BA=ids_BA, logp_BA=torch.stack(logps, 1), right_BA=right_V[ids_BA],
        chance_BA=torch.stack(chances, 1),
    )  # fmt: skip


def _play(policy: Any, task: int, size: int, draw: torch.Generator) -> _Played:
    """`size` executions of a task; task t asks the main agent question t, and helper h question t + h."""

    def prompt(*ids: int) -> torch.Tensor:
        return torch.tensor([ids]).expand(size, -1)

    with torch.no_grad():
        first = _answer(policy, prompt(*_SYSTEM["main"], _MAIN_QUESTION + task, *_BEGIN), task, draw)
        helpers = []
        for h in range(HELPERS):
            question = (task + h) % QUESTIONS
            helpers.append(
                _answer(policy, prompt(*_SYSTEM["helper"], _HELPER_QUESTION + question, *_BEGIN), question, draw)
            )
        told = [first.prompt_BP, first.ids_BA, prompt(_RESULT), *(h.ids_BA for h in helpers), prompt(*_BEGIN)]
        last = _answer(policy, torch.cat(told, 1), task, draw)
    return _Played(first=first, helpers=tuple(helpers), last=last)


def expected_score(folder: Path, judged: Judged, *, size: int = 32, seed: int = 0) -> float:
    """The policy's expected score over all tasks, along `size` executions of each."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    draw = torch.Generator().manual_seed(seed)
    played = [_play(policy, task, size, draw) for task in range(QUESTIONS)]
    return float(torch.stack([a.chance_BA.mean() for p in played for a in p.judged(judged)]).mean())


def record(folder: Path, policy_folder: Path, *, groups: int, size: int = 8, seed: int = 0) -> Path:
    """Record groups of executions by these weights into a run; group g has task g modulo the number of questions.

    Each execution is judged twice, by an evaluator named after each `Judged`.
    """
    policy, version = AutoModelForCausalLM.from_pretrained(policy_folder), base_version(policy_folder)
    draw = torch.Generator().manual_seed(seed)
    with RunWriter(folder) as writer:
        for group in range(groups):
            played = _play(policy, group % QUESTIONS, size, draw)
            right = {j: torch.cat([a.right_BA for a in played.judged(j)], 1).double().mean(1) for j in Judged}
            for place in range(size):
                rows = _Rows(f"{seed:02x}{group:04x}{place:06x}", version)
                scores = {str(judged): float(right_B[place]) for judged, right_B in right.items()}
                writer.append(list(rows.execution(played, place, f"g{group:04d}", scores)))
    return folder


class _Rows:
    """Rows of one execution."""

    def __init__(self, name: str, version: PolicyVersion) -> None:
        self._name, self._version, self._count = name, version, 0
        self._above: dict[str | None, tuple[int, str | None]] = {None: (0, None)}
        """Where a node ends, and its root."""

    def execution(self, played: _Played, place: int, group: str, scores: Mapping[str, float]) -> Iterator[Any]:
        """All of them, in the order of writing."""
        execution_id = f"e_{self._name}"
        common: dict[str, Any] = {"execution_id": execution_id, "at": _START}
        yield ExecutionEvent(event="started", group_id=group, task_id=group, sample_index=place, **common)
        at, rows = self._call(played.first, place, None, AgentRole.MAIN)
        yield from rows
        for number, helper in enumerate(played.helpers):
            yield from self._call(helper, place, None, AgentRole.SUB_AGENT, agent_id=f"a{number}")[1]
        yield from self._call(played.last, place, at, AgentRole.MAIN)[1]
        yield ExecutionEvent(event="ended", end_reason=EndReason.FINISHED, **common)
        for evaluator, value in scores.items():
            yield Score(
                score_id=f"s_{self._name}{evaluator}", evaluator=evaluator, evaluator_version="1",
                status=ScoreStatus.SCORED, value=value, **common,
            )  # fmt: skip

    def _call(
        self, answer: _Answer, place: int, after: str | None, role: AgentRole, **more: Any
    ) -> tuple[str, Sequence[Any]]:
        """The rows of one call, and its output's node id."""
        call_id, start = f"c_{self._name}{self._count:06x}", self._above[after][0]
        prompt_T = answer.prompt_BP[place, start:].numpy().astype(np.int32)
        begun = len(_BEGIN)
        text = self._node(after, call_id, prompt_T[:-begun], kind=NodeKind.PROMPT, author=Author.CLIENT)
        begin = self._node(
            text.node_id, call_id, prompt_T[-begun:], kind=NodeKind.GENERATION_PROMPT, author=Author.TEMPLATE
        )
        span = VersionSpan(policy_id=self._version.policy_id, n=self._version.n, start=0, end=ANSWER)
        out = self._node(
            begin.node_id, call_id, answer.ids_BA[place].numpy().astype(np.int32), kind=NodeKind.OUTPUT,
            author=Author.POLICY, logprobs=answer.logp_BA[place].numpy().astype(np.float32), policy_versions=(span,),
        )  # fmt: skip
        at = _START + timedelta(seconds=self._count)
        call = Call(
            call_id=call_id, execution_id=out.execution_id, agent_role=role, role_source="client", wire="toy",
            prompt_node=begin.node_id, output_node=out.node_id,
            extension=Extension.ROOT if after is None else Extension.BRIDGE,
            branch_reason=BranchReason.SUB_AGENT if role is AgentRole.SUB_AGENT else None,
            prompt_tokens=answer.prompt_BP.shape[1], output_tokens=ANSWER, temperature=1.0, top_p=1.0, top_k=-1,
            constrained=False, finish_reason="length", status=CallStatus.OK,
            attempts=(Attempt(engine="toy", start=0, end=ANSWER),), started_at=at, ended_at=at, **more,
        )  # fmt: skip
        state = DeliveryState.DELIVERED
        delivery = Delivery(call_id=call_id, execution_id=out.execution_id, state=state, at=at)
        return out.node_id, (text, begin, out, call, delivery)

    def _node(self, parent: str | None, call_id: str, ids: np.ndarray[Any, Any], **more: Any) -> Node:
        self._count += 1
        node_id = f"n_{self._name}{self._count:08x}"
        start, root = self._above[parent]
        self._above[node_id] = (start + len(ids), root or node_id)
        return Node(
            node_id=node_id, execution_id=f"e_{self._name}", root_id=root or node_id, parent_id=parent,
            call_id=call_id, start_pos=start, token_ids=ids, **more,
        )  # fmt: skip
