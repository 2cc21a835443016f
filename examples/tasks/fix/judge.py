"""Judge a workspace by hidden tests: python judge.py FOLDER. The score is the share of tests that pass.

The tests run in a copy of the workspace, with the standard library's unittest. Code that cannot be imported fails
every test of its file, which is a score of 0: the harness wrote it. What is wrong with the judge itself (no tests at
all) exits 1, which is a failed evaluator and no score.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

hidden = Path(sys.argv[1])
num_tests = sum(len(re.findall(r"^\s*def test_", file.read_text(), re.MULTILINE)) for file in hidden.glob("test_*.py"))
if not num_tests:
    sys.exit(f"wanted test_*.py with tests in {hidden}, found none")
with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder) / "work"
    shutil.copytree(os.environ["GYRE_WORKSPACE"], copy, symlinks=True)
    shutil.copytree(hidden, copy, dirs_exist_ok=True)
    names = [file.stem for file in sorted(hidden.glob("test_*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", *names],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
passed = len(re.findall(r"\.\.\. ok$", done.stderr, re.MULTILINE))
value = min(1.0, passed / num_tests)
verdict = {"value": value, "partial": value < 1, "detail": f"{passed} of {num_tests} hidden tests pass"}
Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))
