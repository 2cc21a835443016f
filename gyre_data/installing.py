"""The command that installs what is missing, from where this installation came."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import unquote

__all__ = ["DISTRIBUTION", "pip_install"]

DISTRIBUTION = "gyre-rl"


def pip_install(extra: str = "") -> str:
    """What to type for an extra: a path where pip was given a checkout or a file, else the distribution's name."""
    wanted = f"[{extra}]" if extra else ""
    source = _source()
    if source is None:
        return f"pip install '{DISTRIBUTION}{wanted}'" if wanted else f"pip install {DISTRIBUTION}"
    path, editable = source
    return f"pip install {'-e ' if editable else ''}'{path}{wanted}'"


def _source() -> tuple[str, bool] | None:
    """The local folder or file that was installed, and whether it is used in place; None where it was an index."""
    try:
        told = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = str(told.get("url", ""))
    if not url.startswith("file://"):
        return None
    return unquote(url.removeprefix("file://")), bool(told.get("dir_info", {}).get("editable"))
