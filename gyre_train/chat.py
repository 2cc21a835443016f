"""Chat files for SFT: each line one conversation, rendered with the model's own template into a small tree.

A line is {"messages": [...], "tools": [...]}. For every assistant turn (one with "weight": 0 is context) the messages
before it are rendered with the generation prompt, as they would be for inference, and the messages up to it without;
what the second adds, up to the stop token, is the trained turn. Where a template rewrites earlier turns (drops
thoughts, say), the turn after that starts a branch: every turn is trained after exactly the prompt that it would see.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gyre_data.errors import ConfigError, DataError

from .tree_input import TrajectoryInput, TreeInput

__all__ = ["Conversation", "chat_tree", "read_chat", "read_tokenizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One line of a chat file, with an id that depends on its content only."""

    execution_id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None
    where: str
    """File and line, for errors."""


def read_chat(path: str | Path, seen: dict[str, int] | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a JSON-lines file; a line that occurs again gets an id of its own.

    `seen` counts lines over several files that are trained together.
    """
    seen = {} if seen is None else seen
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"data.chat: wanted a JSON-lines file, got {error}; check the path") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            messages = tuple(_plain(message) for message in row["messages"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{where}: wanted a JSON object with a list "messages", got {type(error).__name__} {error}; fix it'
            ) from None
        if not any(map(_trained, messages)):
            raise DataError(f"{where}: wanted an assistant message to train on, got none; remove the line")
        digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        name = f"chat_{digest}" + (f"_{seen[digest]}" if seen[digest] > 1 else "")
        tools = row.get("tools")
        yield Conversation(
            execution_id=name, messages=messages, tools=tuple(tools) if tools else None, where=where
        )  # fmt: skip


def _trained(message: Mapping[str, Any]) -> bool:
    """A turn of weight 0 is context, as in OpenAI's fine-tuning files."""
    return message.get("role") == "assistant" and message.get("weight") != 0


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Give tool-call arguments as objects: chat APIs carry them as JSON text, templates print objects."""
    out = dict(message)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_plain_call(call) for call in calls]
    return out


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            return dict(call)
    return {**call, "function": function} if "function" in call else function


def read_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a model folder; it must have a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: wanted a tokenizer in {folder}, got {error}; copy the model's own") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path: wanted a chat template in {folder}, got none; add chat_template.jinja")
    return tokenizer


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A tree while its turns are added: `texts[i]` is the whole text down to node i."""

    texts: list[str]
    parents: list[int]
    ids: list[np.ndarray]
    owned: list[int]

    def add(self, parent: int, text: str, ids: np.ndarray) -> int:
        self.texts.append((self.texts[parent] if parent >= 0 else "") + text)
        self.parents.append(parent)
        self.ids.append(ids)
        return len(self.ids) - 1


def chat_tree(conversation: Conversation, tokenizer: Any, stop_ids: Sequence[int], number: int) -> TreeInput:
    """Return the conversation's tree with every assistant turn owned once, at temperature 1."""
    draft = _Draft(texts=[], parents=[], ids=[], owned=[])
    for index, message in enumerate(conversation.messages):
        if _trained(message):
            _add_turn(draft, conversation, index, tokenizer, stop_ids)
    parent_N = np.array(draft.parents, dtype=np.int32)
    free = set(draft.owned)
    trajectories = []
    inner = {int(parent) for parent in parent_N}
    for leaf in sorted((node for node in draft.owned if node not in inner), reverse=True):
        path = _path(parent_N, leaf)
        owned = [node for node in path if node in free]
        free.difference_update(owned)
        trajectories.append(
            TrajectoryInput(path_P=np.array(path, np.int32), owned_O=np.array(owned, np.int32), advantage=0.0)
        )
    return TreeInput(
        execution=number,
        parent_N=parent_N,
        ids=tuple(draft.ids),
        temperature_N=np.ones(len(parent_N)),
        trajectories=tuple(trajectories),
    )


def _add_turn(draft: _Draft, conversation: Conversation, index: int, tokenizer: Any, stop_ids: Sequence[int]) -> None:
    prompt = _render(tokenizer, conversation, index, prompt=True)
    whole = _render(tokenizer, conversation, index + 1, prompt=False)
    if not whole.startswith(prompt):
        raise DataError(
            f"{conversation.where}: message {index} does not render after the template's own generation prompt; "
            "put its thoughts where the template wants them, or use another template"
        )
    earlier = [node for node, text in enumerate(draft.texts) if prompt.startswith(text)]
    parent = max(earlier, key=lambda node: len(draft.texts[node]), default=-1)
    rest = prompt[len(draft.texts[parent]) :] if parent >= 0 else prompt
    if rest:
        parent = draft.add(parent, rest, _encode(tokenizer, rest))
    ids = _encode(tokenizer, whole[len(prompt) :])
    stops = np.flatnonzero(np.isin(ids, stop_ids))
    if len(stops):
        ids = ids[: int(stops[-1]) + 1]
    if not len(ids):
        raise DataError(f"{conversation.where}: message {index} renders to nothing; remove it")
    # The node's text is what its ids say, so that a later prompt that goes on with it is recognised.
    draft.owned.append(draft.add(parent, tokenizer.decode(ids), ids))


def _render(tokenizer: Any, conversation: Conversation, end: int, *, prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        list(conversation.messages[:end]),
        tools=list(conversation.tools) if conversation.tools else None,
        tokenize=False,
        add_generation_prompt=prompt,
    )
    return text


def _encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def _path(parent_N: np.ndarray, leaf: int) -> list[int]:
    path = [leaf]
    while (parent := int(parent_N[path[-1]])) >= 0:
        path.append(parent)
    return path[::-1]
