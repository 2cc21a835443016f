"""A stand-in for a container client: box.py FOLDER up NAME | exec NAME [--env NAME ...] -- COMMAND | down NAME.

As a container does, it hides the caller's variables but for those that are passed on. FOLDER/log gets a line a call.
"""

import os
import sys
from pathlib import Path

folder, verb, name, *rest = sys.argv[1:]
with (Path(folder) / "log").open("a") as log:
    log.write(f"{verb} {name}\n")
if verb == "exec":
    cut = rest.index("--")
    passed = [word for word in rest[:cut] if word != "--env"]
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    os.execvpe(rest[cut + 1], rest[cut + 1 :], {**kept, **{key: os.environ[key] for key in passed}, "BOX": name})
