"""What a training run consumes: recorded runs through admission, or chat files, as examples in a fixed order.

The order depends on the seed and the executions' ids only, never on when a process started or stopped. Which examples
come next is decided by how often the ledger says each was trained, so no execution is skipped or trained twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_data.errors import ConfigError, DataError
from gyre_data.types import PolicyVersion

from .chat import chat_tree, read_chat, read_tokenizer
from .config import TrainingConfig
from .lineage import Lineage
from .pack import Array, TrajectoryInput, TreeInput
from .plan import Plan, plan
from .teacher import teacher_logprobs

if TYPE_CHECKING:
    from gyre_data.admission import Admission, AdmittedExecution
    from gyre_data.store import Run

__all__ = ["Example", "Source", "Trained", "load_source", "plan_examples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One kept trajectory, as the ledger names it."""

    trajectory: int
    leaf_node: str
    owned_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One execution that can be trained."""

    execution_id: str
    group_id: str | None
    data_run: str
    manifest: int
    reward: float | None
    advantage: float | None
    score_ids: tuple[str, ...]
    trajectories: tuple[Trained, ...]
    policy_ids: frozenset[str]
    """Lineages that sampled its trained tokens; empty where unknown."""
    node_ids: tuple[str, ...] = ()
    """Ids of the tree's nodes in the run; empty for chats."""
    tree: Callable[[int], TreeInput]
    """Builds the packer's input; its argument becomes `TreeInput.execution`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """All examples that may be trained, and what was left out and why."""

    examples: tuple[Example, ...]
    excluded: Mapping[str, Mapping[str, int]]
    """Counts by reason, for executions, calls and trajectories."""
    seed: int
    epochs: int

    def due(self, trained: Mapping[str, int], limit: int | None = None) -> list[Example]:
        """Return the next examples, given how often each execution was trained; fewest times first."""
        waiting = [e for e in self.examples if trained.get(e.execution_id, 0) < self.epochs]
        waiting.sort(key=lambda e: self._place(e, trained.get(e.execution_id, 0)))
        return waiting[:limit]

    def _place(self, example: Example, epoch: int) -> tuple[int, bytes, bytes]:
        """Executions of one group stand together, groups and executions in an order drawn from the seed."""

        def draw(name: str) -> bytes:
            return hashlib.sha256(f"{self.seed}/{epoch}/{name}".encode()).digest()

        group = example.group_id if example.group_id is not None else example.execution_id
        return epoch, draw(f"{example.data_run}/{group}"), draw(example.execution_id)


def plan_examples(examples: Sequence[Example], config: TrainingConfig) -> Plan:
    """Lay the executions of one step out in packs; an error names the execution by its id."""
    trees = [example.tree(number) for number, example in enumerate(examples)]
    try:
        return plan(trees, tokens=config.pack.tokens, sharing=config.pack.sharing)
    except DataError as error:
        names = {f"execution {number}": f"execution {e.execution_id}" for number, e in enumerate(examples)}
        text = re.sub(r"execution \d+", lambda found: names.get(found[0], found[0]), str(error))
        raise DataError(text) from error


def load_source(config: TrainingConfig, own: Lineage | None = None) -> Source:
    """Read everything the config names; raise an error that says what to do when nothing of it can be trained.

    `own` is the training run's lineage, from which the age of sampled tokens is known.
    """
    examples: list[Example] = []
    excluded: dict[str, Mapping[str, int]] = {}
    vocab = _vocab_size(config.model.path)
    if config.data.runs:
        from gyre_data.admission import admit
        from gyre_data.store import open as open_run

        runs = [open_run(path) for path in config.data.runs]
        for run in runs:
            _check_fingerprint(run, config.model.path)
        rl = config.loss.kind != "sft"
        admission = admit(
            runs,
            j_max=config.data.j_max,
            count=config.data.count,
            evaluators=config.data.evaluators,
            scale=config.data.scale,
            need_score=rl and config.loss.advantage > 0,
            drop_zero_variance=config.data.drop_zero_variance,
        )
        counts = admission.counts()
        excluded = {level: counts[level] for level in ("executions", "calls", "trajectories")}
        if rl and config.loss.advantage:
            _check_signal(admission, runs)
        facts = _Facts(
            policy=rl,
            vocab=vocab,
            own=own,
            teachers={id(run): teacher_logprobs(run, config.loss.teacher_name) for run in runs}
            if config.loss.teacher
            else {},
        )
        examples += [_recorded(e, facts) for e in admission.executions]
        if not examples and not config.data.chat:
            raise _nothing(counts, runs, "a policy loss" if rl else "sft")
    examples += _chat_examples(config)
    _check_unique(examples)
    if not examples:
        raise DataError(f"data.chat: 0 conversations in {', '.join(config.data.chat)}; add lines")
    return Source(examples=tuple(examples), excluded=excluded, seed=config.train.seed, epochs=config.data.epochs)


def _check_unique(examples: Sequence[Example]) -> None:
    """The ledger knows an execution by its id alone: of two with one id, one would be trained twice or never."""
    known: dict[str, Example] = {}
    for example in examples:
        other = known.setdefault(example.execution_id, example)
        if other is not example:
            raise DataError(
                f"execution {example.execution_id}: wanted it once, found it in {other.data_run} and in "
                f"{example.data_run}; name each run once, and no copies of it"
            )


def _vocab_size(folder: str) -> int:
    try:
        return int(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: wanted a Hugging Face folder, {folder} has no readable config.json ({error}); check the path"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What recorded trees are built with."""

    policy: bool
    """A policy loss reads them, not SFT."""
    vocab: int
    own: Lineage | None
    teachers: Mapping[int, Mapping[str, Array]]
    """A teacher's log-probs by node id, by the id() of the run."""


