"""`gyre score` on a run that a real proxy is recording: the verdict goes through its API and can be read at once."""

import asyncio
import json

import pytest

from gyre_data.errors import DataError
from gyre_data.remote import append_scores
from gyre_data.scores import make_score, scores_by_execution
from gyre_data.store import open as open_run
from tests.support.proxy_server import serve_proxy
from tests.support.scripted_engine import ScriptedEngine


async def test_a_score_of_a_live_run_goes_through_its_proxy(tmp_path):
    engine, folder = ScriptedEngine(["hello"]), tmp_path / "run"
    async with engine.serving(), serve_proxy(folder, engine) as served:
        async with served.http() as client:
            made = (await client.post("/api/executions", json={"task": "t"})).json()
        info = json.loads((folder / "run.json").read_bytes())
        info["endpoints"] = {**info.get("endpoints", {}), "proxy": served.url}
        (folder / "run.json").write_text(json.dumps(info))
        run = open_run(folder)

        def score(execution_id, value, **more):
            rows = [make_score(execution_id, value, evaluator="pytest@3", **more)]
            return asyncio.to_thread(append_scores, run, rows)

        (one,), through = await score(made["id"], 0.5, partial=True, detail="3 of 6")
        assert through == served.url
        run.refresh()  # an execution's start is enough to name it, once it can be read
        two = await asyncio.to_thread(
            run.score, made["id"][:8], None, evaluator="pytest@3", status="failed", detail="timed out"
        )
        with pytest.raises(DataError, match="refused the score: 404 wanted an execution of this run"):
            await score("e_none", 0.5)
        run.refresh()
        first, second = scores_by_execution(run)[made["id"]]
        assert [first.score_id, second.score_id] == [one.score_id, two.score_id]
        assert (first.evaluator, first.evaluator_version, first.value, first.partial) == ("pytest", "3", 0.5, True)
        assert (first.status, first.detail) == ("scored", "3 of 6")
        assert (second.status, second.value, second.detail) == ("failed", None, "timed out")
