"""Keys and values of token sequences, and the reuse of what earlier requests computed.

Every sequence has one growing buffer. A finished one stays until memory is wanted, and a new prompt takes the longest
prefix that any buffer under the same `extra_key` holds: agent calls extend one another, so nearly all of a prompt is
usually there. A buffer is only ever appended to, hence a prefix can be copied from one that is still being written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch

__all__ = ["CachedTokens", "KvBuffer", "PrefixCache"]

_SMALLEST = 64


class KvBuffer:
    """Keys and values of one sequence in all layers: `[2, layers, kv heads, capacity, head dim]`."""

    __slots__ = ("_store", "length", "routes")

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, top_k: int = 0) -> None:
        capacity = max(capacity, _SMALLEST)
        self._store = torch.empty(2, num_layers, num_kv_heads, capacity, head_dim)
        self.routes = np.zeros((capacity, num_layers, top_k), np.int32)
        """Experts that each token went to, `[capacity, layers, k]`; 0 in layers without."""
        self.length = 0

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all, growing by half so that decoding copies rarely."""
        capacity = self._store.shape[3]
        if num_tokens <= capacity:
            return
        grown = torch.empty(*self._store.shape[:3], max(num_tokens, capacity * 3 // 2), self._store.shape[4])
        grown[:, :, :, : self.length] = self._store[:, :, :, : self.length]
        self._store = grown
        routes = np.zeros((grown.shape[3], *self.routes.shape[1:]), np.int32)
        routes[: self.length] = self.routes[: self.length]
        self.routes = routes

    def write(
        self, layer: int, start: int, key_HTD: torch.Tensor, value_HTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new rows at `start` and return that layer's keys and values up to their end."""
        end = start + key_HTD.shape[1]
        keys, values = self._store[0, layer], self._store[1, layer]
        keys[:, start:end] = key_HTD
        values[:, start:end] = value_HTD
        return keys[:, :end], values[:, :end]

    def copy_prefix(self, num_tokens: int) -> KvBuffer:
        """A new buffer that holds the first `num_tokens` of this one."""
        _, num_layers, num_kv_heads, _, head_dim = self._store.shape
        copy = KvBuffer(num_layers, num_kv_heads, head_dim, num_tokens + _SMALLEST, self.routes.shape[2])
        copy._store[:, :, :, :num_tokens] = self._store[:, :, :, :num_tokens]
        copy.routes[:num_tokens] = self.routes[:num_tokens]
        copy.length = num_tokens
        return copy


CachedTokens = tuple[str | None, np.ndarray, KvBuffer]
"""extra_key, the tokens whose keys and values are held, and where."""


class PrefixCache:
    """Buffers of finished sequences, least recently used first; at most `max_tokens` in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[int, CachedTokens] = OrderedDict()
        self._next = 0
        self.num_tokens = 0

    def put(self, extra_key: str | None, ids: np.ndarray, buffer: KvBuffer) -> None:
        """Keep a finished sequence; `ids` are the tokens whose keys and values `buffer` holds."""
        if not len(ids):
            return
        self._entries[self._next] = (extra_key, ids, buffer)
        self._next += 1
        self.num_tokens += len(ids)
        self.trim(self._max_tokens)

    def take(self, extra_key: str | None, ids: np.ndarray, running: Iterable[CachedTokens] = ()) -> KvBuffer | None:
        """A buffer of the caller's own with the longest prefix of `ids` held here or by a `running` sequence, or None.

        An entry that is a prefix as a whole is handed over without a copy: the sequence that goes on from it will come
        back and hold all that it held.
        """
        best, best_length = -1, 0
        for number, (key, cached, _) in self._entries.items():
            if key == extra_key and (length := _common_prefix(cached, ids)) > best_length:
                best, best_length = number, length
        shared: KvBuffer | None = None
        for key, cached, buffer in running:
            if key == extra_key and (length := _common_prefix(cached, ids)) > best_length:
                shared, best_length = buffer, length
        if shared is not None:
            return shared.copy_prefix(best_length)
        if best < 0:
            return None
        _, cached, buffer = self._entries[best]
        if best_length == len(cached):
            del self._entries[best]
            self.num_tokens -= len(cached)
            return buffer
        self._entries.move_to_end(best)
        return buffer.copy_prefix(best_length)

    def trim(self, max_tokens: int) -> None:
        """Drop the least recently used until at most `max_tokens` are held."""
        while self.num_tokens > max_tokens and self._entries:
            _, (_, ids, _) = self._entries.popitem(last=False)
            self.num_tokens -= len(ids)

    def clear(self) -> None:
        """Forget everything, as new weights require."""
        self.trim(-1)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    num = min(len(left), len(right))
    different = left[:num] != right[:num]
    first = int(different.argmax()) if num else 0
    return first if num and different[first] else num
