"""Harbor's task folders (Terminal-Bench's too) as tasks: `gyre run -p FOLDER`. Harbor itself is not needed.

A task folder holds task.toml, instruction.md, environment/ (a Dockerfile, unless task.toml names an image) and tests/.
The harness runs in the task's container, with the image's working folder; then tests/ is copied in, tests/test.sh runs
there, and /logs/verifier/reward.txt or reward.json is the score. Containers are `docker`'s, on the host's network, so
that the harness reaches the proxy; networks that a task forbids are not cut off.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError

from .container import Container
from .tasks import Task

__all__ = ["load_harbor", "verify"]

_TIMEOUT_S = 600.0
_UP = (
    'if [ -n "$2" ]; then docker build --quiet --tag "$1" "$2" || exit; fi; '
    'image=$1; name=$3; shift 3; exec docker run --detach --name "$name" --network host "$@" "$image" sleep infinity'
)


def load_harbor(folder: Path) -> tuple[Task, ...]:
    """Read a task folder, or all that lie directly in a folder; no task at all gives an empty result."""
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    return tuple(_task(path) for path in folders if (path / "task.toml").is_file())


def _task(folder: Path) -> Task:
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        prompt = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder}: wanted a Harbor task with task.toml and instruction.md, got {error}") from None
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: wanted tests/test.sh, which judges the task, found none")
    image, build = _section(config, "environment").get("docker_image"), folder / "environment"
    if image is None and not (build / "Dockerfile").is_file():
        raise ConfigError(f"{folder}: wanted environment/Dockerfile or environment.docker_image, found neither")
    if (build / "docker-compose.yaml").is_file():
        raise ConfigError(f"{folder}: tasks of several containers (docker-compose.yaml) are not supported")
    name = "{name}"
    up = ["sh", "-c", _UP, "up", image or f"gyre-harbor-{folder.name.lower()}", "" if image else str(build), name]
    return Task(
        id=folder.name,
        prompt=prompt,
        folder=folder.resolve(),
        timeout_s=_seconds(config, "agent", folder),
        overall_timeout_s=_seconds(config, "agent", folder) + _build_seconds(config),
        evaluator_timeout_s=_seconds(config, "verifier", folder),
        evaluator=(sys.executable, "-m", "gyre_proxy.launch.harbor", name, str(folder.resolve() / "tests")),
        evaluator_outside=True,
        container=Container(
            up=(*up, *_limits(_section(config, "environment"))),
            exec=("docker", "exec", "{env}", name),
            down=("docker", "rm", "--force", name),
        ),
    )


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    return found if isinstance(found, dict) else {}


def _seconds(config: dict[str, Any], section: str, folder: Path) -> float:
    value = _section(config, section).get("timeout_sec", _TIMEOUT_S)
    if not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{folder}/task.toml: {section}.timeout_sec: wanted seconds above 0, got {value!r}")
    return float(value)


def _build_seconds(config: dict[str, Any]) -> float:
    value = _section(config, "environment").get("build_timeout_sec", _TIMEOUT_S)
    return float(value) if isinstance(value, int | float) else _TIMEOUT_S


def _limits(environment: dict[str, Any]) -> list[str]:
    """Flags of `docker run` for what the task may use."""
    flags = ["--cpus", str(environment["cpus"])] if "cpus" in environment else []
    memory = environment.get("memory") or (f"{environment['memory_mb']}m" if "memory_mb" in environment else None)
    return [*flags, *(["--memory", str(memory).lower()] if memory else [])]


def verify(container: str, tests: Path) -> dict[str, Any]:
    """Run a task's tests in its container and read the reward; ConfigError says why there is none.

    What the harness may have left in their places is removed first, so that it cannot judge itself.
    """
    _docker("exec", container, "rm", "-rf", "/tests", "/logs/verifier")
    _docker("exec", container, "mkdir", "-p", "/tests", "/logs/verifier")
    _docker("cp", f"{tests}/.", f"{container}:/tests")
    ran = subprocess.run(["docker", "exec", container, "bash", "/tests/test.sh"], check=False)
    for name in ("reward.json", "reward.txt"):
        found = subprocess.run(
            ["docker", "exec", container, "cat", f"/logs/verifier/{name}"], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            value, detail = _reward(found.stdout, name)
            return {"value": value, "partial": value not in (0.0, 1.0), "detail": detail}
    raise ConfigError(f"tests/test.sh exited {ran.returncode} and wrote neither reward.json nor reward.txt")


def _docker(*words: str) -> None:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"docker {words[0]} exited {done.returncode}: {done.stderr.strip()[-300:]}")


def _reward(text: str, name: str) -> tuple[float, Any]:
    """The reward, and all that was told: of several named ones it is `reward`, or the only one there is."""
    try:
        told = json.loads(text)
        values = told if isinstance(told, dict) else {"reward": told}
        value = float(values["reward"] if "reward" in values else next(iter(values.values())))
    except (ValueError, TypeError, StopIteration) as error:
        raise ConfigError(f"{name}: wanted a number, or an object with reward, got {text[:80]!r} ({error})") from None
    if not math.isfinite(value) or ("reward" not in values and len(values) > 1):
        raise ConfigError(f"{name}: wanted one finite reward, got {text[:80]!r}; name one of them reward")
    return value, told


def _main() -> int:
    container, tests = sys.argv[1:]
    try:
        verdict = verify(container, Path(tests))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
