"""Streaming training: the micro-steps of the open step are claimed by whoever is idle, the core and its satellites.

The *core* is `gyre train` with `stream.satellites = true`: it holds the optimiser, opens each step, hands out its
micro-steps and applies the step. A *satellite* is a replica in a process of its own. To make a cell train, start

    python -m gyre_train.streaming.satellite WHERE [--name CELL] [--patience SECONDS]

and to make it stop, send SIGTERM and wait for its end. That is all a cell needs to know:

- WHERE is the core's address (`http://host:port`) or its output folder, whose `stream.json` {url, pid} names it, with
  `over` once training has ended. In a folder it finds a core that comes back at another port, and an end that it was
  not there to be told of. It needs no config: the core tells it. The model's folder (`model.path`) must be readable
  under the same path; weights come from the core. GYRE_PUBLISH_KEY goes with every request where the core has one.
- NAME is how the core shows it (default: host and pid). One that joins under the name of another takes its place:
  what that one held is computed again, and nothing more is taken from it.
- It says `satellite NAME: joined ...` on stderr, one line for each event of its own, and `left` last.
- SIGTERM: claims nothing more, finishes the micro-step under way, hands its gradients in, leaves, exit status 0. A
  second SIGTERM: leaves at once with nothing handed in; the core computes again what it held. SIGKILL: the same after
  `stream.lease_s`, or as soon as somebody tells the core (`POST /lost`).
- Exit status 0 too when the core says that training is over; 1 when the core cannot be reached for `--patience`
  seconds or something else is wrong, with the reason on stderr.

What the core answers (JSON; with GYRE_PUBLISH_KEY set: `Authorization: Bearer KEY`), for controllers and people:

    GET  /step    {session, step, version, sealed, applied, micro_steps: {pending, running, held, reduced},
                   workers: {NAME: {epoch, step, running, held, leaving}}}
    GET  /events?after=N   {session, events: [{n, kind, worker, key, step}]}: joined, pulled, claimed, done, handed_in,
                   left, lost, opened, offered, sealed, applied, given_up. Numbers ascend within a session, which is
                   the life of a core's process.
    POST /lost {worker: NAME}   the process of this name is dead: what it held is free at once

A micro-step's key is [step, group, part], with `stream.parts` parts for each group of executions, and `step` the number
of the step that is being made. Whoever is idle takes the next one. With the scheduler's controller away everything
here goes on: nothing of it is asked.

Or a controller says who computes what (`stream.controlled = true`): core and satellites then answer the routes of a
training cell (`told`), a micro-step is computed by whom it was told, and a step has the groups that were named and is
made when that is told. What a satellite loses after that, the core computes. For `gyre_sched.cells`:

    command = ["python", "-m", "gyre_train.streaming.satellite", "OUT", "--name", "{cell}", "--listen", "{host}:{port}"]
    core_command = ["gyre", "train", "rl.toml", "--stream.satellites=true", "--stream.controlled=true",
                    "--stream.host={host}", "--stream.port={port}"]

with `stream.parts` equal to `microsteps_per_group`, and the proxy's run in `data.live`. A group is known to the trainer
by the name that the proxy has for it.
"""

from __future__ import annotations

__all__: list[str] = []
