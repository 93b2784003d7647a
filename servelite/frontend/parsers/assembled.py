"""A whole answer, from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from servelite.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning


@dataclass
class Call:
    """A call; `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Assembled:
    """What the events of one answer add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Assembled:
        """Each text is joined once: answers are long."""
        whole = cls()
        content, reasoning = list[str](), list[str]()
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(_, call_id, name):
                    whole.calls.append(Call(call_id, name))
                    arguments.append([])
                case Arguments(call, text):
                    arguments[call].append(text)
        whole.content, whole.reasoning = "".join(content), "".join(reasoning)
        for made, parts in zip(whole.calls, arguments, strict=True):
            made.arguments = "".join(parts)
        return whole
