"""Every parallel layout takes the step that one process takes: loss, figures, gradients, norm and weights.

The norm counts once what tensor-parallel ranks and tied stages hold alike, or the clipped weights would differ. Half of
the layouts resume what another one saved, optimiser and open burst included.

One process equals the trajectories run alone (test_megatron_exact), so the layouts do too.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gyre_train.config import ParallelConfig, TrainingConfig
from gyre_train.edges import Anchor
from gyre_train.megatron.parallel import groups, is_first_rank, model_parallel
from gyre_train.megatron.weights import export_tensors
from gyre_train.pack import Pack, Piece, lay_out
from gyre_train.step import Learner, StepWork
from gyre_train.tiny import make_tiny
from gyre_train.tree_input import TreeInput
from tests.support.exactness import BOUND
from tests.support.ranks import fork_ranks
from tests.support.training import TEXTS, config, tiny_experts, tiny_model
from tests.support.tree_inputs import make_tree

CASES = (
    ("tied", "float64", "sequence", Anchor.BEHAVIOUR),
    ("tied", "float32", "token", Anchor.BURST),
    ("untied", "float64", "execution", Anchor.BURST),
    ("experts", "float64", "sequence", Anchor.BURST),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, the number of the case they take, and where they begin."""

    name: str
    parallel: ParallelConfig
    case: int
    resumes: str | None = None
    """The layout that left the checkpoint of step 1, from which step 2 is taken; None: both steps."""


LAYOUTS = (
    Layout(name="dp4", parallel=ParallelConfig(dp=4), case=0),
    Layout(name="dp4-float32", parallel=ParallelConfig(dp=4), case=1),
    Layout(name="cp4-float32", parallel=ParallelConfig(cp=4), case=1),
    Layout(name="pp4", parallel=ParallelConfig(pp=4), case=0),
    Layout(name="tp2-dp2", parallel=ParallelConfig(tp=2, dp=2), case=2),
    Layout(name="tp2-pp2", parallel=ParallelConfig(tp=2, pp=2), case=0, resumes="one-0"),
    Layout(name="tp2-cp2", parallel=ParallelConfig(tp=2, cp=2), case=2, resumes="one-2"),
    Layout(name="pp2-dp2", parallel=ParallelConfig(pp=2, dp=2), case=2, resumes="tp2-dp2"),
    Layout(name="pp2-cp2", parallel=ParallelConfig(pp=2, cp=2), case=0, resumes="pp4"),
    Layout(name="cp2-dp2", parallel=ParallelConfig(cp=2, dp=2), case=0, resumes="pp4"),
    Layout(name="tp2-pp2-experts", parallel=ParallelConfig(tp=2, pp=2), case=3),
    Layout(name="pp2-cp2-experts", parallel=ParallelConfig(pp=2, cp=2), case=3, resumes="tp2-pp2-experts"),
    Layout(name="tp2-ep2-dp2", parallel=ParallelConfig(tp=2, ep=2, dp=2), case=3, resumes="one-3"),
)
"""Every pair of two, and resharding to and from each kind of slice; `one-N` is one process on case N. Experts replay
recorded routes, and layers are recomputed with them."""


SAVING = ("tp2-pp2", "tp2-pp2-experts")
State = dict[str, torch.Tensor]


def executions(routes: bool) -> list[TreeInput]:
    parents, lengths = [-1, 0, 1, 2, 1, 4, 0, 6, -1, 8], [4, 3, 2, 3, 0, 2, 3, 4, 3, 2]
    wide = make_tree(parents, lengths, [node % 2 == 1 for node in range(10)], execution=3, seed=5)
    deep = make_tree([-1, 0, 1, 2, 2], [3, 4, 2, 3, 3], [False, True, False, True, True], execution=9, seed=6)
    short = make_tree([-1, 0], [1, 2], [False, True], execution=11, seed=7)  # fewer rows than four ranks share
    return [with_routes(tree) if routes else tree for tree in (wide, deep, short)]


def with_routes(tree: TreeInput) -> TreeInput:
    """Two of four experts in two layers, for the tokens of every third node none."""
    rng = np.random.default_rng(tree.execution)
    sizes = enumerate(tree.num_tokens_N)
    drawn = (None if node % 3 == 2 else rng.permuted(np.tile(np.arange(4), (n, 2, 1)), axis=-1) for node, n in sizes)
    return replace(tree, routes=tuple(None if x is None else x[..., :2].astype(np.int16) for x in drawn))


def packs(routes: bool = False) -> tuple[Pack, ...]:
    """Packs of different lengths; some trajectories lie in two, one pack holds both trees."""
    trees, out = executions(routes), []
    for tree, t in ((0, 0), (0, 1), (1, 0)):
        owned = trees[tree].trajectories[t].owned_O
        for part in (owned[:1], owned[1:]):
            out.append([Piece(tree=tree, trajectories=(t,), owned=(part,))])
    rest = [(tree, t) for tree in (0, 1) for t in range(len(trees[tree].trajectories))]
    rest = [place for place in rest if place not in ((0, 0), (0, 1), (1, 0))]
    for tree in (0, 1):
        numbers = tuple(t for at, t in rest if at == tree)
        owned = tuple(trees[tree].trajectories[t].owned_O for t in numbers)
        out.append([Piece(tree=tree, trajectories=numbers, owned=owned)])
    out[-2:] = [out[-2] + out[-1]]
    out.append([Piece(tree=2, trajectories=(0,), owned=(trees[2].trajectories[0].owned_O,))])
    return tuple(lay_out(trees, pieces) for pieces in out if any(o.size for piece in pieces for o in piece.owned))


