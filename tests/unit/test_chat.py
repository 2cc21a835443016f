"""Chat files: every assistant turn is trained once, after exactly the prompt it would see."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_data.errors import ConfigError, DataError
from gyre_train.chat import chat_tree, read_chat, read_tokenizer
from tests.support.training import chat_file, tiny_model

# Thoughts are printed for the last turn only, as Qwen3's own template does.
FORGETS = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.thought and loop.last %}{{- '<think>' + message.thought + '</think>' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_tokenizer(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def turns(tokenizer: Any, tree: Any) -> list[tuple[str, str]]:
    """(prompt, trained turn) of every owned node, in the order of the conversation."""
    found = []
    for t in tree.trajectories:
        for node in t.owned_O:
            place = list(t.path_P).index(node)
            above = [tree.ids[i] for i in t.path_P[:place]]
            found.append((int(node), tokenizer.decode(np.concatenate(above)), tokenizer.decode(tree.ids[node])))
    return [(prompt, turn) for _, prompt, turn in sorted(found)]


def test_turns_are_trained_with_their_stop_token_after_their_own_prompt(tokenizer: Any, tmp_path: Path) -> None:
    first, second = read_chat(chat_file(tmp_path / "c.jsonl", "hello", "brown fox"))
    tree = chat_tree(first, tokenizer, [tokenizer.eos_token_id], 7)
    assert tree.execution == 7
    call, answer = turns(tokenizer, tree)
    assert call == (
        "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n",
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    )
    assert answer[1] == "hello<|im_end|>"
    whole = tokenizer.apply_chat_template(list(first.messages), tokenize=False)
    assert answer[0] + answer[1] + "\n" == whole
    assert len(tree.trajectories) == 1  # one row: the second turn goes on from the first
    (only,) = turns(tokenizer, chat_tree(second, tokenizer, [tokenizer.eos_token_id], 0))
    assert only[1] == "brown fox<|im_end|>"


def test_a_template_that_rewrites_turns_makes_branches(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", FORGETS)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thought": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thought": "so"},
    ]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}))
    (conversation,) = read_chat(tmp_path / "c.jsonl")
    tree = chat_tree(conversation, tokenizer, [tokenizer.eos_token_id], 0)
    assert len(tree.trajectories) == 2
    first, second = turns(tokenizer, tree)
    assert first[1] == "<think>hm</think>b<|im_end|>"
    assert second[0].endswith("assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert second[1] == "<think>so</think>d<|im_end|>"
    trained = [tokenizer(turn, add_special_tokens=False)["input_ids"] for _, turn in (first, second)]
    assert tree.num_owned == sum(map(len, trained))


def test_ids_depend_on_content_only_and_repeats_are_told_apart(tmp_path: Path) -> None:
    path = chat_file(tmp_path / "c.jsonl", "x", "y")
    names = [c.execution_id for c in read_chat(path)]
    path.write_text(path.read_text() + "\n" + path.read_text())
    again = [c.execution_id for c in read_chat(path)]
    assert again == [*names, *(f"{name}_2" for name in names)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"c\.jsonl:2: wanted a JSON object"),
        ('{"text": "x"}', 'list "messages", got KeyError'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "wanted an assistant message to train on"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = chat_file(tmp_path / "c.jsonl", "x")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_chat(path))


def test_a_missing_file_or_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        list(read_chat(tmp_path / "none.jsonl"))
    folder = tiny_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"add chat_template\.jinja"):
        read_tokenizer(folder)


def test_a_turn_of_weight_0_is_context(tokenizer: Any, tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (one,) = read_chat(tmp_path / "c.jsonl")
    ((prompt, turn),) = turns(tokenizer, chat_tree(one, tokenizer, [tokenizer.eos_token_id], 0))
    assert "b" in prompt
    assert turn.startswith("d")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said[:3]}) + "\n")
    with pytest.raises(DataError, match="assistant message"):
        list(read_chat(tmp_path / "c.jsonl"))
