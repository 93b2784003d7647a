"""A streamed answer: the chunks of all its choices on one connection. Nothing but this runs per token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from servelite.frontend.answer import Answer
from servelite.frontend.body import Send
from servelite.frontend.chunks import DONE, WAITING, AnswerHead, StreamTemplate, error_event
from servelite.frontend.errors import APIError
from servelite.frontend.parsers.events import Content, Event
from servelite.frontend.protocol import AnswerForm
from servelite.frontend.sampling import Sampling
from servelite.frontend.writing import ChoiceWriter, usage_of, usage_so_far
from servelite.tokenizer.tokenizer import Tokenizer

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerStream:
    """Sends one request's answers. The stream opens with the first token of any of them, so that an
    engine's refusal still gets its own status; or after a silence, which SSE comments fill.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        head: AnswerHead,
        form: AnswerForm,
        sampling: Sampling,
        tokenizer: Tokenizer,
        send: Send,
        keep_alive: float,
    ) -> None:
        """`keep_alive`: seconds of silence after which a comment is sent."""
        self._answers = answers
        self._head = head
        self._form = form
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._send = send
        self._keep_alive = keep_alive
        self._plain = not (form.logprobs or form.return_token_ids or form.echo)
        self._templates = [
            StreamTemplate(head, include_usage=form.include_usage, index=index)
            for index in range(len(answers))
        ]
        self._opened = False
        self._opening = asyncio.Lock()
        self._unfinished = len(answers)
        self._sent = 0  # parts; what the keep-alive looks at

    async def run(self, *, collected: bool = False) -> None:
        """Until all answers are sent.

        Args:
            collected: `send` keeps what it gets until the end: a failure is never too late to be raised.

        Raises:
            ClientGone: nobody reads them.
            APIError: an answer failed before the stream was open.
        """
        filler = asyncio.create_task(self._fill_silences())
        try:
            if len(self._answers) == 1:
                end = await self._send_choice(self._answers[0], self._templates[0])
            else:
                end = await self._send_choices()
        except APIError as error:
            if collected or not self._opened:
                raise
            await self._send({"type": "http.response.body", "body": error_event(error.body())})
            return
        finally:
            filler.cancel()
        if self._form.include_usage:
            end += self._templates[0].usage(usage_of(self._answers))
        await self._send({"type": "http.response.body", "body": end + DONE})

    async def _send_choices(self) -> bytes:
        """All choices at once, each by a task of its own; the first failure ends the others."""
        tasks = [
            asyncio.create_task(self._send_choice(answer, template))
            for answer, template in zip(self._answers, self._templates, strict=True)
        ]
        try:
            return b"".join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_choice(self, answer: Answer, template: StreamTemplate) -> bytes:
        """One choice; the end of the last one is returned, to be sent with the stream's end."""
        writer = None
        if not self._plain:
            writer = ChoiceWriter(answer, self._form, self._sampling, self._tokenizer, chat=self._head.chat)
        read: Callable[[], Awaitable[str | list[Event]]]
        read = answer.next if answer.parser is None else answer.read
        piece = await read()
        if self._form.continuous_usage:
            template.note_usage(usage_so_far(answer))
        first = b"" if self._opened else await self._open()
        if writer is not None and not self._head.chat:
            first += self._prompt_chunk(answer, writer, template)
        while answer.finish_reason is None:
            chunk = first + self._chunk(piece, writer, template)
            if chunk:
                first = b""
                await self._part(chunk)
            piece = await read()
            if self._form.continuous_usage:
                template.note_usage(usage_so_far(answer))
        end = (
            first
            + self._chunk(piece, writer, template)
            + template.finish(answer.finish_reason, answer.stop_reason)
        )
        self._unfinished -= 1
        if not self._unfinished:
            return end
        await self._part(end)
        return b""

    def _chunk(
        self, piece: str | list[Event], writer: ChoiceWriter | None, template: StreamTemplate
    ) -> bytes:
        """The chunks of what came: text or a parser's events; with a writer, what belongs to new tokens."""
        if isinstance(piece, list):
            return self._event_chunks(piece, writer, template)
        if writer is None:
            return template.text(piece) if piece else b""
        logprobs, more = writer.part()
        if piece or logprobs or more.get("token_ids"):
            return template.rich(piece, logprobs, more)
        return b""

    def _event_chunks(
        self, events: list[Event], writer: ChoiceWriter | None, template: StreamTemplate
    ) -> bytes:
        """A chunk an event. What belongs to new tokens is in the first, which may have nothing else."""
        first = b""
        if writer is not None:
            logprobs, more = writer.part()
            if logprobs or more.get("token_ids"):
                lead = events.pop(0) if events else Content("")
                first = template.rich(lead, logprobs, more)
        return first + b"".join([template.event(event) for event in events])

    def _prompt_chunk(self, answer: Answer, writer: ChoiceWriter, template: StreamTemplate) -> bytes:
        """A completion's chunk before its text: what is asked for of the prompt."""
        form = self._form
        if not (form.echo or form.return_token_ids):
            return b""
        return template.rich(answer.prompt_text if form.echo else "", writer.echo(), writer.prompt_fields())

    async def _open(self) -> bytes:
        """Send the headers, once; returns the chunks that come before all others."""
        async with self._opening:
            if self._opened:
                return b""
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._opened = True
        if self._form.continuous_usage:
            for answer, template in zip(self._answers, self._templates, strict=True):
                template.note_usage(usage_so_far(answer))
        ids = self._answers[0].record.prompt_ids if self._form.return_token_ids else None
        return b"".join(template.first(ids) for template in self._templates)

    def _part(self, body: bytes) -> Awaitable[None]:
        self._sent += 1
        return self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _fill_silences(self) -> None:
        """A comment after each `keep_alive` in which nothing was sent: balancers close silent streams."""
        while True:
            before = self._sent
            await asyncio.sleep(self._keep_alive)
            if self._sent == before:
                await self._part((b"" if self._opened else await self._open()) + WAITING)
