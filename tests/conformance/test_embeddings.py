"""Embeddings: the same vector as numbers and as bytes, through the SDK's default too."""

from __future__ import annotations

import base64
import struct

import openai
import pytest

from tests.conformance.conftest import REAL_MODEL
from tests.conformance.target import Target

pytestmark = REAL_MODEL

PATH = "/v1/embeddings"


def test_emb_01_float_and_base64_agree(real: Target) -> None:
    """EMB-01, f, b and sdk."""
    reply = real.post(PATH, {"input": "hello"})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "list" and body["data"][0]["object"] == "embedding"
    assert [item["index"] for item in body["data"]] == [0]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    numbers = body["data"][0]["embedding"]
    coded = real.post(PATH, {"input": "hello", "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"], validate=True)
    assert len(raw) == 4 * len(numbers)
    assert struct.unpack(f"<{len(numbers)}f", raw) == pytest.approx(numbers, abs=1e-6)
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key=real.key or "none") as client:
        made = client.embeddings.create(model=real.model, input="hello")
    assert made.data[0].embedding == pytest.approx(numbers, abs=1e-6)


def test_emb_01_bad_requests(real: Target) -> None:
    """EMB-01, bad and dim; no model can give more numbers than it has."""
    for fields in ({"encoding_format": "hex"}, {"dimensions": 0}, {"dimensions": 65536}):
        reply = real.post(PATH, {"input": "hello"} | fields)
        assert reply.status_code == 400 and next(iter(fields)) in reply.json()["error"]["message"]
