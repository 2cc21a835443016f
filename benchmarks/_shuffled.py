"""`gyre train CONFIG [--key=value ...]` with the advantages of each step shuffled over its executions.

The control of benchmarks/learns.py. Everything else is the product's: the same executions in the same steps, the same
advantages, only each with the tokens of another execution of the step. So it lives here and not behind a setting.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gyre_train import coordinator, train
from gyre_train.source import Example
from gyre_train.tree_input import TreeInput

__all__ = ["shuffled"]


def shuffled(examples: Sequence[Example], rng: random.Random) -> list[Example]:
    """The examples, each trained with the advantage of one drawn without replacement."""
    advantages = [example.advantage for example in examples]
    rng.shuffle(advantages)
    return [
        replace(example, advantage=advantage, tree=_with(example.tree, advantage))
        for example, advantage in zip(examples, advantages, strict=True)
    ]


def _with(tree: Callable[[int], TreeInput], advantage: float | None) -> Callable[[int], TreeInput]:
    def changed(number: int) -> TreeInput:
        found = tree(number)
        of_it = tuple(replace(one, advantage=advantage or 0.0) for one in found.trajectories)
        fields = {name: getattr(found, name) for name in TreeInput.__dataclass_fields__ if name != "num_tokens_N"}
        return TreeInput(**fields | {"trajectories": of_it})

    return changed


def main() -> None:
    rng, plan_examples = random.Random(0), coordinator.plan_examples

    def plan(examples: Sequence[Example], config: Any) -> Any:
        return plan_examples(shuffled(examples, rng), config)

    coordinator.plan_examples = plan
    train(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
