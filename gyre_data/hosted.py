"""What hosted APIs said they used, and what that costs at list price.

Usage is the provider's own count, read from the block that is recorded as it came. Cost needs a price: a model that the
table does not name has none, and is named instead of guessed.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from .errors import ConfigError
from .json_values import parsed
from .tree import Tables

__all__ = ["Hosted", "HostedUsage", "Price", "Prices", "hosted", "hosted_by_execution", "usage_of"]

_TABLE = Path(__file__).with_name("prices.toml")
_MILLION = 1_000_000
# A date behind a name, and what a client or a gateway puts around it.
_DATED = re.compile(r"-(\d{8}|\d{4}-\d{2}-\d{2}|latest|0)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedUsage:
    """Tokens as a provider counts them; `input` leaves out what was read from or written to its cache."""

    input: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cache_write_1h: int = 0
    output: int = 0
    """Reasoning included."""

    def __add__(self, other: HostedUsage) -> HostedUsage:
        return HostedUsage(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """US dollars per million tokens. A cache write without a price of its own costs what plain input costs."""

    input: float
    output: float
    cache_read: float
    cache_write: float
    cache_write_1h: float

    def cost(self, used: HostedUsage) -> float:
        """US dollars at list price."""
        return math.fsum(getattr(self, name) * getattr(used, name) for name in self.__slots__) / _MILLION


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """A dated price table."""

    day: date
    models: Mapping[str, Price]

    @classmethod
    def load(cls, path: Path | None = None) -> Prices:
        """Read a table; None is the one that came with this release. Raises ConfigError that names the fault."""
        path = path or _TABLE
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"wanted a price table, {path} cannot be read: {error}; see gyre_data/prices.toml"
            ) from error
        day = table.pop("date", None)
        if not isinstance(day, date):
            raise ConfigError(f"{path}: wanted date = YYYY-MM-DD, the day of the prices, got {day!r}; add it")
        table.pop("sources", None)
        models = {name: _price(path, name, row) for rows in table.values() for name, row in _rows(path, rows)}
        return cls(day=day, models=models)

    def of(self, model: str) -> Price | None:
        """Price of a model as it was served, with or without the date of its release behind the name."""
        name = model.rsplit("/", 1)[-1].lower().partition("[")[0]
        return self.models.get(name) or self.models.get(_DATED.sub("", name))


def _rows(path: Path, rows: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(rows, dict):
        raise ConfigError(f"{path}: wanted tables of models, got {rows!r:.80}; see gyre_data/prices.toml")
    return rows.items()


def _price(path: Path, name: str, row: Any) -> Price:
    good = isinstance(row, list) and len(row) in (3, 4, 5) and all(_is_price(value) for value in row)
    if not good:
        raise ConfigError(
            f"{path}: {name}: wanted [input, output, cache read, cache write, 1 h cache write] in dollars per million "
            f"tokens, the last two where they are billed, got {row!r:.80}"
        )
    given, output, cache_read, *writes = (float(value) for value in row)
    short = writes[0] if writes else given
    return Price(
        input=given, output=output, cache_read=cache_read, cache_write=short, cache_write_1h=[short, *writes][-1]
    )


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def usage_of(wire: str, block: Mapping[str, Any]) -> HostedUsage:
    """A provider's usage block in one form. What is not there, or no count, is 0."""
    output = "completion_tokens" if wire == "openai_chat" else "output_tokens"
    if wire == "anthropic":
        written, parts = _count(block, "cache_creation_input_tokens"), block.get("cache_creation")
        hour = _count(parts, "ephemeral_1h_input_tokens")
        return HostedUsage(
            input=_count(block, "input_tokens"),
            cache_read=_count(block, "cache_read_input_tokens"),
            cache_write=max(written - hour, 0),
            cache_write_1h=hour,
            output=_count(block, output),
        )
    given = "prompt_tokens" if wire == "openai_chat" else "input_tokens"
    cached = _count(block.get(f"{given}_details"), "cached_tokens")
    return HostedUsage(input=max(_count(block, given) - cached, 0), cache_read=cached, output=_count(block, output))


def _count(block: Any, name: str) -> int:
    value = block.get(name) if isinstance(block, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosted:
    """Calls to hosted APIs, added up. `cost` is of the priced calls only; `unpriced` counts the others by model."""

    calls: int = 0
    usage: HostedUsage = field(default_factory=HostedUsage)
    cost: float | None = None
    """US dollars; None when no call has a price."""
    unpriced: Counter[str] = field(default_factory=Counter)
    unknown_usage: int = 0
    """Calls without a usage block: failed, cut, or on a wire whose client did not ask for it."""
    prices_day: str = ""

    def __add__(self, other: Hosted) -> Hosted:
        priced = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Hosted(
            calls=self.calls + other.calls,
            usage=self.usage + other.usage,
            cost=math.fsum(priced) if priced else None,
            unpriced=self.unpriced + other.unpriced,
            unknown_usage=self.unknown_usage + other.unknown_usage,
            prices_day=self.prices_day or other.prices_day,
        )


def hosted(run: Tables, prices: Prices | None = None) -> Hosted | None:
    """Hosted usage of a run; None when no call of it went to a hosted API."""
    found = hosted_by_execution(run, prices)
    total = Hosted()
    for one in found.values():
        total = total + one
    return total if found else None


def hosted_by_execution(run: Tables, prices: Prices | None = None) -> dict[str, Hosted]:
    """Hosted usage of each execution that has any."""
    prices = prices or Prices.load()
    names = ("execution_id", "wire", "upstream", "served_model", "provider_usage")
    found: dict[str, Hosted] = {}
    calls = run.table("calls").select(names)
    # An import may know the usage alone.
    told = pc.or_(pc.is_valid(calls.column("upstream")), pc.is_valid(calls.column("provider_usage")))
    for row in calls.filter(told).to_pylist():
        found[row["execution_id"]] = found.get(row["execution_id"], Hosted()) + _of_call(row, prices)
    return found


def _of_call(row: Mapping[str, Any], prices: Prices) -> Hosted:
    day = prices.day.isoformat()
    block = parsed(row["provider_usage"])
    if not isinstance(block, dict):
        return Hosted(calls=1, unknown_usage=1, prices_day=day)
    model, used = row["served_model"] or "unnamed", usage_of(row["wire"], block)
    price = prices.of(model)
    return Hosted(
        calls=1,
        usage=used,
        cost=None if price is None else price.cost(used),
        unpriced=Counter() if price else Counter([model]),
        prices_day=day,
    )
