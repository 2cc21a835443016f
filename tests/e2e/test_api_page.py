"""The HTTP API is what its OpenAPI document says, and the blocks of docs/api.md work."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_data.store import open as open_run
from gyre_proxy import ProxyClient
from gyre_proxy.api import Api
from gyre_proxy.openapi import OPERATIONS, document
from tests.support.proxy_server import serve_proxy
from tests.support.scripted_engine import ScriptedEngine

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "array": list}


def check(value: Any, schema: dict[str, Any], where: str) -> None:
    """Hold a value to the part of JSON Schema that the document uses."""
    for part in schema.get("allOf", ()):
        check(value, part, where)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and "null" in kinds:
        return
    wanted = [TYPES[kind] for kind in kinds if kind != "null"]
    assert not wanted or any(isinstance(value, kind) for kind in wanted), (where, value)
    assert "enum" not in schema or value in schema["enum"], (where, value)
    for name in schema.get("required", ()):
        assert name in value, (where, name)
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            check(value[name], inner, f"{where}.{name}")
    for number, item in enumerate(value if "items" in schema else ()):
        check(item, schema["items"], f"{where}[{number}]")


async def test_every_answer_is_what_the_document_says(tmp_path: Path) -> None:
    engine, seen = ScriptedEngine([OTHER]), set()
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        assert {(op.method, op.path) for op in OPERATIONS} == {
            (method, route.path)
            for route in Api(served.proxy).routes()
            for method in route.methods or ()
            if method != "HEAD"
        }
        told = (await http.get("/api/openapi.json")).json()
        assert told == document()

        async def call(method: str, path: str, body: dict[str, Any] | None = None, **values: str) -> Any:
            answer = await http.request(method, path.format(**values), json=body)
            assert answer.status_code == 200, answer.text
            seen.add((method, path.partition("?")[0]))
            described = told["paths"][path.partition("?")[0]][method.lower()]
            assert set(body or ()) <= set(
                described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
                .get("properties", {})
            )  # fmt: skip
            ((media, content),) = described["responses"]["200"]["content"].items()
            assert answer.headers["content-type"].startswith(media)
            if media == "application/json":
                check(answer.json(), content["schema"], f"{method} {path}")
            return answer.json() if media == "application/json" else answer.content

        group = (await call("POST", "/api/groups", {"task": "t", "size": 1, "attributes": {"a": 1}}))["id"]
        await call("POST", "/api/executions", {"group": group, "sample_index": 0, "harness": "h"})
        (one,) = (await call("POST", "/api/executions/claim", {"limit": 1, "tasks": ["t"]}))["executions"]
        path = "/api/executions/{id}"
        await call("POST", f"{path}/environments", {"kind": "digest", "digest": "d"}, id=one["id"])
        await call("POST", f"{path}/scores", {"evaluator": "e", "value": 1}, id=one["id"])
        await call("POST", f"{path}/end", {"reason": "finished"}, id=one["id"])
        await call("GET", path, id=one["id"])
        for plain in ("groups", "executions", "engines", "status", "events", "openapi.json"):
            await call("GET", f"/api/{plain}")
        assert len((await call("GET", "/api/executions?state=ended"))["executions"]) == 1
        await call("POST", "/api/engines", {"action": "drain", "url": engine.url})
        await call("GET", "/metrics")
        manifest = sorted((tmp_path / "run" / "manifest").iterdir())[-1].name
        await call("GET", "/api/segments/{table}/{name}", table="manifest", name=manifest)
        assert seen == {(op.method, op.path) for op in OPERATIONS}
        refused = await http.post("/api/groups", json={"size": -1})
        assert refused.status_code == 400
        check(refused.json(), told["components"]["schemas"]["Error"], "error")


async def test_an_own_harness_in_python_and_in_a_shell(tmp_path: Path) -> None:
    async def agent(base_url: str, key: str) -> str:
        body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{base_url}/v1/messages", json=body, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        return "ok"

    (python,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shell,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served:
        names: dict[str, Any] = {"agent": agent}
        exec(compile(python, "docs/api.md", "exec"), names)
        await names["own_harness"](served.url)
        run = await asyncio.create_subprocess_exec("sh", "-ec", shell, env={**os.environ, "PROXY": served.url})
        assert await run.wait() == 0
        async with ProxyClient(served.url) as client:
            with pytest.raises(RuntimeError, match="mine"):
                async with client.execution(task="t2"):
                    raise RuntimeError("mine")
            known = await client.executions()
    assert sorted(str(one["end_reason"]) for one in known) == ["crashed", "finished", "finished", "finished"]
    assert [row["value"] for row in open_run(tmp_path / "run").table("scores").to_pylist()] == [1.0, 1.0, 1.0]
