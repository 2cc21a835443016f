"""What is told to be typed for an extra can be typed: the package lies on no index."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from gyre_data.installing import pip_install


@pytest.mark.parametrize(
    ("told", "command"),
    [
        ({"url": "file:///src/my%20copy", "dir_info": {}}, "pip install '/src/my copy[proxy]'"),
        ({"url": "file:///src/gyre", "dir_info": {"editable": True}}, "pip install -e '/src/gyre[proxy]'"),
        ({"url": "file:///w/gyre.whl", "archive_info": {}}, "pip install '/w/gyre.whl[proxy]'"),
        ({"url": "https://git.example/gyre", "vcs_info": {}}, "pip install 'gyre-rl[proxy]'"),
        (None, "pip install 'gyre-rl[proxy]'"),
    ],
)
def test_an_extra_comes_from_where_the_rest_came(
    told: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if told is None else json.dumps(told)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert pip_install("proxy") == command


def test_without_an_installation_the_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert pip_install() == "pip install gyre-rl"
