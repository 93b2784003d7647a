"""`LLM`: the engine from a Python program, without HTTP.

    from servelite import LLM

    with LLM("demo") as llm:
        print(llm.generate(["The capital of France is"], max_tokens=8)[0].text)

The engine is the same process that `servelite serve` starts. No main guard is needed: it is started
by exec, not by multiprocessing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from servelite.config import Settings
from servelite.frontend.answer import Answer
from servelite.frontend.chunks import Usage
from servelite.frontend.errors import APIError, engine_dead, shutting_down
from servelite.frontend.fields import Field, Integer, read_fields
from servelite.frontend.model_metadata import read_metadata
from servelite.frontend.prompts import read_messages, read_prompt
from servelite.frontend.protocol import COMPLETION_MAX_TOKENS
from servelite.frontend.sampling import MAX_TOKENS, SAMPLING_FIELDS, Sampling
from servelite.frontend.service import Service
from servelite.frontend.writing import usage_of
from servelite.ipc.messages import Stop
from servelite.ipc.process import usable_cpus
from servelite.ipc.progress import ProgressPage
from servelite.launcher.child import Child
from servelite.launcher.engine_life import EngineLife
from servelite.launcher.runtime_dir import runtime_folder
from servelite.launcher.start import find_model

__all__ = ["LLM", "Completion", "EngineFailed", "Sampling"]

_FIELDS: Final = (
    *SAMPLING_FIELDS,
    Field("max_tokens", Integer(1, MAX_TOKENS), None, "longest answer, in tokens"),
)
_STOP_S: Final = 5.0  # from Stop to SIGKILL

_T = TypeVar("_T")
Messages = Sequence[dict[str, Any]]
Start = Callable[[Service], Awaitable[list[Answer]]]
"""Starts one answer, in a list."""


class EngineFailed(RuntimeError):
    """The engine could not start, has died, or gave a request up."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]  # a stop token at its end included
    finish_reason: str  # "stop" or "length"
    usage: Usage


