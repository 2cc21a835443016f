"""`python -m gyre_train.streaming.satellite WHERE`: a replica that claims micro-steps of a core's open step.

What it promises, and how it is stopped, stands in the docstring of the package. Every rank runs `_work`; the first one
speaks with the core (`desk`) and tells the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError, EngineError, GyreError
from gyre_train.config import TrainingConfig, load_config
from gyre_train.edges import Anchor
from gyre_train.figures import Figures, total
from gyre_train.interrupts import asked_to_stop
from gyre_train.megatron.gradients import gradients_by_name
from gyre_train.megatron.parallel import (
    counts_figures,
    from_all_ranks,
    from_first_rank,
    is_first_rank,
    place,
    run_ranks,
)
from gyre_train.publish.control import Deadline, EngineGone
from gyre_train.replica import Replica

from .acts import check_place
from .carrier import Carrier, Offer, open_carrier
from .client import Client, Over, ended_before
from .core import folder_of
from .desk import Desk, Errand, Job
from .told import Told, listening

__all__ = ["main", "satellite", "stopping"]

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.5
_TOLD = "Help a `gyre train` with its open step until it says that training is over, or until SIGTERM."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def satellite(where: str, *, name: str | None = None, listen: str | None = None, patience_s: float = 600.0) -> None:
    """Help the core at `where` until it says that training is over, or until SIGTERM.

    That training was over before this began is no reason to leave: it may be about to go on. `listen` is the HOST:PORT
    at which a controller tells it what to compute, where the core is controlled. EngineError when the core cannot be
    reached for `patience_s` seconds.
    """
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: wanted letters, digits, dots, dashes and underscores, got {name!r}; choose another")
    stale = ended_before(where)
    with tempfile.TemporaryDirectory(prefix="gyre-satellite-") as made:
        folder = Path(made)
        with stopping(folder / "stop"):
            anew = folder / "anew"
            while True:
                found = _hello(Client(where, stale), folder / "stop", patience_s)
                if found is None:
                    _LOG.info("satellite %s: left; nothing to do", name)
                    return
                hello, host = found
                file = folder / "config.toml"
                file.write_text(hello["config"], encoding="utf-8")
                config = load_config(file)
                config = replace(config, parallel=replace(config.parallel, dp=1))
                if bool(listen) != config.stream.controlled:
                    raise ConfigError(
                        f"--listen {listen}: wanted it where, and only where, stream.controlled = true; the core at "
                        f"{where} has {config.stream.controlled}"
                    )
                run_ranks(
                    _work, config.parallel, config, where, host, name, listen, hello, str(folder), patience_s,
                    device=config.model.device,
                )  # fmt: skip
                if not anew.exists():
                    return
                anew.unlink()


def _hello(client: Client, stop: Path, patience_s: float) -> tuple[dict[str, Any], str] | None:
    """What the core says of itself, and this machine's address as it sees it, once it is there.

    None when this satellite is to stop, or training ends, before.
    """
    until = Deadline(patience_s)
    try:
        while not stop.exists():
            try:
                return client.get("/hello"), client.own_host()
            except Over:
                return None
            except EngineGone:
                if until.passed:
                    raise
                time.sleep(_AGAIN_S)
        return None
    finally:
        client.close()


@contextmanager
def stopping(file: Path) -> Iterator[None]:
    """SIGTERM, or Ctrl-C, makes the file; a second one raises SystemExit where this process is."""

    def ask(_: signal.Signals) -> None:
        if file.exists():
            raise SystemExit(0)
        file.touch()

    with asked_to_stop(ask, once=False):
        yield


def _work(
    config: TrainingConfig,
    where: str,
    host: str,
    name: str,
    listen: str | None,
    hello: Mapping[str, Any],
    folder: str,
    patience_s: float,
) -> None:
    anchor = Anchor(hello["anchor"]) if hello["anchor"] else None
    replica = Replica(config, anchor, Path(config.model.path))
    carrier = open_carrier(config.stream, folder_of(config), host)
    told = Told() if listen and is_first_rank() else None
    desk = Desk(where, name, hello, Path(folder) / "stop", patience_s, told) if is_first_rank() else None
    worker = _Worker(config, replica, carrier, name)
    at, _, port = (listen or "").rpartition(":")
    with listening(told, at, int(port)) if told else nullcontext():
        _follow(desk, worker, Path(folder))


def _follow(desk: Desk | None, worker: _Worker, folder: Path) -> None:
    """Do what the first rank says until it says that this is the end."""
    try:
        while True:
            errand: Errand = from_first_rank(desk.next() if desk else None)
            match errand.job:
                case Job.RUN:
                    worker.run(errand)
                    if desk:
                        desk.ran()
                case Job.PULL:
                    error = worker.pull(errand)
                    if desk:
                        desk.pulled(errand.step, error)
                case Job.HAND_IN:
                    offers, figures = worker.lay_out()
                    if desk:
                        desk.hand_in(offers, figures)
                    from_first_rank(None)  # each rank's offer stays until the core has the sum, or will never have it
                    worker.drop()
                case Job.DROP:
                    worker.drop()
                case Job.LEAVE:
                    return
                case Job.BEGIN_ANEW:
                    (folder / "anew").touch()
                    return
    finally:
        worker.drop()
        if desk:
            desk.close()


class _Worker:
    """One rank's tensors."""

    def __init__(self, config: TrainingConfig, replica: Replica, carrier: Carrier, name: str) -> None:
        self._replica, self._carrier, self._timeout_s = replica, carrier, config.publish.timeout_s
        self._name = f"gradients-{name}-{os.getpid()}-{place()}"
        self._figures: Figures = {}
        self._anchor: str | None = None
        """Digest of the weights behind logp_old."""

    def run(self, errand: Errand) -> None:
        self._figures = total(self._figures, self._replica.accumulate(errand.packs, step=errand.step))

    def pull(self, errand: Errand) -> str | None:
        """Take the step's weights in all ranks; returns what went wrong in any, and then none may be used."""
        error: str | None = None
        try:
            weights = check_place(errand.weights, place())
            self._replica.set_weights(self._fetched(weights))
            if errand.anchor is None:
                self._replica.burst, self._anchor = None, str(weights["sha256"])  # where there is one, it opens now
            else:
                anchor = check_place(errand.anchor, place())
                if self._replica.burst is None or self._anchor != anchor["sha256"]:
                    self._replica.burst, self._anchor = self._fetched(anchor), str(anchor["sha256"])
        except EngineError as failure:
            error = str(failure)
        self._replica.begin()
        self._figures = {}
        return next((one for one in from_all_ranks(error) if one is not None), None)

    def _fetched(self, offer: Offer) -> dict[str, Any]:
        return self._carrier.fetch(offer, Deadline(self._timeout_s))

    def lay_out(self) -> tuple[dict[str, Offer], Figures]:
        """Offer this rank's sum; returns every rank's offer, and the figures of all."""
        offer = self._carrier.offer(self._name, gradients_by_name(self._replica.model))
        offers = dict(from_all_ranks((place(), offer)))
        return offers, total(*from_all_ranks(self._figures if counts_figures() else {}))

    def drop(self) -> None:
        """Forget the sum."""
        self._carrier.withdraw(self._name)
        self._replica.wrapped.zero_grad_buffer()
        self._figures = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m gyre_train.streaming.satellite", description=_TOLD)
    parser.add_argument("where", help="the core's address (http://host:port), or its output folder")
    parser.add_argument("--name", help="how the core shows it (default: host and pid)")
    parser.add_argument("--listen", help="HOST:PORT for a controller (stream.controlled)")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a core that is away")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "megatron", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        satellite(given.where, name=given.name, listen=given.listen, patience_s=given.patience)
    except (GyreError, json.JSONDecodeError) as error:
        sys.stderr.write(f"satellite: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
