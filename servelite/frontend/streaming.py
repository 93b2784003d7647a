"""A streamed answer: the chunks of all its choices on one connection. Nothing but this runs per token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from servelite.frontend.answer import Answer
from servelite.frontend.body import Send
from servelite.frontend.chunks import Chunks
from servelite.frontend.errors import APIError
from servelite.frontend.parsers.events import Content, Event
from servelite.frontend.protocol import ChatRequest, CompletionRequest
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
        request: ChatRequest | CompletionRequest,
        chunks: Sequence[Chunks],
        tokenizer: Tokenizer,
        send: Send,
        send_part: Send,
        keep_alive: float,
    ) -> None:
        """
        Args:
            chunks: of each answer.
            send_part: for all that comes between the stream's head and its end.
            keep_alive: seconds of silence after which a comment is sent.
        """
        self._answers = answers
        self._form = request.form
        self._sampling = request.sampling
        self._chat = isinstance(request, ChatRequest)
        self._chunks = chunks
        self._tokenizer = tokenizer
        self._send, self._send_part = send, send_part
        self._keep_alive = keep_alive
        self._opened = False
        self._opening = asyncio.Lock()
        self._unfinished = len(answers)
        self._sent = 0  # parts; what the keep-alive looks at

    async def run(self) -> None:
        """Until all answers are sent.

        Raises:
            ClientGone: nobody reads them.
            APIError: an answer failed before the stream was open, or of one that is not streamed.
        """
        filler = asyncio.create_task(self._fill_silences())
        try:
            if len(self._answers) == 1:
                end = await self._send_choice(self._answers[0], self._chunks[0])
            else:
                end = await self._send_choices()
        except APIError as error:
            if not (self._opened and self._form.stream):
                raise
            await self._send({"type": "http.response.body", "body": self._chunks[0].failed(error)})
            return
        finally:
            filler.cancel()
        end += self._chunks[0].done(usage_of(self._answers))
        await self._send({"type": "http.response.body", "body": end})

    async def _send_choices(self) -> bytes:
        """All choices at once, each by a task of its own; the first failure ends the others."""
        tasks = [
            asyncio.create_task(self._send_choice(answer, chunks))
            for answer, chunks in zip(self._answers, self._chunks, strict=True)
        ]
        try:
            return b"".join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_choice(self, answer: Answer, chunks: Chunks) -> bytes:
        """One choice; the end of the last one is returned, to be sent with the stream's end."""
        form, writer = self._form, None
        if form.logprobs or form.return_token_ids or form.echo:
            writer = ChoiceWriter(answer, form, self._sampling, self._tokenizer, chat=self._chat)
        read: Callable[[], Awaitable[str | list[Event]]]
        read = answer.next if answer.parser is None else answer.read
        piece = await read()
        if form.continuous_usage:
            chunks.note_usage(usage_so_far(answer))
        first = b"" if self._opened else await self._open()
        if writer is not None and not self._chat and (form.echo or form.return_token_ids):
            prompt = answer.prompt_text if form.echo else ""
            first += chunks.rich(prompt, writer.echo(), writer.prompt_fields())
        while answer.finish_reason is None:
            chunk = first + _chunk(piece, writer, chunks)
            if chunk:
                first = b""
                await self._part(chunk)
            piece = await read()
            if form.continuous_usage:
                chunks.note_usage(usage_so_far(answer))
        end = first + _chunk(piece, writer, chunks) + chunks.finish(answer.finish_reason, answer.stop_reason)
        self._unfinished -= 1
        if not self._unfinished:
            return end
        await self._part(end)
        return b""

    async def _open(self) -> bytes:
        """Send the headers, once; returns the chunks that come before all others."""
        async with self._opening:
            if self._opened:
                return b""
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._opened = True
        for answer, chunks in zip(self._answers, self._chunks, strict=True):
            chunks.note_usage(usage_so_far(answer))
        ids = self._answers[0].record.prompt_ids if self._form.return_token_ids else None
        return b"".join(chunks.first(ids) for chunks in self._chunks)

    def _part(self, body: bytes) -> Awaitable[None]:
        self._sent += 1
        return self._send_part({"type": "http.response.body", "body": body, "more_body": True})

    async def _fill_silences(self) -> None:
        """A comment after each `keep_alive` in which nothing was sent: balancers close silent streams."""
        while True:
            before = self._sent
            await asyncio.sleep(self._keep_alive)
            if self._sent == before:
                await self._part((b"" if self._opened else await self._open()) + self._chunks[0].waiting)


def _chunk(piece: str | list[Event], writer: ChoiceWriter | None, chunks: Chunks) -> bytes:
    """The chunks of what came: text or a parser's events. With a writer, what belongs to new tokens is in
    the first, which may have nothing else."""
    if writer is None:
        if isinstance(piece, str):
            return chunks.text(piece) if piece else b""
        if len(piece) == 1:  # the rule
            return chunks.event(piece[0])
        return b"".join([chunks.event(event) for event in piece])
    logprobs, more = writer.part()
    if isinstance(piece, str):
        return chunks.rich(piece, logprobs, more) if piece or logprobs or more.get("token_ids") else b""
    first = b""
    if logprobs or more.get("token_ids"):
        first = chunks.rich(piece.pop(0) if piece else Content(""), logprobs, more)
    return first + b"".join([chunks.event(event) for event in piece])
