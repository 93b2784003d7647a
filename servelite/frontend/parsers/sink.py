"""Where a parser puts what it finds: white space beside markers dropped, calls numbered, events in order."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from servelite.frontend.parsers.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from servelite.frontend.parsers.reader import SPACE, NotACall, Reader

_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ALPHANUMERIC: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallRules:
    """What a request says about calls.

    Attributes:
        parameters: by name of each function that may be called, its arguments' schema.
        most: calls that are told; what the model writes beyond is dropped. 0: any number.
        forced: the answer has to be a call.
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most: int = 0
    forced: bool = False


class _Channel:
    """One of the two texts. White space at its end waits until more follows it."""

    def __init__(self) -> None:
        self.begun = False
        self._held = ""

    def add(self, text: str, *, strip: bool) -> str:
        """What is now certain. `strip`: the text's own beginning is beside a marker."""
        body = text.rstrip(SPACE)
        if not body:
            self._held += text
            return ""
        before, self._held = self._held, text[len(body) :]
        if strip and not self.begun:
            before, body = "", body.lstrip(SPACE)
        self.begun = True
        return before + body

    def end(self) -> str:
        """The white space at its end."""
        held, self._held = self._held, ""
        return held


class Sink:
    """Collects the events of one answer.

    Attributes:
        forced: the answer has to be a call.
        in_call: a call has begun and not ended.
        begun, complete: how many calls have begun, told or not; how many of those told have ended.
    """

    def __init__(
        self, reader: Reader, rules: CallRules, *, call_id_length: int = 0, include_reasoning: bool = True
    ) -> None:
        """`call_id_length`: of IDs that a template insists on; 0: OpenAI's form."""
        self._reader = reader
        self._rules = rules
        self.forced = rules.forced
        self._call_id_length = call_id_length
        self._include_reasoning = include_reasoning
        self._events: list[Event] = []
        self._content, self._reasoning = _Channel(), _Channel()
        self._beside_marker = False
        self.begun = 0
        self.in_call = False
        self.complete = 0
        self._told = True  # the last call that has begun

    @property
    def content_begun(self) -> bool:
        """There was content other than white space."""
        return self._content.begun

    @property
    def reasoning_begun(self) -> bool:
        """There was reasoning other than white space."""
        return self._reasoning.begun

    def content(self, text: str) -> None:
        if text := self._content.add(text, strip=self._beside_marker):
            self._events.append(Content(text))

    def cut(self, text: str) -> None:
        """What is no call, because the answer ends there: text, unless it had to become one."""
        if not self.forced:
            self.content(text)

    def reasoning(self, text: str) -> None:
        self._beside_marker = True  # its end is one
        if (text := self._reasoning.add(text, strip=True)) and self._include_reasoning:
            self._events.append(Reasoning(text))

    def marker(self) -> None:
        """Something stood here that is no text: white space around it is none either."""
        self._beside_marker = True

    def accepts(self, name: str, *, declared: bool) -> None:
        """Raises `NotACall` for what is no function's name, `declared`: of the request's functions."""
        if not _NAME.fullmatch(name) or (declared and name not in self._rules.parameters):
            raise NotACall

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of a function's arguments; empty where none is known."""
        return self._rules.parameters.get(name, {})

    def start(self, name: str) -> None:
        """A call begins: it is one, come what may."""
        self._reader.commit()
        self.marker()
        self.in_call = True
        self.begun += 1
        self._told = not self._rules.most or self.begun <= self._rules.most
        if self._told:
            self._events.append(CallStart(self.begun - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        if self._told and text:
            self._events.append(Arguments(self.begun - 1, text))

    def end(self) -> None:
        """The call is complete."""
        self.in_call = False
        if self._told:
            self.complete += 1
            self._events.append(CallEnd(self.begun - 1))

    def break_off(self) -> None:
        """The call does not go on as one."""
        self.in_call = False

    @property
    def calls(self) -> int:
        """How many calls were told."""
        return min(self.begun, self._rules.most) if self._rules.most else self.begun

    def finish(self) -> None:
        """No more text comes."""
        held = self._content.end()
        if held and not self._beside_marker:
            self._events.append(Content(held))

    def take(self) -> list[Event]:
        """The events since the last call, neighbours of one kind joined."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        joined: list[Event] = []
        for event in events:
            last = joined[-1] if joined else None
            if type(last) is type(event) and isinstance(last, (Content, Reasoning, Arguments)):
                joined[-1] = replace(last, text=last.text + event.text)  # type: ignore[union-attr]
            else:
                joined.append(event)
        return joined

    def _new_id(self) -> str:
        if self._call_id_length:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self._call_id_length))
        return "call_" + secrets.token_hex(12)
