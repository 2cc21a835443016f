"""A proxy, its engines and random harnesses in one event loop, with everything that can go wrong between them.

A restart is a kill: the run folder is copied as it lies on the disk at one instant, every connection of the old proxy
is cut in the same instant, and another proxy opens the copy. What a harness had read to its end is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import uvicorn

from gyre_data.errors import CaptureError
from gyre_data.store import RunWriter
from gyre_proxy.app import build_app
from gyre_proxy.sampler import SamplerLimits
from gyre_proxy.serve import running
from gyre_proxy.settings import ProxySettings
from tests.support.harness import Model, rewritten, some_text
from tests.support.telling_engine import Policy, TellingEngine
from tests.support.toy_template import ToyTemplate
from tests.support.wire_fold import fold_anthropic, fold_chat

__all__ = ["Acknowledged", "World"]

_TOOLS = {
    "anthropic": lambda name: {"name": name, "input_schema": {"type": "object"}},
    "openai_chat": lambda name: {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}},
}
_PATHS = {"anthropic": "messages", "openai_chat": "chat/completions"}
_LOSSES = ("leave", "twice", "die", "down", "stop", "drain", "remove", "disk", "kill")
_NEXT = ("extend",) * 7 + ("rewind", "edit", "insert")


class LostReplyError(Exception):
    """The reply did not arrive whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledged:
    """A reply that a harness read to its end. `after` is the call whose reply its request took up and went on from."""

    call_id: str
    execution_id: str
    after: str | None


class Disk(RunWriter):
    """A run writer whose disk can be full."""

    full = False

    def write(self, rows: Iterable[Any]) -> None:
        if self.full:
            raise CaptureError("no space left on device")
        super().write(rows)


@dataclass(kw_only=True)
class World:
    folder: Path
    random: Random
    num_kills: int = 2
    num_engines: int = 3
    template: ToyTemplate = field(default_factory=ToyTemplate)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_LOSSES, 0))
    url: str = ""

    def __post_init__(self) -> None:
        self._model = Model(self.template, self.random, "<|im_end|>")
        self.policy = Policy(self._sample)
        self.engines = [
            TellingEngine(self.policy, number, version=f"base:{number}", pause_s=0.001)
            for number in range(self.num_engines)
        ]
        self._proxy = AsyncExitStack()

    def _sample(self, prompt: Any) -> list[int]:
        """A reply that no other call gets: two of the same words could not be told apart when they come back."""
        with_calls = self.random.random() < 0.5
        *ids, stop = self._model.reply(with_calls=with_calls)[0]
        return [*ids, *([] if with_calls else self._model.tokens(f" no {len(self.policy.whole)}")), stop]

    @property
    def run(self) -> Path:
        """The folder that the present proxy records to."""
        return self.folder / f"run-{self.faults['kill']}"

    async def live(self, num_executions: int, num_turns: int) -> None:
        """Run every harness to its end, while engines and the proxy fail."""
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                await stack.enter_async_context(engine.serving())
            stack.push_async_callback(lambda: self._proxy.aclose())
            await self._start()
            self.http = await stack.enter_async_context(httpx.AsyncClient(timeout=30, trust_env=False))
            agents = [(f"e{i}", agent) for i in range(num_executions) for agent in ("", "a/helper/")]
            harnesses = [
                asyncio.create_task(Harness(world=self, execution=name, agent=agent).talk(num_turns))
                for name, agent in agents
            ]
            chaos = asyncio.create_task(self._chaos())
            try:
                await asyncio.gather(*harnesses)
            finally:
                for task in (chaos, *harnesses):
                    task.cancel()
                await asyncio.gather(chaos, *harnesses, return_exceptions=True)
                self._mend()

    async def _start(self) -> None:
        settings = ProxySettings(
            run=self.run,
            engines=tuple(engine.url for engine in self.engines),
            tokenizer=self.run,
            limits=SamplerLimits(attempts=100, recovery_s=20.0, abort_s=0.2),
            grace_s=0.1,
            drain_s=0.0,
            poll_s=0.03,
            probe_s=0.2,
        )
        self._writer = Disk(self.run)
        proxy = await self._proxy.enter_async_context(running(settings, self.template, self._writer))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        app, number = build_app(proxy), self.faults["kill"]

        async def alive(scope: Any, receive: Any, send: Any) -> None:
            if self.faults["kill"] == number:  # a connection that was being accepted as the proxy was killed
                await app(scope, receive, send)

        config = uvicorn.Config(alive, ws="none", log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server._serve([listener]))

        async def stop() -> None:
            self._server.should_exit = True
            await serving

        self._proxy.push_async_callback(stop)
        while not self._server.started:
            await asyncio.sleep(0.002)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def _kill(self) -> None:
        with self._writer._commit_lock:  # between two commits; a cut through one is the crash tests' matter
            old = self.run
            self.faults["kill"] += 1
            shutil.copytree(old, self.run)
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._mend()
        await self._proxy.aclose()
        self._proxy = AsyncExitStack()
        await self._start()

    def _mend(self) -> None:
        for engine in self.engines:
            engine.down = False
            engine.flow.set()
        self._writer.full = False

    async def _chaos(self) -> None:
        random = self.random
        kinds = [kind for kind in _LOSSES if kind not in ("leave", "twice", "kill")]
        while True:
            await asyncio.sleep(random.uniform(0.02, 0.1))
            if self.faults["kill"] < self.num_kills and random.random() < 0.1:
                await self._kill()
                continue
            kind, engine = random.choice(kinds), random.choice(self.engines)
            self.faults[kind] += 1
            match kind:
                case "die":
                    engine.faults.append(random.randint(0, 12))
                case "down":
                    engine.down = True
                case "stop":
                    engine.flow.clear()
                case "disk":
                    self._writer.full = True
                case action:
                    await self._change(action, engine)
            await asyncio.sleep(random.uniform(0.0, 0.15))
            self._mend()
            await self._change("add", engine)

    async def _change(self, action: str, engine: TellingEngine) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post(f"{self.url}/api/engines", json={"action": action, "url": engine.url})


