"""Lawful but odd requests over real HTTP: honoured as docs/proxy.md says, or refused in the wire's own shape."""

from gyre_data.store import open as open_run
from tests.support.proxy_server import check_run, serve_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.toy_template import ToyTemplate

OH = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}


class Broken(ToyTemplate):
    """A template with a fault of its own that no rule foresees, once it is past its first render."""

    broken = False

    def render(self, messages, tools, add_generation_prompt):
        if self.broken:
            raise RuntimeError("no rule foresees this")
        return super().render(messages, tools, add_generation_prompt)


async def test_a_fault_that_nobody_foresaw_has_the_wires_own_shape(tmp_path, caplog):
    engine, template = ScriptedEngine([OH]), Broken()
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, template=template) as served:
        template.broken = True
        async with served.http() as http:
            anthropic = await http.post("/x/e1/v1/messages", json=REQUEST)
            chat = await http.post("/x/e1/v1/chat/completions", json=REQUEST)
            assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (500, "api_error")
            assert (chat.status_code, chat.json()["error"]["type"]) == (500, "server_error")
            assert "RuntimeError; see its log" in anthropic.json()["error"]["message"]
            assert "no rule foresees this" in caplog.text
            template.broken = False
            assert (await http.post("/x/e1/v1/messages", json=REQUEST)).status_code == 200
    (call,) = check_run(tmp_path / "run", engine)
    assert call.extension == "root"
    assert open_run(tmp_path / "run").table("calls").num_rows == 1