def settings(root: Path, case: tuple[str, str, str, Anchor]) -> TrainingConfig:
    model, dtype, kind, anchor = case
    more = () if anchor is Anchor.BEHAVIOUR else ("--train.anchor=burst", "--train.steps_per_burst=2")
    if model == "experts" and dist.get_world_size() > 1:
        more += ("--parallel.recompute=full",)
    return config(
        root / model, root / "out", f"--model.dtype={dtype}", f"--loss.kind={kind}", "--loss.clip_low=0.01",
        "--loss.clip_high=100.0", "--train.clip_grad=0.01", "--loss.kl=0.1", "--train.weight_decay=0.1", *more,
        runs=root,
    )  # fmt: skip


def whole_state(learner: Learner) -> State:
    """Weights and moments, under their Hugging Face names."""
    moments = learner.optimizer.tensors()["exp_avg"]
    out = {f"moment {name}": x.clone() for name, x in export_tensors(learner.model, moments)}
    return out | {f"weight {name}": x.clone() for name, x in export_tensors(learner.model)}


def found(root: Path, case: tuple[str, str, str, Anchor], name: str, resumes: str | None = None) -> State:
    """Two clipped steps on the same packs; everything that must not depend on the layout. Step 1 is saved."""
    start = root / resumes / "step-00000001" if resumes else None
    learner = Learner(settings(root, case), case[3], start)
    out: State = {}
    for step in (2,) if start else (1, 2):
        figures = learner.step(StepWork(step=step, packs=packs(case[0] == "experts"), num_executions=3, lr=1e-2))
        figures.pop("seconds")
        assert figures["grad_norm"] > 0.01
        out |= {f"{name} of step {step}": torch.tensor([value]) for name, value in figures.items()}
        if step == 1:
            moments = learner.optimizer.tensors()["exp_avg"]
            out |= {f"gradient {name}": x.clone() for name, x in export_tensors(learner.model, moments)}
            if case[1] == "float32":  # Adam divides by a gradient's own size, so rounding does not stay small
                return out
            learner.save(root / name, 1, {"step": 1})
    if name in SAVING:
        learner.save(root / name, 2, {"step": 2})
    return out | whole_state(learner)


def in_every_layout(root: str) -> None:
    """The process groups stay, Megatron's groups are made anew for each layout: one spawn for all of them."""
    parallel_state.destroy_model_parallel()
    for layout in LAYOUTS:
        with model_parallel(layout.parallel):
            outcome = found(Path(root), CASES[layout.case], layout.name, layout.resumes)
            if is_first_rank():
                torch.save(outcome, Path(root) / f"{layout.name}.pt")
    parallel_state.initialize_model_parallel()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    described = tiny_model(folder / "tied", arch="qwen2", layers=4) / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"tie_word_embeddings": True}))
    # An odd vocabulary: two tensor-parallel ranks pad it, and a checkpoint goes between both shapes.
    sizes = {"layers": 2, "vocab": 301, "hidden": 32, "heads": 4, "kv_heads": 2, "context": 512}
    make_tiny(folder / "untied", arch="qwen3", texts=TEXTS, **sizes)
    tiny_experts(folder / "experts")
    return folder


def test_every_layout_equals_one_process(root: Path) -> None:
    assert len(packs()) == 7
    assert min(pack.num_tokens for pack in packs()) == 3 < len({pack.num_tokens for pack in packs()})
    with groups():
        alone = [found(root, case, f"one-{number}") for number, case in enumerate(CASES)]
    fork_ranks(in_every_layout, ParallelConfig(dp=4), root, str(root))
    for layout in LAYOUTS:
        wanted = alone[layout.case]
        if layout.resumes:  # `gradient` is what step 1 left
            wanted = {name: x for name, x in wanted.items() if "gradient" not in name and "of step 1" not in name}
        same(torch.load(root / f"{layout.name}.pt"), wanted, CASES[layout.case][1])
    for name in SAVING:
        number = next(layout.case for layout in LAYOUTS if layout.name == name)
        with groups():
            resumed = whole_state(
                Learner(settings(root, CASES[number]), CASES[number][3], root / name / "step-00000002")
            )
        same(resumed, {name: alone[number][name] for name in resumed}, "float64")


def same(got: State, wanted: State, dtype: str) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert value.isfinite().all(), key
        worst = float((got[key] - value).abs().max()) / max(float(value.abs().max()), 1e-30)
        assert worst <= BOUND[getattr(torch, dtype)], (key, worst)
