"""`/v1/embeddings` on running servers: the OpenAI SDK, many inputs, a killed engine; a real encoder."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.http.server import Server, running_server

PATH = "/v1/embeddings"
SIMULATED = ("--executor", "simulated", "--max-model-len", "512")
TEXTS = [f"text number {i} of some" for i in range(32)]
STEPS = "servelite_engine_steps_total"


def embed(server: Server, texts: Any, model: str = "demo") -> np.ndarray:
    """By the SDK, which asks for base64 by itself."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=model, input=texts)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("embed"), *SIMULATED, "--simulated-step-ms", "5") as running:
        yield running


def test_the_sdks_bytes_are_the_numbers(server: Server) -> None:
    status, body = server.post(PATH, {"model": "demo", "input": "hello"})
    numbers = np.array(body["data"][0]["embedding"])
    assert status == 200 and numbers.shape == (576,)
    assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(embed(server, "hello")[0], numbers, atol=1e-6)


def test_a_batch_takes_few_steps_and_each_vector_is_what_it_is_alone(server: Server) -> None:
    server.idle_metrics()
    before = server.metrics()
    together = embed(server, TEXTS)
    after = server.idle_metrics()
    assert after[STEPS] - before[STEPS] <= 6  # a step may begin before all have arrived
    assert after["servelite_prompt_tokens_total"] - before["servelite_prompt_tokens_total"] == 32 * 7 - 10
    assert after["servelite_generation_tokens_total"] == before["servelite_generation_tokens_total"]
    np.testing.assert_array_equal(together[7], embed(server, TEXTS[7])[0])


def test_as_many_inputs_as_the_api_takes(server: Server) -> None:
    vectors = embed(server, [[i % 1000 + 1, i // 1000 + 1] for i in range(2048)])
    assert len(np.unique(vectors[:, 0])) == 2048


def test_a_client_that_is_gone_frees_its_blocks(server: Server) -> None:
    body = json.dumps({"model": "demo", "input": [[i + 1] * 500 for i in range(400)]}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 10
        while not server.metrics()["servelite_num_requests_running"]:
            assert time.monotonic() < deadline
    steps = server.idle_metrics()[STEPS]  # 400 steps of 5 ms are 2 s
    time.sleep(0.2)
    assert server.metrics()[STEPS] == steps


def test_ranks_make_the_same_vectors(server: Server, tmp_path: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--tp", "2", "--async-depth", "2") as ranks:
        np.testing.assert_array_equal(embed(ranks, TEXTS), embed(server, TEXTS))


def test_a_batch_outlives_its_engine(server: Server, tmp_path: Path) -> None:
    inputs = [[i + 1] * 100 for i in range(60)]
    expected, found = embed(server, inputs), []
    flags = ("--simulated-step-ms", "30", "--max-num-seqs", "8", "--max-num-batched-tokens", "128")
    with running_server(tmp_path, *SIMULATED, *flags) as killed:
        client = threading.Thread(target=lambda: found.append(embed(killed, inputs)))
        client.start()
        deadline = time.monotonic() + 10
        while killed.metrics()[STEPS] < 10:
            assert time.monotonic() < deadline
        os.kill(killed.child("engine core"), signal.SIGKILL)
        client.join(60)
        assert killed.metrics()["servelite_requests_resumed_total"] > 0
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.real_model
@pytest.mark.parametrize("flags", [(), ("--tp", "2")], ids=str)
def test_a_real_encoder(minilm_model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Vectors are those of its own recipe: transformers' hidden states, their mean, a length of 1."""
    texts = ["How do I bake bread?", "A recipe for a loaf.", "The stock market fell today. " * 12, "x"]
    with running_server(
        tmp_path, "--served-model-name", "minilm", *flags, model=str(minilm_model)
    ) as encoder:
        found = embed(encoder, texts, "minilm")
        before = encoder.idle_metrics()[STEPS]
        embed(encoder, TEXTS, "minilm")
        assert encoder.idle_metrics()[STEPS] - before <= 6
        assert encoder.get("/health/ready")[0] == 200
        status, body = encoder.post("/v1/completions", {"model": "minilm", "prompt": "hi"})
        assert status == 400 and "/v1/embeddings only" in body["error"]["message"]
        status, body = encoder.post(PATH, {"model": "minilm", "input": ["ok", "word " * 600]})
        assert status == 400 and body["error"]["param"] == "input[1]" and "602" in body["error"]["message"]
        cut = {"model": "minilm", "input": "word " * 600, "truncate_prompt_tokens": -1}
        assert encoder.post(PATH, cut)[1]["usage"]["prompt_tokens"] == 512
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import transformers

    model = transformers.AutoModel.from_pretrained(minilm_model, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_model, local_files_only=True)
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)
    alike, unlike = found[0] @ found[1], found[0] @ found[2]
    assert alike > 0.5 > 0.2 > unlike