class LLM:
    """A model and its engine; close it, or use it as a context manager. Any thread may call it."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        """Start the engine and wait until it is ready.

        Args:
            model: a GGUF file, a Hugging Face folder, a hub id (`ORG/NAME`), or `demo`.
            settings: fields of `servelite.config.Settings`.

        Raises:
            SettingError: a setting has a value it cannot have.
            LaunchError: there is no such model.
            ModelFileError, InvalidTemplate: its files cannot be used.
            EngineFailed: the engine did not start.
        """
        self._backend = _Backend(find_model(Settings(model=model, **settings)))
        self._finalizer = weakref.finalize(self, self._backend.close)
        try:
            self._backend.start()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling: Sampling | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Continue each prompt (a text or token IDs); 16 tokens unless `max_tokens` says more.

        Args:
            prompts: one text, or a list of texts or of token ID lists.
            sampling: how to draw; or give its fields as keyword arguments.

        Raises:
            ValueError: a prompt or an option is not possible; the text names it.
            EngineFailed: the engine died or gave a request up.
        """
        chosen = _sampling(sampling, options, self._backend.sampling_defaults)
        if chosen.max_tokens is None:
            chosen = dataclasses.replace(chosen, max_tokens=COMPLETION_MAX_TOKENS)
        with _public_errors():
            items = [prompts] if isinstance(prompts, str) else prompts
            checked = [read_prompt(f"prompts[{i}]", prompt) for i, prompt in enumerate(items)]
            starts: list[Start] = [
                partial(Service.complete, prompts=[prompt], sampling=chosen) for prompt in checked
            ]
            return self._backend.call(self._backend.answer_all(starts))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: Sampling | None = None,
        **options: Any,
    ) -> list[Completion]:
        """The assistant's answer to a conversation, or to each of a list of conversations.

        Arguments and errors are those of `generate`; without `max_tokens` an answer may run to the
        end of the context.
        """
        chosen = _sampling(sampling, options, self._backend.sampling_defaults)
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: Sequence[Any] = messages if several else [messages]
        with _public_errors():
            checked = [read_messages("messages", list(conversation)) for conversation in conversations]
            starts: list[Start] = [partial(Service.chat, messages=one, sampling=chosen) for one in checked]
            return self._backend.call(self._backend.answer_all(starts))

    def stream_chat(
        self, messages: Messages, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[str]:
        """The assistant's answer as it comes, piece by piece; closing the iterator ends it early."""
        chosen = _sampling(sampling, options, self._backend.sampling_defaults)
        with _public_errors():
            checked = read_messages("messages", list(messages))
            pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            future = self._backend.begin(self._backend.feed(checked, chosen, pieces))
            try:
                while (piece := pieces.get()) is not None:
                    yield piece
                future.result()
            finally:
                future.cancel()

    def close(self) -> None:
        """End the engine; idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sampling(
    sampling: Sampling | None, options: dict[str, Any], model_defaults: Mapping[str, Any]
) -> Sampling:
    """One validated `Sampling`, by the same declarations as HTTP's.

    Keyword arguments are completed by the model's own defaults; a `Sampling` is complete in itself.
    """
    if sampling is not None and options:
        raise ValueError(f"give either a Sampling or keyword arguments, not both: {', '.join(options)}")
    if sampling is not None:
        defaults = {f.name: f.default for f in dataclasses.fields(Sampling)}
        given = {name: getattr(sampling, name) for name in defaults}
        options = {name: value for name, value in given.items() if value != defaults[name]}
        model_defaults = {}
    if isinstance(options.get("logit_bias"), tuple):  # as `Sampling` has it
        options = options | {"logit_bias": dict(options["logit_bias"])}
    with _public_errors():
        values = read_fields(_FIELDS, options, model_defaults)
        return Sampling.from_fields(values, values["max_tokens"])


@contextlib.contextmanager
def _public_errors() -> Iterator[None]:
    """What HTTP clients get as error bodies, as the exceptions of a library."""
    try:
        yield
    except APIError as error:
        if error.status < 500:
            raise ValueError(error.message) from None
        raise EngineFailed(error.message) from None


class _Backend:
    """The engine process and an event loop in a thread of its own, which talks to it.

    The thread also starts the engine: the kernel ends a child when the thread that started it ends,
    and this one lives as long as the engine should.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servelite", daemon=True)
        self._stack = contextlib.ExitStack()
        # No more at once than the engine takes: a list of prompts is never refused for its length.
        waiting = min(settings.max_waiting_requests, settings.max_num_seqs)
        self._at_once = asyncio.Semaphore(settings.max_num_seqs + waiting)
        self._engine: EngineLife | None = None
        self._service: Service | None = None
        self._reader: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    def start(self) -> None:
        """Raises `EngineFailed`, `LaunchError` or `ModelFileError`."""
        folder = self._stack.enter_context(runtime_folder(self._settings.runtime_dir))
        page = ProgressPage.create()
        self._stack.callback(os.close, page.fd)
        self._thread.start()
        self.call(self._open(folder, page))

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the model's generation_config.json sets."""
        assert self._service is not None
        return self._service.sampling_defaults

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run `work` on the loop; raises `EngineFailed` after `close`."""
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise EngineFailed("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` on the loop and wait for it; an interrupt cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()

    async def answer_all(self, starts: Sequence[Start]) -> list[Completion]:
        """Read all answers; the first failure ends the others."""
        tasks = [asyncio.ensure_future(self._answer_one(start)) for start in starts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer_one(self, start: Start) -> Completion:
        assert self._service is not None
        async with self._at_once:
            with self._service.lifecycle.answering():
                (answer,) = await start(self._service)
                try:
                    texts = []
                    while answer.finish_reason is None:
                        texts.append(await answer.next())
                    return Completion(
                        "".join(texts), answer.token_ids, answer.finish_reason, usage_of([answer])
                    )
                finally:
                    answer.close()

    async def feed(
        self, messages: list[dict[str, str]], sampling: Sampling, pieces: queue.SimpleQueue[str | None]
    ) -> None:
        """Put an answer's text into `pieces` as it comes, None at its end."""
        assert self._service is not None
        try:
            with self._service.lifecycle.answering():
                (answer,) = await self._service.chat(messages, sampling)
                try:
                    while answer.finish_reason is None:
                        if text := await answer.next():
                            pieces.put(text)
                finally:
                    answer.close()
        finally:
            pieces.put(None)

    async def _open(self, folder: str, page: ProgressPage) -> None:
        self._engine = EngineLife.start(self._settings, folder, page)
        for member in self._engine.members:
            self._loop.add_reader(member.pidfd, self._bury, member)
        metadata = read_metadata(self._settings)
        self._service = Service(self._settings, 0, page.slots, metadata, usable_cpus())
        client, boot = self._service.engine, self._engine.boot
        self._reader = asyncio.create_task(client.run(boot.engine_address, boot.epoch))
        ready = asyncio.create_task(client.ready())
        died = asyncio.create_task(self._died.wait())
        try:
            await asyncio.wait((ready, died, self._reader), return_when=asyncio.FIRST_COMPLETED)
            if self._reader.done():
                self._reader.result()
            if self._died.is_set():
                raise EngineFailed(f"the engine did not start: {self._engine.death()}")
        finally:
            ready.cancel()
            died.cancel()
        self._service.lifecycle.serve()

    def _bury(self, member: Child) -> None:
        """One of the engine's processes has died, the others follow: answers under way end with an error."""
        assert self._engine is not None
        self._loop.remove_reader(member.pidfd)
        member.reap()
        self._engine.lost(member)
        if self._engine.alive:
            return
        self._died.set()
        if self._service is not None:
            cause = self._engine.death()
            self._service.lifecycle.lose_engine(cause)
            self._service.engine.fail_all(engine_dead(cause))

    async def _end(self) -> None:
        if self._service is not None:
            self._service.lifecycle.refuse()
            self._service.engine.fail_all(shutting_down())
            await self._service.lifecycle.idle()
            self._service.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._engine is not None:
            self._engine.send(Stop())
            try:
                await asyncio.wait_for(self._died.wait(), _STOP_S)
            except TimeoutError:
                self._engine.kill()
                await self._died.wait()

    def close(self) -> None:
        """End engine and thread, remove the folder. Called once."""
        if self._thread.is_alive():
            self.call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._stack.close()