def _recorded(execution: AdmittedExecution, facts: _Facts) -> Example:
    run: Any = execution.run
    tree = execution.tree
    owned = [node for trajectory in execution.trajectories for node in trajectory.owned]
    return Example(
        execution_id=execution.execution_id,
        group_id=execution.group_id if facts.policy else None,
        data_run=str(Path(run.path).resolve()),
        manifest=int(run.manifest_number),
        reward=execution.reward,
        advantage=execution.advantage,
        score_ids=tuple(execution.score_ids),
        trajectories=tuple(
            Trained(trajectory=t.index, leaf_node=tree.node_id[t.leaf], owned_tokens=t.num_owned)
            for t in execution.trajectories
        ),
        policy_ids=frozenset(span.policy_id for node in owned for span in tree.versions(node) or ()),
        node_ids=tuple(tree.node_id),
        tree=partial(_recorded_tree, execution, facts),
    )


def _recorded_tree(execution: AdmittedExecution, facts: _Facts, number: int) -> TreeInput:
    """Views of the run's own token arrays; the first copy of a token is the pack's."""
    tree = execution.tree
    temperature_N = np.full(len(tree.node_id), np.nan)
    for node, calls in tree.outputs.items():
        if calls[0].temperature is not None:
            temperature_N[node] = calls[0].temperature
    ids = tuple(tree.ids(node) for node in range(len(tree.node_id)))
    smallest = min((int(x.min()) for x in ids if len(x)), default=0)
    if smallest < 0:
        raise DataError(
            f"execution {execution.execution_id}: wanted token ids from 0, got {smallest}; run `gyre verify` on its run"
        )
    largest = max((int(x.max()) for x in ids if len(x)), default=0)
    if largest >= facts.vocab:
        raise DataError(
            f"execution {execution.execution_id}: wanted token ids below the model's {facts.vocab}, got {largest}; it "
            "was recorded with another tokenizer, set model.path to the model that was served"
        )
    recorded = [tree.logprobs(node) for node in range(len(ids))]
    if not facts.policy:  # trained at temperature 1, so only log-probs recorded at 1 can be compared
        recorded = [x if temperature_N[node] == 1.0 else None for node, x in enumerate(recorded)]
        temperature_N = np.ones(len(ids))
    return TreeInput(
        execution=number,
        parent_N=tree.parent_N,
        ids=ids,
        temperature_N=temperature_N,
        trajectories=tuple(
            TrajectoryInput(
                path_P=np.array(t.path, np.int32),
                owned_O=np.array(t.owned, np.int32),
                advantage=execution.advantage or 0.0,
                role=str(t.role),
            )
            for t in execution.trajectories
        ),
        logp_behaviour=tuple(recorded),
        logp_teacher=_teacher(execution, facts.teachers) if facts.teachers else None,
        version=_own_steps(execution, facts.own) if facts.own else None,
    )


def _teacher(execution: AdmittedExecution, teachers: Mapping[int, Mapping[str, Array]]) -> tuple[Array | None, ...]:
    known = teachers[id(execution.run)]
    return tuple(known.get(node_id) for node_id in execution.tree.node_id)


def _own_steps(execution: AdmittedExecution, own: Lineage) -> tuple[Array | None, ...]:
    """Per token, how many steps of this training run its weights had seen: 0 for those it started from, -1 unknown."""
    tree = execution.tree
    out: list[Array | None] = [None] * len(tree.node_id)
    for node in {node for trajectory in execution.trajectories for node in trajectory.owned}:
        step_T = np.full(int(tree.num_tokens_N[node]), -1, np.int64)
        for span in tree.versions(node) or ():
            if span.policy_id == own.version.policy_id:
                step_T[span.start : span.end] = span.n
            elif PolicyVersion(policy_id=span.policy_id, n=span.n) == own.start:
                step_T[span.start : span.end] = 0
        out[node] = step_T
    return tuple(out)


