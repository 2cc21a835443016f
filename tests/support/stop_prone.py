"""A tiny model that samples its stop token by itself, without training."""

import json
import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from gyre_train.tiny import make_tiny

__all__ = ["stop_prone"]


def stop_prone(folder: Path, *, probability: float = 0.1, hidden: int = 64, vocab: int = 1024) -> Path:
    """Make a tiny Qwen3 with a window of 65,536 that ends its reply at each token with about `probability`.

    Dimension 0 of the residual stream is made a constant that no layer writes to, and only the stop token's output row
    reads it.
    """
    make_tiny(folder, hidden=hidden, vocab=vocab, context=65536)
    weights = load_file(folder / "model.safetensors")
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    spread = float(weights["model.embed_tokens.weight"].std())
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0, :] = 0.0
    constant = 1.0 / math.sqrt((1.0 + (hidden - 1) * spread**2) / hidden)
    # The layers add to the norm of the residual stream, which shrinks the constant; 1.7 makes up for two of them.
    wanted = 1.7 * math.log(probability / (1 - probability) * vocab)
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][stop, 0] = wanted / constant
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
