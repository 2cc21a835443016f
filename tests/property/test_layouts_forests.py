"""Each way of dividing a step over two ranks takes the step of one, over random forests; no wrong pack passes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state

from gyre_train.config import ParallelConfig
from gyre_train.edges import Anchor
from gyre_train.megatron.parallel import groups, is_first_rank, model_parallel
from gyre_train.megatron.weights import export_tensors
from gyre_train.pack import Pack
from gyre_train.plan import plan
from gyre_train.step import Learner, StepWork
from gyre_train.tree_input import TreeInput
from tests.support.exactness import BOUND
from tests.support.faults import FAULTS
from tests.support.ranks import fork_ranks
from tests.support.training import config, tiny_model
from tests.support.tree_inputs import random_tree

LAYOUTS = {name: ParallelConfig(**{name: 2}) for name in ("tp", "pp", "cp", "dp")}
SEEDS = (1, 2)
Outcome = dict[str, torch.Tensor]


def forest(seed: int) -> list[TreeInput]:
    return [random_tree(11, 100 * seed + place, execution=place) for place in range(3)]


def works() -> Iterator[tuple[str, tuple[Pack, ...]]]:
    """Forests in several packs; then the first of them in one pack, right and wrong."""
    for seed in SEEDS:
        trees = forest(seed)
        longest = max(int(t.num_tokens_N[t.needed_path(j)].sum()) for t in trees for j in range(len(t.trajectories)))
        yield f"forest {seed}", plan(trees, tokens=longest + 4).packs
    (pack,) = plan(forest(SEEDS[0]), tokens=10**6).packs
    yield "right", (pack,)
    yield from ((name, (fault(pack),)) for name, fault in FAULTS.items())


def found(root: Path, packs: tuple[Pack, ...]) -> Outcome:
    """Loss, gradient norm and gradients of a step."""
    settings = config(root / "model", root / "out", "--model.dtype=float64", runs=root)
    learner = Learner(settings, Anchor.STEP, None)
    figures = learner.step(StepWork(step=1, packs=packs, num_executions=3, lr=1e-3))
    moments = export_tensors(learner.model, learner.optimizer.tensors()["exp_avg"])
    shown = {name: torch.tensor([figures[name]], dtype=torch.float64) for name in ("loss", "grad_norm")}
    return shown | {name: x.clone() for name, x in moments}


def in_every_layout(root: str) -> None:
    parallel_state.destroy_model_parallel()
    for name, parallel in LAYOUTS.items():
        with model_parallel(parallel):
            outcomes = {work: found(Path(root), packs) for work, packs in works()}
            if is_first_rank():
                torch.save(outcomes, Path(root) / f"{name}.pt")
    parallel_state.initialize_model_parallel()


def gap(came: Outcome, wanted: Outcome) -> float:
    """The largest difference relative to the largest value of a tensor."""
    assert came.keys() == wanted.keys()
    assert all(bool(x.isfinite().all()) for x in (*came.values(), *wanted.values()))
    return max(float((came[name] - x).abs().max()) / max(float(x.abs().max()), 1e-30) for name, x in wanted.items())


def test_two_ranks_take_the_step_of_one_and_see_each_fault(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", layers=2)
    with groups():
        alone = {work: found(tmp_path, packs) for work, packs in works() if work not in FAULTS}
    assert any(len(packs) > 1 for _, packs in works())
    fork_ranks(in_every_layout, ParallelConfig(dp=2), tmp_path, str(tmp_path))
    bound = BOUND[torch.float64]
    for name in LAYOUTS:
        outcomes = torch.load(tmp_path / f"{name}.pt")
        assert outcomes.keys() == alone.keys() | FAULTS.keys()
        for work, wanted in alone.items():
            assert gap(outcomes[work], wanted) <= bound, (name, work)
        for fault in FAULTS:
            assert gap(outcomes[fault], alone["right"]) > bound, (name, fault)
