"""Evaluator of the client tests: the second execution of a group is the better one."""

import json
import os
from pathlib import Path

verdict = {"value": float(os.environ["GYRE_SAMPLE_INDEX"]), "partial": False, "detail": None}
Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))
