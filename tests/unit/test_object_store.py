"""Runs behind a URL: what is sealed reads as on the disk, nothing is fetched before it is wanted."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import fsspec
import pytest

import gyre_data
from gyre_data.compact import compact
from gyre_data.errors import ConfigError, CorruptError
from gyre_data.object_store import remote_url
from gyre_data.pins import tag
from gyre_data.removal import remove
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter, find_run
from tests.support.rows import one_execution
from tests.unit.test_compact import content


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def made(path: Path) -> Path:
    with RunWriter(path) as writer:
        writer.update_info({"policy": "base"})
        writer.put_blob(b"some words " * 20)
        writer.write(one_execution("e_1"))
        writer.write(one_execution("e_2"))
    return path


def put(path: Path, fs, root: str) -> None:
    """As docs/folder.md says: segments first, manifests last."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != "lock")
    for file in sorted(files, key=lambda p: p.parent.name == "manifest"):
        fs.pipe_file(f"{root}/{file.relative_to(path)}", file.read_bytes())


def same(url: str, path: Path) -> None:
    run = gyre_data.open(url)
    for name in TABLES:
        assert run.table(name).equals(gyre_data.open(path).table(name)), name
    assert run.info["policy"] == "base"
    assert run["e_1"].main.token_ids.tolist() == gyre_data.open(path)["e_1"].main.token_ids.tolist()


def test_in_memory(tmp_path, memory):
    path = made(tmp_path / "run")
    put(path, memory, "/runs/a")
    same("memory://runs/a", path)
    same(str(find_run(Path("memory://runs/a"))), path)  # what a command line gives
    run = gyre_data.open("memory://runs/a")
    blob = run.table("blobs").column("blob_id")[0].as_py()
    assert run.blob(blob) == b"some words " * 20


def test_a_version_a_removal_and_a_later_manifest(tmp_path, memory):
    path = made(tmp_path / "run")
    tag(path, "v1")
    put(path, memory, "/runs/a")
    run = gyre_data.open("memory://runs/a")
    assert not run.refresh()
    assert not run.wait(0.01)
    remove(path, ["e_1"])
    compact(path, cold=True)
    put(path, memory, "/runs/a")
    assert run.wait(60)
    assert run.table("calls").num_rows == 3
    assert gyre_data.open("memory://runs/a@v1").table("calls").num_rows == 6
    with pytest.raises(ConfigError, match="wanted the tag v2"):
        gyre_data.open("memory://runs/a@v2")


def test_only_what_is_wanted_is_fetched(tmp_path, memory, monkeypatch):
    path = made(tmp_path / "run")
    put(path, memory, "/runs/a")
    fetched = []
    real = type(memory).cat_file
    monkeypatch.setattr(type(memory), "cat_file", lambda self, p, **k: (fetched.append(p), real(self, p, **k))[1])
    run = gyre_data.open("memory://runs/a")
    run.table("scores")
    assert [name.split("/")[-2] for name in fetched] == ["manifest", "scores"]


def test_damage_and_absence_are_told(tmp_path, memory):
    path = made(tmp_path / "run")
    put(path, memory, "/runs/a")
    (name,) = (name for name in memory.find("/runs/a/nodes") if name.endswith(".arrow"))
    data = memory.cat_file(name)
    memory.pipe_file(name, data[:900] + b"\x01" + data[901:])
    with pytest.raises(CorruptError, match=r"memory://runs/a/nodes/.*CRC-32"):
        gyre_data.open("memory://runs/a").table("nodes")
    memory.rm_file(name)
    with pytest.raises(CorruptError, match="copy it there"):
        gyre_data.open("memory://runs/a").table("nodes")
    with pytest.raises(ConfigError, match="found no manifest"):
        gyre_data.open("memory://runs/none")
    with pytest.raises(ConfigError, match="URL that fsspec knows"):
        gyre_data.open("nosuch://runs/a")


def test_file_and_http(tmp_path):
    path = made(tmp_path / "run")
    copy = tmp_path / "www" / "run"
    shutil.copytree(path, copy)
    same(f"file://{copy}", path)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "www"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        same(f"http://127.0.0.1:{server.server_port}/run", path)
    finally:
        server.shutdown()
        server.server_close()
    assert content(copy) == content(path)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        (Path("s3://bucket/a"), "s3://bucket/a"),
        (Path("file:///data/a"), "file:///data/a"),
        ("runs/a", None),
        ("/data/a@v1", None),
        ("C:/data", None),
    ],
)
def test_urls(given, url):
    assert remote_url(given) == url
