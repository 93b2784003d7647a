"""Texts in each format, and what they mean; and a way to read a text in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.parsers.events import CallEnd, CallStart, Event
from servelite.frontend.parsers.formats import REASONING_FORMATS, ReasoningFormat, tool_format
from servelite.frontend.parsers.parser import AnswerParser
from servelite.frontend.parsers.sink import CallRules

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "more": {"type": "object"},
    },
}
RULES = CallRules({"get_weather": WEATHER, "ping": {}})
Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Read:
    """What a text is read as. `ended`: the calls that are complete."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    ended: tuple[int, ...]
    ends_in_calls: bool

    @property
    def parsed(self) -> Calls:
        """The calls with their arguments decoded."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def reasoning_format(name: str) -> ReasoningFormat | None:
    return {f.name: f for f in REASONING_FORMATS}[name] if name else None


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` in pieces."""
    places = [0, *sorted({place % (len(text) + 1) for place in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def read(
    pieces: Sequence[str], tools: str = "", reasoning: str = "", rules: CallRules = RULES, **options: Any
) -> Read:
    """Read a text that comes in `pieces`; checks that the events are in order."""
    parser = AnswerParser(
        tool_format(tools) if tools else None, reasoning_format(reasoning), rules, **options
    )
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    open_call = -1
    started = 0
    for event in events:
        if isinstance(event, CallStart):
            assert event.call == started
            started, open_call = started + 1, event.call
        elif hasattr(event, "call"):
            assert event.call == open_call
        if isinstance(event, CallEnd):
            open_call = -1
        assert getattr(event, "text", "x")
    whole = Assembled.of(events)
    assert len({call.call_id for call in whole.calls}) == len(whole.calls)
    return Read(
        whole.content,
        whole.reasoning,
        [(call.name, call.arguments) for call in whole.calls],
        tuple(event.call for event in events if isinstance(event, CallEnd)),
        parser.ends_in_calls,
    )


def _json_call(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _tags(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _braces(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braces(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_braces(one, quote) for one in value) + "]"
    return json.dumps(value)


def write(form: str, calls: Calls) -> str:
    """Calls as a model of that format writes them."""
    begin, sep, end = "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"
    one, close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    bodies = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    names = [name for name, _ in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_json_call(*call)}\n</tool_call>" for call in calls)
        case "qwen3_coder":
            return "\n".join(_tags(*call) for call in calls)
        case "llama3_json":
            return "; ".join(_json_call(*call, key="parameters") for call in calls)
        case "pythonic":
            written = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in calls
            ]
            return f"[{', '.join(written)}]"
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(_json_call(*call) for call in calls)}]"
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{name}{_braces(arguments, '<escape>')}<end_function_call>"
                for name, arguments in calls
            )
        case "gemma4":
            return "".join(
                f"<|tool_call>call:{name}{_braces(arguments, '<|' + chr(34) + '|>')}<tool_call|>"
                for name, arguments in calls
            )
        case "deepseek_v3":
            each = [
                f"{one}function{sep}{name}\n```json\n{body}\n```{close}"
                for name, body in zip(names, bodies, strict=True)
            ]
            return begin + "\n".join(each) + end
        case "deepseek_v31":
            each = [f"{one}{name}{sep}{body}{close}" for name, body in zip(names, bodies, strict=True)]
            return begin + "".join(each) + end
        case "openai":
            each = [
                f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
                f"<|message|>{body}<|call|>"
                for name, body in zip(names, bodies, strict=True)
            ]
            return "".join(each)
    raise AssertionError(form)


BARE = ("llama3_json", "pythonic")
