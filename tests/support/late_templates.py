"""Toy templates that do not take system messages after the beginning, each in its own way."""

import itertools

from gyre_proxy.template import RenderError
from tests.support.toy_template import ToyTemplate

__all__ = ["ByTurns", "Hoisting", "Refusing"]


class Refusing(ToyTemplate):
    """System messages stand at the beginning or nowhere."""

    def render(self, messages, tools, add_generation_prompt):
        if any(message.role == "system" for message in messages[1:]):
            raise RenderError("System message must be at the beginning.")
        return super().render(messages, tools, add_generation_prompt)


class Hoisting(ToyTemplate):
    """The newest system message is the one in front."""

    def render(self, messages, tools, add_generation_prompt):
        late = [message for message in messages if message.role == "system"]
        rest = [message for message in messages if message.role != "system"]
        return super().render([*late[-1:], *rest], tools, add_generation_prompt)


class ByTurns(Refusing):
    """User and assistant alternate."""

    def render(self, messages, tools, add_generation_prompt):
        for one, two in itertools.pairwise(messages):
            if one.role == two.role == "user":
                raise RenderError("Conversation roles must alternate user/assistant.")
        return super().render(messages, tools, add_generation_prompt)
