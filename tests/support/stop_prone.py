"""A tiny model that samples its stop token by itself, without training."""

import json
import math
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gyre_train.tiny import make_tiny

__all__ = ["stop_prone"]


def stop_prone(folder: Path, *, probability: float = 0.1, hidden: int = 64, vocab: int = 1024) -> Path:
    """Make a tiny Qwen3 with a window of 65,536 that says something and then stops, at about `probability` a token.

    Two dimensions of the residual stream are constants that no layer writes to. The first is missing where the last
    token is a newline, and raises the stop token: so no reply is empty, which clients leave out of their history. The
    second lowers what has no visible text of its own: blanks, parts of characters, control tokens, marks.
    """
    make_tiny(folder, hidden=hidden, vocab=vocab, context=65536)
    weights = load_file(folder / "model.safetensors")
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    spread = float(embedding.std())
    embedding[:, :2] = 1.0
    embedding[tokenizer.encode("\n").ids, 0] = 0.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2, :] = 0.0
    constant = 1.0 / math.sqrt((2.0 + (hidden - 2) * spread**2) / hidden)
    head[:, :2] = 0.0
    # The layers add to the norm of the residual stream, which shrinks the constant; 1.7 makes up for two of them.
    head[stop, 0] = 1.7 * math.log(probability / (1 - probability) * vocab) / constant
    head[stop, 1] = -8.0 / constant
    head[stop, 0] += 8.0 / constant
    for token in range(vocab):
        text = tokenizer.decode([token], skip_special_tokens=True).strip()
        part_of_a_character = "\ufffd" in text
        if token != stop and (not text or part_of_a_character or tokenizer.id_to_token(token).startswith("<")):
            head[token, 1] = -20.0 / constant
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
