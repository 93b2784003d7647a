"""Sampling: seeds whatever a request is batched with, biased logits, penalties of what was generated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.target import COMPLETIONS, GREEDY, Target, a_long_stream, together

PROMPT = "The old house stood at the end of"
SOLO = {"prompt": PROMPT, "temperature": 1, "max_tokens": 16, "seed": 42, "ignore_eos": True}
TIE = 1e-4


def text_of(target: Target, **fields: Any) -> Callable[[], str]:
    return lambda: target.plain(COMPLETIONS, SOLO | fields).text


def later(seconds: float, job: Callable[[], str]) -> Callable[[], str]:
    def run() -> str:
        time.sleep(seconds)
        return job()

    return run


def test_smp_02_a_seed_whatever_it_is_batched_with(each: Target) -> None:
    """SMP-02."""
    solo = each.both(COMPLETIONS, SOLO).text
    free: set[str] = set()
    for _ in range(4):
        mine, *others = together([text_of(each), *[text_of(each, seed=None)] * 7])
        assert mine == solo
        free.update(others)
    assert len(free) > 20  # a neighbour's seed makes nobody else deterministic
    arriving = [later(0.003 * number, text_of(each, seed=number)) for number in range(1, 8)]
    assert together([later(0.01, text_of(each)), *arriving])[0] == solo
    assert together([text_of(each)] * 2) == [solo] * 2
    assert text_of(each, seed=43)() != solo


def test_smp_02_any_int64_is_a_seed(target: Target) -> None:
    """SMP-02, big."""
    target.both(COMPLETIONS, SOLO | {"seed": -(1 << 63), "max_tokens": 2})


def test_smp_02_more_than_an_int64_is_no_seed(target: Target) -> None:
    """SMP-02, over."""
    body = b'{"model":"%s","prompt":"x","seed":9223372036854775808}' % target.model.encode()
    target.refused(COMPLETIONS, body)


def first_token(target: Target, **fields: Any) -> str:
    """The text of the greedy first token."""
    body = {"max_tokens": 1, "logprobs": 0} | GREEDY | fields
    token = target.plain(COMPLETIONS, body).choices[0].logprobs["tokens"][0]
    assert isinstance(token, str)
    return token


def id_of(target: Target, token: str) -> int:
    """The ID of a token that its text encodes to."""
    (index,) = target.tokens_of(token)
    return index


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_smp_05_ban_force_and_nothing(real: Target) -> None:
    """SMP-05, while another request runs."""
    body = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 0} | GREEDY
    usual = real.both(COMPLETIONS, body)
    best = first_token(real, prompt=PROMPT)
    other = " Paris"
    banned = real.both(COMPLETIONS, body | {"logit_bias": {str(id_of(real, best)): -100}})
    assert best not in banned.choices[0].logprobs["tokens"]
    forced = body | {"ignore_eos": True, "logit_bias": {str(id_of(real, other)): 100}}
    neighbour, forced_answer = together(
        [lambda: real.plain(COMPLETIONS, body), lambda: real.plain(COMPLETIONS, forced)]
    )
    assert forced_answer.choices[0].logprobs["tokens"] == [other] * 8
    assert neighbour.text == usual.text
    assert real.both(COMPLETIONS, body | {"logit_bias": {}}).text == usual.text


@pytest.mark.parametrize("bias", [{"AI": -100}, {"99999999": -100}, {"-1": 1}], ids=["word", "oov", "negid"])
def test_smp_05_bad_keys_are_a_400(target: Target, bias: dict[str, int]) -> None:
    """SMP-05. They are found before the sampler would find them; who runs meanwhile notices nothing."""
    with a_long_stream(target):
        error = target.refused(COMPLETIONS, {"prompt": "x", "logit_bias": bias} | GREEDY)
    assert "logit_bias" in error["message"]
    target.check_alive()


def test_smp_05_a_bias_out_of_range(target: Target) -> None:
    """SMP-05, range: refused, or taken for 100."""
    body = {"prompt": "x", "max_tokens": 2, "logit_bias": {"5": 101}} | GREEDY
    assert target.post(COMPLETIONS, body).status_code in (200, 400)
    target.check_alive()


@pytest.fixture(scope="module")
def repeated(real: Target) -> list[int]:
    """Forty token IDs, those of the token that greedily comes after them among them."""
    ids = real.tokens_of("We went to the river, the forest, the mountain and to the sea, and we saw")[:20]
    for _ in range(20):
        token = first_token(real, prompt=ids)
        found = real.tokens_of(token)
        ids = [*ids, found[0]]
    return ids


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_smp_06_penalties_look_at_generated_tokens_only(real: Target, repeated: list[int]) -> None:
    """SMP-06. OpenAI's two leave the prompt alone; the extension counts it too."""
    usual = first_token(real, prompt=repeated)
    assert real.tokens_of(usual)[0] in repeated or first_token(real, prompt=[*repeated, id_of(real, usual)])
    assert first_token(real, prompt=repeated, presence_penalty=2) == usual
    assert first_token(real, prompt=repeated, frequency_penalty=2) == usual
    against = first_token(real, prompt=repeated, repetition_penalty=1000.0)
    assert not set(real.tokens_of(against)) & set(repeated)
    for name, value in (("presence_penalty", 2.1), ("frequency_penalty", -2.1)):
        assert name in real.refused(COMPLETIONS, {"prompt": "x", name: value})["message"]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_smp_06_a_long_answer_is_what_the_definition_picks(real: Target, repeated: list[int]) -> None:
    """SMP-06, long: 2 less for each earlier occurrence, replayed over the logprobs of single steps."""
    body = {"max_tokens": 40, "ignore_eos": True, "frequency_penalty": 2, "logprobs": 0} | GREEDY
    body |= {"prompt": repeated, "return_token_ids": True}
    answer = real.both(COMPLETIONS, body)
    tokens, ids = answer.choices[0].logprobs["tokens"], answer.choices[0].token_ids
    seen: Counter[str] = Counter()
    for step, token in enumerate(tokens):
        asked = {"prompt": [*repeated, *ids[:step]], "max_tokens": 1, "logprobs": 20} | GREEDY
        table = real.plain(COMPLETIONS, asked).choices[0].logprobs["top_logprobs"][0]
        scores = {each: score - 2 * seen[each] for each, score in table.items()}
        assert scores[token] >= max(scores.values()) - TIE, (step, token, scores)
        seen[token] += 1
