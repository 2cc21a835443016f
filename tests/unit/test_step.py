"""One optimiser step: trajectories spread over packs, what decays, and the size of a clipped gradient."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gyre_data.errors import CorruptError
from gyre_train.edges import Anchor
from gyre_train.megatron.gradients import clip_gradients
from gyre_train.megatron.optimizer import Optimizer
from gyre_train.megatron.parallel import groups
from gyre_train.pack import Pack, Piece, lay_out
from gyre_train.step import Learner, StepWork
from gyre_train.tree_input import TreeInput
from tests.support.training import config, tiny_model
from tests.support.tree_inputs import make_tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True, scope="module")
def _one_rank() -> Iterator[None]:
    with groups():
        yield


def tree() -> TreeInput:
    """One trajectory with two owned nodes far apart, and a second one beside it."""
    return make_tree(
        [-1, 0, 1, 2, 2], [3, 4, 2, 3, 3], [False, True, False, True, True], advantages=[1.0, -0.5], seed=2
    )


def gradients(model: Path, tmp_path: Path, packs: tuple[Pack, ...], anchor: Anchor) -> tuple[dict, dict]:
    settings = config(model, tmp_path, "--model.dtype=float64", "--train.clip_grad=0", runs=tmp_path)
    learner = Learner(settings, anchor, None)
    figures = learner.step(StepWork(step=1, packs=packs, num_executions=1, lr=0.0))
    return learner.optimizer.tensors()["exp_avg"], figures


@pytest.mark.parametrize("anchor", [Anchor.BEHAVIOUR, Anchor.STEP])
def test_a_trajectory_in_two_packs_gives_the_gradient_of_one(model: Path, tmp_path: Path, anchor: Anchor) -> None:
    first = tree().trajectories[0].owned_O
    assert len(first) == 2
    second = tree().trajectories[1].owned_O
    whole = lay_out([tree()], [Piece(tree=0, trajectories=(0, 1), owned=(first, second))])
    parts = (
        lay_out([tree()], [Piece(tree=0, trajectories=(0, 1), owned=(first[:1], second))]),
        lay_out([tree()], [Piece(tree=0, trajectories=(0,), owned=(first[1:],))]),
    )
    one, figures = gradients(model, tmp_path, (whole,), anchor)
    two, split_figures = gradients(model, tmp_path, parts, anchor)
    assert (figures["extra_forwards"], split_figures["extra_forwards"]) == (0, 2)
    assert split_figures["loss"] == pytest.approx(figures["loss"], abs=1e-12)
    for name, value in one.items():
        assert value.abs().max() > 0, name
        assert (two[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


def test_norm_gains_and_biases_do_not_decay(tmp_path: Path) -> None:
    settings = config(tiny_model(tmp_path / "qwen2", arch="qwen2"), tmp_path / "out", runs=tmp_path)
    learner = Learner(settings, Anchor.STEP, None)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for p in learner.model.parameters():
        p.grad = torch.zeros_like(p)
    Optimizer(learner.model, weight_decay=0.5).step(0.1)
    kept = {name for name, p in learner.model.named_parameters() if torch.equal(p, before[name])}
    assert kept == {name for name in before if "layernorm" in name or name.endswith("bias")}
    assert any(name.endswith("bias") for name in kept)


def test_clipping_scales_every_gradient_alike(model: Path, tmp_path: Path) -> None:
    learner = Learner(config(model, tmp_path, runs=tmp_path), Anchor.STEP, None)
    for p in learner.model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in learner.model.parameters())
    assert clip_gradients(learner.model, 1.0) == pytest.approx(2.0 * count**0.5)
    assert clip_gradients(learner.model, 0) == pytest.approx(1.0, rel=1e-5)


def one_step(model: Path, out: Path, made: tuple[Pack, ...], *more: str) -> tuple[dict, dict]:
    learner = Learner(config(model, out, "--model.dtype=float64", *more, runs=out), Anchor.BEHAVIOUR, None)
    return learner.step(StepWork(step=1, packs=made, num_executions=1, lr=0.0)), learner.optimizer.tensors()["exp_avg"]


@pytest.mark.parametrize("kind", ["sequence", "execution", "token"])
def test_an_execution_in_two_packs_needs_a_first_pass_only_where_its_tokens_share_a_ratio(
    model: Path, tmp_path: Path, kind: str
) -> None:
    first, second = (t.owned_O for t in tree().trajectories)
    whole = (lay_out([tree()], [Piece(tree=0, trajectories=(0, 1), owned=(first, second))]),)
    parts = tuple(
        lay_out([tree()], [Piece(tree=0, trajectories=(t,), owned=(owned,))]) for t, owned in enumerate((first, second))
    )
    one, gradient = one_step(model, tmp_path, whole, f"--loss.kind={kind}")
    two, split = one_step(model, tmp_path, parts, f"--loss.kind={kind}")
    assert two["extra_forwards"] == (2 if kind == "execution" else 0)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-12)
    for name, value in gradient.items():
        assert (split[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


def test_the_reference_is_the_start_until_it_is_another_folder(model: Path, tmp_path: Path) -> None:
    first, second = (t.owned_O for t in tree().trajectories)
    made = (lay_out([tree()], [Piece(tree=0, trajectories=(0, 1), owned=(first, second))]),)
    plain, _ = one_step(model, tmp_path, made)
    assert 0 < plain["entropy"] < math.log(300)
    own, _ = one_step(model, tmp_path, made, "--loss.kl=0.5")
    assert own["kl"] == pytest.approx(0.0, abs=1e-12)  # the reference is what the weights still are
    assert own["loss"] == pytest.approx(plain["loss"], abs=1e-12)
    other = tiny_model(tmp_path / "other", seed=7)
    far, _ = one_step(model, tmp_path, made, "--loss.kl=0.5", f"--loss.reference={other}")
    assert far["kl"] > 0.01
    assert far["loss"] > plain["loss"]


def test_a_checkpoint_loses_nothing_when_the_dtype_changes(model: Path, tmp_path: Path) -> None:
    """Below float32 the exact weights are the optimiser's copies: float32 goes on from these, not from rounded ones."""
    made = (lay_out([tree()], [Piece(tree=0, trajectories=(0,), owned=(tree().trajectories[0].owned_O,))]),)
    narrow = config(model, tmp_path, "--model.dtype=bfloat16", runs=tmp_path)
    learner = Learner(narrow, Anchor.STEP, None)
    learner.step(StepWork(step=1, packs=made, num_executions=1, lr=1e-4))
    folder = learner.save(tmp_path / "a", 1, {"step": 1})
    masters = learner.optimizer.tensors()["param"]
    wide = Learner(config(model, tmp_path, runs=tmp_path), Anchor.STEP, folder)
    for name, p in wide.model.named_parameters():
        assert torch.equal(p, masters[name]), name
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    back = Learner(narrow, Anchor.STEP, wide.save(tmp_path / "b", 1, {"step": 1}))
    for name, master in back.optimizer.tensors()["param"].items():
        assert torch.equal(master, masters[name]), name


def test_a_damaged_checkpoint_says_so_and_what_to_do(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path, runs=tmp_path)
    folder = Learner(settings, Anchor.STEP, None).save(tmp_path / "c", 1, {"step": 1})
    for file in [path for path in (folder / "trainer").iterdir() if path.is_file()]:
        whole = file.read_bytes()
        for left in (whole[: len(whole) // 2], None):
            file.unlink() if left is None else file.write_bytes(left)
            with pytest.raises(
                CorruptError, match=r"wanted the optimiser in trainer, got .+; delete the checkpoint to"
            ):
                Learner(settings, Anchor.STEP, folder)
        file.write_bytes(whole)
    Learner(settings, Anchor.STEP, folder)
    (folder / "state.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"wanted its step.s number.*delete the folder"):
        Learner(settings, Anchor.STEP, folder)
