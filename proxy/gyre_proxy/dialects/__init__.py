"""Wire dialects: client JSON in, canonical messages out, and replies back in the same wire.

The wires are loaded when asked for, since the official models behind them take a while to import.
"""

from __future__ import annotations

from gyre_data.errors import ConfigError
from gyre_proxy.dialects.base import BadRequest, Dialect, ReplyContext, StreamEncoder, mint_call_id, node_of

__all__ = ["WIRES", "BadRequest", "Dialect", "ReplyContext", "StreamEncoder", "load", "mint_call_id", "node_of"]

WIRES = ("anthropic", "openai_chat", "openai_responses")


def load(wire: str) -> Dialect:
    """The dialect of a wire."""
    match wire:
        case "anthropic":
            from gyre_proxy.dialects.anthropic import ANTHROPIC

            return ANTHROPIC
        case "openai_chat":
            from gyre_proxy.dialects.openai_chat import OPENAI_CHAT

            return OPENAI_CHAT
        case "openai_responses":
            from gyre_proxy.dialects.openai_responses import OPENAI_RESPONSES

            return OPENAI_RESPONSES
        case _:
            raise ConfigError(f"Wire must be one of {', '.join(WIRES)}, got {wire!r}.")
