"""What the site takes from outside docs/: pages of the repository's root, references from the code, files linked to.

Nothing is written twice: README.md is the home page, docstrings and `--help` are the references.
"""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import gyre_data
import gyre_proxy
import gyre_train
from gyre_data import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# A page of the site: the file of the repository that it is.
ROOT_PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "notices.md": "THIRD_PARTY_NOTICES.md",
}
SCHEDULER = ("api", "actions", "policies", "simulate", "experiment", "invariants", "controller")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the source files that pages link to."""
    made = {page: (ROOT / source).read_text() for page, source in ROOT_PAGES.items()}
    made["reference/commands.md"] = _commands()
    made["reference/gyre_data.md"] = _names(gyre_data, gyre_data._EXPORTS)
    made["reference/gyre_proxy.md"] = _names(gyre_proxy, gyre_proxy._HOME)
    made["reference/gyre_train.md"] = _names(gyre_train, gyre_train._HOME)
    made["reference/gyre_sched.md"] = _modules("gyre_sched", SCHEDULER)
    made["schemas.md"] = _schemas()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_name("site.css"))))
    linked = {path for file in files.documentation_pages() for path in _linked(file) if path.is_file()}
    for path in sorted(path for path in linked if not path.is_relative_to(DOCS) and _page_of(path) is None):
        uri = f"source/{path.relative_to(ROOT)}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links that are right in the repository at their places in the site."""

    def moved(link: re.Match[str]) -> str:
        target = (_home(page.file) / link[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]  # a page that is made here, or a broken link, which the build reports
        if target.is_relative_to(DOCS) and target.is_file():
            uri = str(target.relative_to(DOCS))
        else:
            uri = _page_of(target) or f"source/{target.relative_to(ROOT)}"
        return os.path.relpath(uri, Path(page.file.src_uri).parent) + (link[2] or "")

    return LINK.sub(moved, markdown)


def _home(file: File) -> Path:
    """The folder that a page's links start from."""
    return ROOT if file.src_uri in ROOT_PAGES else (DOCS / file.src_uri).parent


def _linked(file: File) -> Iterator[Path]:
    for link in LINK.finditer(file.content_string):
        yield (_home(file) / link[1]).resolve()


def _page_of(path: Path) -> str | None:
    """The page of the site that shows a file or folder outside docs/."""
    pages = {ROOT / source: page for page, source in ROOT_PAGES.items()}
    return {**pages, ROOT / "schemas": "schemas.md", DOCS / "adr": "adr/0001-layout-and-names.md"}.get(path)


def _names(package: ModuleType, homes: dict[str, str]) -> str:
    """The public names of a package that loads them lazily."""
    entries = [f"::: {package.__name__}.{homes[name]}.{name}" for name in sorted(homes)]
    return "\n\n".join([f"# {package.__name__}", inspect.cleandoc(package.__doc__ or ""), *entries])


def _modules(package: str, names: tuple[str, ...]) -> str:
    return "\n\n".join([f"# {package}", *(f"::: {package}.{name}" for name in names)])


def _schemas() -> str:
    rows = [f"- [`{path.name}`](../schemas/{path.name})" for path in sorted((ROOT / "schemas").glob("*.json"))]
    about = "Columns, types and meaning of every table, and the proxy's HTTP API, as the code declares them."
    return f"# Schemas\n\n{about}\n\n" + "\n".join(rows)


def _commands() -> str:
    """`--help` of every command as a page."""
    parts = ["# Commands", "What `gyre COMMAND --help` says. Exit status 2 is wrong use."]
    for name in main.COMMANDS:
        command = main._load(name)
        parts += [f"## gyre {name}", inspect.cleandoc(command.help or "")]
        words = command.collect_usage_pieces(command.context_class(command))
        parts.append("```text\n" + " ".join([f"gyre {name}", *words]) + "\n```")
        options = [one for one in command.params if one.param_type_name == "option"]
        if options:
            parts.append("| option | |\n| --- | --- |\n" + "\n".join(map(_option, options)))
    return "\n\n".join(parts)


def _option(option: Any) -> str:
    text = (option.help or "").replace("|", "\\|").replace("\n", " ")
    return f"| {', '.join(f'`{name}`' for name in option.opts + option.secondary_opts)} | {text} |"
