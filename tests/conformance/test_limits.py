"""The output's limit: its defaults, its two names, zero and less."""

from __future__ import annotations

import pytest

from tests.conformance.target import CHAT, COMPLETIONS, GREEDY, Target

CHAT_BODY = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True} | GREEDY


@pytest.mark.parametrize(
    "limits",
    [{"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}],
    ids=["mct", "both"],
)
def test_lim_02_max_completion_tokens(target: Target, limits: dict) -> None:
    """LIM-02. The newer name wins."""
    answer = target.both(CHAT, CHAT_BODY | limits)
    assert answer.counts["completion_tokens"] == 5 and answer.finish_reason == "length"


@pytest.mark.parametrize("limits", [{"max_tokens": None}, {}], ids=["null", "absent"])
def test_lim_02_no_limit_is_the_contexts_end(target: Target, limits: dict) -> None:
    """LIM-02. No hidden 16, 100 or 512."""
    if target.max_model_len > 4096:
        pytest.skip(f"a context of {target.max_model_len} tokens is too long to fill")
    answer = target.both(CHAT, CHAT_BODY | limits)
    assert answer.counts["total_tokens"] == target.max_model_len and answer.finish_reason == "length"


def test_lim_02_the_older_endpoints_default_is_16(target: Target) -> None:
    """LIM-02, legacy."""
    answer = target.both(COMPLETIONS, {"prompt": "x", "ignore_eos": True} | GREEDY)
    assert answer.counts["completion_tokens"] == 16 and answer.finish_reason == "length"


def test_lim_03_zero_and_negative_limits(target: Target) -> None:
    """LIM-03. Nothing to write is no chat; less than nothing is a mistake."""
    target.refused(CHAT, CHAT_BODY | {"max_tokens": 0})
    target.refused(COMPLETIONS, {"prompt": "x", "max_tokens": -1} | GREEDY)
    reply = target.post(COMPLETIONS, {"prompt": "x", "max_tokens": 0} | GREEDY)
    assert reply.status_code == 400 or (reply.status_code == 200 and reply.json()["choices"][0]["text"] == "")
    target.check_alive()


@pytest.mark.slow
@pytest.mark.real_model
def test_lim_03_scoring_with_no_answer(real: Target) -> None:
    """LIM-03, score: what an evaluation asks for."""
    prompt = "The capital of France is"
    answer = real.both(COMPLETIONS, {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1} | GREEDY)
    assert answer.text == prompt and answer.counts["completion_tokens"] == 0
    assert answer.finish_reason in ("length", "stop")
    (choice,) = answer.choices
    assert len(choice.logprobs["token_logprobs"]) == answer.counts["prompt_tokens"]
    assert choice.logprobs["token_logprobs"][0] is None and choice.logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in choice.logprobs["token_logprobs"][1:])
    real.check_alive()
