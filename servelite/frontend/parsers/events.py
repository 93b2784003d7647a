"""What an answer's text turns out to be, piece by piece."""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the answer proper."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins. Its arguments follow; calls do not overlap. `call`: 0 for an answer's first call."""

    call: int
    call_id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: JSON text, which is whole when the call has ended."""

    call: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete: its arguments are a JSON object."""

    call: int


Event = Reasoning | Content | CallStart | Arguments | CallEnd
