"""A stand-in for the docker client: a container is a folder of $BOXES, whose /tests, /logs and /app are folders in it.

Absolute paths of commands, and of shell scripts that are copied in, are led there. An image is an empty folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

boxes = Path(os.environ["BOXES"])
verb, *rest = sys.argv[1:]
with (boxes / "log").open("a") as log:
    log.write(json.dumps([verb, *rest]) + "\n")


def inside(box: Path, text: str) -> str:
    return re.sub(r"(?<![\w/])/(tests|logs|app)\b", lambda found: f"{box}/{found[1]}", text)


if verb == "build":
    (boxes / rest[2]).mkdir(exist_ok=True)
elif verb == "run":
    box = boxes / rest[rest.index("--name") + 1]
    assert (boxes / rest[-3]).is_dir() or rest[-3] == "python:3.11", f"no image {rest[-3]}"
    (box / "app").mkdir(parents=True)
elif verb == "exec":
    passed = []
    while rest[0] == "--env":
        passed, rest = [*passed, rest[1]], rest[2:]
    box, words = boxes / rest[0], rest[1:]
    env = {"PATH": os.environ["PATH"], **{name: os.environ[name] for name in passed}}
    done = subprocess.run([inside(box, word) for word in words], cwd=box / "app", env=env, check=False)
    sys.exit(done.returncode)
elif verb == "cp":
    source, (name, _, target) = rest[0], rest[1].partition(":")
    box = boxes / name
    shutil.copytree(source.removesuffix("/."), f"{box}{target}", dirs_exist_ok=True)
    for script in Path(f"{box}{target}").glob("*.sh"):
        script.write_text(inside(box, script.read_text()))
elif verb == "rm":
    shutil.rmtree(boxes / rest[-1], ignore_errors=True)
