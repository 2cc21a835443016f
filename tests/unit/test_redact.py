"""What counts as a secret, and what an export of a run with secrets still holds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gyre_data.admission import admit
from gyre_data.arrays import from_table
from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.redact import PATTERNS, Redactor
from gyre_data.run_copy import export_run
from gyre_data.schema import DeliveryState
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_data.types import Delivery, TopLogprobs
from gyre_data.verify import verify
from tests.support.rows import START, call_row, output_node, prompt_node

# kind: (text around it, the secret)
SECRETS = {
    "private_key": ("key: {}", "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\nxyz\n-----END RSA PRIVATE KEY-----"),
    "api_key": ("use {} now", "sk-ant-api03-" + "aB3_-" * 8),
    "gyre_key": ("{}", "gyre-" + "a1B2" * 8),
    "github_token": ("clone with {}.", "ghp_" + "a1B2" * 9),
    "gitlab_token": ("{}", "glpat-" + "a1B2c" * 4),
    "aws_key_id": ("id {}", "AKIA" + "A1B2" * 4),
    "google_key": ("?k={}&x", "AIza" + "a1B2c" * 7),
    "slack_token": ("{}", "xoxb-123456789012-abcdef"),
    "huggingface_token": ("{}", "hf_" + "aB" * 17),
    "stripe_key": ("{}", "sk_live_" + "aB1" * 8),
    "npm_token": ("{}", "npm_" + "aB1c" * 9),
    "pypi_token": ("{}", "pypi-" + "aB1_-" * 12),
    "jwt": ("c {} d", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.s1gnatureABC"),
    "authorization": ("curl -H 'Authorization: Bearer {}'", "abcDEF1234567890._~"),
    "url_password": ("git clone https://me:{}@host/repo", "hunter22"),
    "assignment": ("export DB_PASSWORD='{}'", "correct-horse"),
}


def test_every_pattern_has_an_example():
    assert set(SECRETS) == set(PATTERNS)


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_taken_out_and_the_text_around_it_stays(kind):
    frame, secret = SECRETS[kind]
    clean, kinds = Redactor().text(frame.format(secret))
    assert secret not in clean
    assert kind in kinds
    assert clean == frame.format(f"[REDACTED:{kind}]")
    as_json = json.dumps({"content": [{"text": frame.format(secret)}]}).encode()
    assert secret not in json.loads(Redactor().blob(as_json)[0])["content"][0]["text"]
    piece = b'{"cut":' + as_json  # a body cut at a message's border is no JSON
    assert json.dumps(secret)[1:-1].encode() not in Redactor().blob(piece)[0]


@pytest.mark.parametrize(
    "text",
    [
        "def token(self): return self.tokens[0]",
        "password = input()",
        "https://host/path:8080/x@y",
        "the Bearer of this letter",
        "skip-this-and-that-sk-1",
        "n_0123456789abcdef0123",
        "a" * 64,
        "TOKEN=$SECRET_FROM_ELSEWHERE",
    ],
)
def test_ordinary_text_stays(text):
    assert Redactor().text(text) == (text, ())


def test_an_escaped_secret_in_a_cut_piece_takes_the_piece_with_it():
    piece = b'"text": "' + b"ghp_" + b"\\u0061" + b"a1B2" * 9 + b'"'
    clean, kinds = Redactor().blob(piece)
    assert (clean, "github_token" in kinds) == (b'"[REDACTED]"', True)


def test_own_patterns():
    assert Redactor(["EMP-[0-9]{5}"]).text("by EMP-12345") == ("by [REDACTED:custom]", ("custom",))
    with pytest.raises(ConfigError, match="mend --pattern"):
        Redactor(["("])


@given(st.text(), st.sampled_from(sorted(SECRETS)))
def test_what_is_redacted_once_is_clean(text, kind):
    frame, secret = SECRETS[kind]
    clean, _ = Redactor().text(f"{text} {frame.format(secret)} {text}")
    assert Redactor().text(clean)[0].count("[REDACTED") == clean.count("[REDACTED")


SECRET = SECRETS["github_token"][1]


def message(writer, text):
    return (writer.put_blob(json.dumps({"content": text, "role": "user"}).encode()),)


@pytest.fixture
def run(tmp_path):
    """Two executions: in e_1 the second of three calls holds a secret in its prompt; e_2 has none."""
    with RunWriter(tmp_path / "run") as writer:
        for execution, secret in (("e_1", f"token {SECRET}"), ("e_2", "no token")):
            parent = None
            for turn, text in enumerate(("hello", secret, "go on")):
                call = f"c_{execution}_{turn}"
                prompt = prompt_node(f"n_{execution}_{turn}p", call, parent, execution_id=execution)
                prompt = replace(prompt, message_blobs=message(writer, text), content_hash=f"h{turn}")
                output = output_node(f"n_{execution}_{turn}o", call, prompt, message_blobs=message(writer, "fine"))
                body = (writer.put_blob(b'{"messages":['), writer.put_blob(json.dumps({"content": text}).encode()))
                row = call_row(
                    call, prompt, output, execution, request_blobs=body, error=f"{SECRET}" if turn == 2 else None
                )
                top = TopLogprobs(node_id=output.node_id, k=1, token_ids=output.token_ids, logprobs=output.logprobs)
                given = Delivery(call_id=call, execution_id=execution, state=DeliveryState.DELIVERED, at=START)
                writer.write([prompt, output, top, row, given])
                parent = output
    return tmp_path / "run"


def test_an_export_holds_no_secret_and_says_what_it_took(run, tmp_path):
    before = verify(run)
    assert not before.problems
    done = export_run(open_run(run), tmp_path / "out")
    assert done.secrets["github_token"] >= 2
    assert done.num_nodes_redacted == 1
    report = verify(tmp_path / "out")
    assert not report.problems
    assert {k: v for k, v in report.num_rows.items() if k != "blobs"} == {
        k: v for k, v in before.num_rows.items() if k != "blobs"
    }
    copy = open_run(tmp_path / "out")
    texts = [copy.blob(blob_id) for blob_id in copy.table("blobs")["blob_id"].to_pylist()]
    assert not any(SECRET.encode() in text for text in texts)
    assert not any(SECRET.encode() in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    nodes = {node.node_id: node for node in from_table("nodes", copy.table("nodes"))}
    gone = nodes["n_e_1_1p"]
    assert (len(gone.token_ids), gone.counted_tokens, gone.redacted) == (0, 3, ("github_token",))
    assert nodes["n_e_1_2p"].content_hash is None
    old = {node.node_id: node for node in from_table("nodes", open_run(run).table("nodes"))}
    for name, node in nodes.items():
        if name != "n_e_1_1p":
            np.testing.assert_array_equal(node.token_ids, old[name].token_ids)


def test_what_was_sampled_after_a_redacted_message_is_not_trained(run, tmp_path):
    def trained(path):
        admitted = admit([open_run(path)], need_score=False, include_running=True)
        why = {item.call_id: str(item.reason) for item in admitted.excluded if item.call_id}
        return sum(execution.num_owned for execution in admitted.executions), why

    whole, _ = trained(run)
    export_run(open_run(run), tmp_path / "out")
    left, why = trained(tmp_path / "out")
    assert (whole, left) == (24, 16)
    assert why == {"c_e_1_1": "redacted", "c_e_1_2": "redacted"}


def test_the_command_redacts_unless_told_otherwise(run, tmp_path):
    result = CliRunner().invoke(app, ["export", str(run), "-o", str(tmp_path / "a")])
    assert "taken out: github_token" in result.stdout
    result = CliRunner().invoke(app, ["export", str(run), "-o", str(tmp_path / "b"), "--no-redact"])
    assert "secrets were left in it" in result.stdout
    assert export_run(open_run(run), tmp_path / "c", redact=False).secrets == {}
    for name in ("nodes", "calls", "top_logprobs"):
        assert open_run(tmp_path / "b").table(name).equals(open_run(run).table(name))
    with pytest.raises(ConfigError, match="is not empty; name another"):
        export_run(open_run(run), tmp_path / "a")
