"""What is trained and in which order: mixes by share, tasks kept for evaluation, lengths and fingerprints."""

import dataclasses
import gc
import json
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import gyre_data
import gyre_data.tree
from gyre_data.compact import compact
from gyre_data.errors import ConfigError, CorruptError, DataError
from gyre_data.pins import tag
from gyre_data.store import RunWriter
from gyre_data.tree import Tree
from gyre_train import recorded
from gyre_train.config import TrainingConfig, load_config
from gyre_train.source import Source, load_source
from tests.support.forest import Forest

VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only what the data side reads of a model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder


def made_run(
    folder: Path, name: str, *, groups: int, size: int = 2, task: bool = True, fingerprint: str = "f1"
) -> Path:
    forest = Forest()
    for g in range(groups):
        for i in range(size):
            more = {"task": f"{name}-t{g}"} if task else {}
            e = forest.execution(f"e_{name}{g:02d}{i}", group=f"g{g}", score=float(i), **more)
            e.call(after=e.call(new=[("user", 4 + g)], output=3), new=[("tool", 2)], output=3)
    forest.rows["nodes"] = [
        dataclasses.replace(n, token_ids=n.token_ids % VOCAB, fingerprint=fingerprint) for n in forest.rows["nodes"]
    ]
    forest.write(folder / name)
    return folder / name


def settings(model: Path, runs: list[Path], *overrides: str) -> TrainingConfig:
    base = [f"--model.path={model}", "--output.dir=out", f"--data.runs={json.dumps([str(run) for run in runs])}"]
    return load_config(None, [*base, *overrides])


def order(source: Source) -> list[str]:
    return [e.execution_id for e in source.due({})]


def mix_of(**shares: float) -> str:
    return "--data.mix={" + ", ".join(f'"{run}" = {share}' for run, share in shares.items()) + "}"


def test_a_mix_keeps_its_shares_in_every_stretch(model: Path, tmp_path: Path) -> None:
    runs = [made_run(tmp_path, "a", groups=12), made_run(tmp_path, "b", groups=12)]
    mix = mix_of(**{str(runs[0]): 3, str(runs[1]): 1})
    source = load_source(settings(model, runs, mix))
    names = order(source)
    for end in range(8, len(names) + 1, 8):
        seen = Counter(name[2] for name in names[:end])
        assert abs(seen["a"] - 0.75 * end) <= 2  # a group's size
    # `a` is used up after 24 of its own; the shares leave 8 of b's 24 to go with them.
    assert Counter(name[2] for name in names) == {"a": 24, "b": 8}
    assert source.excluded["executions"]["beyond_mix"] == 16
    assert order(load_source(settings(model, runs[::-1], mix))) == names
    assert order(load_source(settings(model, runs, mix, "--train.seed=1"))) != names


