import json

import pytest

from gyre_data.errors import ConfigError
from gyre_data.types import PolicyVersion
from gyre_proxy.engine import EngineInfo
from gyre_proxy.router import Engine
from gyre_proxy.tokenizer_check import check_tokenizer
from tests.support.toy_template import ToyTemplate


class Client:
    url = "http://engine"

    def __init__(self, change=None):
        self._change = change

    async def tokenize(self, text):
        if self._change is None:
            return None
        return self._change(ToyTemplate().encode(text).ids.tolist())


def engine(change=None, **info):
    version = PolicyVersion(policy_id="base", n=0)
    return Engine(client=Client(change), info=EngineInfo(weight_version="base:0", **info), version=version)


def folder(path, vocab, added=()):
    path.mkdir()
    tokens = [{"id": i, "content": text} for text, i in added]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))
    return path


async def test_the_served_tokenizer_is_accepted(tmp_path):
    ours = folder(tmp_path / "a", {"x": 0, "y": 1})
    theirs = folder(tmp_path / "b", {"y": 1, "x": 0})
    padded = engine(lambda ids: ids, vocab_size=512, tokenizer_path=str(theirs))
    await check_tokenizer(ToyTemplate(), padded, ours)
    await check_tokenizer(ToyTemplate(), engine(tokenizer_path="/not/here"), ours)
    await check_tokenizer(ToyTemplate(), engine(), ours)


async def test_a_model_with_fewer_ids_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has 310 ids, the model of engine http://engine 309; nothing recorded"):
        await check_tokenizer(ToyTemplate(), engine(vocab_size=309), tmp_path)


async def test_another_vocabulary_is_refused_with_the_first_difference(tmp_path):
    ours = folder(tmp_path / "a", {"x": 0, "y": 1}, [("<e>", 2)])
    theirs = folder(tmp_path / "b", {"x": 0, "y": 1}, [("<f>", 2)])
    with pytest.raises(ConfigError, match=r"first difference id 2\); nothing recorded; pass the served"):
        await check_tokenizer(ToyTemplate(), engine(vocab_size=512, tokenizer_path=str(theirs)), ours)


@pytest.mark.parametrize("change", [lambda ids: [*ids, 7], lambda ids: [7, *ids[1:]]])
async def test_other_ids_for_the_same_text_are_refused(tmp_path, change):
    with pytest.raises(ConfigError, match="the same text gives other ids from token"):
        await check_tokenizer(ToyTemplate(), engine(change, vocab_size=512), tmp_path)
