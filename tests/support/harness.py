"""A random harness and a random model: conversations with the rewrites that real clients make, token by token."""

import json
from dataclasses import dataclass, field, replace
from random import Random

from gyre_proxy.message import Message, Reply, ToolCall
from gyre_proxy.template import Template
from tests.support.driver import Driver, assistant, said, user

WORDS = ("abc", "the bay", "moving", "crate 123", "12", "ok", "bc\n\nab", "zß", "go on", "half-way 🤖 done")
NAMES = ("stat_bay", "move")


def some_text(random: Random) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(1, 3)))


def some_arguments(random: Random) -> dict:
    values = (1, 12, 2.0, True, None, "abc", 'quo"te', "two\nlines", {"b": 1, "a": [1, 2]}, "")
    return {name: random.choice(values) for name in random.sample(("bay", "to", "crate"), random.randint(0, 3))}


@dataclass
class Model:
    """Samples replies the way a policy does: other token splits, other JSON spacing, blanks, cuts, reasoning."""

    template: Template
    random: Random
    stop: str
    split: float = 0.3
    think: bool = True

    def reply(self, *, with_calls: bool, cut: bool = False) -> tuple[list[int], Reply]:
        random = self.random
        reasoning = some_text(random) if self.think and random.random() < 0.4 else None
        text = random.choice(("", " ", "\n\n")) + some_text(random) + random.choice(("", "\n", " "))
        calls = tuple(
            ToolCall(name=random.choice(NAMES), arguments=some_arguments(random))
            for _ in range(random.randint(1, 2) if with_calls else 0)
        )
        if calls and random.random() < 0.5:
            text = ""
        if cut and reasoning and not calls and random.random() < 0.5:
            return self.tokens(f"<think>{reasoning}"), said("", reasoning=reasoning, finish="length")
        shown = f"<think>{reasoning}</think>" if reasoning else ""
        shown += text
        for call in calls:
            spacing = random.choice(((", ", ": "), (",", ":")))
            body = json.dumps({"name": call.name, "arguments": call.arguments}, separators=spacing)
            shown += f"<tool_call>{body}</tool_call>"
        ids = self.tokens(shown)
        return (ids if cut else [*ids, *self.tokens(self.stop)]), said(text, *calls, reasoning=reasoning)

    def tokens(self, text: str) -> list[int]:
        """Tokens whose text is `text`, some of them split in another way than the tokenizer would."""
        random, at, out = self.random, 0, []
        while at < len(text):
            end = len(text)
            if random.random() < self.split and text[at] != "<":
                close = text.find("<", at)
                end = random.randint(at + 1, min(len(text), at + 6, close if close > at else len(text)))
            else:
                close = text.find("<", at + 1)
                end = close if close > 0 and random.random() < 0.5 else end
                if text[at] == "<":
                    end = max(end, text.find(">", at) + 1)
            out += self.template.encode(text[at:end]).ids.tolist()
            at = end
        return out


def echoed(random: Random, reply: Reply, node: str, *, rewrite: bool = True) -> Message:
    """The reply as a client sends it back: the same turn, written in its own way."""
    sent = reply.message()
    calls = tuple(
        replace(call, id=f"call_{node}_{i}", arguments=rewritten(random, call.arguments) if rewrite else call.arguments)
        for i, call in enumerate(sent.tool_calls)
    )
    content = sent.content
    if rewrite and random.random() < 0.3:
        content = content.strip()
    reasoning = sent.reasoning if random.random() < 0.5 else None
    hint = node if calls or random.random() < 0.5 else None
    return assistant(content, *calls, reasoning=reasoning, hint=hint)


def rewritten(random: Random, arguments):
    """The same values in another form: key order, integral floats."""
    if isinstance(arguments, dict):
        names = list(arguments)
        random.shuffle(names)
        return {name: rewritten(random, arguments[name]) for name in names}
    if isinstance(arguments, float) and random.random() < 0.5:
        return int(arguments)
    return arguments


def answers(random: Random, message: Message) -> list[Message]:
    """What follows an assistant message: results in any order, or a user turn."""
    results = [
        Message(role="tool", content=random.choice(("", some_text(random))), tool_call_id=call.id)
        for call in message.tool_calls
    ]
    random.shuffle(results)
    return results or [user(some_text(random))]


@dataclass
class Harness:
    """Runs one execution against a history. `log` says what each call was meant to be."""

    driver: Driver
    model: Model
    random: Random
    stops: dict[str, str] = field(default_factory=dict)
    """Stop text by the role that comes next, where it matters."""
    calls: float = 0.6
    """How many of the replies call tools."""
    log: list[tuple[str, object]] = field(default_factory=list)

    def start(self) -> list[Message]:
        head = [Message(role="system", content=some_text(self.random))] if self.random.random() < 0.6 else []
        return [*head, user(some_text(self.random))]

    def sample(self, kind: str, chat: list[Message]) -> list[Message]:
        """One call, and the conversation after it as the client sees it."""
        with_calls = self.random.random() < self.calls
        if self.stops:
            self.model.stop = self.stops["tool" if with_calls else "user"]
        cut = not with_calls and self.random.random() < 0.15
        ids, reply = self.model.reply(with_calls=with_calls, cut=cut)
        plan = self.driver.call(chat, ids, reply)
        self.log.append((kind, plan))
        turn = echoed(self.random, reply, self.driver.output_node)
        return [*chat, turn, *answers(self.random, turn)]

    def run(self, num_calls: int) -> None:
        states = [self.sample("start", self.start())]
        while len(self.log) < num_calls:
            kind = self.random.choice(("extend",) * 6 + ("retry", "rewind", "value", "insert", "compact"))
            chat = states[-1]
            if kind == "rewind":
                chat = self.random.choice(states)
                chat = [*chat[:-1], replace(chat[-1], content=chat[-1].content + " again")]
            elif kind == "retry" and len(states) > 1:
                chat = states[-2]
            elif kind == "value":
                turns = [i for i, message in enumerate(chat) if message.role == "assistant"]
                i = self.random.choice(turns)
                chat = [*chat[:i], replace(chat[i], content=chat[i].content + " edited"), *chat[i + 1 :]]
            elif kind == "insert":
                chat = [*chat, assistant(some_text(self.random)), user(some_text(self.random))]
            elif kind == "compact":
                tail = chat[-(1 + len(chat) % 3) :]
                while tail and tail[0].role == "tool":
                    tail = tail[1:]
                head = chat[:1] if chat[0].role == "system" else []
                chat = [*head, user("summary: " + some_text(self.random)), *(tail or chat[-1:])]
            states.append(self.sample(kind, chat))
