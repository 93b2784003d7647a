"""What an answer's text turns out to be, piece by piece."""

from __future__ import annotations

from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class Content(NamedTuple):
    """More of the answer proper."""

    text: str


class CallStart(NamedTuple):
    """A call begins. Its arguments follow; calls do not overlap. `call`: 0 for an answer's first call."""

    call: int
    call_id: str
    name: str


class Arguments(NamedTuple):
    """More of a call's arguments: JSON text, which is whole when the call has ended."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The call is complete: its arguments are a JSON object."""

    call: int


Event = Reasoning | Content | CallStart | Arguments | CallEnd
