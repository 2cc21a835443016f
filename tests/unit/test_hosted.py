"""Usage of hosted APIs in one form, and its cost from a dated table."""

import json
from pathlib import Path

import pytest

from gyre_data.errors import ConfigError
from gyre_data.hosted import HostedUsage, Prices, hosted, usage_of
from gyre_data.schema import Author, CallStatus
from gyre_data.show.numbers import dollars
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_data.verify import verify
from tests.support.rows import call_row, output_node, prompt_node

ANTHROPIC = {
    "input_tokens": 10,
    "cache_read_input_tokens": 1000,
    "cache_creation_input_tokens": 300,
    "cache_creation": {"ephemeral_5m_input_tokens": 200, "ephemeral_1h_input_tokens": 100},
    "output_tokens": 50,
    "service_tier": "standard",
}


@pytest.mark.parametrize(
    ("wire", "block", "wanted"),
    [
        (
            "anthropic",
            ANTHROPIC,
            HostedUsage(input=10, cache_read=1000, cache_write=200, cache_write_1h=100, output=50),
        ),
        (
            "openai_chat",
            {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}},
            HostedUsage(input=36, cache_read=64, output=7),
        ),
        (
            "openai_responses",
            {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}},
            HostedUsage(input=36, cache_read=64, output=7),
        ),
        ("anthropic", {"input_tokens": None, "output_tokens": "5", "cache_creation": []}, HostedUsage()),
    ],
)
def test_usage_of_each_wire_has_one_form(wire: str, block: dict[str, object], wanted: HostedUsage) -> None:
    assert usage_of(wire, block) == wanted


def test_cost_is_the_list_price_of_each_kind_of_token() -> None:
    price = Prices.load().of("claude-opus-4-5-20251101")
    assert price is not None
    used = usage_of("anthropic", ANTHROPIC)
    assert price.cost(used) == pytest.approx((10 * 5 + 1000 * 0.5 + 200 * 6.25 + 100 * 10 + 50 * 25) / 1e6)


@pytest.mark.parametrize("name", ["gpt-4o", "gpt-4o-2024-11-20", "openai/gpt-4o", "GPT-4o"])
def test_a_dated_or_prefixed_name_is_the_same_model(name: str) -> None:
    prices = Prices.load()
    assert prices.of(name) == prices.models["gpt-4o"]


@pytest.mark.parametrize("name", ["gpt-4o-audio", "claude-opus-99", "unnamed", ""])
def test_an_unknown_model_has_no_price(name: str) -> None:
    assert Prices.load().of(name) is None


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("[a]\nm = [1, 2, 3]\n", "date = YYYY-MM-DD"),
        ("date = 2026-01-01\n[a]\nm = [1, 2]\n", "dollars per million"),
        ("date = 2026-01-01\n[a]\nm = [1, -2, 3]\n", "dollars per million"),
        ("date = 2026-01-01\nm = 3\n", "tables of models"),
        ("date = ", "cannot be read"),
    ],
)
def test_a_wrong_price_table_says_what_is_wanted(tmp_path: Path, text: str, mend: str) -> None:
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(ConfigError, match=mend):
        Prices.load(tmp_path / "prices.toml")


def test_an_own_table_prices_what_the_release_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("date = 2026-01-01\n[own]\nbig = [1, 2, 0.5]\n")
    price = Prices.load(tmp_path / "prices.toml").of("big")
    assert price is not None
    assert price.cost(HostedUsage(cache_write=1_000_000, cache_write_1h=1_000_000)) == 2.0


def test_a_run_adds_up_what_is_priced_and_names_what_is_not(tmp_path: Path) -> None:
    prompt = prompt_node("n_1", "c_1", num_tokens=0, counted_tokens=12)
    first = output_node(
        "n_2",
        "c_1",
        prompt,
        0,
        counted_tokens=5,
        start_pos=12,
        author=Author.PROVIDER,
        logprobs=None,
        policy_versions=None,
    )
    hosted_call = {"upstream": "https://api.example", "wire": "anthropic", "attempts": ()}
    used = {"provider_usage": json.dumps(ANTHROPIC)}
    calls = [
        call_row(
            "c_1",
            prompt,
            first,
            prompt_tokens=12,
            output_tokens=5,
            served_model="claude-opus-4-5",
            **used,
            **hosted_call,
        ),
        call_row("c_2", prompt, None, prompt_tokens=12, served_model="odd", **used, **hosted_call),
        call_row("c_3", prompt, None, prompt_tokens=12, status=CallStatus.FAILED, **hosted_call),
    ]
    with RunWriter(tmp_path / "run") as writer:
        writer.write([prompt, first, *calls])
    run = open_run(tmp_path / "run")
    found = hosted(run)
    assert found is not None
    assert (found.calls, found.unknown_usage, dict(found.unpriced)) == (3, 1, {"odd": 1})
    assert found.usage.cache_read == 2000
    assert found.cost == pytest.approx(0.00405)
    assert found.prices_day == Prices.load().day.isoformat()
    assert verify(tmp_path / "run").problems == ()
    assert run["e_1"].tree.num_tokens == 17


def test_a_run_of_own_engines_has_no_bill(tmp_path: Path) -> None:
    prompt = prompt_node("n_1", "c_1")
    output = output_node("n_2", "c_1", prompt)
    with RunWriter(tmp_path / "run") as writer:
        writer.write([prompt, output, call_row("c_1", prompt, output)])
    assert hosted(open_run(tmp_path / "run")) is None


def test_a_node_has_ids_or_a_count(tmp_path: Path) -> None:
    prompt = prompt_node("n_1", "c_1", num_tokens=3, counted_tokens=3)
    with RunWriter(tmp_path / "run") as writer:
        writer.write([prompt, call_row("c_1", prompt, None)])
    assert ["local count" in problem.detail for problem in verify(tmp_path / "run").problems] == [True]


@pytest.mark.parametrize(
    ("value", "text"), [(14.2, "$14"), (3.214, "$3.21"), (0.0042, "$0.0042"), (0, "$0.00"), (None, "-")]
)
def test_money_is_short(value: float | None, text: str) -> None:
    assert dollars(value) == text
