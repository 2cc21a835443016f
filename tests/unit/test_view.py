"""`gyre view` without a browser: what the models say, who may ask the server, and what a report is made of."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shlex
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gyre_data
from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.view.data import Kept, execution_model, run_figures, run_model
from gyre_data.view.loopback import is_loopback
from gyre_data.view.page import link, page
from gyre_data.view.report import write_report
from gyre_data.view.server import ViewServer
from gyre_data.view.texts import Texts
from tests.support.busy_case import busy_case
from tests.support.published_case import CALLS, MESSAGE_NODES, OCCURRENCES, published_case
from tests.support.view_case import HOSTILE, view_case

BUSY = "e_e7f300000002"
ASSETS = Path(gyre_data.__file__).parent / "view" / "assets"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> gyre_data.Run:
    opened: gyre_data.Run = view_case().write(tmp_path_factory.mktemp("view") / "run")
    return opened


@pytest.fixture
def server(run: gyre_data.Run) -> Iterator[ViewServer]:
    with ViewServer(run) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def ask(server: ViewServer, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    sent = None if body is None else json.dumps(body)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if sent is not None:
        given.setdefault("Content-Type", "application/json")
    connection.request("GET" if body is None else "POST", path, sent, given)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_run_at_a_glance(run: gyre_data.Run) -> None:
    told = run_model(run)
    assert [e["execution_id"] for e in told["executions"]] == ["e_b02c00000001", BUSY, "e_9d1e00000003"]
    assert told["calls"] == {
        "status": {"ok": 21, "failed": 2},
        "role": {"main": 17, "side": 1, "sub_agent": 3, "main_summary": 1, "unknown": 1},
        "total": 23,
    }
    json.dumps(told)


def test_an_execution_whole(run: gyre_data.Run) -> None:
    told = execution_model(run[BUSY], Kept(Texts(run)))
    assert len(told["calls"]) == 18
    assert {call["call_id"] for call in told["calls"]} == set(run[BUSY].tree._call)
    output = next(n for n in told["nodes"] if n["kind"] == "output" and n.get("versions"))
    assert output["versions"] == [["run:4", 0, output["num_tokens"]]]
    lines = [told["lines"][m] for n in told["nodes"] for m in n.get("messages", ())]
    assert any(line["tools"] == ["Task"] for line in lines)
    call = told["calls"][1]
    assert call["sampling_asked"] != call["sampling_used"]
    assert [told["blobs"][n] for n in call["request_blobs"]] == list(run[BUSY].tree.calls[1].request_blobs or ())
    assert [c["tokens_after"] for c in told["compactions"]] == [call["prompt_tokens"] for call in told["calls"][13:14]]
    assert [e["digest"] for e in told["environments"]] == ["9f1c3a77d20b"]
    assert sum("teachers" in node for node in told["nodes"]) > 3
    json.dumps(told)


def test_the_published_case_is_told_exactly(tmp_path: Path) -> None:
    told = run_figures(published_case().write(tmp_path / "run"))
    assert told["stats"]["calls"] == CALLS
    assert told["stats"]["message_nodes"] == MESSAGE_NODES
    assert told["stats"]["occurrences"] == OCCURRENCES


def test_several_evaluators_are_no_error(run: gyre_data.Run) -> None:
    told = run_figures(run)
    assert "evaluators" in told["not_judged"]
    assert told["admission"] == {}
    judged = run_figures(run, evaluators={"pytest": 1.0})
    assert judged["not_judged"] is None
    assert judged["admission"]["e_b02c00000001"]["reason"] == "group_running"


def test_a_report_holds_every_token_and_text(run: gyre_data.Run, tmp_path: Path) -> None:
    path = write_report(run, tmp_path / "r.html", execution="e7f3")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    chunks = {
        name: zlib.decompress(base64.b64decode(data), -15)
        for name, data in re.findall(r'<script type="application/x-gyre" id="data:([^"]+)">([^<]*)</script>', text)
    }
    tree = run[BUSY].tree
    ids = np.concatenate([tree.ids(i) for i in range(len(tree))])
    assert np.array_equal(np.frombuffer(chunks["ids:0"], "<i4"), ids)
    logprobs = np.concatenate([found for i in range(len(tree)) if (found := tree.logprobs(i)) is not None])
    planes = np.frombuffer(chunks["logprobs:0"], np.uint8).reshape(4, -1)
    assert np.array_equal(np.ascontiguousarray(planes.T).view("<f4").ravel(), logprobs)
    texts = {k: v for name, data in chunks.items() if name.startswith("texts:") for k, v in json.loads(data).items()}
    named = {m for i in range(len(tree)) for m in tree.message_blobs(i)}
    assert named <= texts.keys()
    assert any(HOSTILE in json.loads(texts[name])["content"] for name in named)
    assert len(json.loads(chunks["run"])["executions"]) == 1
    # Nothing that was recorded stands in the file as markup: between our tags there is only base64.
    assert "'owned'" not in text
    assert "</script" not in link("main")


def test_names_that_look_like_markup_stay_names(tmp_path: Path) -> None:
    hostile = busy_case()
    run = hostile.write(tmp_path / "<img src=x onerror=alert(1)>")
    text = write_report(run, tmp_path / "r.html").read_text()
    assert "<img" not in text
    assert "<title>&lt;img src=x onerror=alert(1)&gt; - gyre view</title>" in text


def test_no_asset_makes_markup_from_text_or_reaches_out() -> None:
    for path in ASSETS.glob("*.js"):
        source = path.read_text()
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert banned not in source, path.name
    for path in ASSETS.iterdir():
        # The namespace of SVG is a name, not an address that anything fetches.
        source = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(", source), path.name


def test_the_page_allows_its_own_script_only() -> None:
    served, report = "".join(page()), "".join(page([]))
    for text, reach in ((served, "connect-src &#x27;self&#x27;"), (report, "connect-src &#x27;none&#x27;")):
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
        assert policy is not None
        assert reach.replace("&#x27;", "'") in policy[1]
        assert "default-src 'none'" in policy[1]
        assert "unsafe" not in policy[1]


def test_a_strange_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gyre_data.view import page as made

    link.cache_clear()
    monkeypatch.setattr(made, "_asset", lambda name: 'import x from "./y.js";\n')
    with pytest.raises(ValueError, match="wanted `import"):
        link("main")
    monkeypatch.undo()
    link.cache_clear()


def test_the_server_answers_this_machine_only(server: ViewServer) -> None:
    status, headers, body = ask(server, "/")
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b'data-source="served"' in body
    assert ask(server, "/api/run", Host="evil.example")[0] == 403
    assert ask(server, "/", Host="evil.example:80")[0] == 403
    assert ask(server, "/", Host="[::1")[0] == 403
    assert ask(server, "/api/texts", {"ids": []}, Host="evil.example")[0] == 403
    assert ask(server, "/api/texts", {"ids": []}, Content_Type="text/plain")[0] == 400  # no form of a foreign page
    assert ask(server, "/nothing")[0] == 404
    assert ask(server, "/api/execution?id=nope")[0] == 409
    assert ask(server, "/api/execution")[0] == 404


def test_the_server_gives_texts_tokens_and_words(server: ViewServer, run: gyre_data.Run) -> None:
    tree = run[BUSY].tree
    names = [tree.node_id[3], tree.node_id[1]]
    body = ask(server, "/api/tokens", {"execution": BUSY, "nodes": names})[2]
    ids = np.concatenate([tree.ids(3), tree.ids(1)])
    assert np.array_equal(np.frombuffer(body, "<i4", len(ids)), ids)
    blob = tree.message_blobs(3)[0]
    assert json.loads(ask(server, "/api/texts", {"ids": [blob, "0" * 64]})[2]) == {
        blob: run.blob(blob).decode(),
        "0" * 64: None,
    }
    told = json.loads(ask(server, "/api/vocabulary", {"ids": [1]})[2])
    assert told == {"problem": "run.json names no tokenizer", "texts": {}}
    assert ask(server, "/api/tokens", {"execution": BUSY, "nodes": ["n_none"]})[0] == 409


def test_other_machines_need_a_flag_and_a_token(run: gyre_data.Run) -> None:
    with pytest.raises(ConfigError, match="--remote"):
        ViewServer(run, host="0.0.0.0")
    with ViewServer(run, host="0.0.0.0", remote=True, token="t0ken") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.url.endswith("/?token=t0ken")
        assert ask(server, "/")[0] == 403
        assert ask(server, "/?token=wrong")[0] == 403
        assert ask(server, "/?token=%C3%A9")[0] == 403
        assert ask(server, "/api/run", Cookie="gyre_view=wrong")[0] == 403
        status, headers, _ = ask(server, "/?token=t0ken")
        assert (status, headers["Location"]) == (303, "/")
        assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        assert ask(server, "/api/run", Cookie=headers["Set-Cookie"].partition(";")[0], Host="any.example")[0] == 200
        server.shutdown()


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True),
                                             ("127.9.9.9", True), ("0.0.0.0", False), ("10.0.0.1", False),
                                             ("localhost.evil.example", False), ("", False)])  # fmt: skip
def test_what_counts_as_this_machine(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


def test_a_port_that_is_taken_is_told(server: ViewServer, run: gyre_data.Run) -> None:
    with pytest.raises(ConfigError, match="another --port"):
        ViewServer(run, port=server.server_address[1])


def test_the_command_writes_a_report_or_refuses(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["view", "sample", "0a7f", "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0
    assert re.search(r"r.html: 0\.\d MB, opens in any browser without network", done.output.replace("\n", " "))
    refused = runner.invoke(app, ["view", "sample", "--host", "0.0.0.0", "--no-open"])
    assert isinstance(refused.exception, ConfigError)
    assert "--remote" in str(refused.exception)
    unwritable = runner.invoke(app, ["view", "sample", "-o", str(tmp_path / "r.html" / "r.html")])
    assert "name another place" in str(unwritable.exception)


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "view.md").read_text()
    (block,) = re.findall(r"^```\w+\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    view_case().write(Path("runs/a"))
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(ViewServer, "serve_forever", lambda server: None)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        done = CliRunner().invoke(app, words[2:])
        assert done.exit_code == 0, done.output
    assert [url.partition("#")[2] for url in opened] == ["", f"e={BUSY}"]
    assert Path("report.html").stat().st_size > 50_000


def test_watchers_hear_of_new_rows(tmp_path: Path) -> None:
    made = view_case()
    run = made.write(tmp_path / "run")
    with ViewServer(run) as server, gyre_data.RunWriter(tmp_path / "run") as writer:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request("GET", "/api/events")
        events = connection.getresponse()
        assert events.fp.readline().startswith(b"data: ")
        assert json.loads(ask(server, "/api/run")[2])["whole"]["executions"][0]["score"] == 1.0
        gyre_data.score(writer, "e_b02c00000001", 0.25, evaluator="again")
        writer.commit()
        told = None
        while told != 0.25:  # opening the writer may be told of before the score is
            if events.fp.readline().startswith(b"data: "):
                told = json.loads(ask(server, "/api/run")[2])["whole"]["executions"][0]["score"]
        connection.close()
        server.shutdown()


def test_the_tutorial_names_every_key_and_colour() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "view.md").read_text()
    source = re.sub(r'"([/?\[\]])": ', r"\1: ", (ASSETS / "keys.js").read_text())
    keys = re.findall(r"(\S): \[\"[\w-]+\"", source)
    assert len(keys) > 15
    for key in keys:
        assert f"`{key}`" in guide, key
    for name in re.findall(r"^  \w+: \"([^\"]+)\",$", (ASSETS / "tokens.js").read_text(), re.MULTILINE):
        assert f"| {name} |" in guide, name
