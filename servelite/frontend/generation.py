"""The two generating routes as raw ASGI endpoints: a body in, an answer out, whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from servelite.frontend.answer import Answer
from servelite.frontend.body import (
    DIRECT_SEND,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    decode_json,
    read_body,
    send_error,
    send_json,
)
from servelite.frontend.chunks import AnswerHead, Chunks, StreamTemplate, Translation, whole_answer
from servelite.frontend.errors import APIError
from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.parsers.events import Event
from servelite.frontend.protocol import ChatRequest, CompletionRequest, read_chat, read_completion
from servelite.frontend.request import RequestRecord
from servelite.frontend.service import Reading, Service
from servelite.frontend.streaming import AnswerStream
from servelite.frontend.writing import ChoiceWriter, usage_of

_T = TypeVar("_T")


class Generation:
    """`/v1/chat/completions` (chat) or `/v1/completions`."""

    def __init__(self, service: Service, *, chat: bool) -> None:
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await generating(self._service, scope, send, self._read_and_answer(scope, receive, send))

    async def _read_and_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(self._service, scope, receive, self._read)
        await self.answer(request, scope, receive, send)

    async def answer(
        self,
        request: ChatRequest | CompletionRequest,
        scope: Scope,
        receive: Receive,
        send: Send,
        translation: Translation | None = None,
    ) -> None:
        """Send the answer to a request whose body has been read.

        Args:
            translation: of an answer in the words of another API. A whole one is put together from what is
                streamed, so that it cannot differ from it, and text and calls keep their order.

        Raises:
            APIError: it is refused, or has failed before anything was sent on.
            ClientGone: nobody waits for it any more.
        """
        service = self._service
        service.check_model(request.model)
        answers, records = list[Answer](), list[RequestRecord]()
        starting = asyncio.create_task(self._start(request))
        watching = asyncio.create_task(watch(receive, records, starting))
        head = AnswerHead(
            self._chat,
            ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            int(time.time()),
            request.model,
            isinstance(request, ChatRequest) and request.tools.wanted,
        )
        try:
            answers = await _unless_gone(starting)
            records += [answer.record for answer in answers]
            if watching.done():
                raise ClientGone
            if request.form.stream or translation is not None:
                chunks: list[Chunks] = [StreamTemplate(head, request.form, i) for i in range(len(answers))]
                streamed = request.form.stream
                await AnswerStream(
                    answers,
                    request,
                    chunks if translation is None else [translation],
                    service.tokenizer,
                    send if streamed else _keep_back,
                    scope.get(DIRECT_SEND, send) if streamed else _keep_back,
                    service.settings.sse_keep_alive,
                ).run()
                if translation is not None and not streamed:
                    await send_json(send, 200, translation.whole())
            else:
                await self._whole(request, answers, head, send)
        finally:
            watching.cancel()
            for answer in answers:
                answer.close()

    async def _start(self, request: ChatRequest | CompletionRequest) -> list[Answer]:
        if isinstance(request, ChatRequest):
            return await self._service.chat(
                request.messages,
                request.sampling,
                request.options,
                request.template,
                Reading(request.tools, request.include_reasoning, request.thinking_token_budget),
            )
        return await self._service.complete(
            request.prompts,
            request.sampling,
            request.options,
            echo=request.form.echo,
            add_special_tokens=request.add_special_tokens,
        )

    def _read(self, body: Any) -> ChatRequest | CompletionRequest:
        rules = self._service.rules
        return read_chat(body, rules) if self._chat else read_completion(body, rules)

    async def _whole(
        self,
        request: ChatRequest | CompletionRequest,
        answers: Sequence[Answer],
        head: AnswerHead,
        send: Send,
    ) -> None:
        form, choices, more = request.form, [], {}
        for answer, read in zip(answers, await _read_all(answers), strict=True):
            writer = ChoiceWriter(answer, form, request.sampling, self._service.tokenizer, chat=self._chat)
            choices.append(writer.whole(read))
            if self._chat and answer is answers[0]:  # the choices of a chat have one prompt
                more = writer.prompt_fields()
        await send_json(send, 200, whole_answer(head, choices, usage_of(answers), more))


async def generating(service: Service, scope: Scope, send: Send, work: Coroutine[Any, Any, None]) -> None:
    """Run the `work` of a generating route; what it raises is the answer."""
    try:
        try:
            service.lifecycle.check()
        except APIError:
            work.close()
            raise
        with service.lifecycle.answering():
            # A task of its own: what is woken once a token is three frames deep, not fifteen.
            await asyncio.create_task(work)
    except ClientGone:
        pass
    except APIError as error:
        service.metrics.refused(error.code or str(error.status))
        await send_error(send, error, scope["path"])


async def read_request(service: Service, scope: Scope, receive: Receive, read: Callable[[Any], _T]) -> _T:
    """What `read` makes of the request's body, decoded; raises `APIError` and `ClientGone`."""
    reading = read_body(scope, receive, service.settings.max_body_bytes)
    body = await service.lifecycle.arrival(reading)
    return await service.preparation.parse(lambda: read(decode_json(body)), len(body))


async def _keep_back(message: Message) -> None:
    """The `send` of an answer that is not streamed."""


async def _read_all(answers: Sequence[Answer]) -> list[Assembled]:
    """All answers, complete; the first failure is told at once."""
    if len(answers) == 1:
        return [await _read(answers[0])]
    tasks = [asyncio.create_task(_read(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(answer: Answer) -> Assembled:
    if answer.parser is not None:
        events: list[Event] = []
        while answer.finish_reason is None:
            events += await answer.read()
        return Assembled.of(events)
    texts = []
    while answer.finish_reason is None:
        texts.append(await answer.next())
    return Assembled("".join(texts))


async def _unless_gone(starting: asyncio.Task[list[Answer]]) -> list[Answer]:
    """What `starting` gives; raises `ClientGone` where `watch` has ended it."""
    try:
        return await starting
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ClientGone from None


async def watch(
    receive: Receive, records: Iterable[RequestRecord], starting: asyncio.Task[Any] | None = None
) -> None:
    """Tell the records when the client is gone, and end what is `starting`. The body has been read: nothing
    else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if starting is not None:
        starting.cancel()
    for record in records:
        record.client_gone()
