"""The core's part of a streamed step, in every rank: compute, add up what satellites hand in, apply.

Rank 0 asks its hub what is next and tells the others, so all ranks do the same things in the same order. A satellite's
gradients have the core's layout: each of its ranks' go to the rank that holds the same part of the model. They are
added before the sum over ranks, as if this replica had computed them.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gyre_data.errors import EngineError, GyreError
from gyre_train.config import TrainingConfig, to_toml
from gyre_train.edges import Anchor
from gyre_train.figures import Figures, total
from gyre_train.megatron.gradients import add_gradients
from gyre_train.megatron.parallel import counts_figures, dp_rank, from_all_ranks, from_first_rank, place
from gyre_train.pack import Pack
from gyre_train.publish.control import Deadline
from gyre_train.step import Learner

from .acts import Act, Task, Weights, check_place
from .board import Key
from .carrier import Carrier, open_carrier
from .engines import EngineWeights
from .hub import Hub
from .server import serving, tell_over
from .told import Told

if TYPE_CHECKING:
    from gyre_train.coordinator import Order

__all__ = ["Arrivals", "Core", "folder_of", "open_core"]

_LOG = logging.getLogger(__name__)
_ASK_S = 0.5
_GOODBYE_S = 5.0


class Arrivals(Protocol):
    """Where the executions of the open step come from; rank 0 has it."""

    def open_step(self) -> int | None:
        """The number of the step that begins; None when training is over."""
        ...

    def arrivals(self, named: Sequence[str] | None) -> tuple[Mapping[Key, tuple[Pack, ...]], bool]:
        """Micro-steps that came since, without waiting, and whether these were the step's last.

        With `named`, those of these groups and of no others; then somebody else knows when the step is whole.
        """
        ...

    @property
    def num_steps(self) -> int:
        """Steps that are applied."""
        ...

    def gives_up(self, whole: bool) -> bool:
        """Whether the open step is not to be made; `whole`: nothing more comes to it."""
        ...

    def close_step(self) -> Order:
        """The whole step as rank 0 wants it, without its packs."""
        ...


def folder_of(config: TrainingConfig) -> Path:
    """Where tensors lie when they travel as files."""
    return Path(config.output.dir) / "stream"


@contextmanager
def open_core(
    config: TrainingConfig, learner: Learner, anchor: Anchor | None, arrivals: Arrivals | None, version: str, stop: Path
) -> Iterator[Core]:
    """Serve satellites while the context is open; every rank enters, rank 0 with `arrivals`.

    A controlled core is served until the file `stop` exists, though nothing may be left to train.
    """
    if arrivals is None:
        yield Core(config, learner, None, None, from_first_rank(None))
        return
    shutil.rmtree(folder_of(config), ignore_errors=True)  # of a core that was killed
    told = Told(arrivals.num_steps) if config.stream.controlled else None
    hub = Hub(config.stream.lease_s, version, {"config": to_toml(_absolute(config)), "anchor": anchor}, told)
    weights = EngineWeights(config) if told else None
    with serving(hub, config.stream.host, config.stream.port, Path(config.output.dir), weights) as url:
        _LOG.info("satellites join at %s", url)
        yield Core(config, learner, hub, arrivals, from_first_rank(hub.session))
        if hub.told is None:
            hub.end(_GOODBYE_S)
        while hub.told and not stop.exists():  # its controller has yet to hear of the last step, and ends satellites
            time.sleep(_ASK_S)
        tell_over(Path(config.output.dir))  # not after an error: satellites then wait for the core to come back
    shutil.rmtree(folder_of(config), ignore_errors=True)


def _absolute(config: TrainingConfig) -> TrainingConfig:
    """The same config for a process in another working directory."""

    def path(name: str) -> str:
        return str(Path(name).resolve())

    loss = config.loss if config.loss.reference is None else replace(config.loss, reference=path(config.loss.reference))
    return replace(
        config, model=replace(config.model, path=path(config.model.path)), loss=loss,
        output=replace(config.output, dir=path(config.output.dir)),
    )  # fmt: skip


class Core:
    """One rank of the core."""

    def __init__(
        self, config: TrainingConfig, learner: Learner, hub: Hub | None, arrivals: Arrivals | None, session: str
    ) -> None:
        self._learner, self._hub, self._arrivals, self._session = learner, hub, arrivals, session
        self._carrier: Carrier = open_carrier(config.stream, folder_of(config), config.stream.host)
        self._deadline_s = config.publish.timeout_s
        self._weights_name: str | None = None
        self._anchor: tuple[Mapping[str, torch.Tensor], str, dict[str, Any]] | None = None
        self._whole = False
        self._idle_s = 0.0

    def step(self) -> tuple[Order, dict[str, float]] | None:
        """Make one step with whoever is there; None when training is over, with nothing of an open step applied."""
        number = from_first_rank(self._arrivals.open_step() if self._arrivals else None)
        if number is None:
            return None
        started = time.monotonic()
        self._learner.begin()
        if self._hub:
            self._hub.open(number)
        self._whole, self._idle_s = False, 0.0
        own: Figures = {}
        more: dict[str, torch.Tensor] = {}
        while True:
            act: Act = from_first_rank(self._next() if self._hub else None)
            match act.task:
                case Task.RUN:
                    own = total(own, self._learner.accumulate(act.packs, step=number))
                    if self._hub:
                        self._hub.ran()
                case Task.ADD:
                    self._add(act, more)
                case Task.OFFER:
                    self._offer(number)
                case Task.CLOSE:
                    return self._close(own, more, started)
                case Task.GIVE_UP:
                    if self._hub:
                        self._hub.close(None)
                    return None

    def applied(self, version: str) -> None:
        """Rank 0: the step that was made is written down as this version."""
        if self._hub:
            self._hub.close(version)

    def saved(self) -> None:
        """Rank 0: the step is saved, where it is to be."""
        if self._hub:
            self._hub.saved()

    def _next(self) -> Act:
        assert self._hub is not None
        assert self._arrivals is not None
        if not self._whole:
            controlled = self._hub.told is not None
            is_whole, named = self._hub.is_whole, self._hub.named
            micro_steps, self._whole = self._arrivals.arrivals(named if controlled else None)
            if controlled:
                self._whole = is_whole
            self._hub.offer(micro_steps, whole=self._whole)
        if self._arrivals.gives_up(self._whole):
            return Act(task=Task.GIVE_UP)
        began = time.monotonic()
        act = self._hub.next(_ASK_S)
        self._idle_s += time.monotonic() - began
        return act

    def _offer(self, number: int) -> None:
        """Lay out the weights that the open step is computed with, and the anchor's where these are others."""
        found: dict[str, Any] = {}
        anchor = self._learner.anchor_weights
        if dp_rank() == 0:
            if self._weights_name is not None:
                self._carrier.withdraw(self._weights_name)
            self._weights_name = f"weights-{number}-{self._session}-{place()}"
            found["weights"] = {place(): self._carrier.offer(self._weights_name, self._learner.weights())}
            if anchor is not None:
                found["anchor"] = {place(): self._anchor_offer(anchor, number)}
        everywhere = from_all_ranks(found)
        if self._hub:
            weights, old = _joined(everywhere, "weights"), _joined(everywhere, "anchor")
            self._hub.offered(Weights(step=number, weights=weights, anchor=old if anchor is not None else None))

    def _anchor_offer(self, anchor: Mapping[str, torch.Tensor], number: int) -> dict[str, Any]:
        """Laid out once a burst."""
        if self._anchor is None or self._anchor[0] is not anchor:
            if self._anchor is not None:
                self._carrier.withdraw(self._anchor[1])
            name = f"anchor-{number}-{self._session}-{place()}"
            self._anchor = (anchor, name, self._carrier.offer(name, anchor))
        return self._anchor[2]

    def _add(self, act: Act, more: dict[str, torch.Tensor]) -> None:
        """Fetch a satellite's sum and, if it still counts, add it."""
        found: dict[str, torch.Tensor] = {}
        error: str | None = None
        if dp_rank() == 0:
            try:
                found = self._carrier.fetch(check_place(act.offers, place()), Deadline(self._deadline_s))
                self._check(found)
            except GyreError as failure:
                error = str(failure)
        errors = [one for one in from_all_ranks(error) if one is not None]
        if errors:
            _LOG.warning("a satellite's gradients could not be fetched: %s", errors[0])
        if not from_first_rank(self._hub.settle(errors[0] if errors else None) if self._hub else None):
            return
        for name, tensor in found.items():
            if name in more:
                more[name].add_(tensor)
            else:
                more[name] = tensor

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: p.shape for name, p in self._learner.model.named_parameters()}
        for name, tensor in found.items():
            if shapes.get(name) != tensor.shape:
                raise EngineError(
                    f"gradients: wanted {name} of shape {shapes.get(name)}, got {tuple(tensor.shape)}; is the "
                    "satellite of this run?"
                )

    def _close(self, own: Figures, more: Mapping[str, torch.Tensor], started: float) -> tuple[Order, dict[str, float]]:
        order, theirs, counts = from_first_rank(self._closing() if self._hub else None)
        add_gradients(self._learner.model, more)
        if counts_figures() and dp_rank() == 0:
            own = total(own, theirs)
        return order, {**self._learner.apply(order.work, own, started), **counts}

    def _closing(self) -> tuple[Order, Figures, dict[str, float]]:
        assert self._hub is not None
        assert self._arrivals is not None
        counts = {
            "micro_steps": self._hub.reduced,
            "satellite_micro_steps": self._hub.handed_in,
            "idle_seconds": self._idle_s,
        }
        return self._arrivals.close_step(), self._hub.figures, counts


def _joined(parts: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in parts:
        out |= part.get(kind, {})
    return out
