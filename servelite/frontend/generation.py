"""The two generating routes as raw ASGI endpoints: nothing but this file runs per token."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable
from typing import Final

from servelite.frontend.answer import Answer
from servelite.frontend.body import (
    ClientGone,
    Receive,
    Scope,
    Send,
    decode_json,
    read_body,
    send_error,
    send_json,
)
from servelite.frontend.chunks import DONE, WAITING, StreamTemplate, error_event, whole_answer
from servelite.frontend.errors import APIError
from servelite.frontend.protocol import ChatRequest, CompletionRequest, read_chat, read_completion
from servelite.frontend.request import RequestRecord
from servelite.frontend.service import Service

log = logging.getLogger(__name__)

OPEN_AFTER_S: Final = 10.0
"""A stream that has no token after this long is opened anyway, and says every so often that it waits.

Until then an engine's refusal can still be answered with its own status."""

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """`/v1/chat/completions` (chat) or `/v1/completions`."""

    def __init__(self, service: Service, *, chat: bool) -> None:
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            service.lifecycle.check()
            with service.lifecycle.answering():
                # A task of its own: what is woken once a token is three frames deep, not fifteen.
                await asyncio.create_task(self._answer(scope, receive, send))
        except ClientGone:
            pass
        except APIError as error:
            service.metrics.refused(error.code or str(error.status))
            await send_error(send, error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = decode_json(await read_body(scope, receive))
        request: ChatRequest | CompletionRequest = read_chat(body) if self._chat else read_completion(body)
        service.check_model(request.model)
        if isinstance(request, ChatRequest):
            answer = await service.chat(request.messages, request.sampling)
        else:
            answer = await service.complete(request.prompt, request.sampling)
        watch = asyncio.create_task(_watch(receive, answer.record))
        try:
            if request.stream:
                await self._stream(request, answer, send)
            else:
                await self._whole(request, answer, send)
        finally:
            watch.cancel()
            answer.close()

    async def _whole(self, request: ChatRequest | CompletionRequest, answer: Answer, send: Send) -> None:
        texts = []
        while answer.finish_reason is None:
            texts.append(await answer.next())
        body = whole_answer(
            chat=self._chat,
            answer_id=self._new_id(),
            created=int(time.time()),
            model=request.model,
            text="".join(texts),
            finish_reason=answer.finish_reason,
            usage=answer.usage,
        )
        await send_json(send, 200, body)

    async def _stream(self, request: ChatRequest | CompletionRequest, answer: Answer, send: Send) -> None:
        template = StreamTemplate(
            chat=self._chat,
            answer_id=self._new_id(),
            created=int(time.time()),
            model=request.model,
            include_usage=request.include_usage,
        )
        opened = await _open(answer.record, template, send)
        try:
            text = await answer.next()
            first = b""
            if not opened:
                await _start(send)
                opened, first = True, template.first()
            while answer.finish_reason is None:
                if text or first:
                    await _send_part(send, first + template.text(text) if text else first)
                    first = b""
                text = await answer.next()
        except APIError as error:
            if not opened:
                raise
            await send({"type": "http.response.body", "body": error_event(error.body())})
            return
        end = first + template.text(text) if text else first
        end += template.finish(answer.finish_reason)
        if request.include_usage:
            end += template.usage(answer.usage)
        await send({"type": "http.response.body", "body": end + DONE})

    def _new_id(self) -> str:
        return ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex


async def _watch(receive: Receive, record: RequestRecord) -> None:
    """Tell the record when the client is gone. The body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    record.client_gone()


async def _open(record: RequestRecord, template: StreamTemplate, send: Send) -> bool:
    """Wait for the first news; a long wait opens the stream and is filled with SSE comments."""
    loop = asyncio.get_running_loop()
    opened = False
    while not record.has_news:
        timer = loop.call_later(OPEN_AFTER_S, record.wake)
        await record.news()
        timer.cancel()
        if not record.has_news:
            if not opened:
                await _start(send)
                opened = True
                await _send_part(send, template.first())
            await _send_part(send, WAITING)
    return opened


async def _start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})


def _send_part(send: Send, body: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": body, "more_body": True})