def _chat_examples(config: TrainingConfig) -> list[Example]:
    if not config.data.chat:
        return []
    tokenizer = read_tokenizer(config.model.path)
    stop_ids = _stop_ids(config.model.path, tokenizer)
    examples = []
    seen: dict[str, int] = {}
    for path in config.data.chat:
        for conversation in read_chat(path, seen):
            tree = chat_tree(conversation, tokenizer, stop_ids, 0)
            trained = tuple(
                Trained(
                    trajectory=index,
                    leaf_node=f"message-tree:{int(t.path_P[-1])}",
                    owned_tokens=int(tree.num_tokens_N[t.owned_O].sum()),
                )
                for index, t in enumerate(tree.trajectories)
            )
            examples.append(
                Example(
                    execution_id=conversation.execution_id, group_id=None, data_run=str(path), manifest=0,
                    reward=None, advantage=None, score_ids=(), trajectories=trained, policy_ids=frozenset(),
                    tree=partial(chat_tree, conversation, tokenizer, stop_ids),
                )
            )  # fmt: skip
    return examples


def _stop_ids(folder: str, tokenizer: Any) -> list[int]:
    """Ids that end a turn: the tokenizer's and those of generation_config.json."""
    found = {tokenizer.eos_token_id}
    file = Path(folder) / "generation_config.json"
    if file.is_file():
        declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(declared if isinstance(declared, list) else [declared])
    return sorted(x for x in found if x is not None)


def _check_signal(admission: Admission, runs: Sequence[Run]) -> None:
    if not admission.executions or any(e.advantage for e in admission.executions):
        return
    flat = [group for group in admission.groups if group.std == 0]
    group = flat[0]
    raise DataError(
        f"Group {group.group_id}: {group.num_valid} equal scores, no signal; 0 of {len(admission.groups)} groups left "
        f"for step 1; see `gyre stats {runs[0].path} --by evaluator`, or record more attempts"
    )


_MENDS = {
    "no_logprobs": 'recorded without log-probs (a hosted API); use loss.kind = "sft"',
    "text_only": "imported as text, without token ids; export it as chat and train on that file by SFT (data.chat)",
    "no_score": "no evaluator scored them; run `gyre score`, or use loss.kind = \"sft\"",
    "evaluator_failed": "every evaluator failed; mend it and score again",
    "running": "they have not ended; wait, or end them through the proxy's API",
    "no_group": "they belong to no group; record several executions of one task as a group",
    "group_running": "a member of their group still runs; wait, or end it through the proxy's API",
    "group_too_small": "a group needs 2 valid scores; record more attempts or score them",
    "zero_variance": "all scores of each group are equal; record more attempts",
}  # fmt: skip


def _nothing(counts: Mapping[str, Mapping[str, int]], runs: Sequence[Run], loss: str) -> DataError:
    """The reasons by count; where executions only say that nothing is left, those of their calls say why."""
    import pyarrow.compute as pc

    sampled = sum(pc.sum(run.table("calls").column("output_tokens")).as_py() or 0 for run in runs)
    ranked = Counter(dict(counts["executions"])).most_common()
    if ranked and ranked[0][0] in ("nothing_trainable", "no_eligible_output"):
        ranked = Counter(dict(counts["calls"])).most_common() or ranked
    why = ", ".join(f"{reason} {count}" for reason, count in ranked) or "the runs hold no execution"
    mend = _MENDS.get(ranked[0][0] if ranked else "", "see `gyre stats` for what the runs hold")
    return DataError(f"0 of {sampled:,} sampled tokens trainable by {loss} ({why}): {mend}")


def _check_fingerprint(run: Run, folder: str) -> None:
    """Refuse a run whose tokenizer or template differs from the model's, when the run says where its own lie."""
    recorded_with = run.info.get("tokenizer")
    if not isinstance(recorded_with, str) or not (Path(recorded_with) / "tokenizer.json").is_file():
        return
    own_template = run.info.get("template")
    theirs = _identity(Path(recorded_with), Path(own_template) if own_template else None)
    mine = _identity(Path(folder))
    for what, mend in (
        ("tokenizer", "set model.path to the model that was served"),
        ("template", "put the template it was recorded with into the model's folder, or record again"),
    ):
        if theirs[what] != mine[what]:
            raise ConfigError(
                f"{run.path} was recorded with {what} {theirs[what][:4]}, the model has {mine[what][:4]}; {mend}"
            )


def _identity(folder: Path, template_file: Path | None = None) -> dict[str, str]:
    """Digests of what turns messages into ids: the tokenizer's file and the chat template's text."""
    file = folder / "tokenizer.json"
    tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
    template = ""
    template_file = template_file or folder / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = str(config.get("chat_template") or "")
    return {"tokenizer": tokenizer, "template": hashlib.sha256(template.strip().encode()).hexdigest()}
