"""`gyre doctor`: what of this machine and installation works, and what to do about the rest.

Each check is a function that looks and changes nothing. A check that finds something wrong says what to do. What is
only needed for some uses (a GPU, RDMA, an engine) is a remark when it is missing, never a failure.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path

from .errors import GyreError
from .installing import DISTRIBUTION, pip_install
from .probe import ask, listens

__all__ = ["Finding", "Level", "doctor"]

_ENGINE = "http://127.0.0.1:30000"
_PORTS = ((8765, "proxy"), (8766, "live page"), (30000, "engine"))
_TESTED_SGLANG = "0.5.23"
_CLIENTS = ("claude", "codex", "opencode", "pi", "qwen", "mini")
_GIB = 1 << 30
_OPTIONAL = ("gpu", "transfer", "cluster", "remote", "log", "dev")
"""Extras whose absence is nobody's loss until they are asked for."""


class Level(StrEnum):
    """How a check came out: `missing` is not there and not needed by everybody."""

    OK = "ok"
    MISSING = "missing"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, and what to do where that is not well."""

    check: str
    level: Level
    found: str
    do: str | None = None


def doctor(
    folder: str | Path = ".", *, engines: Sequence[str] = (), tokenizer: str | Path | None = None
) -> tuple[Finding, ...]:
    """Look at installation, extras, devices, network, engines and the disk under `folder`.

    Engines that are named must answer; without names the usual address is tried. `tokenizer` is compared with each.
    """
    checks: list[Callable[[], Iterable[Finding]]] = [
        _python, _installation, _extras, _gpu, _rdma, _limits, _ports, lambda: _disk(Path(folder)), _clients,
        lambda: _engines(engines, Path(tokenizer) if tokenizer is not None else None),
    ]  # fmt: skip
    return tuple(found for check in checks for found in check())


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        told = "record and inspect are made for Linux and macOS, training for Linux"
        yield Finding(check="python", level=Level.WARN, found=found, do=told)
    else:
        yield Finding(check="python", level=Level.OK, found=found)


def _installation() -> Iterator[Finding]:
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        told = f"{pip_install()}; a checkout runs without, through cli.py"
        yield Finding(check="gyre", level=Level.WARN, found=f"{DISTRIBUTION} is not installed here", do=told)
    else:
        yield Finding(check="gyre", level=Level.OK, found=f"{DISTRIBUTION} {version} in {Path(__file__).parents[1]}")
    try:
        other = metadata.version("gyre")
    except metadata.PackageNotFoundError:
        return
    told = "it is another project, which brings a command of the same name: pip uninstall gyre"
    yield Finding(check="gyre", level=Level.FAIL, found=f"the distribution gyre {other} is installed too", do=told)


def _extras() -> Iterator[Finding]:
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return
    wanted: dict[str, list[str]] = {}
    for line in required:
        text, _, marker = line.partition(";")
        named = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        elsewhere = "sys_platform" in marker and not re.search(rf"sys_platform\s*(==\s*['\"]{sys.platform}|!=)", marker)
        if not elsewhere and not text.startswith(DISTRIBUTION):
            wanted.setdefault(named[1] if named else "", []).append(text.strip())
    for extra, lines in wanted.items():
        wrong = [told for line in lines if (told := _unmet(line))]
        name = f"extra {extra}" if extra else "core"
        if not wrong:
            yield Finding(check=name, level=Level.OK, found=f"{len(lines)} packages")
            continue
        absent = all(told.endswith("is missing") for told in wrong) and extra
        level = Level.MISSING if absent else Level.FAIL
        if extra in _OPTIONAL:
            level = Level.MISSING
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield Finding(check=name, level=level, found=", ".join(wrong[:3]) + more, do=pip_install(extra))


def _unmet(requirement: str) -> str | None:
    """What is wrong with one requirement such as `httpx>=0.28.1,<0.29`; None when it is met."""
    name = re.match(r"[\w.-]+", requirement)
    if name is None:
        return None
    try:
        installed = metadata.version(name[0])
    except metadata.PackageNotFoundError:
        return f"{name[0]} is missing"
    have = _release(installed)
    for sign, number in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", requirement):
        want = _release(number)
        width = max(len(have), len(want))
        a, b = (part + (0,) * (width - len(part)) for part in (have, want))
        held = {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[sign]
        if not held:
            return f"{name[0]} {installed} is not {sign}{number}"
    return None


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _gpu() -> Iterator[Finding]:
    torch = _installed("torch")
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        told = "training runs on the CPU (gloo); a GPU needs its driver, so that nvidia-smi works"
        yield Finding(check="gpu", level=Level.MISSING, found="no NVIDIA GPU that nvidia-smi knows", do=told)
        return
    rows = asked.stdout.strip().splitlines()
    found = f"{len(rows)} x {rows[0]}" if rows else "nvidia-smi names none"
    if torch is not None and "+cpu" in torch:
        told = "install the CUDA build of torch; see docs/training.md, On GPUs"
        yield Finding(check="gpu", level=Level.FAIL, found=f"{found}, but torch {torch} is the CPU build", do=told)
    else:
        yield Finding(check="gpu", level=Level.OK, found=found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _rdma(root: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    devices = sorted(root.iterdir()) if root.is_dir() else []
    if not devices:
        told = 'weights travel by files, broadcast, or Mooncake over TCP (publish.protocol = "tcp")'
        yield Finding(check="rdma", level=Level.MISSING, found="no InfiniBand or RoCE device", do=told)
        return
    for device in devices:
        states = [_first_line(port / "state") for port in sorted((device / "ports").glob("*"))]
        active = sum("ACTIVE" in state for state in states)
        found = f"{device.name}: {active} of {len(states)} ports active"
        do = None if active else "bring the link up; ibstat shows why it is down"
        yield Finding(check="rdma", level=Level.OK if active else Level.WARN, found=found, do=do)
    if find_library("ibverbs") is None:
        told = "install libibverbs1 (rdma-core)"
        yield Finding(check="rdma", level=Level.WARN, found="libibverbs is missing", do=told)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        told = "ulimit -l unlimited, or memlock in limits.conf; containers: --ulimit memlock=-1"
        yield Finding(check="rdma", level=Level.WARN, found=f"only {locked >> 10} KiB can be locked", do=told)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{files:,} open files, {os.cpu_count()} cores"
    if files != resource.RLIM_INFINITY and files < 4096:
        told = "ulimit -n 65536 before `gyre proxy`: each call holds two connections"
        yield Finding(check="limits", level=Level.WARN, found=found, do=told)
    else:
        yield Finding(check="limits", level=Level.OK, found=found)


def _ports() -> Iterator[Finding]:
    for port, what in _PORTS:
        if not listens(port):
            yield Finding(check=f"port {port}", level=Level.OK, found=f"free for the {what}")
            continue
        status = ask(f"http://127.0.0.1:{port}/api/status") or {}
        if "run" in status:
            found = f"a proxy records to {status['run']} (pid {status.get('pid')})"
            yield Finding(check=f"port {port}", level=Level.OK, found=found)
        elif ask(f"http://127.0.0.1:{port}/model_info") is not None:
            yield Finding(check=f"port {port}", level=Level.OK, found="an engine listens there")
        else:
            told = f"give the {what} another --port, or stop what listens there"
            yield Finding(check=f"port {port}", level=Level.WARN, found="somebody else listens there", do=told)


def _disk(folder: Path) -> Iterator[Finding]:
    at = folder.resolve()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    try:
        sync_ms = _sync_ms(at)
    except OSError as error:
        told = "give a folder that can be written, or free some of the disk"
        yield Finding(check="disk", level=Level.FAIL, found=f"{at}: {error.strerror or error}", do=told)
        return
    found = f"{free / _GIB:.1f} GiB free at {at}, a durable write takes {sync_ms:.1f} ms"
    if free < _GIB:
        told = "free some of it: a proxy whose disk is full refuses calls"
        yield Finding(check="disk", level=Level.FAIL, found=found, do=told)
    elif free < 10 * _GIB:
        told = "free some: a million tokens take about 10 MB, a checkpoint up to 16 bytes for each parameter"
        yield Finding(check="disk", level=Level.WARN, found=found, do=told)
    elif sync_ms > 50:
        told = "record to a local disk: each reply waits for one such write before it ends"
        yield Finding(check="disk", level=Level.WARN, found=found, do=told)
    else:
        yield Finding(check="disk", level=Level.OK, found=found)


def _sync_ms(folder: Path, tries: int = 5) -> float:
    """Median time of a 64 KiB write that is on the disk when it returns."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(tries):
            started = time.perf_counter()
            file.write(b"\0" * 65536)
            file.flush()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)[tries // 2]


def _clients() -> Iterator[Finding]:
    found = [name for name in _CLIENTS if shutil.which(name)]
    if found:
        yield Finding(check="clients", level=Level.OK, found=", ".join(found))
    else:
        told = "any program that takes a base URL can be recorded; docs/proxy.md names some"
        yield Finding(check="clients", level=Level.MISSING, found=f"none of {', '.join(_CLIENTS)}", do=told)


def _engines(urls: Sequence[str], tokenizer: Path | None) -> Iterator[Finding]:
    for url in urls or (_ENGINE,):
        model = ask(f"{url.rstrip('/')}/model_info")
        if model is None:
            told = f"start one: gyre engine MODEL_DIR, or SGLang {_TESTED_SGLANG}; or record a hosted API"
            level = Level.FAIL if urls else Level.MISSING
            yield Finding(check="engine", level=level, found=f"none answers at {url}", do=told)
            continue
        yield _version(url, model)
        if tokenizer is not None:
            yield _tokenizer(url, tokenizer)
        else:
            told = "give --tokenizer MODEL_DIR, the served model's folder"
            yield Finding(check="tokenizer", level=Level.MISSING, found=f"not compared with {url}", do=told)


def _version(url: str, model: dict[str, object]) -> Finding:
    server = ask(f"{url.rstrip('/')}/server_info") or {}
    version, weights = server.get("version"), model.get("weight_version") or "default"
    found = f"{url}: {f'SGLang {version}' if version else 'gyre engine'}, weights {weights}"
    if weights == "default":
        told = "start it with --weight-version base:0, or the proxy with --policy NAME: tokens must name their weights"
        return Finding(check="engine", level=Level.WARN, found=found, do=told)
    if isinstance(version, str) and _release(version)[:2] != _release(_TESTED_SGLANG)[:2]:
        told = f"tested with SGLang {_TESTED_SGLANG}; record a few calls and look at `gyre verify` before you trust it"
        return Finding(check="engine", level=Level.WARN, found=found, do=told)
    return Finding(check="engine", level=Level.OK, found=found)


def _tokenizer(url: str, folder: Path) -> Finding:
    try:
        check = import_module("gyre_proxy.engine_check").check_engine
        version = check(url, folder, "base")
    except ModuleNotFoundError as error:
        told = pip_install("proxy")
        return Finding(check="tokenizer", level=Level.WARN, found=f"not compared: no module {error.name}", do=told)
    except (GyreError, OSError) as error:
        found, _, mend = str(error).rpartition("; ")
        return Finding(check="tokenizer", level=Level.FAIL, found=found or mend, do=mend)
    return Finding(check="tokenizer", level=Level.OK, found=f"{folder} is that of {url} ({version})")
