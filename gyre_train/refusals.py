"""Why some data cannot be trained as it is, found before training starts and told with what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from gyre_data.errors import DataError

if TYPE_CHECKING:
    from gyre_data.admission import Group
    from gyre_data.store import Run

    from .source import Example

__all__ = ["check_fits", "check_signal", "check_unique", "nothing_to_train"]

_MAX_NAMED = 5


def check_unique(examples: Sequence[Example]) -> None:
    """The ledger knows an execution by its id alone: of two with one id, one would be trained twice or never."""
    known: dict[str, Example] = {}
    for example in examples:
        other = known.setdefault(example.execution_id, example)
        if other is not example:
            raise DataError(
                f"execution {example.execution_id}: wanted it once, found it in {other.data_run} and in "
                f"{example.data_run}; name each run once, and no copies of it"
            )


def check_fits(examples: Sequence[Example], tokens: int) -> None:
    """Every trajectory must fit into a pack: its last trained token sees all of it."""
    long = [(t.needed_tokens, t, e) for e in examples for t in e.trajectories if t.needed_tokens > tokens]
    if not long:
        return
    long.sort(key=lambda item: -item[0])
    named = ", ".join(
        f"{size:,} in trajectory {t.trajectory} of execution {e.execution_id}" for size, t, e in long[:_MAX_NAMED]
    )
    more = f" and {len(long) - _MAX_NAMED} more" if len(long) > _MAX_NAMED else ""
    raise DataError(
        f"pack.tokens: wanted every trajectory within {tokens} tokens, got {named}{more}; set pack.tokens to "
        f"{long[0][0]} or more, or take the executions out with `gyre rm`"
    )


def check_signal(advantages: Sequence[float | None], groups: Sequence[Group]) -> None:
    """Some group must have two different scores: with every advantage zero there is nothing to learn."""
    if not advantages or any(advantages):
        return
    group = next(group for group in groups if group.std == 0)
    where = getattr(group.run, "path", "RUN")
    raise DataError(
        f"Group {group.group_id}: {group.num_valid} equal scores, no signal; 0 of {len(groups)} groups left "
        f"for step 1; see `gyre stats {where} --by evaluator`, or record more attempts"
    )


_MENDS = {
    "no_logprobs": 'recorded without log-probs (a hosted API); use loss.kind = "sft"',
    "text_only": "imported as text, without token ids; export it as chat and train on that file by SFT (data.chat)",
    "no_score": 'no evaluator scored them; run `gyre score`, or use loss.kind = "sft"',
    "evaluator_failed": "every evaluator failed; mend it and score again",
    "eval_split": "they are kept for evaluation; lower data.eval_share or name fewer data.eval_tasks",
    "running": "they have not ended; wait, or end them through the proxy's API",
    "no_group": "they belong to no group; record several executions of one task as a group",
    "group_running": "a member of their group still runs; wait, or end it through the proxy's API",
    "group_too_small": "a group needs 2 valid scores; record more attempts or score them",
    "zero_variance": "all scores of each group are equal; record more attempts",
}


def nothing_to_train(counts: Mapping[str, Mapping[str, int]], runs: Sequence[Run], loss: str) -> DataError:
    """The reasons by count; where executions only say that nothing is left, those of their calls say why."""
    sampled = sum(pc.sum(run.table("calls").column("output_tokens")).as_py() or 0 for run in runs)
    ranked = Counter(dict(counts["executions"])).most_common()
    if ranked and ranked[0][0] in ("nothing_trainable", "no_eligible_output"):
        ranked = Counter(dict(counts["calls"])).most_common() or ranked
    why = ", ".join(f"{reason} {count}" for reason, count in ranked) or "the runs hold no execution"
    mend = _MENDS.get(ranked[0][0] if ranked else "", "see `gyre stats` for what the runs hold")
    return DataError(f"0 of {sampled:,} sampled tokens trainable by {loss} ({why}): {mend}")
