"""What a training run consumes: recorded runs through admission, or chat files, as examples in a fixed order.

The order depends on the seed and the executions' ids only, never on when a process started or stopped. Which examples
come next is decided by how often the ledger says each was trained, so no execution is skipped or trained twice.
Groups of a run that is still being recorded stand in the order in which they were complete.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_data.errors import ConfigError, DataError

from .chat import chat_tree, read_chat, read_tokenizer
from .config import DataConfig, TrainingConfig
from .fingerprint import check_fingerprints
from .lineage import Lineage
from .plan import Plan, plan
from .refusals import check_fits, check_signal, check_unique, nothing_to_train
from .tree_input import TreeInput

if TYPE_CHECKING:
    from gyre_data.store import Run
    from gyre_data.tree import Tree

    from .recorded import Admitted, RecordedExecution

_TRAINED_FROM = ("nodes", "routed_experts", "teacher_logprobs")
"""Tables that training reads and whose checksum plain reading leaves out."""

__all__ = ["Example", "Source", "Split", "Trained", "load_source", "plan_examples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One kept trajectory, as the ledger names it."""

    trajectory: int
    leaf_node: str
    owned_tokens: int
    needed_tokens: int
    """Tokens from the root down to the last owned one: the least that a pack must hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One execution that can be trained. It holds no token: `tree` reads them when its step is planned."""

    execution_id: str
    group_id: str | None
    data_run: str
    manifest: int
    part: str = ""
    """Entry of `data.runs` or `data.chat` that it comes from."""
    reward: float | None
    advantage: float | None
    score_ids: tuple[str, ...]
    trajectories: tuple[Trained, ...]
    policy_ids: frozenset[str]
    """Lineages that sampled its trained tokens; empty where unknown."""
    tree: Callable[[int], TreeInput]
    """Builds the packer's input; its argument becomes `TreeInput.execution`."""
    recorded: Callable[[], Tree] | None = None
    """Reads the recorded tree with its names, nodes numbered as in `tree`; None for chats."""
    settled_at: datetime | None = None
    """Of a live run: when its group was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """All examples that may be trained, and what was left out and why."""

    examples: tuple[Example, ...]
    excluded: Mapping[str, Mapping[str, int]]
    """Counts by reason, for executions, calls and trajectories."""
    seed: int
    epochs: int
    mix: Mapping[str, float] | None = None
    """Share of each part; None: one order over all."""
    live: tuple[Run, ...] = ()
    """Runs that are still being recorded and may bring more that is due; `load_source` takes in what came."""
    recorded: Admitted | None = None
    """What was admitted of recorded runs, for the next `load_source` to start from."""
    _orders: dict[int, list[Example]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def complete(self) -> frozenset[str]:
        """Groups of live runs that are complete, those that are not trained included."""
        return self.recorded.complete if self.recorded is not None else frozenset()

    def due(self, trained: Mapping[str, int], limit: int | None = None) -> list[Example]:
        """Return the next examples, given how often each execution was trained; fewest times first."""
        out: list[Example] = []
        for epoch in sorted({trained.get(e.execution_id, 0) for e in self.examples}):
            if epoch >= self.epochs or (limit is not None and len(out) >= limit):
                break
            out += [e for e in self._order(epoch) if trained.get(e.execution_id, 0) == epoch]
        return out[:limit]

    def _order(self, epoch: int) -> list[Example]:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # where one epoch ends, two are in use
                del self._orders[min(self._orders)]
            self._orders[epoch] = [e for _, e in _ordered(self.examples, self.mix, f"{self.seed}/{epoch}")]
        return self._orders[epoch]


def _ordered(examples: Sequence[Example], mix: Mapping[str, float] | None, seed: str) -> list[tuple[float, Example]]:
    """Examples with their place in the mix: groups stand together, groups and executions in an order drawn from `seed`.

    Groups of live runs stand in the order in which they were complete, after all others where there is no mix: what
    comes later never goes before what was there.

    In a mix the parts advance in proportion to their shares: the place of a group is the number of executions that
    precede it in its own part over the part's share. Without one, everything is at place 0.
    """

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{seed}/{name}".encode()).digest()

    def group(e: Example) -> tuple[str, str]:
        return e.part, e.group_id or e.execution_id

    first: dict[tuple[str, str], str] = {}  # groups of two runs may have one name; executions never do
    for e in examples:
        first[group(e)] = min(first.get(group(e), e.execution_id), e.execution_id)
    keys = {
        e.execution_id: (
            e.settled_at.timestamp() if e.settled_at else 0.0, draw(first[group(e)]), draw(e.execution_id),
        )
        for e in examples
    }  # fmt: skip
    drawn = sorted(examples, key=lambda e: keys[e.execution_id])
    if mix is None:
        return [(0.0, e) for e in drawn]
    before: Counter[str] = Counter()
    begun: dict[tuple[str, str], int] = {}
    for e in drawn:
        begun.setdefault(group(e), before[e.part])
        before[e.part] += 1
    placed = [(begun[group(e)] / mix[e.part], e) for e in drawn]
    return sorted(placed, key=lambda item: (item[0], keys[item[1].execution_id]))


def plan_examples(examples: Sequence[Example], config: TrainingConfig) -> Plan:
    """Lay the executions of one step out in packs; an error names the execution by its id."""
    trees = [example.tree(number) for number, example in enumerate(examples)]
    try:
        return plan(trees, tokens=config.pack.tokens, sharing=config.pack.sharing)
    except DataError as error:
        names = {f"execution {number}": f"execution {e.execution_id}" for number, e in enumerate(examples)}
        text = re.sub(r"execution \d+", lambda found: names.get(found[0], found[0]), str(error))
        raise DataError(text) from error


def load_source(
    config: TrainingConfig,
    own: Lineage | None = None,
    *,
    pack_tokens: int | None = None,
    before: Source | None = None,
    trained: Collection[str] = (),
) -> Source:
    """Read everything the config names; raise an error that says what to do when nothing of it can be trained.

    `own` is the training run's lineage, from which the age of sampled tokens is known. With `pack_tokens`, a trajectory
    that no pack of this size can hold is an error now and not when its step comes. `before` is what this config gave
    earlier: the result is the same with it, and only groups of which something new was recorded are looked at. It is
    not to be used any more: its runs are taken on. Of live runs, groups of which all that can be was `trained` are left
    out; `due` gives the same.
    """
    split = Split(config.data)
    examples: list[Example] = []
    live: tuple[Run, ...] = ()
    found: Admitted | None = None
    excluded: dict[str, Counter[str]] = {level: Counter() for level in ("executions", "calls", "trajectories")}
    if config.data.runs:
        # In a mix the place of what is left depends on what was.
        gone = trained if config.data.mix is None else ()
        found, live = _recorded_examples(config, own, split, examples, before.recorded if before else None, gone)
        for level, counts in found.counts.items():
            excluded[level].update(counts)
    examples += _chat_examples(config, split, excluded["executions"])
    if not live:  # the tasks of a run that grows are not all there yet
        split.check()
    check_unique(examples)
    if not examples and not config.data.live:
        raise DataError(f"data.chat: 0 conversations to train in {', '.join(config.data.chat)}; add lines")
    if config.data.mix is not None and not config.stream.controlled:  # there the step takes the shares itself
        if not _limited_by_live(examples, config):
            live = ()
        examples = _within_mix(examples, config, excluded["executions"])
    if pack_tokens is not None:
        check_fits(examples, pack_tokens)
    return Source(
        examples=tuple(examples), excluded=excluded, seed=config.train.seed, epochs=config.data.epochs,
        mix=config.data.mix, live=live, recorded=found,
    )  # fmt: skip


class Split:
    """Which tasks are kept for evaluation: those named, and a share of the others by a hash of their id alone."""

    def __init__(self, data: DataConfig) -> None:
        self._named, self._share = frozenset(data.eval_tasks), data.eval_share
        self._seen: set[str] = set()

    def __call__(self, task: str) -> bool:
        """Whether a task is held out."""
        self._seen.add(task)
        drawn = int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") / 2**64
        return task in self._named or drawn < self._share

    def check(self) -> None:
        """Refuse a name that is no task of the data: it would silently hold nothing out."""
        for name in sorted(self._named - self._seen):
            near = difflib.get_close_matches(name, sorted(self._seen), n=1, cutoff=0.0)
            raise ConfigError(f"data.eval_tasks: no execution of task {name}; nearest {near[0] if near else 'none'}")


def _limited_by_live(examples: Sequence[Example], config: TrainingConfig) -> bool:
    """Whether a part that grows is used up first. Where another is, nothing that comes could be trained."""
    numbers = Counter(e.part for e in examples)
    ends = {name: numbers[name] / share for name, share in (config.data.mix or {}).items()}
    still = [end for name, end in ends.items() if name not in config.data.live]
    return min(ends.values()) < min(still, default=math.inf)


def _within_mix(examples: list[Example], config: TrainingConfig, excluded: Counter[str]) -> list[Example]:
    """Up to where the first part is used up: beyond, the stated shares could not be kept. The rest is counted."""
    mix = config.data.mix or {}
    numbers = Counter(e.part for e in examples)
    if missing := sorted(name for name in mix if not numbers[name] and name not in config.data.live):
        raise DataError(
            f"data.mix: wanted something to train in each part, found nothing in {', '.join(missing)}; remove it from "
            "the mix, or see `gyre stats` for what it holds"
        )
    end = min(numbers[name] / share for name, share in mix.items())
    kept = [e for place, e in _ordered(examples, mix, f"{config.train.seed}/0") if place < end]
    excluded["beyond_mix"] += len(examples) - len(kept)
    return kept


def _recorded_examples(
    config: TrainingConfig,
    own: Lineage | None,
    split: Split,
    examples: list[Example],
    before: Admitted | None,
    trained: Collection[str],
) -> tuple[Admitted, tuple[Run, ...]]:
    """Add the executions of recorded runs to `examples`; the runs that grow are returned beside what was admitted."""
    from gyre_data.store import open as open_run

    from .recorded import admitted

    runs = list(before.runs) if before else [open_run(path) for path in config.data.runs]
    for run in runs if before else ():
        run.refresh()
    for run in runs:  # a flipped bit would become another token, and nothing that reads it later could tell
        run.check_bytes(_TRAINED_FROM)
    check_fingerprints(runs, config.model.path)
    live = tuple(run for path, run in zip(config.data.runs, runs, strict=True) if path in config.data.live)
    found = admitted(
        runs, config, own, _vocab_size(config.model.path), held_out=split, live=live,
        before=before.by_group if before else {}, trained=trained,
    )  # fmt: skip
    rl = config.loss.kind != "sft"
    if rl and config.loss.advantage and not live:
        check_signal([e.advantage for e in found.executions], found.groups)
    part = {id(run): path for path, run in zip(config.data.runs, runs, strict=True)}
    examples += [_example(e, part[id(e.facts.run)]) for e in found.executions]
    if not examples and not config.data.chat and not live:
        raise nothing_to_train(found.counts, runs, "a policy loss" if rl else "sft")
    return found, live


def _example(execution: RecordedExecution, part: str) -> Example:
    run = execution.facts.run
    return Example(
        execution_id=execution.execution_id,
        group_id=execution.group_id,
        data_run=str(Path(run.path).resolve()),
        manifest=int(run.manifest_number),
        part=part,
        reward=execution.reward,
        advantage=execution.advantage,
        score_ids=execution.score_ids,
        trajectories=tuple(
            Trained(
                trajectory=t.index, leaf_node=t.leaf_node, owned_tokens=t.owned_tokens, needed_tokens=t.needed_tokens
            )
            for t in execution.kept
        ),
        policy_ids=execution.policy_ids,
        tree=execution.packed,
        recorded=execution.tree,
        settled_at=execution.settled_at,
    )


def _vocab_size(folder: str) -> int:
    try:
        return int(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: wanted a Hugging Face folder, {folder} has no readable config.json ({error}); check the path"
        ) from None


def _chat_examples(config: TrainingConfig, split: Split, excluded: Counter[str]) -> list[Example]:
    """The conversations of chat files; each is a task of its own."""
    if not config.data.chat:
        return []
    tokenizer = read_tokenizer(config.model.path)
    stop_ids = _stop_ids(config.model.path, tokenizer)
    examples = []
    seen: dict[str, int] = {}
    for path in config.data.chat:
        for conversation in read_chat(path, seen):
            if split(conversation.execution_id):
                excluded["eval_split"] += 1
                continue
            tree = chat_tree(conversation, tokenizer, stop_ids, 0)
            trained = tuple(
                Trained(
                    trajectory=index,
                    leaf_node=f"message-tree:{int(t.path_P[-1])}",
                    owned_tokens=int(tree.num_tokens_N[t.owned_O].sum()),
                    needed_tokens=int(tree.num_tokens_N[tree.needed_path(index)].sum()),
                )
                for index, t in enumerate(tree.trajectories)
            )
            examples.append(
                Example(
                    execution_id=conversation.execution_id, group_id=None, data_run=str(path), manifest=0, part=path,
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
