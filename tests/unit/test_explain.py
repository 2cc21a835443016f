"""`gyre explain`: the verdicts of a run, an execution, a call and a token are those of admission; no guesses."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.eligible import Reason
from gyre_data.errors import ConfigError, DataError
from gyre_data.execution import Execution
from gyre_data.explain import RULES, explain_execution, explain_run
from gyre_data.main import app
from gyre_data.provenance import explain_call, explain_token
from gyre_data.types import Step
from tests.support.busy_case import busy_case
from tests.support.forest import START, Forest, Made
from tests.support.ledgers import append

SESSIONS = Path(__file__).parents[1] / "data" / "sessions"


def group() -> tuple[Forest, list[Made]]:
    """A group of three: one trained with a sub-agent and a lost call, one without a verdict, one with a failed one."""
    run = Forest()
    e = run.execution("e_0aaa00000001", group="g", score=1.0)
    a = e.call(output=6)
    lost = e.call(after=a, delivery="undelivered")
    b = e.retry(lost, output=5)
    sub = e.call(role="sub_agent", agent_id="x", spawned_by_node=a.output, branch_reason="sub_agent", output=3)
    side = e.call(role="side", new=[("user", 2)])
    run.execution("e_0bbb00000002", group="g", score=0.0).call()
    run.execution("e_0ccc00000003", group="g").call()
    other = run.execution("e_0ddd00000004", group="g")
    other.call()
    other.score(None, status="failed", detail="judge is down")
    return run, [a, lost, b, sub, side]


def test_every_reason_has_its_rule() -> None:
    assert set(RULES) == set(Reason)


def test_a_run_is_explained_as_it_is_admitted() -> None:
    run, _ = group()
    admission, found = gd.admit(run), explain_run(run)
    assert {v.execution_id for v in found.verdicts if v.trained} == {e.execution_id for e in admission.executions}
    assert [v.advantage for v in found.verdicts if v.trained] == [e.advantage for e in admission.executions]
    assert sum(v.num_owned for v in found.verdicts) == admission.num_owned
    assert found.counts == admission.counts()
    assert [(v.reason, v.reward) for v in found.verdicts[2:]] == [("no_score", None), ("evaluator_failed", None)]


def test_an_execution_is_judged_with_its_group() -> None:
    run, made = group()
    found = explain_execution(Execution.load(run, "0aaa"))
    assert found.group is not None
    assert (found.group.mean, found.group.num_valid, found.group.num_executions) == (0.5, 2, 4)
    assert (found.verdict.trained, found.verdict.num_owned) == (True, 6 + 5 + 3)
    assert [(t.index, t.role, t.leaf_call, t.owned_calls) for t in found.trajectories] == [
        (0, "main", 3, (1, 3)),
        (1, "sub_agent", 4, (4,)),
    ]
    assert [(x.number, str(x.reason)) for x in found.left_out] == [(2, "undelivered"), (5, "role_side")]
    capped = explain_execution(Execution.load(run, "0aaa"), j_max=1)
    assert [(t.index, t.reason) for t in capped.trajectories] == [(0, None), (None, Reason.BEYOND_J_MAX)]
    assert made


def test_several_evaluators_ask_for_a_name() -> None:
    run = busy_case()
    found = explain_run(run)
    assert found.note is not None
    assert "several" not in found.note
    assert "which evaluator is the reward" in found.note
    assert all(v.reward is None for v in found.verdicts)
    named = explain_run(run, evaluators={"pytest": 1.0})
    assert named.note is None
    assert [v.reward for v in named.verdicts] == [None, 0.5, None]
    with pytest.raises(ConfigError, match="finite weights"):
        explain_run(run, evaluators={"pytest": float("nan")})


def test_sft_asks_for_no_score_and_no_log_probs() -> None:
    run = Forest()
    run.execution("e_0123456789ab").call(logprobs=False, output=7)
    assert [str(v.reason) for v in explain_run(run).verdicts] == ["no_score"]
    (v,) = explain_run(run, loss="sft").verdicts
    assert (v.trained, v.num_owned, v.advantage) == (True, 7, None)
    e = Execution.load(run, "0123")
    assert explain_call(e, 1).ownership.rule == "admit.no_logprobs"
    assert explain_call(e, 1, loss="sft").ownership.owner == 0
    assert explain_execution(e, loss="sft").trajectories[0].num_owned == 7


def test_imported_text_is_not_sent_for_a_verdict_but_to_export(tmp_path: Path) -> None:
    gd.import_sessions([SESSIONS / "pi"], tmp_path / "run")
    told = {}
    for words in (["--loss", "rl"], ["--loss", "sft"], ["e_", "--loss", "rl"]):
        found = CliRunner().invoke(app, ["explain", str(tmp_path / "run"), *words])
        told[" ".join(words)] = " ".join(found.output.split())
    assert "RL can train on no token of it: imported text" in told["--loss rl"]
    assert "SFT can train on no token of it: imported text" in told["--loss sft"]
    assert "nor would a verdict do: imported text" in told["e_ --loss rl"]
    assert all(
        text.endswith(f"its text, for SFT: gyre export {tmp_path / 'run'} -o chat.jsonl") for text in told.values()
    )


def test_a_call_names_its_owner_and_the_rule() -> None:
    run, _ = group()
    e = Execution.load(run, "0aaa")
    first = explain_call(e, 1)
    assert (first.ownership.owner, first.ownership.rule, first.ownership.also_in) == (0, "admit.owner", ())
    assert (first.tokens_reused, first.tokens_new) == (0, 3 + 2)
    retried = explain_call(e, 3)
    assert (retried.tokens_reused, retried.tokens_new) == (first.tokens_new + 6 + 3 + 2, 0)
    lost = explain_call(e, 2).ownership
    assert (lost.owner, lost.rule, lost.reason) == (None, "admit.undelivered", Reason.UNDELIVERED)
    assert explain_call(e, 4, j_max=1).ownership.rule == "admit.beyond_j_max"


def test_a_shared_turn_is_context_in_the_other_trajectory() -> None:
    run = Forest()
    e = run.execution("e_0123456789ab")
    a = e.call(output=9)
    e.call(after=a, output=7)
    e.call(after=a, output=5, branch_reason="rewind", extension="fork")
    own = explain_call(Execution.load(run, "0123"), 1).ownership
    assert (own.owner, own.also_in) == (0, (1,))
    assert own.told == "most tokens without an owner first, then time"


def test_a_token_has_id_log_prob_version_and_place() -> None:
    run, made = group()
    e = Execution.load(run, "0aaa")
    node = e.tree.index[made[2].output]
    token = explain_token(e, 3, 2)
    assert (token.index, token.num_tokens, token.token_id) == (2, 5, int(e.tree.ids(node)[2]))
    assert token.position == int(e.tree.start_pos_N[node]) + 2
    logprobs = e.tree.logprobs(node)
    assert logprobs is not None
    assert token.logprob == float(logprobs[2])
    assert (token.version, token.engine) == ("base:0", "engine-0")
    with pytest.raises(DataError, match="tokens 0 to 4"):
        explain_token(e, 3, 5)


def test_the_trainers_ledger_tells_the_step(tmp_path: Path) -> None:
    run, _ = group()
    admission = gd.admit(run)
    step = Step(
        step=3, policy_id="run", n=3, parent_policy_id="run", parent_n=2,
        num_executions=len(admission.executions), trained_tokens=admission.num_owned, at=START + timedelta(hours=1),
    )  # fmt: skip
    with gd.RunWriter(tmp_path / "trainer") as writer:
        append(writer, step, admission.executions)
    found = explain_execution(Execution.load(run, "0aaa"), trainer=tmp_path / "trainer")
    assert [(c.step, c.version, c.num_executions, c.trajectory) for c in found.consumed or ()] == [
        (3, "run:3", 2, 0),
        (3, "run:3", 2, 1),
    ]
    other = explain_execution(Execution.load(run, "0ccc"), trainer=tmp_path / "trainer")
    assert (other.consumed, explain_execution(Execution.load(run, "0ccc")).consumed) == ((), None)
    with pytest.raises(ConfigError, match="holds no step"):
        explain_execution(Execution.load(run, "0aaa"), trainer=tmp_path)
    run.write(tmp_path / "a")
    shown = CliRunner().invoke(
        app, ["explain", str(tmp_path / "a"), "0aaa:c1:0", "--trainer", str(tmp_path / "trainer")]
    )
    assert "step 3, which made run:3" in shown.output
    assert "1/2 * 1/14 * min(e^(old - behaviour), 5) = 0.036" in shown.output


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    busy_case().write(Path("runs/a"))
    return Path("runs/a")


def out(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_takes_a_run_an_execution_a_call_or_a_token(runs: Path) -> None:
    assert "0 of 3 executions would be trained on" in out("explain", runs, "--evaluator", "pytest")
    assert "no reward chosen" in out("explain", runs)
    assert "could be trained on" in out("explain", runs)
    assert "yes, once a reward is named" in out("explain", runs, "0bbb")
    assert "2 of 3 executions would be trained on by SFT" in out("explain", runs, "--loss", "sft")
    assert out("explain", runs, "0bbb") == out("explain", "0bbb")
    whole = out("explain", runs, "0bbb", "--evaluator", "pytest=2")
    assert "admit.group_running" in whole
    assert "admit.undelivered" in whole
    call = json.loads(out("explain", runs, "0bbb:c4", "--json"))
    assert call["call"]["call"]["call_id"] in out("explain", runs, "0bbb:c4")
    assert (call["token"], call["call"]["ownership"]["owner"]) == (None, 3)
    token = json.loads(out("explain", runs, f"0bbb:{call['call']['call']['call_id']}:3", "--json"))
    assert token["token"]["index"] == 3
    assert f"id {token['token']['token_id']}" in out("explain", runs, "0bbb:c4:3")
    assert all(len(line) <= 80 for line in whole.splitlines())
    failed = CliRunner().invoke(app, ["explain", str(runs), "0bbb:c4", "--request"])
    assert isinstance(failed.exception, DataError)


def test_a_run_without_its_texts_is_explained_all_the_same(tmp_path: Path) -> None:
    """A copy that lacks blobs that its rows name: `gyre verify` says so, looking at it goes on."""
    run = Forest()
    e = run.execution("e_0123456789ab")
    made = e.call(request_blobs=("ab" * 32,))
    e.say(made.output, {"role": "assistant", "content": "x"})
    run.rows["blobs"].clear()
    opened = run.write(tmp_path / "a")
    assert explain_call(opened["0123"], 1).request_bytes is None
    assert "not kept" in out("explain", tmp_path / "a", "0123:c1")
    told = out("tree", tmp_path / "a", "0123:c1")
    assert "the run holds no text of these messages" in told
    assert "no message holds" in out("search", tmp_path / "a", "x")
    assert out("tree", tmp_path / "a", "0123", "--breaks").startswith("no prefix broke")
