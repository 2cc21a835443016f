"""Template folders, and rendering equal to transformers on templates that use its extras."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from gyre_data.errors import ConfigError
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.template import ChatTemplate, RenderError
from tests.support.driver import assistant, user
from tests.support.qwen3 import qwen3_template

CHATML = (
    "{%- for m in messages -%}<|s|>{{ m.role }}:{{ m.content }}<|e|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|s|>assistant:{%- endif -%}"
)
EXTRAS = """{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- if loop.index0 > 2 %}{% break %}{% endif %}
    {{- m.role }}|{{ m.thinking }}|{{ m.content }}
    {%- for call in m.tool_calls or [] %}{{ call.function | tojson(indent=2) }}{% endfor %}
{% endfor %}
{% generation %}{{ bos_token }}{% endgeneration %}{{ mood }} {{ tools | tojson }} {{ documents is none }}"""


def folder(at: Path, template: str | None = CHATML, **config) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|s|>", "<|e|>", "<x>")]
    )
    tokenizer.save(str(at / "tokenizer.json"))
    config = {"bos_token": {"content": "<|s|>"}, "eos_token": "<x>", **config}
    if template is not None:
        config["chat_template"] = template
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    return at


def test_stop_ids_come_from_configuration_and_from_the_template(tmp_path: Path) -> None:
    at = folder(tmp_path)
    template = ChatTemplate.load(at)
    end, eos = template.encode("<|e|>").ids[0], template.encode("<x>").ids[0]
    assert template.stop_ids == {end, eos}
    (at / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    assert ChatTemplate.load(at).stop_ids == {end, eos, 1}
    assert template.think_ids is None
    assert template.vocab_size == 6


def test_template_file_wins_over_jinja_file_over_configuration(tmp_path: Path) -> None:
    at = folder(tmp_path)
    assert ChatTemplate.load(at).render([user("a")], (), True) == "<|s|>user:a<|e|><|s|>assistant:"
    (at / "chat_template.jinja").write_text("jinja")
    assert ChatTemplate.load(at).render([user("a")], (), True) == "jinja"
    other = tmp_path / "other"
    other.write_text("other {{ mood }}")
    assert ChatTemplate.load(at, other, {"mood": "good"}).render([user("a")], (), True) == "other good"


def test_named_templates(tmp_path: Path) -> None:
    pair = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = ChatTemplate.load(folder(tmp_path, pair))
    assert template.render([user("a")], (), True) == "plain"
    assert template.render([user("a")], ({"x": 1},), True) == "with tools"


def test_the_fingerprint_follows_everything_that_changes_ids(tmp_path: Path) -> None:
    at = folder(tmp_path)
    day, next_day = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    plain = ChatTemplate.load(at, now=day).fingerprint
    assert ChatTemplate.load(at, now=next_day).fingerprint == plain
    assert ChatTemplate.load(at, kwargs={"enable_thinking": False}).fingerprint != plain
    dated = tmp_path / "dated"
    dated.write_text("{{ strftime_now('%d %B') }}")
    one, two = ChatTemplate.load(at, dated, now=day), ChatTemplate.load(at, dated, now=next_day)
    assert one.render([user("a")], (), True) == "01 January"
    assert len({plain, one.fingerprint, two.fingerprint}) == 3


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*point --tokenizer at"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ConfigError, match="pass one with --template FILE"):
        ChatTemplate.load(folder(tmp_path, None))
    with pytest.raises(ConfigError, match="check --template"):
        ChatTemplate.load(folder(tmp_path), tmp_path / "nowhere")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="download the file again"):
        ChatTemplate.load(tmp_path)


def test_a_refusal_of_the_template_is_the_requests_fault(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(EXTRAS)
    template = ChatTemplate.load(folder(tmp_path), tmp_path / "t")
    with pytest.raises(RenderError, match=r"\(system\): no system; send roles"):
        template.render([Message(role="system", content="x")], (), True)
    (tmp_path / "t").write_text("{%- macro down(x) %}{{ down(x) }}{% endmacro %}{{ down(tools) }}")
    with pytest.raises(RenderError, match="recursion"):
        ChatTemplate.load(folder(tmp_path), tmp_path / "t").render([user("q")], (), True)


def test_rendering_equals_transformers(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (tmp_path / "t").write_text(EXTRAS)
    template = ChatTemplate.load(folder(tmp_path), tmp_path / "t", {"mood": "<&'é>"})
    call = ToolCall(name="f", arguments={"b": "é<", "a": 1.0}, id="i")
    chat = [user("q"), assistant("x", call, reasoning="why"), user("y"), user("never")]
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c'"}}]
    shown = [message.for_template() for message in chat]
    shown[1] = {"thinking": "why", **shown[1]}
    text, _ = render_jinja_template(
        [shown], tools=tools, chat_template=EXTRAS, add_generation_prompt=True, bos_token="<|s|>", mood="<&'é>"
    )
    assert template.render(chat, tools, True) == text[0]


def test_offsets_count_characters() -> None:
    template = qwen3_template()
    text = "héllo 🤖🤖<|im_end|>\nzß"
    encoded = template.encode(text)
    assert template.decode(encoded.ids) == text
    assert all(one <= two for one, two in zip(encoded.starts, encoded.starts[1:], strict=False))
    stop = encoded.ids.tolist().index(151645)
    assert text[encoded.starts[stop] :].startswith("<|im_end|>")
    assert template.stop_ids == {151645}
