"""Calls of one execution as columns, and as records only when somebody looks at them.

Legend: C calls of the execution, by start time, then id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .arrays import from_table
from .columns import Codes, Rows, code_of, codes, floats, found_in, ints, joined, valid
from .schema import DeliveryState
from .types import Call

__all__ = ["CALL_COLUMNS", "DELIVERY_COLUMNS", "CallColumns", "Calls", "latest_deliveries"]

CALL_COLUMNS = (
    "call_id", "agent_role", "continues_from", "spawned_by_node", "prompt_node", "output_node", "branch_reason",
    "fork_check", "echo_difference", "tokens_lost", "prompt_tokens", "temperature", "top_p", "top_k", "constrained",
    "status", "started_at", "upstream",
)  # fmt: skip
DELIVERY_COLUMNS = ("call_id", "state", "at")

_ONE_BY_ONE = 8  # records made singly before all are made at once, which costs as much as some twenty


class CallColumns:
    """The columns of calls that counting needs, each read once."""

    def __init__(self, calls: pa.Table) -> None:
        """`calls` holds `CALL_COLUMNS` of one execution, in order."""
        self.table = calls
        self._held: dict[str, Any] = {}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def ids(self) -> pa.Array:
        """Call ids in one array."""
        return self._once("ids", lambda: joined(self.table.column("call_id")))

    def codes(self, name: str, kind: type[StrEnum]) -> Codes:
        """Place of each spelling in its enum, -1 for null."""
        codes_C: Codes = self._once(name, lambda: codes(self.table.column(name), kind))
        return codes_C

    def ints(self, name: str) -> Rows:
        """Integers of a column, 0 for null."""
        ints_C: Rows = self._once(name, lambda: ints(self.table.column(name)))
        return ints_C

    def floats(self, name: str) -> npt.NDArray[np.float64]:
        """Numbers of a column, NaN for null."""
        floats_C: npt.NDArray[np.float64] = self._once(name, lambda: floats(self.table.column(name)))
        return floats_C

    def places(self, name: str) -> Rows:
        """Place of the call of this execution that a column names; -1 where it names none of them."""
        places_C: Rows = self._once(f"places of {name}", lambda: found_in(self.ids, self.table.column(name)))
        return places_C

    def told(self, name: str) -> list[Any]:
        """Values of a column that are not null, in order."""
        found: list[Any] = pc.drop_null(self.table.column(name)).to_pylist()
        return found

    def given(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column is not null."""
        return valid(self.table.column(name))

    def true(self, name: str) -> npt.NDArray[np.bool_]:
        """Where a column of yes and no says yes; null is no."""
        return np.asarray(pc.fill_null(self.table.column(name), False).to_numpy(), np.bool_)

    @property
    def started_us(self) -> Rows:
        """Start times, microseconds."""
        started_C: Rows = self._once("started_us", lambda: ints(self.table.column("started_at").cast(pa.int64())))
        return started_C

    def _once(self, name: str, make: Any) -> Any:
        if name not in self._held:
            self._held[name] = make()
        return self._held[name]


class Calls(Sequence[Call]):
    """Committed calls as records, made when they are touched."""

    def __init__(self, table: pa.Table, rows: Rows) -> None:
        self._table, self._rows = table, rows
        self._single: dict[int, Call] = {}
        self._all: tuple[Call, ...] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._every())

    def __reversed__(self) -> Iterator[Call]:
        return reversed(self._every())

    @overload
    def __getitem__(self, at: int) -> Call: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Call, ...]: ...
    def __getitem__(self, at: int | slice) -> Call | tuple[Call, ...]:
        if isinstance(at, slice) or self._all is not None or len(self._single) >= _ONE_BY_ONE:
            return self._every()[at]
        number = range(len(self))[at]
        if number not in self._single:
            self._single[number] = self._records(self._rows[number : number + 1])[0]
        return self._single[number]

    def at(self, numbers: Rows) -> list[Call]:
        """Several at once: of few of many calls, the others are not made."""
        if self._all is not None or not len(numbers):
            return [self._every()[number] for number in numbers.tolist()]
        return self._records(self._rows[numbers])

    def _every(self) -> tuple[Call, ...]:
        if self._all is None:
            made = self._records(self._rows)
            for number, call in self._single.items():  # one call, one record
                made[number] = call
            self._all = tuple(made)
        return self._all

    def _records(self, rows: Rows) -> list[Call]:
        # One row of a live run with a chunk a call: a slice costs a tenth of taking it.
        picked = self._table.slice(int(rows[0]), 1) if len(rows) == 1 else self._table.take(pa.array(rows))
        return from_table("calls", picked)


def latest_deliveries(table: pa.Table, calls: pa.Array) -> Codes:
    """Code of each call's latest state, -1 for none; of one instant `delivered` wins, whatever the order of rows."""
    out_C = np.full(len(calls), -1, np.int8)
    if table.num_rows:
        call_R, state_R = found_in(calls, table.column("call_id")), codes(table.column("state"), DeliveryState)
        spelling = np.argsort(np.argsort([state.value for state in DeliveryState]))
        last_R = np.where(state_R == code_of(DeliveryState.DELIVERED), len(spelling), spelling[state_R])
        order = np.lexsort((last_R, ints(table.column("at").cast(pa.int64()))))
        order = order[call_R[order] >= 0]
        out_C[call_R[order]] = state_R[order]  # of equal places the last one stays
    return out_C
