"""`LLM` on the simulated executor: no HTTP, the same engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelite import LLM
from servelite.config import SettingError
from servelite.launcher.errors import LaunchError
from servelite.llm import EngineFailed, Sampling

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), executor="simulated", simulated_step_ms=2, max_num_seqs=4) as made:
        yield made


def test_generate(llm: LLM) -> None:
    texts = ["one", "two", "three"]
    answers = llm.generate(texts, temperature=0, max_tokens=5, ignore_eos=True)
    assert [len(answer.token_ids) for answer in answers] == [5, 5, 5]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert llm.generate("two", Sampling(temperature=0, max_tokens=5, ignore_eos=True)) == [answers[1]]
    assert answers[0].usage.completion_tokens == 5
    assert len(llm.generate([[1, 2, 3]], ignore_eos=True)[0].token_ids) == 16


def test_more_prompts_than_the_engine_takes(llm: LLM) -> None:
    answers = llm.generate(["x"] * 600, max_tokens=1)
    assert len(answers) == 600


def test_chat_and_stream(llm: LLM) -> None:
    options = {"temperature": 0.0, "max_tokens": 12, "seed": 3}
    (answer,) = llm.chat(MESSAGES, **options)
    again = llm.chat([MESSAGES, MESSAGES], **options)
    assert [one.token_ids for one in again] == [answer.token_ids] * 2
    assert {one.usage.cached_tokens for one in again} == {16}  # the prompt is known by now
    assert "".join(llm.stream_chat(MESSAGES, **options)) == answer.text


def test_a_stream_that_is_closed_is_aborted(llm: LLM) -> None:
    stream = llm.stream_chat(MESSAGES)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 5
    while llm._backend._service.engine._active:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_share_it(llm: LLM) -> None:
    texts: list[str] = []

    def ask() -> None:
        texts.append(llm.generate("x", temperature=0, max_tokens=8)[0].text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 6 and len(set(texts)) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"best": 3}, "best"),
        ({"max_tokens": 9000}, "8192"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(), "top_p": 0.5}, "top_p"),
    ],
)
def test_bad_options_are_named(llm: LLM, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        llm.generate("x", **options)  # type: ignore[arg-type]


def test_bad_prompts_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.generate(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"role": "robot", "content": "x"}])
    with pytest.raises(ValueError, match="no tokens"):
        llm.generate("")


def test_a_dead_engine_is_told(demo_model: Path) -> None:
    with LLM(str(demo_model), executor="simulated", simulated_step_ms=20) as llm:
        stream = llm.stream_chat(MESSAGES)
        next(stream)
        os.kill(llm._backend._engine.core.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            for _ in stream:
                pass
        with pytest.raises(EngineFailed, match="SIGKILL"):
            llm.generate("x")
    llm.close()


def test_closing_ends_what_other_threads_wait_for(demo_model: Path) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate("x", max_tokens=5000, ignore_eos=True)
        except EngineFailed as error:
            errors.append(error)

    with LLM(str(demo_model), executor="simulated", simulated_step_ms=20) as llm:
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
    thread.join(10)
    assert len(errors) == 1 and not thread.is_alive()
    with pytest.raises(EngineFailed, match="closed"):
        llm.generate("x")
    llm.close()


def test_what_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="none"):
        LLM(str(tmp_path / "none"))
    with pytest.raises(SettingError, match="block-size"):
        LLM("demo", block_size=0)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\0\0\0 nonsense")
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        LLM(str(tmp_path / "bad.gguf"), executor="simulated")


def test_no_main_guard_and_no_close_are_needed(tmp_path: Path, demo_model: Path) -> None:
    """A script without a main guard that forgets to close leaves nothing (the leftovers plugin looks)."""
    script = tmp_path / "script.py"
    script.write_text(
        "from servelite import LLM\n"
        f"llm = LLM({str(demo_model)!r}, executor='simulated')\n"
        "print(len(llm.generate('x', max_tokens=3, ignore_eos=True)[0].token_ids))\n"
    )
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "3\n", "")


@pytest.mark.real_model
def test_the_real_model(demo_model: Path) -> None:
    with LLM(str(demo_model), max_model_len=512, kv_cache_memory_bytes=64 << 20) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_text_without_an_encoding_is_a_value_error(llm: LLM) -> None:
    for call in (
        lambda: llm.generate("half \ud800"),
        lambda: llm.chat([{"role": "user", "content": "\udc00"}]),
        lambda: llm.generate("x", bad_words=["\ud800"]),
    ):
        with pytest.raises(ValueError, match="surrogate"):
            call()
    assert llm.generate("x", max_tokens=1, ignore_eos=True)[0].usage.completion_tokens == 1


def test_every_sampling_field_is_taken(llm: LLM) -> None:
    fields = {"min_p": 0.1, "logit_bias": {"5": 1}, "allowed_token_ids": [5, 6], "bad_words": "no"}
    fields |= {"stop_token_ids": [7], "min_tokens": 2, "presence_penalty": 0.5, "max_tokens": 3}
    (answer,) = llm.generate("x", **fields)
    assert answer.usage.completion_tokens == 3
    sampling = Sampling(logit_bias=((5, 1.0),), min_tokens=2, max_tokens=3, skip_special_tokens=False)
    assert llm.generate("x", sampling)[0].usage.completion_tokens >= 2
    with pytest.raises(ValueError, match="token IDs go from 0"):
        llm.generate("x", stop_token_ids=[1 << 20])
