"""Training speed on this machine: tree attention against a dense mask, packed trees against rows, the planner.

Run: python benchmarks/training.py [--quick] [--json]. Every figure is a ratio of two things measured in one run,
beside the CPU seconds it came from. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_train.attn.api import tree_attention
from gyre_train.attn.reference import dense_mask
from gyre_train.edges import edges_of
from gyre_train.loss import policy_loss
from gyre_train.pack import Pack, TrajectoryInput, TreeInput
from gyre_train.plan import plan

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 8, 4, 64, 256, 2048
BOUNDS = {"attention_speedup": 1.0, "packed_speedup": 1.0}
"""Least ratios: the tree path must not be slower than what it replaces."""


def edge_logprobs(logits_UV: Tensor, pack: Pack) -> Tensor:
    """Log-prob of each edge's target; the benchmark samples at temperature 1."""
    logp_UV = logits_UV.log_softmax(-1)[torch.as_tensor(pack.edge_logit_E)]
    return logp_UV.gather(1, torch.as_tensor(pack.target_id_E)[:, None])[:, 0]


def execution(*, trunk: int, turns: int, turn: int, branches: int, seed: int) -> TreeInput:
    """A main conversation after a long prompt, and side trajectories that leave it at evenly spread turns."""
    rng = np.random.default_rng(seed)
    parent, length, sampled = [-1], [trunk], [False]
    spine = [0]
    for _ in range(turns):
        for kind, size in ((True, turn), (False, turn // 2)):
            parent.append(spine[-1])
            length.append(size)
            sampled.append(kind)
            spine.append(len(parent) - 1)
    spine.pop()  # the last sampled turn is the leaf of the main trajectory
    paths = [spine]
    for b in range(branches):
        cut = 2 * (turns * (b + 1) // (branches + 1))
        parent.append(spine[cut])
        length.append(turn)
        sampled.append(True)
        paths.append([*spine[: cut + 1], len(parent) - 1])
    taken: set[int] = set()
    trajectories = []
    for path in paths:
        owned = [n for n in path if sampled[n] and n not in taken]
        taken.update(owned)
        trajectories.append(
            TrajectoryInput(path_P=np.array(path, np.int32), owned_O=np.array(owned, np.int32), advantage=1.0)
        )
    return TreeInput(
        execution=seed,
        parent_N=np.array(parent, np.int32),
        ids=tuple(rng.integers(0, VOCAB, n).astype(np.int32) for n in length),
        temperature_N=np.ones(len(parent)),
        trajectories=tuple(trajectories),
        logp_behaviour=tuple(np.full(n, -7.0) for n in length),
    )


def seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest of some runs: wall time says little on a shared machine."""
    work()
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def attention(pack: Pack, repeats: int) -> dict[str, Any]:
    """Forward and backward of the segments backend against SDPA under the dense mask of the same tree."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(pack.num_tokens, heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    mask = dense_mask(pack.segments)

    def dense() -> Tensor:
        wide = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)[None] for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], *wide, attn_mask=mask)
        return out[0].transpose(0, 1)

    def segments() -> Tensor:
        return tree_attention(q, k, v, pack.segments)

    figures: dict[str, Any] = {"attention_tokens": pack.num_tokens}
    gradients = []
    for name, attend in (("dense", dense), ("segments", segments)):
        figures[f"attention_{name}_s"] = seconds(lambda attend=attend: attend().sum().backward(), repeats)
        q.grad = k.grad = v.grad = None
        attend().square().sum().backward()
        gradients.append(torch.cat([x.grad.flatten() for x in (q, k, v)]))
    figures["attention_live_share"] = pack.segments.num_pairs / pack.num_tokens**2
    figures["attention_difference"] = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    figures["attention_speedup"] = figures["attention_dense_s"] / figures["attention_segments_s"]
    return figures


class Block(torch.nn.Module):
    """One decoder block with embedding and head: enough to weigh tokens, attention pairs and logit rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, pack: Pack) -> Tensor:
        x = self.embedding(torch.from_numpy(pack.ids_T))
        qkv = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + self.out(tree_attention(*qkv, pack.segments).flatten(1))
        x = x + self.down(F.silu(self.up(x)))
        return self.head(x[torch.from_numpy(pack.logit_row_U)])


def step(model: Block, packs: tuple[Pack, ...]) -> float:
    """Forward, loss and backward over the packs of a step."""
    total = 0.0
    for pack in packs:
        edges = edges_of(pack)
        result = policy_loss(edges, edge_logprobs(model(pack), pack))
        result.loss.backward()
        total += float(result.loss.detach())
    return total


def packing(trees: list[TreeInput], tokens: int, repeats: int) -> dict[str, Any]:
    """A training step on packed trees against the same targets in independent rows."""
    torch.manual_seed(0)
    model = Block()
    tree, rows = (plan(trees, tokens=tokens, sharing=sharing) for sharing in ("tree", "rows"))
    losses = [step(model, made.packs) for made in (tree, rows)]
    figures = {
        "packed_tokens": tree.num_packed_tokens,
        "unpacked_tokens": rows.num_packed_tokens,
        "packed_s": seconds(lambda: step(model, tree.packs), repeats),
        "rows_s": seconds(lambda: step(model, rows.packs), repeats),
        "loss_difference": abs(losses[0] - losses[1]) / abs(losses[1]),
    }
    figures["token_saving"] = figures["unpacked_tokens"] / figures["packed_tokens"]
    figures["packed_speedup"] = figures["rows_s"] / figures["packed_s"]
    return figures


def planning(repeats: int) -> dict[str, Any]:
    """Planning and laying out one execution of a million tokens and 1,300 nodes, whole and cut over several packs."""
    tree = execution(trunk=20_000, turns=650, turn=1_000, branches=4, seed=0)
    longest = max(int(tree.num_tokens_N[tree.needed_path(t)].sum()) for t in range(len(tree.trajectories)))
    cut = plan([tree], tokens=longest)
    return {
        "plan_nodes": len(tree.ids),
        "plan_tokens": cut.num_distinct_tokens,
        "plan_s": seconds(lambda: plan([tree], tokens=2_000_000), repeats),
        "plan_cut_packs": len(cut.packs),
        "plan_cut_s": seconds(lambda: plan([tree], tokens=longest), repeats),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a minute on two cores")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = parser.parse_args()
    size, repeats = (1, 2) if arguments.quick else (2, 3)
    trees = [execution(trunk=800 * size, turns=10, turn=80 * size, branches=4, seed=s) for s in range(2)]
    (pack,) = plan(trees[:1], tokens=10**6).packs
    longest = max(int(tree.num_tokens_N[tree.needed_path(0)].sum()) for tree in trees)
    figures = {
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        **attention(pack, repeats),
        **packing(trees, 2 * longest, repeats),
        **planning(repeats),
    }
    missed = [f"{name}: wanted at least {least}, got {figures[name]:.2f}" for name, least in BOUNDS.items()
              if figures[name] < least]  # fmt: skip
    for name in ("attention_difference", "loss_difference"):
        if not figures[name] <= 1e-5:
            missed.append(f"{name}: wanted at most 1e-5, got {figures[name]:.2g}")
    if arguments.json:
        print(json.dumps({**figures, "missed": missed}))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value:,}")
    for line in missed:
        print(line, file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
