"""The bodies of calls: what stands between the markers, turned into a name and a JSON object.

Each reads at least one call. Before the first one has begun, `NotACall` means that the text is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from servelite.frontend.parsers.formats import ToolFormat
from servelite.frontend.parsers.json_text import copy_value, dump, escaped, read_string
from servelite.frontend.parsers.python_text import copy_arguments
from servelite.frontend.parsers.reader import NotACall, Reader, Steps, Truncated
from servelite.frontend.parsers.sink import Sink
from servelite.frontend.parsers.tag_values import copy_tag_value

NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]+")
_BARE: Final = re.compile(r"[^,:{}\[\]<]+")
_MAX_DEPTH: Final = 64
_JSON_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

Body = Callable[[Reader, Sink, ToolFormat], Steps[None]]


def read_name(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[str]:
    """A bare function name."""
    name = yield from reader.run(NAME)
    sink.accepts(name, declared=bool(form.bare))
    return name


def json_calls(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """An object with a name and arguments, or a list of such."""
    if (yield from reader.skip_space()) != "[":
        yield from _json_call(reader, sink, form)
        return
    yield from _listed(reader, lambda: _json_call(reader, sink, form))


def _listed(reader: Reader, item: Callable[[], Steps[None]]) -> Steps[None]:
    """A list that is not empty, from its opening to behind its end; `item` reads one of what it holds."""
    yield from reader.expect("[")
    following = ","
    while following == ",":
        yield from reader.skip_space()
        yield from item()
        following = yield from reader.skip_space()
        if following not in ",]":
            raise NotACall
        reader.at += 1


def _json_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    call = _JSONCall(reader, sink, form)
    try:
        yield from call.read()
    except Truncated:
        if call.name and not sink.in_call and not call.whole:
            sink.start(call.name)
        raise
    except NotACall:
        if not call.whole:
            raise
        # Its arguments are whole; a brace too few behind them does not make them less.
    sink.end()


class _JSONCall:
    """One object; its members come in any order."""

    def __init__(self, reader: Reader, sink: Sink, form: ToolFormat) -> None:
        self._reader, self._sink, self._form = reader, sink, form
        self._early: list[str] | None = None  # arguments that came before the name
        self.name = ""
        self.whole = False  # the call has begun, and all of its arguments are told

    def read(self) -> Steps[None]:
        reader = self._reader
        yield from reader.expect("{")
        while (yield from reader.skip_space()) != "}":
            yield from self._member()
            if (yield from reader.skip_space()) == ",":
                reader.at += 1
            elif reader.text[reader.at] != "}":
                raise NotACall
        reader.at += 1
        if not self.name:
            raise NotACall
        if not self.whole:
            self._tell(self._early or ["{}"])

    def _member(self) -> Steps[None]:
        reader, sink = self._reader, self._sink
        key = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        first = yield from reader.skip_space()
        if key == "name" and not self.name:
            name = yield from read_string(reader)
            sink.accepts(name, declared=bool(self._form.bare))
            self.name = name
            if self._early is not None:
                self._tell(self._early)
        elif key not in self._form.argument_keys or self.whole or self._early is not None:
            yield from copy_value(reader, _forget)
        elif first == "{" and self.name:
            sink.start(self.name)
            yield from copy_value(reader, sink.arguments)
            self.whole = True
        else:
            yield from self._odd_arguments(first)

    def _odd_arguments(self, first: str) -> Steps[None]:
        """Arguments before the name, as a string that holds JSON, or null."""
        parts: list[str] = []
        if first == '"':
            text = yield from read_string(self._reader)
            try:
                value = json.loads(text)
                parts.append(dump(value))  # which escapes what no stream could hold
            except (ValueError, RecursionError):
                raise NotACall from None
            if not isinstance(value, dict):
                raise NotACall
        elif first in "{n":
            yield from copy_value(self._reader, parts.append)
            if first == "n":
                parts = ["{}"]
        else:
            raise NotACall
        if self.name:
            self._tell(parts)
        else:
            self._early = parts

    def _tell(self, arguments: list[str]) -> None:
        self._sink.start(self.name)
        for part in arguments:
            self._sink.arguments(part)
        self.whole = True


def _forget(text: str) -> None:
    """A member that says nothing about the call."""


def named_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """A name, then the object of its arguments."""
    yield from reader.skip_space()
    name = yield from read_name(reader, sink, form)
    separated = False
    try:
        if form.call_id and (yield from reader.optional(form.call_id)):
            separated = True
            yield from reader.run(NAME)
        for separator in form.after_name:
            separated |= yield from reader.optional(separator)
        if (yield from reader.skip_space()) != "{":
            raise NotACall
    except Truncated:
        if separated:
            sink.start(name)
        raise
    sink.start(name)
    yield from copy_value(reader, sink.arguments)
    sink.end()


def json_or_named(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """Either of the two, by its first character."""
    body = json_calls if (yield from reader.skip_space()) in "[{" else named_call
    yield from body(reader, sink, form)


def tagged_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """A function element with an element for each parameter."""
    tags = form.tags
    assert tags is not None
    yield from reader.skip_space()
    yield from reader.expect(tags.function)
    name = yield from read_name(reader, sink, form)
    yield from reader.expect(tags.name_end)
    sink.start(name)
    schema = sink.schema(name)
    opening = "{"
    while True:
        yield from reader.skip_space()
        if (yield from reader.begins(tags.parameter)):
            reader.mark()
            yield from reader.expect(tags.parameter)
            key = yield from reader.run(NAME)
            yield from reader.expect(tags.key_end)
            if not key:
                raise NotACall
            reader.commit()
            sink.arguments(f"{opening}{dump(key)}: ")
            opening = ", "
            yield from copy_tag_value(reader, sink.arguments, tags.parameter_close, schema, key)
        elif (yield from reader.begins(tags.function_close)):
            yield from reader.expect(tags.function_close)
            break
        elif (yield from _begins_any(reader, form.closings)):
            break  # the function's own end is missing
        else:
            raise NotACall
    sink.arguments("{}" if opening == "{" else "}")
    sink.end()


def _begins_any(reader: Reader, literals: tuple[str, ...]) -> Steps[bool]:
    for literal in literals:
        if (yield from reader.begins(literal)):
            return True
    return False


def python_calls(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """A Python list of calls with keyword arguments."""
    yield from reader.skip_space()
    yield from _listed(reader, lambda: _python_call(reader, sink, form))


def _python_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    name = yield from read_name(reader, sink, form)
    yield from reader.expect("(")
    yield from copy_arguments(reader, sink, name)


def braces_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[None]:
    """A name, then an object with bare keys and strings in quotes of the format's own."""
    yield from reader.skip_space()
    yield from reader.optional("call:")
    name = yield from read_name(reader, sink, form)
    if (yield from reader.skip_space()) != "{":
        raise NotACall
    sink.start(name)
    yield from _braces_value(reader, sink, form.quote, 0)
    sink.end()


