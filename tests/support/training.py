"""What the trainer's tests share: a tiny model folder, a recorded run that this model could have sampled, configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gyre_data.types import VersionSpan
from gyre_train.config import TrainingConfig, load_config
from gyre_train.lineage import base_version
from gyre_train.tiny import make_tiny
from tests.support.forest import Forest

VOCAB = 300
TEXTS = ("the quick brown fox jumps over the lazy dog and says hello to all of them again and again",) * 4


def tiny_model(folder: Path, **more: Any) -> Path:
    return make_tiny(folder, vocab=VOCAB, hidden=32, heads=4, kv_heads=2, context=512, texts=TEXTS, **more)


def tiny_experts(folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """The same tokenizer with a Qwen3-MoE, as transformers writes one."""
    tiny_model(folder)
    sizes = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
    settings = {key: sizes[key] for key in kept} | {
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **settings | more)).save_pretrained(folder)
    return folder


def recorded_run(folder: Path, model: Path, *, groups: int = 2, size: int = 2, shift: float = 0.0) -> Path:
    """Groups of executions with alternating scores, a retry and a sub-agent each, sampled by `model`'s own weights.

    Log-probs are the model's own for the recorded ids, plus `shift`; the ids themselves are drawn uniformly.
    """
    forest = Forest()
    for g in range(groups):
        for i in range(size):
            e = forest.execution(f"e_{g}{i}0000000000", group=f"g{g}", score=float(i % 2))
            first = e.call(new=[("system", 6), ("user", 5)], output=5)
            second = e.call(after=first, new=[("tool", 4)], output=6)
            e.retry(second, output=4)
            e.call(after=None, new=[("user", 7)], output=5, role="sub_agent", agent_id="a1")
            e.call(after=second, new=[("tool", 3)], output=3 + i)
    lineage = base_version(model)
    nodes = [replace(n, token_ids=n.token_ids % VOCAB) for n in forest.rows["nodes"]]
    by_id = {n.node_id: n for n in nodes}
    policy = AutoModelForCausalLM.from_pretrained(model)
    for place, node in enumerate(nodes):
        if node.logprobs is None:
            continue
        path = [node]
        while path[0].parent_id:
            path.insert(0, by_id[path[0].parent_id])
        logp = own_logprobs(policy, np.concatenate([n.token_ids for n in path]))[-len(node.token_ids) :]
        span = VersionSpan(policy_id=lineage.policy_id, n=0, start=0, end=len(node.token_ids))
        nodes[place] = replace(node, logprobs=(logp + shift).astype(np.float32), policy_versions=(span,))
    forest.rows["nodes"] = nodes
    forest.write(folder)
    return folder


def own_logprobs(policy: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Log-prob of every token after the first, by transformers."""
    tensor = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logp = policy(tensor).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, tensor[0, 1:, None])[:, 0].numpy()


def config(
    model: Path, out: Path, *overrides: str, runs: Path | None = None, chat: Path | None = None
) -> TrainingConfig:
    """The config of a test run."""
    base = [f"--model.path={model}", f"--output.dir={out}", "--train.lr=1e-3", "--output.policy_id=run"]
    base += [f'--data.runs=["{runs}"]'] if runs else []
    base += [f'--data.chat=["{chat}"]', "--loss.kind=sft"] if chat else []
    return load_config(None, [*base, *overrides])


def chat_file(path: Path, *answers: str) -> Path:
    """One short conversation per answer, with a tool call in the first."""
    lines = []
    for number, answer in enumerate(answers):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {number}"}]
        if number == 0:
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": "c1", "content": "ok"}]
        messages += [{"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path
