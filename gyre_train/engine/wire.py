"""The JSON of SGLang's native API: requests in, replies out. No model, no sockets.

A reply has no `text`: the engine is token-in, token-out, as SGLang with `--skip-tokenizer-init`.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_data.errors import ConfigError

from .sampling import SamplingParams, parse_sampling
from .sequence import Sequence

__all__ = ["GenerateRequest", "parse_generate", "reply", "request_object"]

# Fields that change nothing here, at any value.
_IGNORED = frozenset(
    {
        "conversation_id",
        "custom_labels",
        "log_metrics",
        "no_logs",
        "priority",
        "return_text_in_logprobs",
        "routing_key",
    }
)
_OWN = frozenset(
    {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "extra_key", "cache_salt"}
    | {"return_routed_experts", "routed_experts_start_len"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One checked body of POST /generate."""

    rid: str
    prompt_ids: np.ndarray
    params: SamplingParams
    return_logprob: bool
    stream: bool
    extra_key: str | None
    routes_from: int | None
    """First position whose experts the reply's end tells; None: it tells none."""


def request_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body; an empty body is an empty object."""
    try:
        value = json.loads(body) if body.strip() else {}
    except ValueError as error:
        raise ConfigError(f"the body must be a JSON object, it does not parse ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"the body must be a JSON object, got a {type(value).__name__}")
    return value


def parse_generate(
    body: Mapping[str, Any], *, vocab_size: int, context_length: int, max_prompt: int, experts: bool = False
) -> GenerateRequest:
    """Check a request against what the engine can do; whatever it could not obey is refused with a ConfigError."""
    for name, value in body.items():
        if name not in _OWN and name not in _IGNORED and value not in (None, False, 0, [], {}, ""):
            raise ConfigError(f"{name} is not supported by the embedded engine, got {value!r}: leave it out")
    ids = body.get("input_ids")
    if ids is None:
        raise ConfigError("input_ids should be provided: this engine takes token ids, never text")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ConfigError("input_ids must be one flat list of whole numbers; send one request for each prompt")
    if not ids:
        raise ConfigError("input_ids cannot be empty.")
    if len(ids) >= max_prompt:
        raise ConfigError(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ConfigError(f"input_ids must lie in [0, {vocab_size - 1}], got {wrong}: is it this model's tokenizer?")
    params = _sampling(body, len(ids), context_length)
    if body.get("logprob_start_len", -1) not in (None, -1):
        raise ConfigError(f"logprob_start_len must be -1 (outputs only), got {body['logprob_start_len']!r}")
    rid, extra_key = body.get("rid") or uuid.uuid4().hex, body.get("extra_key") or ""
    salt = body.get("cache_salt") or ""
    for name, value in (("rid", rid), ("extra_key", extra_key), ("cache_salt", salt)):
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, got {value!r}")
    return GenerateRequest(
        rid=rid,
        prompt_ids=np.array(ids, dtype=np.int32),
        params=params,
        return_logprob=bool(body.get("return_logprob")),
        stream=bool(body.get("stream")),
        extra_key=f"{salt}\n{extra_key}" if salt else extra_key,
        routes_from=_routes_from(body, experts),
    )


def _routes_from(body: Mapping[str, Any], experts: bool) -> int | None:
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len") or 0
    if not experts or type(start) is not int or start < 0:
        came = f"routed_experts_start_len {start!r}" if experts else "a dense model"
        raise ConfigError(f"return_routed_experts: wanted a mixture and a position from 0, got {came}: leave it out")
    return start


def _sampling(body: Mapping[str, Any], num_prompt: int, context_length: int) -> SamplingParams:
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise ConfigError(f"sampling_params must be an object, got {sampling!r}")
    params = parse_sampling(sampling)
    asked = sampling.get("max_new_tokens")
    # The default is cut to what fits, as SGLang does; a number the client names is not.
    if asked is not None and num_prompt + asked > context_length:
        raise ConfigError(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens: "
            f"{num_prompt} tokens of input and {asked} new ones; ask for fewer new tokens"
        )
    return params


def reply(
    sequence: Sequence, *, return_logprob: bool, weight_version: str, routes_from: int | None = None
) -> dict[str, Any]:
    """The cumulative reply as it stands now; whole once its finish_reason is not null."""
    reason, num = sequence.snapshot()
    ids = sequence.output_ids[:num]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": reason,
        "prompt_tokens": len(sequence.prompt_ids),
        "completion_tokens": num,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": weight_version,
        # SGLang gives the spans at the end only; a reader of a stream that breaks off is better off with them always.
        "weight_versions": sequence.spans(num, weight_version),
        "num_retractions": sequence.num_retractions,
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs[:num], ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = num
    if reason is not None and routes_from is not None and sequence.routes is not None:
        meta["routed_experts"] = base64.b64encode(sequence.routes[routes_from:].tobytes()).decode()
    if reason is not None:
        meta["e2e_latency"] = (sequence.finished_at or time.monotonic()) - sequence.arrived_at
    return {"output_ids": ids, "meta_info": meta}
