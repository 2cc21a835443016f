"""A harness of some turns: _elastic_harness.py MEMBER TURNS TOKENS PROMPT, with TURNS a JSON list, one of which is its.

It asks, keeps what came in a file, says how many words that were, and asks again. Of each reply that it got whole it
adds a line to `replies.jsonl`: what the audit holds the recording against.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TRIES, _AGAIN_S, _PATIENCE_S = 10, 2.0, 900.0


def ask(messages: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One request, sent again when its connection breaks, as clients do."""
    where = urlsplit(os.environ["GYRE_BASE_URL"])
    body = json.dumps({"model": "policy", "max_tokens": tokens, "messages": messages})
    headers = {"content-type": "application/json", "x-api-key": os.environ["GYRE_KEY"]}
    for left in reversed(range(_TRIES)):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", f"{where.path}/v1/messages", body, headers)
            answer = connection.getresponse()
            told: dict[str, Any] = json.loads(answer.read())
            if answer.status == 200 and told.get("type") == "message":
                return told
            raise ConnectionError(f"wanted a message, got {answer.status} {told}")
        except (OSError, http.client.HTTPException, ValueError):
            if not left:
                raise
            time.sleep(_AGAIN_S)
        finally:
            connection.close()
    raise AssertionError


def main(turns: int, tokens: int, prompt: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    for turn in range(turns):
        told = ask(messages, tokens)
        text = "".join(block.get("text", "") for block in told["content"])
        Path(f"answer-{turn}.txt").write_text(text)
        with Path("replies.jsonl").open("a") as file:
            file.write(json.dumps({"id": told["id"], "tokens": told["usage"]["output_tokens"]}) + "\n")
        messages.append({"role": "assistant", "content": told["content"]})
        messages.append({"role": "user", "content": f"These are {len(text.split())} words. Go on."})


if __name__ == "__main__":
    member, turns_of, most, prompt = sys.argv[1:]
    main(json.loads(turns_of)[int(member) % len(json.loads(turns_of))], int(most), prompt)
