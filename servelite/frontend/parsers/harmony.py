"""gpt-oss's answers: messages, each with a header that says whom it is for."""

from __future__ import annotations

import re
from typing import Final

from servelite.frontend.parsers.json_text import copy_value
from servelite.frontend.parsers.reader import SPACE, Emit, NotACall, Reader, Steps, Truncated
from servelite.frontend.parsers.sink import Sink

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_OPENS_NEXT: Final = ("<|start|>", "<|channel|>")
_MAX_HEADER: Final = 512  # characters
_RECIPIENT: Final = re.compile(r"\bto=functions\.([A-Za-z0-9_.:/-]{1,128})")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_WORDS: Final = ("to=", "<|")  # what one begins with, white space aside


def harmony(reader: Reader, sink: Sink, *, calls: bool, reasoning: bool) -> Steps[None]:
    """Read a whole answer.

    Args:
        calls: messages to functions are calls; else they are content.
        reasoning: the analysis is set apart; else it is content.
    """
    first = True
    while True:
        header = yield from _header(reader, sink)
        if header is None:
            return
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None and calls:
            yield from _call(reader, sink, recipient[1])
            emit: Emit = sink.cut  # what stands behind the arguments
        elif channel is not None and channel[1] == "analysis" and reasoning:
            if not first:
                sink.reasoning("\n")
            emit = sink.reasoning
        else:
            emit = sink.content
        first = False
        if not (yield from _text(reader, emit)):
            return
        sink.marker()


def _header(reader: Reader, sink: Sink) -> Steps[str | None]:
    """What stands before a message, which is read; None: there is no message any more.

    "" where the text is no header's: it is content, without one.
    """
    while True:
        begun = reader.text[reader.at :].lstrip(SPACE)
        if begun and not any(begun.startswith(word[: len(begun)]) for word in _HEADER_WORDS):
            return ""
        at = reader.text.find(_MESSAGE, reader.at)
        length = (len(reader.text) if at < 0 else at) - reader.at
        if length > _MAX_HEADER + (len(_MESSAGE) if at < 0 else 0):
            return ""
        if at >= 0:
            header = reader.text[reader.at : at]
            reader.at = at + len(_MESSAGE)
            sink.marker()
            return header
        if reader.ended:
            text = reader.rest()
            if not begun.startswith(_HEADER_WORDS):
                sink.cut(text)
            return None
        yield


def _call(reader: Reader, sink: Sink, name: str) -> Steps[None]:
    sink.start(name)
    try:
        if (yield from reader.skip_space()) != "{":
            raise NotACall
        yield from copy_value(reader, sink.arguments)
        sink.end()
    except (NotACall, Truncated):
        sink.break_off()


def _text(reader: Reader, emit: Emit) -> Steps[bool]:
    """A message up to its end; False: it has none any more."""
    stop = yield from reader.until(_ENDS, emit)
    if stop in _OPENS_NEXT:
        reader.at -= len(stop)  # the next header's first word
    return bool(stop)
