"""Recorded routes from the side table to the rows of a pack, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gyre_data.errors import AlignmentError, ConfigError, DataError
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_data.types import RoutedExperts
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from gyre_train.routes import check_routes, joined_routes, recorded_routes
from gyre_train.source import load_source, plan_examples
from tests.support.training import chat_file, config, recorded_run, tiny_experts, tiny_model

LAYERS, EXPERTS, TOP_K = 2, 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_experts(tmp_path_factory.mktemp("model") / "experts")


def row(node: str, experts: np.ndarray, **more: object) -> RoutedExperts:
    values: dict = {"node_id": node, "call_id": "c", "num_layers": LAYERS, "top_k": TOP_K} | more
    return RoutedExperts(experts=experts.astype(np.int16).reshape(-1), **values)


def some(num_tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(EXPERTS), (num_tokens, LAYERS, 1)), axis=-1)[..., :TOP_K]


def write(run: Path, rows: list[RoutedExperts]) -> None:
    with RunWriter(run, create=False) as writer:
        writer.write(rows)


def nodes_of(run: Path) -> dict[str, int]:
    table = open_run(run).table("nodes")
    return {n: len(x) for n, x in zip(*(table.column(c).to_pylist() for c in ("node_id", "token_ids")), strict=True)}


def replayed(model: Path, run: Path, out: Path) -> object:
    return config(model, out, "--model.router_replay=R3", "--train.executions_per_step=4", runs=run)


def test_rows_of_a_pack_carry_what_the_first_call_computed(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model, groups=1)
    sizes = nodes_of(run)
    rows, wanted = [], {}
    for seed, (node, num) in enumerate(sizes.items()):
        wanted[node] = some(num, seed)
        wanted[node][-1] = -1  # the last token has none
        first = (num - 1) // 2  # two calls told it in parts, and a third told other experts for the same tokens
        rows += [row(node, wanted[node][:first]), row(node, wanted[node][first:-1], start=first)]
        rows += [row(node, some(num - 1, seed + 1000))]
    write(run, rows)
    settings = replayed(model, run, tmp_path / "out")
    examples = load_source(settings).due({})
    for pack in plan_examples(examples, settings).packs:
        assert pack.routes_TLK is not None
        assert pack.routes_TLK.shape == (pack.num_tokens, LAYERS, TOP_K)
        for tree, node, offset, source in zip(pack.tree_E, pack.node_E, pack.offset_E, pack.source_row_E, strict=True):
            if offset:
                name = examples[tree].recorded().node_id[node]
                assert np.array_equal(pack.routes_TLK[source], wanted[name][offset - 1])


def test_training_replays_and_counts(model: Path, tmp_path: Path) -> None:
    seen = []
    for name, part in (("none", 0.0), ("half", 0.5), ("all", 1.0)):
        run = recorded_run(tmp_path / name, model, groups=1)
        write(run, [row(node, some(max(1, int(num * part)))) for node, num in nodes_of(run).items()])
        out = tmp_path / f"out-{name}"
        train(replayed(model, run, out) if part else config(model, out, "--train.executions_per_step=4", runs=run))
        seen += read_metrics(out / "metrics.jsonl")
    none, half, whole = seen
    assert none["mismatch_max"] < 1e-4
    assert "tokens_with_routes" not in none
    assert half["tokens_with_routes"] + half["tokens_without_routes"] == whole["tokens_with_routes"]
    assert half["tokens_without_routes"] > 0
    assert whole["tokens_without_routes"] == 0
    assert "mismatch_without_routes" not in whole
    assert whole["mismatch_with_routes"] == whole["mismatch_mean"] > 0.01  # other experts than those that sampled


Broken = Callable[[str, int], RoutedExperts]
BROKEN: dict[str, tuple[Broken, str]] = {
    "layers": (lambda n, num: row(n, some(num), num_layers=1, top_k=4), r"wanted 2 layers and 2 .*, got 1 and 4; set"),
    "ids": (lambda n, num: row(n, some(num) + 1), r"wanted 2 different ones from 0 to 3, got \d to 4; it was recorded"),
    "twice": (lambda n, num: row(n, some(num) * 0), r"got one expert twice for a token"),
    "beyond": (lambda n, num: row(n, some(num), start=1), r"wanted tokens 0 to (\d+), got 1 to \d+; run `gyre verify`"),
    "odd": (lambda n, num: row(n, some(num).reshape(-1)[1:]), r"wanted 2 x 2 values for each token, got \d+ values"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_replayed_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model, groups=1)
    make, told = BROKEN[kind]
    write(run, [make(node, num) for node, num in nodes_of(run).items()])
    with pytest.raises(DataError, match=told):
        train(replayed(model, run, tmp_path / "out"))


def test_replay_without_effect_is_refused(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model, groups=1)
    with pytest.raises(DataError, match=r"wanted routed experts in .*, it holds none; record with .*return-routed"):
        train(replayed(model, run, tmp_path / "out"))
    dense = tiny_model(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"router_replay = R3 has no effect on .*dense, a dense model \(qwen3\)"):
        recorded_routes(open_run(run), dense)
    chat = chat_file(tmp_path / "chat.jsonl", "yes")
    with pytest.raises(ConfigError, match="has no effect on chat files"):
        config(model, tmp_path / "out", "--model.router_replay=R3", chat=chat)


def test_routes_of_a_tree_have_its_shape() -> None:
    sizes = np.array([3, 2])
    check_routes((some(3), None), sizes)
    with pytest.raises(AlignmentError, match=r"routes\[1\]: wanted integers for \(2 tokens, .* got int64 \(3, 2, 2\)"):
        check_routes((None, some(3)), sizes)
    with pytest.raises(AlignmentError, match=r"wanted 2 nodes of one .*, got 2 of \[\(1, 2\), \(2, 2\)\]"):
        check_routes((some(3), some(2)[:, :1]), sizes)
    assert joined_routes({}, 5) is None
    joined = joined_routes({3: some(2)}, 5)
    assert joined is not None
    assert (joined[:3] == -1).all()
    assert (joined[3:] == some(2)).all()