def _braces_value(reader: Reader, sink: Sink, quote: str, depth: int) -> Steps[None]:
    if depth == _MAX_DEPTH:
        raise NotACall
    first = yield from reader.skip_space()
    if first == "{":
        yield from _braces_members(reader, sink, quote, depth, "}")
    elif first == "[":
        yield from _braces_members(reader, sink, quote, depth, "]")
    elif (yield from reader.begins(quote)):
        yield from reader.expect(quote)
        sink.arguments('"')
        if not (yield from reader.until((quote,), lambda text: sink.arguments(escaped(text)), lossy=True)):
            raise Truncated
        sink.arguments('"')
    else:
        text = (yield from reader.run(_BARE)).strip()
        if not text:
            raise NotACall
        yield from reader.peek()  # a number that is cut off may be another one
        sink.arguments(text if _JSON_SCALAR.fullmatch(text) else dump(text))


def _braces_members(reader: Reader, sink: Sink, quote: str, depth: int, closer: str) -> Steps[None]:
    """What is in an object or a list, from its opening to `closer`."""
    sink.arguments(reader.text[reader.at])
    reader.at += 1
    more = False
    while (yield from reader.skip_space()) != closer:
        if more:
            yield from reader.expect(",")
            sink.arguments(", ")
            yield from reader.skip_space()
        more = True
        if closer == "}":
            yield from _braces_key(reader, sink, quote)
        yield from _braces_value(reader, sink, quote, depth + 1)
    reader.at += 1
    sink.arguments(closer)


def _braces_key(reader: Reader, sink: Sink, quote: str) -> Steps[None]:
    """A bare key, or one in quotes, with its colon."""
    if (yield from reader.begins(quote)):
        yield from reader.expect(quote)
        parts: list[str] = []
        if not (yield from reader.until((quote,), parts.append)):
            raise Truncated
        key = "".join(parts)
    else:
        key = (yield from reader.run(_BARE)).strip()
    yield from reader.skip_space()
    yield from reader.expect(":")
    sink.arguments(f"{dump(key)}: ")


BODIES: Final[dict[str, Body]] = {
    "json": json_calls,
    "named": named_call,
    "json or named": json_or_named,
    "tags": tagged_call,
    "python": python_calls,
    "braces": braces_call,
}
"""By `ToolFormat.body`; `harmony` is no body but a whole answer."""
