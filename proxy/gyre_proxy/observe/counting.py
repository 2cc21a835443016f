"""Local token counts of messages, in the proxy's own form of them."""

from __future__ import annotations

from collections.abc import Mapping

from gyre_data.counting import ByteCounter, TokenCounter, TokenizerCounter, count_tools, count_turn, load_counter
from gyre_proxy.message import Message

__all__ = ["ByteCounter", "TokenCounter", "TokenizerCounter", "count_message", "count_tools", "load_counter"]


def count_message(counter: TokenCounter, message: Message) -> int:
    """Tokens of a message; at least 1."""
    return count_turn(
        counter,
        content=message.content,
        reasoning=message.reasoning,
        calls=((call.name, call.arguments) for call in message.tool_calls),
        blocks=message.raw.get("blocks") if isinstance(message.raw, Mapping) else None,
    )
