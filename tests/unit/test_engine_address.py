"""`gyre engine` says where it listens only once it does."""

import socket

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_train.engine.serve import EngineSettings, serve
from gyre_train.tiny import make_tiny


def _refused(folder, port: int) -> str:
    said = []
    with pytest.raises(ConfigError) as caught:
        serve(EngineSettings(model_dir=str(folder)), host="127.0.0.1", port=port, on_bound=lambda: said.append(port))
    assert not said, "nothing is announced that does not hold"
    return str(caught.value)


def test_a_port_that_is_not_to_be_had_is_an_error_with_a_way_out(tmp_path):
    model = make_tiny(tmp_path / "tiny", vocab=512)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "give another --port" in _refused(model, taken.getsockname()[1])
    assert "0-65535" in _refused(model, 99999)


def test_the_weights_of_a_checkpoint_are_named_by_it(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("gyre_train.engine.serve.serve", lambda settings, **_: begun.append(settings.weight_version))
    (tmp_path / "state.json").write_text('{"version": "mine:7", "policy_ids": ["mine"]}')
    for words in ((str(tmp_path),), (str(tmp_path), "--weight-version", "other:1"), ("untrained",)):
        assert CliRunner().invoke(app, ["engine", *words]).exit_code == 0
    assert begun == ["mine:7", "other:1", "base:0"]
