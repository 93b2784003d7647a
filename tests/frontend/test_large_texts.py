"""Texts of megabytes: refused unread where they cannot fit, else one at a time and beside the small ones."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend import preparation
from servelite.frontend.app import make_app
from servelite.frontend.errors import APIError
from servelite.frontend.preparation import Caching, Preparation
from servelite.frontend.protocol import TemplateOptions
from servelite.frontend.sampling import Sampling
from servelite.tokenizer.tokenizer import Tokenizer
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import opened, service_and_engine


class Encoding:
    """`Tokenizer.encode_rendered` as the tests watch it: texts longer than `holds` wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: int) -> None:
        self.go = threading.Event()
        self.threads: list[str] = []
        self.under_way = self.most = 0
        encode = Tokenizer.encode_rendered

        def watched(tokenizer: Tokenizer, text: str, controls: Any) -> list[int]:
            self.threads.append(threading.current_thread().name)
            if len(text) > holds:
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                assert self.go.wait(30)
                self.under_way -= 1
            return encode(tokenizer, text, controls)

        monkeypatch.setattr(Tokenizer, "encode_rendered", watched)


@pytest.fixture
def made(demo_model: Path) -> Any:
    metadata = opened(demo_model)
    one = Preparation(metadata.files, metadata.tokenizer, 4)
    yield one
    one.close()


def complete(made: Preparation, prompt: str) -> Any:
    return made.completion([prompt], Sampling(), Caching(0), 1 << 30, echo=False)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_cannot_fit_is_not_tokenized(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        limit = service.tokenizer.most_bytes(512)
        encoding = Encoding(monkeypatch, 1 << 30)
        text = " a" * limit
        body: dict[str, Any] = {"model": "demo"}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        call = Call(make_app(service), "/v1/chat/completions" if chat else "/v1/completions", body)
        error = (await call.done())["error"]
        assert (call.status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == ("messages" if chat else "prompt")
        assert str(limit) in error["message"] and ("bytes" in error["message"])
        assert chat or str(2 * limit) in error["message"]
        assert encoding.threads == []


async def test_token_ids_that_cannot_fit_are_not_looked_at(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        body = {"model": "demo", "prompt": [10**6] * 513}  # nor is their range
        call = Call(make_app(service), "/v1/completions", body)
        error = (await call.done())["error"]
        assert (call.status, error["code"]) == (400, "context_length_exceeded") and "513" in error["message"]


async def test_small_texts_do_not_wait_for_large_ones(
    made: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "LARGE_TEXT", 1000)
    encoding = Encoding(monkeypatch, 900)
    large = [asyncio.create_task(complete(made, " a" * 2000)) for _ in range(6)]
    await asyncio.sleep(0.05)
    small = await asyncio.wait_for(complete(made, "hi"), 10)
    assert small.prompts[0].num_tokens == 1 and not any(task.done() for task in large)
    encoding.go.set()
    assert {(await task).prompts[0].num_tokens for task in large} == {2000}
    assert encoding.most == 1


async def test_a_template_that_writes_much(made: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its few messages do not tell: the tokenizing moves to the thread for large texts."""
    encoding = Encoding(monkeypatch, 1 << 30)
    message = {"role": "user", "content": "x" * 50}
    for large, thread in ((10_000, "prepare_"), (60, "prepare-large_")):
        monkeypatch.setattr(preparation, "LARGE_TEXT", large)
        await made.chat([message], TemplateOptions(), Sampling(), Caching(0), 1 << 20)
        assert encoding.threads.pop().startswith(thread)


async def test_large_texts_that_wait_are_bounded(made: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "LARGE_TEXT", 1000)
    monkeypatch.setattr(preparation, "MAX_LARGE_TEXTS", 5000)
    encoding = Encoding(monkeypatch, 900)
    first = asyncio.create_task(complete(made, "a" * 9000))  # alone, it may be larger than the bound
    await asyncio.sleep(0.05)
    with pytest.raises(APIError) as caught:
        await complete(made, "a" * 1000)
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert dict(caught.value.headers)["retry-after"] == "1"
    encoding.go.set()
    await first
    assert (await complete(made, "a" * 1000)).prompts