@pytest.mark.parametrize("loss", ["sequence", "sft"])
def test_a_flipped_bit_in_a_token_is_not_trained_on(model: Path, tmp_path: Path, loss: str) -> None:
    """It would be another token of the vocabulary: nothing but the checksum tells."""
    run = made_run(tmp_path, "a", groups=2)
    config = settings(model, [run], f"--loss.kind={loss}")
    assert order(load_source(config))
    (file,) = (run / "nodes").glob("*.arrow")
    data = bytearray(file.read_bytes())
    ids = gyre_data.open(run).table("nodes").column("token_ids").chunk(0).values.to_numpy()
    at = bytes(data).index(ids[:8].tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    gyre_data.stats(gyre_data.open(run))  # which counts, and does not look at tokens
    with pytest.raises(CorruptError, match=rf"{file}: wanted CRC-32 .*restore the file .*--salvage"):
        load_source(config)
    data[at] ^= 1
    file.write_bytes(data)
    assert order(load_source(config))


def test_a_file_is_checked_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run is opened again whenever groups are complete."""
    config = settings(model, [made_run(tmp_path, "a", groups=2)])
    load_source(config)
    summed: list[int] = []
    monkeypatch.setattr("gyre_data.segment.check_bytes", lambda data, *more, full: summed.append(data.size * full))
    load_source(config)
    (nodes,) = (tmp_path / "a" / "nodes").glob("*.arrow")
    assert summed
    assert nodes.stat().st_size not in summed


def test_a_mix_goes_on_from_the_ledger(model: Path, tmp_path: Path) -> None:
    runs = [made_run(tmp_path, "a", groups=6), made_run(tmp_path, "b", groups=3)]
    source = load_source(settings(model, runs, mix_of(**{str(runs[0]): 2, str(runs[1]): 1})))
    names = order(source)
    assert [e.execution_id for e in source.due(dict.fromkeys(names[:5], 1))] == names[5:]
    assert [e.execution_id for e in source.due({}, 5)] == names[:5]


def test_groups_stand_together_and_the_folder_does_not_matter(model: Path, tmp_path: Path) -> None:
    names = order(load_source(settings(model, [made_run(tmp_path, "a", groups=6)])))
    assert [name[:-1] for name in names[::2]] == [name[:-1] for name in names[1::2]]
    (tmp_path / "a").rename(tmp_path / "moved")
    assert order(load_source(settings(model, [tmp_path / "moved"]))) == names


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"a": 1.0}, r"data.mix: wanted a share of each .* missing \['.*/b'\]"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, r"unknown \['.*/c'\]"),
        ({"a": 1.0, "b": 0.0}, r"finite shares above 0, got others for \['.*/b'\]"),
    ],
)
def test_a_mix_that_does_not_fit_its_runs_is_refused(
    model: Path, tmp_path: Path, mix: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(
            model, [tmp_path / "a", tmp_path / "b"], mix_of(**{str(tmp_path / name): x for name, x in mix.items()})
        )


def test_a_part_without_anything_to_train_is_refused(model: Path, tmp_path: Path) -> None:
    runs = [made_run(tmp_path, "a", groups=1), made_run(tmp_path, "b", groups=1, size=1)]
    with pytest.raises(DataError, match=r"data.mix: wanted something to train in each part, found nothing in .*/b"):
        load_source(settings(model, runs, mix_of(**{str(run): 1 for run in runs})))


def test_tasks_of_the_eval_split_are_never_trained(model: Path, tmp_path: Path) -> None:
    runs = [made_run(tmp_path, "a", groups=40)]
    named = load_source(settings(model, runs, '--data.eval_tasks=["a-t3", "a-t5"]'))
    assert {name[:-1] for name in order(named)} == {f"e_a{g:02d}" for g in range(40) if g not in (3, 5)}
    assert named.excluded["executions"]["eval_split"] == 4
    shared = load_source(settings(model, runs, "--data.eval_share=0.25"))
    held = set(range(40)) - {int(name[3:5]) for name in order(shared)}
    assert 4 <= len(held) <= 16
    assert shared.excluded["executions"]["eval_split"] == 2 * len(held)
    other_seed = load_source(settings(model, runs, "--data.eval_share=0.25", "--train.seed=5"))
    assert set(order(other_seed)) == set(order(shared))  # a task is of one side for good
    more = load_source(settings(model, runs, "--data.eval_share=0.5"))
    assert set(order(more)) < set(order(shared))


def test_without_a_task_the_group_is_what_is_split(model: Path, tmp_path: Path) -> None:
    source = load_source(settings(model, [made_run(tmp_path, "a", groups=4, task=False)], "--data.eval_tasks=g1"))
    assert "e_a01" not in {name[:-1] for name in order(source)}
    assert len(order(source)) == 6


def test_an_eval_task_that_nothing_has_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.eval_tasks: no execution of task a-t9; nearest a-t"):
        load_source(settings(model, [made_run(tmp_path, "a", groups=2)], "--data.eval_tasks=a-t9"))
    with pytest.raises(DataError, match=r"\(eval_split 4\): they are kept for evaluation; lower data.eval_share"):
        load_source(settings(model, [tmp_path / "a"], "--data.eval_share=0.999999"))


def test_all_trajectories_that_are_too_long_are_named_at_once(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", groups=9)  # 16 tokens in group 0, one more in each next
    load_source(settings(model, [run]), pack_tokens=24)
    with pytest.raises(DataError) as told:
        load_source(settings(model, [run]), pack_tokens=20)
    assert "wanted every trajectory within 20 tokens, got 24 in trajectory 0 of execution e_a08" in str(told.value)
    assert "and 3 more; set pack.tokens to 24 or more" in str(told.value)


def test_compaction_and_tags_change_no_order(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", groups=6)
    names = order(load_source(settings(model, [run])))
    tag(run, "v1")
    compact(run)
    assert order(load_source(settings(model, [run]))) == names
    assert order(load_source(settings(model, [Path(f"{run}@v1")]))) == names


def test_admission_in_parts_is_admission(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, "a", groups=5)
    whole = load_source(settings(model, [run]))
    monkeypatch.setattr(recorded, "_PART_NODES", 1)
    parts = load_source(settings(model, [run]))
    told = [[(e.execution_id, e.advantage, e.trajectories) for e in s.due({})] for s in (whole, parts)]
    assert told[0] == told[1]
    assert whole.excluded == parts.excluded


def test_no_tree_stays_in_memory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = gyre_data.tree.Forest.tree, list[weakref.ref[Tree]]()

    def watched(forest: gyre_data.tree.Forest, execution_id: str) -> Tree:
        tree = real(forest, execution_id)
        made.append(weakref.ref(tree))
        return tree

    monkeypatch.setattr(gyre_data.tree.Forest, "tree", watched)
    source = load_source(settings(model, [made_run(tmp_path, "a", groups=3)]))
    first = source.examples[0].tree(0)
    gc.collect()
    assert len(made) == 7  # six executions were admitted, one was laid out
    assert not [one for one in made if one() is not None]
    assert all(np.array_equal(a, b) for a, b in zip(first.ids, source.examples[0].tree(0).ids, strict=True))


def test_runs_of_two_templates_are_not_trained_together(model: Path, tmp_path: Path) -> None:
    one, other = made_run(tmp_path, "a", groups=1), made_run(tmp_path, "b", groups=1, fingerprint="f2aa")
    load_source(settings(model, [one]))
    with pytest.raises(DataError, match=r"execution e_b000 of .*/b was recorded with tokenizer and template f2aa, "):
        load_source(settings(model, [one, other]))


def test_nodes_made_by_another_template_than_their_run_says_are_refused(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", groups=1)
    (model / "tokenizer.json").write_text("{}")
    with RunWriter(run) as writer:
        writer.update_info({"tokenizer": str(model), "fingerprint": "f1"})
    assert len(order(load_source(settings(model, [run])))) == 2
    with RunWriter(run) as writer:
        writer.update_info({"fingerprint": "f9cc"})
    with pytest.raises(DataError, match=r"was recorded with tokenizer and template f1, wanted f9cc; train"):
        load_source(settings(model, [run]))


def test_what_is_left_out_is_counted_at_each_level(model: Path, tmp_path: Path) -> None:
    forest = Forest()
    for i in range(3):
        e = forest.execution(f"e_{i}", group="g", score=float(i) if i < 2 else None)
        e.call(new=[("user", 4)], output=3)
        e.call(new=[("user", 5)], output=3, role="sub_agent", agent_id="a")
        e.call(new=[("user", 3)], output=2, role="side")
    forest.rows["nodes"] = [dataclasses.replace(n, token_ids=n.token_ids % VOCAB) for n in forest.rows["nodes"]]
    forest.write(tmp_path / "r")
    source = load_source(settings(model, [tmp_path / "r"], "--data.j_max=1"))
    told = gyre_data.admit(gyre_data.open(tmp_path / "r"), j_max=1).counts()
    assert source.excluded == {level: told[level] for level in ("executions", "calls", "trajectories")}
    assert [sum(counts.values()) for counts in source.excluded.values()] == [1, 3, 3]