@dataclass(kw_only=True)
class Harness:
    """One agent of one execution: talks, rewrites what it sends back as clients do, leaves, and asks again."""

    world: World
    execution: str
    agent: str

    def __post_init__(self) -> None:
        self.random = Random(self.world.random.random())
        self.wire = self.random.choice(("anthropic", "openai_chat"))
        self.tools = [_TOOLS[self.wire](name) for name in ("stat_bay", "move")] if self.random.random() < 0.7 else []
        self._number = 0

    async def talk(self, num_turns: int) -> None:
        """Take turns; `states` are the conversations so far, each with the call that its last reply came from."""
        states: list[tuple[list[dict[str, Any]], str | None]] = [([self._user()], None)]
        for _ in range(num_turns):
            chat, after = self._next(states)
            reply = await self._ask(chat, after)
            if reply is None:  # it gave up on this one
                continue
            call_id, message = reply
            turn = self._echo(message)
            if turn is None:  # nothing to be seen: clients leave such a turn out
                states.append(([*chat, self._user()], after))
            else:
                states.append(([*chat, turn, *self._answers(turn)], call_id))

    def _next(self, states: list[tuple[list[dict[str, Any]], str | None]]) -> tuple[list[dict[str, Any]], str | None]:
        (chat, after), kind = states[-1], self.random.choice(_NEXT)
        if kind == "rewind":
            chat, after = self.random.choice(states)
            return [*chat, self._user()], after
        if kind == "insert":
            return [*chat, {"role": "assistant", "content": f"not sampled {self._count()}"}, self._user()], after
        if kind == "edit":
            return [self._user(), *chat[1:]], None
        return chat, after

    def _count(self) -> int:
        self._number += 1
        return self._number

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": f"{some_text(self.random)} {self.agent}{self._count()}"}

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _ask(self, chat: list[dict[str, Any]], after: str | None) -> tuple[str, dict[str, Any]] | None:
        body = {"model": "toy", "max_tokens": self.random.choice((400, 400, 400, 6)), "messages": chat}
        if self.tools:
            body["tools"] = self.tools
        for _ in range(500):
            chance = self.random.random()
            if chance < 0.1:
                self.world.faults["leave"] += 1
                await self._leave(body)
                if self.random.random() < 0.3:
                    return None
                continue
            times = 2 if chance < 0.17 else 1
            self.world.faults["twice"] += times - 1
            replies = await asyncio.gather(*(self._whole(body) for _ in range(times)), return_exceptions=True)
            for reply in replies:
                if not isinstance(reply, BaseException):
                    self.world.acknowledged.append(
                        Acknowledged(call_id=reply[0], execution_id=self.execution, after=after)
                    )
            for reply in replies:
                if not isinstance(reply, BaseException):
                    return reply
                if not isinstance(reply, LostReplyError | httpx.TransportError):
                    raise reply
            await asyncio.sleep(0.02)
        raise AssertionError("no reply after 500 attempts")

    def _url(self) -> str:
        return f"{self.world.url}/x/{self.execution}/{self.agent}v1/{_PATHS[self.wire]}"

    async def _whole(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        stream = self.random.random() < 0.5
        answer = await self.world.http.post(self._url(), json={**body, "stream": stream})
        if answer.status_code >= 500:
            raise LostReplyError(answer.text)
        assert answer.status_code == 200, answer.text
        fold = fold_anthropic if self.wire == "anthropic" else fold_chat
        return answer.headers["x-gyre-call"], fold(answer.content) if stream else json.loads(answer.text)

    async def _leave(self, body: dict[str, Any]) -> None:
        num_lines = self.random.randint(0, 6)
        with contextlib.suppress(httpx.TransportError):
            async with self.world.http.stream("POST", self._url(), json={**body, "stream": True}) as answer:
                lines = answer.aiter_lines()
                for _ in range(num_lines):
                    if await anext(lines, None) is None:
                        break

    # --- sending back -------------------------------------------------------------------------------------------------

    def _echo(self, message: dict[str, Any]) -> dict[str, Any] | None:
        return self._anthropic(message) if self.wire == "anthropic" else self._openai(message["choices"][0]["message"])

    def _anthropic(self, message: dict[str, Any]) -> dict[str, Any] | None:
        blocks: list[dict[str, Any]] = []
        for block in message["content"]:
            if block["type"] == "thinking" and self.random.random() < 0.5:
                blocks.append(block)
            elif block["type"] == "text" and block["text"].strip():
                blocks.append({"type": "text", "text": self._blanks(block["text"])})
            elif block["type"] == "tool_use":
                blocks.append({**block, "input": rewritten(self.random, block["input"])})
        seen = [block for block in blocks if block["type"] != "thinking"]
        if not seen:
            return None
        if len(blocks) == 1 and blocks[0]["type"] == "text" and self.random.random() < 0.5:
            return {"role": "assistant", "content": blocks[0]["text"]}
        return {"role": "assistant", "content": blocks}

    def _openai(self, message: dict[str, Any]) -> dict[str, Any] | None:
        calls = []
        for call in message.get("tool_calls") or []:
            arguments = rewritten(self.random, json.loads(call["function"]["arguments"]))
            text = json.dumps(arguments, separators=self.random.choice(((", ", ": "), (",", ":"))))
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        text = message.get("content") or ""
        if not calls and not text.strip():
            return None
        turn: dict[str, Any] = {"role": "assistant", "content": self._blanks(text) or None}
        if calls:
            turn["tool_calls"] = calls
        if message.get("reasoning_content") and self.random.random() < 0.5:
            turn["reasoning_content"] = message["reasoning_content"]
        return turn

    def _blanks(self, text: str) -> str:
        return text.strip() if self.random.random() < 0.4 else text

    def _answers(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        if self.wire == "openai_chat":
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": some_text(self.random)}
                for call in turn.get("tool_calls", ())
            ]
            self.random.shuffle(results)
            return results or [self._user()]
        blocks = turn["content"] if isinstance(turn["content"], list) else []
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": some_text(self.random)}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.random.shuffle(results)
        return [{"role": "user", "content": results}] if results else [self._user()]
