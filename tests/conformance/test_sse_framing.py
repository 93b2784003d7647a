"""SSE: bad requests fail before a stream opens; what keeps a stream open is comments only."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest

from tests.conformance.sse import FramingError, read_events
from tests.conformance.target import CHAT, COMPLETIONS, GREEDY, Target, error_of, together

ASK = {"messages": [{"role": "user", "content": "x"}]} | GREEDY


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "", "max_tokens": 4} | GREEDY),
        (CHAT, ASK | {"n": 0}),
        (
            CHAT,
            ASK
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "hiccup"}},
                }
            },
        ),
        (CHAT, ASK | {"tool_choice": "required", "tools": []}),
    ],
    ids=["too_long", "n0", "bad_schema", "no_tools"],
)
def test_sse_03_bad_requests_fail_before_the_stream_opens(target: Target, path: str, body: dict) -> None:
    """SSE-03. A retry or a gateway decides by the status: a 200 with an error in it is none."""
    if body.get("prompt") == "":
        body = body | {"prompt": "word " * (target.max_model_len + 44)}
    begun = time.monotonic()
    with httpx.Client(base_url=target.url, headers=target.client.headers, timeout=10) as client:
        for _ in range(2):  # the second on the same connection, if the server kept it
            reply = client.post(path, json={"model": target.model, "stream": True} | body)
            assert reply.status_code == 400 and b"data:" not in reply.content
            error_of(reply)
    assert time.monotonic() - begun < 5
    target.check_alive()


def test_sse_05_keep_alive_lines_are_comments_only(narrow: Target) -> None:
    """SSE-05. Two rows are taken; a stream and a plain answer wait for one."""
    target = narrow
    long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True} | GREEDY
    short = {"prompt": "hello", "max_tokens": 4} | GREEDY
    quiet = target.events(COMPLETIONS, short)

    def later(ask):
        time.sleep(0.1)
        return ask()

    _, _, waiting, plain = together(
        [
            lambda: target.plain(COMPLETIONS, long),
            lambda: target.plain(COMPLETIONS, long),
            lambda: later(lambda: target.events(COMPLETIONS, short)),
            lambda: later(lambda: target.post(COMPLETIONS, short)),
        ]
    )
    assert len(waiting.comments) >= 2 and not quiet.comments
    same = [{k: v for k, v in chunk.items() if k not in ("id", "created")} for chunk in waiting.chunks]
    assert same == [{k: v for k, v in chunk.items() if k not in ("id", "created")} for chunk in quiet.chunks]
    assert plain.content.startswith(b"{") and json.loads(plain.content)
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0) as client:
        blockers = [lambda: target.plain(COMPLETIONS, long)] * 2
        texts = together([*blockers, lambda: later(lambda: _sdk_text(client, target.model))])
    assert texts[2] == plain.json()["choices"][0]["text"]


def _sdk_text(client: openai.OpenAI, model: str) -> str:
    stream = client.completions.create(model=model, prompt="hello", max_tokens=4, temperature=0, stream=True)
    return "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"a": 1}\n\n',
        b'data: {"a": 1}\n\ndata: [DONE]\n',
        b"waiting\n\ndata: [DONE]\n\n",
        b"\ndata: [DONE]\n\n",
        b'data: {"a": NaN}\n\ndata: [DONE]\n\n',
        b'data: {"a": "\xf0\x9f"}\n\ndata: [DONE]\n\n',
        b'data: [DONE]\n\ndata: {"a": 1}\n\n',
        b'data: {"error": {}}\n\ndata: [DONE]\n\n',
        b'data: {"a":\ndata: 1}\n\ndata: [DONE]\n\n',
    ],
)
def test_the_reader_finds_bad_frames(data: bytes) -> None:
    with pytest.raises(FramingError):
        read_events(data)
