"""The two generating routes as raw ASGI endpoints: a body in, an answer out, whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

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
from servelite.frontend.chunks import AnswerHead, whole_answer
from servelite.frontend.errors import APIError
from servelite.frontend.protocol import ChatRequest, CompletionRequest, read_chat, read_completion
from servelite.frontend.service import Service
from servelite.frontend.streaming import AnswerStream
from servelite.frontend.writing import ChoiceWriter, usage_of


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
        reading = read_body(scope, receive, service.settings.max_body_bytes)
        body = await service.lifecycle.arrival(reading)
        request = await service.preparation.parse(lambda: self._read(body), len(body))
        service.check_model(request.model)
        if isinstance(request, ChatRequest):
            answers = await service.chat(
                request.messages, request.sampling, request.options, request.template
            )
        else:
            answers = await service.complete(
                request.prompts, request.sampling, request.options, echo=request.form.echo
            )
        watch = asyncio.create_task(_watch(receive, answers))
        head = AnswerHead(
            self._chat,
            ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            int(time.time()),
            request.model,
        )
        try:
            if request.form.stream:
                keep_alive = service.settings.sse_keep_alive
                await AnswerStream(
                    answers, head, request.form, request.sampling, service.tokenizer, send, keep_alive
                ).run()
            else:
                await self._whole(request, answers, head, send)
        finally:
            watch.cancel()
            for answer in answers:
                answer.close()

    def _read(self, body: bytes) -> ChatRequest | CompletionRequest:
        rules = self._service.rules
        return (
            read_chat(decode_json(body), rules) if self._chat else read_completion(decode_json(body), rules)
        )

    async def _whole(
        self,
        request: ChatRequest | CompletionRequest,
        answers: Sequence[Answer],
        head: AnswerHead,
        send: Send,
    ) -> None:
        form, choices, more = request.form, [], {}
        for answer, text in zip(answers, await _read_all(answers), strict=True):
            writer = ChoiceWriter(answer, form, request.sampling, self._service.tokenizer, chat=self._chat)
            choices.append(writer.whole(text))
            if self._chat and answer is answers[0]:  # the choices of a chat have one prompt
                more = writer.prompt_fields()
        await send_json(send, 200, whole_answer(head, choices, usage_of(answers), more))


async def _read_all(answers: Sequence[Answer]) -> list[str]:
    """The texts of all answers, complete; the first failure is told at once."""
    if len(answers) == 1:
        return [await _read(answers[0])]
    tasks = [asyncio.create_task(_read(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(answer: Answer) -> str:
    texts = []
    while answer.finish_reason is None:
        texts.append(await answer.next())
    return "".join(texts)


async def _watch(receive: Receive, answers: Sequence[Answer]) -> None:
    """Tell the answers when the client is gone. The body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for answer in answers:
        answer.record.client_gone()
