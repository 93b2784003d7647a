"""The one incremental parser: text deltas in, events out, by formats that are data.

For every way to cut a text into deltas the events add up to the same, because what is read is a
sequence of characters (`reader`) and a piece is never looked at as such.
"""

from __future__ import annotations

from servelite.frontend.parsers.bodies import BODIES
from servelite.frontend.parsers.events import Event
from servelite.frontend.parsers.formats import HARMONY, ReasoningFormat, ToolFormat
from servelite.frontend.parsers.harmony import harmony
from servelite.frontend.parsers.reader import SPACE, NotACall, Reader, Steps, Truncated, stop_pattern
from servelite.frontend.parsers.sink import CallRules, Sink


class AnswerParser:
    """Reads one answer: `push` each piece, then `finish` once.

    Text that only looks like a call is content. A call that is cut off comes as far as it goes.
    White space beside reasoning and calls is nobody's text.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        rules: CallRules | None = None,
        *,
        opened: bool = False,
        include_reasoning: bool = True,
    ) -> None:
        """
        Args:
            tools: None, or `rules` None: calls are not looked for.
            reasoning: None: nothing is set apart.
            opened: the answer begins inside the reasoning; the prompt opened it.
            include_reasoning: False: it is dropped.
        """
        if rules is None:
            tools = None
        self._reader = Reader()
        self._sink = Sink(
            self._reader,
            rules or CallRules(),
            call_id_length=tools.call_id_length if tools else 0,
            include_reasoning=include_reasoning,
        )
        self._steps = self._read(tools, reasoning, opened)
        self._waiting = True

    @property
    def has_reasoned(self) -> bool:
        """There was reasoning, told or not."""
        return self._sink.reasoning_begun

    @property
    def ends_in_calls(self) -> bool:
        """There are calls, and each is complete."""
        sink = self._sink
        return 0 < sink.calls == sink.complete

    def push(self, text: str) -> list[Event]:
        """More text; what it means, as far as that is certain."""
        self._reader.push(text)
        return self._go_on()

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        self._reader.ended = True
        events = self._go_on()
        self._sink.finish()
        return events + self._sink.take()

    def _go_on(self) -> list[Event]:
        if self._waiting:
            self._waiting = next(self._steps, _DONE) is None
        return self._sink.take()

    def _read(self, tools: ToolFormat | None, reasoning: ReasoningFormat | None, opened: bool) -> Steps[None]:
        reader, sink = self._reader, self._sink
        if (reasoning and not reasoning.opening) or (tools and tools.body == HARMONY):
            yield from harmony(reader, sink, calls=tools is not None, reasoning=reasoning is not None)
            return
        if reasoning is not None:
            yield from _reasoning(reader, sink, reasoning, opened)
        if tools is None:
            while not reader.ended:
                if text := reader.rest():
                    sink.content(text)
                yield
            sink.content(reader.rest())
            return
        while (yield from _to_call(reader, sink, tools)):
            if not (yield from _call(reader, sink, tools)):
                sink.content(reader.text[reader.at])  # no call, whatever its first character
                reader.at += 1


_DONE = object()


def _reasoning(reader: Reader, sink: Sink, form: ReasoningFormat, opened: bool) -> Steps[None]:
    """What stands before the answer; the opening is read even where the prompt has written it."""
    if not ((yield from reader.optional(form.opening)) or opened):
        return
    yield from reader.until((form.closing,), sink.reasoning)
    sink.marker()


def _to_call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[bool]:
    """Read content up to where a call may begin; False: there is no more text."""
    pattern = stop_pattern(form.openings)
    while True:
        if form.bare and not sink.content_begun:
            spaces = len(reader.text) - len(reader.text[reader.at :].lstrip(SPACE)) - reader.at
            if spaces > 0:
                sink.content(reader.text[reader.at : reader.at + spaces])
                reader.at += spaces
            if reader.text.startswith(form.bare, reader.at):
                return True
        found = pattern.search(reader.text, reader.at)
        whole = found is not None and found[0] in form.openings
        safe = len(reader.text) if found is None else found.start()
        if safe > reader.at:
            sink.content(reader.text[reader.at : safe])
            reader.at = safe
        if whole:
            return True
        if reader.ended:
            sink.cut(reader.rest())
            return False
        yield


def _call(reader: Reader, sink: Sink, form: ToolFormat) -> Steps[bool]:
    """Read what an opening begins; False: it is no call, and nothing was read."""
    reader.mark()
    opening = next((text for text in form.openings if reader.text.startswith(text, reader.at)), "")
    reader.at += len(opening)
    begun = sink.begun
    try:
        yield from BODIES[form.body](reader, sink, form)
        reader.commit()
        for closing in form.closings:
            yield from reader.optional(closing, lossy=True)
        return True
    except NotACall:
        reader.rewind()
        if sink.forced and reader.ended:
            sink.cut(reader.rest())
    except Truncated:
        if sink.begun == begun:
            reader.rewind()
            sink.cut(reader.rest())
    broken = sink.in_call
    sink.break_off()
    return broken or sink.begun > begun or reader.at == len(reader.text)
