"""The page as one HTML text: template, style and script in one, with or without a run's data in it.

The script is a handful of ES modules that a browser could load as they are. They are linked here instead, since a
report is a single file and its policy allows exactly one script: each module becomes a function that returns what it
exports. Only `import { a, b } from "./x.js"` and `export` before a declaration are used, and anything else is refused.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Chunk", "link", "page", "policy"]

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|class|const) ([\w$]+)", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a run's data in a report: deflated bytes under a name."""

    name: str
    data: bytes


def page(chunks: Iterable[Chunk] | None = None, *, title: str = "gyre view") -> Iterator[str]:
    """The page in pieces, so that a large report never stands in memory whole; without chunks it asks its server."""
    script, style = link("main"), _asset("style.css")
    head, body = _asset("page.html").split("<!-- data -->")
    served = chunks is None
    yield (
        head.replace("{policy}", html.escape(policy(served=served), quote=False))
        .replace("{source}", "served" if served else "report")
        .replace("{style}", style)
        .replace("{title}", html.escape(title))
    )
    for chunk in chunks or ():
        text = base64.b64encode(chunk.data).decode("ascii")
        yield f'<script type="application/x-gyre" id="data:{html.escape(chunk.name)}">{text}</script>\n'
    yield body.replace("{script}", script)


def policy(*, served: bool) -> str:
    """Content-Security-Policy: our own script and style by their hash; a report may reach nothing at all."""
    script, style = _hash(link("main")), _hash(_asset("style.css"))
    reach = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src {reach}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def link(entry: str) -> str:
    """The script of module `entry` with everything it imports, each module once, in order of need."""
    done: dict[str, str] = {}
    _link(entry, done, ())
    return '"use strict";\n' + "".join(done.values())


def _link(name: str, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in done:
        return
    if name in above:
        raise ValueError(f"modules import each other in a circle: {' > '.join((*above, name))}")
    source = _asset(f"{name}.js")
    for _, needed in _IMPORT.findall(source):
        _link(needed, done, (*above, name))
    names = [found for _, found in _EXPORT.findall(source)]
    body = _IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_variable(m[2])};\n", source)
    body = _EXPORT.sub(r"\1 \2", body)
    if left := _LEFT_OVER.search(body):
        raise ValueError(
            f'{name}.js: wanted `import {{ a }} from "./x.js";` or `export` before a declaration, got {left[0]!r}'
        )
    done[name] = f"const {_variable(name)} = (() => {{\n{body}return {{ {', '.join(names)} }};\n}})();\n"


def _variable(name: str) -> str:
    return "module_" + name.replace("-", "_")


@cache
def _asset(name: str) -> str:
    return files("gyre_data.view").joinpath("assets", name).read_text(encoding="utf-8")
