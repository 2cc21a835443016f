"""The evaluator of the elastic benchmark: the share of letters in what the harness kept of the replies."""

from __future__ import annotations

import json
import os
from pathlib import Path

if __name__ == "__main__":
    kept = sorted(Path(os.environ["GYRE_WORKSPACE"]).glob("answer-*.txt"))
    text = "".join(file.read_text() for file in kept)
    value = sum(char.isalpha() for char in text) / max(1, len(text))
    Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps({"value": value, "detail": f"{len(text)} characters"}))
