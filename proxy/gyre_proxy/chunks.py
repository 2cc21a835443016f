"""What an engine's `/generate` stream says: events as they come together, each new token once, with its log-prob."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from gyre_data.errors import EngineError
from gyre_data.types import Floats, Ints

__all__ = ["Chunk", "ChunkReader", "EngineRefusedError", "error_text", "is_refusal", "payloads_of"]

_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_FINISHES = ("stop", "length", "abort")


class EngineRefusedError(EngineError):
    """The engine understood the request and will not serve it; another try gives the same answer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """New tokens of a reply. `versions` are (weight version, start, end) over all tokens of this request so far."""

    token_ids: Ints
    logprobs: Floats
    finish: str | None = None
    matched: int | str | None = None
    message: str | None = None
    cached_tokens: int | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    experts: str | None = None
    """Routed experts as the engine gives them, with the finish."""


class ChunkReader:
    """Turns the chunks of one `/generate` stream into new tokens, whether they are cumulative or deltas.

    The engine's own `completion_tokens` decides how many tokens are new, so a closing chunk that repeats everything
    adds nothing. Ids that run ahead of their log-probs wait for them; a finish without them is an error.
    """

    def __init__(self) -> None:
        self._ids = self._logprobs = 0  # taken so far
        self._waiting_ids: list[int] = []
        self._waiting_logprobs: list[list[Any]] = []
        self._new_ids: list[int] = []
        self._new_logprobs: list[float] = []
        self._spans: list[tuple[str, int, int]] = []
        self._given = 0
        self._meta: dict[str, Any] = {}

    def read(self, *payloads: dict[str, Any]) -> Chunk:
        """One chunk of all `payloads`; raise EngineError when ids and log-probs cannot be aligned."""
        for payload in payloads:
            self.take(payload)
        return self.chunk()

    def take(self, payload: dict[str, Any]) -> None:
        """Take in one event; what it added is in the next `chunk`, also when a later event is an error."""
        if "error" in payload:
            error = payload["error"]
            refused = isinstance(error, dict) and is_refusal(error.get("code"))
            kind = EngineRefusedError if refused else EngineError
            raise kind(f"the engine ended the reply with an error: {error_text(error)}")
        meta = payload.get("meta_info") or {}
        ended = meta.get("finish_reason") or {}
        if ended.get("type") == "abort" and is_refusal(ended.get("status_code")):
            # In a stream SGLang says so like this, beside a token that means nothing and has no log-prob.
            raise EngineRefusedError(f"the engine refused the request: {ended.get('message')}")
        if ended and ended.get("type") not in _FINISHES:
            raise EngineError(
                f"wanted a finish of {', '.join(_FINISHES)}, got {ended.get('type')!r:.80}; use an SGLang engine"
            )
        ids = payload.get("output_ids") or []
        total = meta.get("completion_tokens", self._ids if not ids else None)
        if total is None:
            raise EngineError("wanted meta_info.completion_tokens beside output_ids, got none; use an SGLang engine")
        self._waiting_ids += _fresh(ids, self._ids, total, "output_ids")
        self._ids = max(self._ids, total)
        logprobs = meta.get("output_token_logprobs") or []
        have = meta.get("output_token_logprobs_length", total) if logprobs else self._logprobs
        self._waiting_logprobs += _fresh(logprobs, self._logprobs, have, "output_token_logprobs")
        self._logprobs = max(self._logprobs, have)
        self._align(bool(meta.get("finish_reason")))
        self._note_versions(meta)
        self._meta = meta

    def chunk(self) -> Chunk:
        """What was taken in since the last chunk."""
        finish = self._meta.get("finish_reason") or {}
        ids, logprobs = self._new_ids, self._new_logprobs
        self._new_ids, self._new_logprobs = [], []
        return Chunk(
            token_ids=np.array(ids, np.int32) if ids else _NO_IDS,
            logprobs=np.array(logprobs, np.float32) if ids else _NO_LOGPROBS,
            finish=finish.get("type"),
            matched=finish.get("matched"),
            message=finish.get("message"),
            cached_tokens=self._meta.get("cached_tokens"),
            versions=tuple(self._spans),
            experts=self._meta.get("routed_experts") if finish else None,
        )

    def _align(self, finished: bool) -> None:
        ids, pairs = self._waiting_ids, self._waiting_logprobs
        if len(ids) != len(pairs):
            if finished:
                raise EngineError(
                    f"wanted a log-prob for every sampled id, got {self._logprobs} for {self._ids} ids; "
                    "the call is not recorded"
                )
            count = min(len(ids), len(pairs))
            self._waiting_ids, ids = ids[count:], ids[:count]
            self._waiting_logprobs, pairs = pairs[count:], pairs[:count]
        else:
            self._waiting_ids, self._waiting_logprobs = [], []
        if [pair[1] for pair in pairs] != ids:
            raise EngineError("the engine's log-probs are for other ids than its output_ids; the call is not recorded")
        self._new_ids += ids
        self._new_logprobs += [pair[0] for pair in pairs]
        self._given += len(ids)

    def _note_versions(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions")
        if spans:
            whole = [(str(s["version"]), int(s["start"]), min(int(s["end"]), self._given)) for s in spans]
            self._spans = [span for span in whole if span[1] < span[2]]
        covered = self._spans[-1][2] if self._spans else 0
        version = meta.get("weight_version")
        if version is None or covered >= self._given:
            return
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1], self._given)
        else:
            self._spans.append((str(version), covered, self._given))


def _fresh(items: list[Any], taken: int, total: int, what: str) -> list[Any]:
    new = total - taken
    if new <= 0:
        return []
    if len(items) == total:
        return items[taken:]
    if len(items) == new:
        return items
    raise EngineError(
        f"wanted {new} new or {total} cumulative {what}, got {len(items)}; the engine's stream lost tokens, "
        "the call is not recorded"
    )


async def payloads_of(stream: aiohttp.StreamReader) -> AsyncIterator[list[dict[str, Any]]]:
    """The events of a stream, those that arrived together in one list."""
    held: list[bytes] = []  # an unfinished line: cumulative chunks span many pieces
    while piece := await stream.readany():
        held.append(piece)
        if b"\n" not in piece:
            continue
        *lines, rest = b"".join(held).split(b"\n")
        held = [rest]
        data = [line[5:].strip() for line in lines if line[:5] == b"data:"]
        ended = b"[DONE]" in data
        if ended:
            del data[data.index(b"[DONE]") :]
        if data:
            yield [orjson.loads(line) for line in data]
        if ended:
            return


def is_refusal(status: Any) -> bool:
    """Whether a status says that another try is of no use; 408 and 429 ask for one."""
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def error_text(error: Any) -> str:
    """What an error, as engines write it, says."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
