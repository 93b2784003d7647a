"""Answers under a grammar, in the engine: each follows its grammar, ends with it, and costs nobody else."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servelite.config import Settings
from servelite.engine.grammars import MASK_ALLOWANCE_S, MASK_PER_TOKEN_S, RequestGrammars
from servelite.ipc.masks import pack_masks, unpack_bits, unpack_masks
from servelite.ipc.messages import FinishReason, Plan
from servelite.tokenizer.grammar import Grammars, Matcher
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.worker.model_runner import CPUModelRunner
from tests.engine.soak import Faults
from tests.engine_harness import Answer, Harness, prompt, simulated
from tests.tiny_models import tiny_llama

END = 258
PIECES = [*(bytes([byte]) for byte in range(256)), b"true", b"ab", b"<end>", b"<pad>"]


class Bytes:
    """What `Grammars` needs of a tokenizer: bytes, two longer tokens, an end token, and no more; the model's
    vocabulary goes on beyond it."""

    vocab_size = len(PIECES)
    eos_token_ids = (END,)
    bos_token_id = None
    special_ids = frozenset({END, END + 1})
    special_tokens = ("<end>",)

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]

    def encode_rendered(self, text: str, controls: Sequence[tuple[int, int]]) -> list[int]:
        cut = controls[0][1] if controls else 0
        return [END] * bool(cut) + list(text[cut:].encode())


@cache
def load() -> Grammars:
    return Grammars(Bytes())  # type: ignore[arg-type]


def engine(**settings: Any) -> Harness:
    return simulated(**({"load_grammars": load} | settings))


@pytest.fixture(params=[1, 2, 3])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = engine(async_depth=request.param)
    yield made
    made.close()


def regex(pattern: str) -> str:
    return grammar_text(GrammarKind.REGEX, pattern)


def text_of(answer: Answer) -> str:
    """Its text, which an end token closes."""
    assert answer.error is None and answer.finish is FinishReason.STOP and answer.tokens[-1] == END
    return b"".join(PIECES[token] for token in answer.tokens[:-1]).decode()


def alone(windows: tuple[int, ...] = (), **fields: Any) -> list[int]:
    """The tokens of a request that has a synchronous engine for itself."""
    harness = engine(max_num_seqs=1, windows=windows)
    number = harness.add(**fields)
    harness.drain()
    harness.close()
    return harness.answers[number].tokens


def test_an_answer_follows_its_grammar_and_ends_with_it(harness: Harness) -> None:
    cases = [
        (regex("[a-c]{3,5}x"), re.compile("[a-c]{3,5}x").fullmatch),
        (grammar_text(GrammarKind.CHOICE, ["true", "maybe"]), ["true", "maybe"].__contains__),
        (grammar_text(GrammarKind.LARK, 'start: "ab"+ "!"'), re.compile("(ab)+!").fullmatch),
        (grammar_text(GrammarKind.JSON_SCHEMA, {"type": "boolean"}), json.loads),
    ]
    numbers = [
        (harness.add(prompt(5, salt), 90, grammar=grammar, stop_token_ids=(END,)), check)
        for grammar, check in cases
        for salt in range(3)
    ]
    harness.drain()
    for number, check in numbers:
        assert check(text_of(harness.answers[number])) not in (None, False) or check is json.loads
    harness.assert_empty()


def test_what_a_grammar_costs_others_is_nothing(harness: Harness) -> None:
    """Their tokens stay the same, and where no row is bound no mask is made."""
    plans: list[tuple[Plan, bytes | None]] = []
    runner: Any = harness.executor._runner  # type: ignore[attr-defined]
    sample = runner.sample

    def spy(plan: Plan, masks: bytes | None) -> Any:
        plans.append((plan, masks))
        return sample(plan, masks)

    runner.sample = spy
    plain = [harness.add(prompt(9, salt), 20, seed=salt) for salt in range(4)]
    harness.turn(6)
    bound = harness.add(prompt(5, 9), 90, grammar=regex("[ab]{8}"), stop_token_ids=(END,))
    harness.drain()
    assert [harness.answers[n].tokens for n in plain] == [
        alone(prompt=prompt(9, s), max_tokens=20, seed=s) for s in range(4)
    ]
    assert len(text_of(harness.answers[bound])) == 8
    masked = [(plan, masks) for plan, masks in plans if masks is not None]
    assert len(masked) <= 8 + 1 + harness.settings.async_depth < len(plans)
    assert all(plan.needs_masks for plan, _ in masked)
    assert max(len(unpack_masks(masks)[0]) for _, masks in masked if masks) == 1


def test_a_mix_is_what_each_gets_alone() -> None:
    """Preemption, prefix hits, aborts, failed steps and rows that are not finite, at every depth."""
    for seed in range(12):
        _mix(random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_mixes() -> None:
    for seed in range(100, 220):
        _mix(random.Random(seed))


def _mix(rng: random.Random) -> None:
    windows = rng.choice([(), (6,)])
    harness = engine(
        async_depth=rng.choice([1, 2, 3]),
        num_gpu_blocks_override=rng.randint(30, 60) * (1 + len(windows)),
        max_num_batched_tokens=rng.choice([8, 64]),
        max_model_len=128,
        windows=windows,
    )
    faulty = rng.random() < 0.4
    if faulty:
        Faults(harness, rng, 0.03)
    asked: dict[int, dict[str, Any]] = {}
    aborted = set()
    for _ in range(rng.randint(5, 15)):
        fields: dict[str, Any] = {"prompt": prompt(40, rng.randint(0, 2))[: rng.randint(1, 40)]}
        fields |= {"max_tokens": rng.randint(1, 30), "seed": rng.randint(0, 3)}
        if rng.random() < 0.5:
            fields |= {"grammar": regex(rng.choice(["[ab]{6}", "(true|ab)+", "[^x]*x"]))}
            fields |= {"stop_token_ids": (END,)}
        number = harness.add(**fields)
        asked[number] = fields
        if rng.random() < 0.1:
            harness.abort(number)
            aborted.add(number)
        harness.turn(rng.randint(0, 6))
    harness.drain()
    harness.assert_empty()
    for number, fields in asked.items():
        answer, expected = harness.answers.get(number, Answer()), alone(windows, **fields)
        if answer.error is not None:
            assert faulty and answer.error.status == 500, answer.error
        elif number not in aborted:
            assert len(answer.tokens) == len(expected)
        assert answer.tokens == expected[: len(answer.tokens)]
    harness.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_answer_goes_on_after_its_engines_death(depth: int) -> None:
    fields: dict[str, Any] = {"prompt": prompt(9), "max_tokens": 40, "seed": 4}
    fields |= {"grammar": regex("[a-z]{4}-[0-9]{4}"), "stop_token_ids": (END,)}
    whole = alone(**fields)
    for had in (1, 5, len(whole) - 1):
        harness = engine(async_depth=depth, epoch=2)
        number = harness.add(**fields, produced=whole[:had], attempt=1)
        harness.drain()
        harness.close()
        assert harness.answers[number].tokens == whole[had:]


def test_choices_share_their_prompt_and_follow_the_grammar(harness: Harness) -> None:
    fields: dict[str, Any] = {"grammar": regex("[a-z]{9}"), "stop_token_ids": (END,), "temperature": 1.0}
    leader = harness.add(prompt(20), 30, seed=3, choice=0, **fields)
    others = [harness.add(prompt(20), 30, seed=3, choice=i, prefix_of=leader, **fields) for i in (1, 2)]
    harness.drain()
    texts = {text_of(harness.answers[number]) for number in (leader, *others)}
    assert len(texts) == 3 and all(re.fullmatch("[a-z]{9}", text) for text in texts)


def test_min_tokens_and_ignore_eos_hold_while_the_grammar_can_go_on(harness: Harness) -> None:
    longest, fixed = regex("a{1,20}"), regex("a{3}")
    at_least = harness.add(prompt(4), 60, grammar=longest, stop_token_ids=(END,), min_tokens=12)
    never = harness.add(prompt(4), 60, grammar=longest)  # ignore_eos: the end token is no stop token
    short = harness.add(prompt(4), 60, grammar=fixed, stop_token_ids=(END,), min_tokens=12)
    harness.drain()
    assert 12 <= len(text_of(harness.answers[at_least])) <= 20
    assert text_of(harness.answers[never]) == "a" * 20
    assert text_of(harness.answers[short]) == "aaa"


def test_a_stop_token_of_the_clients_ends_an_answer_too(harness: Harness) -> None:
    number = harness.add(prompt(4), 60, grammar=regex("a{5}"), stop_token_ids=(END, ord("a")))
    harness.drain()
    assert harness.answers[number].tokens == [ord("a")]
    assert harness.answers[number].finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (regex("(unclosed"), "invalid_grammar"),
        ("no JSON", "invalid_grammar"),
        (grammar_text(GrammarKind.JSON_SCHEMA, {"$ref": "#"}), "invalid_grammar"),
        (regex("é"), ""),
    ],
)
def test_a_grammar_that_cannot_be_used_ends_its_request_alone(
    grammar: str, code: str, harness: Harness
) -> None:
    bad = harness.add(prompt(4), 20, grammar=grammar, stop_token_ids=(END,))
    good = harness.add(prompt(5, 1), 20, seed=1)
    harness.drain()
    error = harness.answers[bad].error
    assert (error.code, error.status) == (code, 400) if code and error else error is None and not code
    assert harness.answers[good].tokens == alone(prompt=prompt(5, 1), max_tokens=20, seed=1)


def test_a_token_that_the_grammar_forbids_ends_its_request_alone(harness: Harness) -> None:
    """A runner takes one where masks and other parameters leave none."""
    runner: Any = harness.executor._runner  # type: ignore[attr-defined]
    sample = runner.sample
    nothing = pack_masks(np.empty(0, np.int32), np.empty((0, 32), np.uint32))
    bad = harness.add(prompt(4), 20, grammar=regex("[ab]{9}"), stop_token_ids=(END,))
    good = harness.add(prompt(5, 1), 20, seed=1)
    harness.turn(3)
    runner.sample = lambda plan, masks: sample(plan, None if masks is None else nothing)
    harness.drain()
    error = harness.answers[bad].error
    assert error is not None and (error.code, error.status) == ("grammar_dead_end", 400)
    assert harness.answers[good].tokens == alone(prompt=prompt(5, 1), max_tokens=20, seed=1)
    harness.assert_empty()


def test_an_empty_mask_ends_its_request_alone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = harness.add(prompt(4), 20, grammar=regex("[ab]{9}"), stop_token_ids=(END,))
    good = harness.add(prompt(5, 1), 20, seed=1)
    while bad not in harness.answers:
        harness.turn()
    monkeypatch.setattr("servelite.tokenizer.grammar.Matcher.fill", lambda matcher, words: None)
    harness.drain()
    error = harness.answers[bad].error
    assert error is not None and error.code == "grammar_dead_end"
    assert harness.answers[good].tokens == alone(prompt=prompt(5, 1), max_tokens=20, seed=1)


def test_masks_that_take_long_end_their_request_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=0.03)
    monkeypatch.setattr("servelite.engine.grammars.thread_time", lambda: next(clock))
    bad = harness.add(prompt(4), 40, grammar=regex("[ab]{39}"), stop_token_ids=(END,))
    good = harness.add(prompt(5, 1), 20, seed=1)
    harness.drain()
    error = harness.answers[bad].error
    assert error is not None and (error.code, error.status) == ("grammar_too_complex", 400)
    assert len(harness.answers[bad].tokens) == int(MASK_ALLOWANCE_S / (0.03 - MASK_PER_TOKEN_S))
    assert harness.answers[good].tokens == alone(prompt=prompt(5, 1), max_tokens=20, seed=1)
    harness.assert_empty()


def test_a_short_grammar_waits_for_no_long_one(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, true_compile = threading.Event(), Grammars.compile

    def compile_slowly(grammars: Grammars, text: str) -> Matcher:
        if len(text) > 10_000:
            gate.wait(30)
        return true_compile(grammars, text)

    monkeypatch.setattr(Grammars, "compile", compile_slowly)
    choice = grammar_text(GrammarKind.CHOICE, [f"{i:05}" for i in range(2000)])
    long = harness.add(prompt(4), 20, grammar=choice, stop_token_ids=(END,))
    short = harness.add(prompt(4), 20, grammar=regex("ab"), stop_token_ids=(END,))
    while short not in harness.answers or harness.answers[short].finish is FinishReason.NONE:
        harness.turn()
    assert text_of(harness.answers[short]) == "ab" and long not in harness.answers
    gate.set()
    harness.drain()
    assert len(text_of(harness.answers[long])) == 5
    harness.assert_empty()


def test_a_token_that_takes_too_many_states_to_follow_ends_its_request_alone(harness: Harness) -> None:
    bad = harness.add(prompt(4), 40, grammar=regex("(a?){300}a{300}"), stop_token_ids=(END,))
    good = harness.add(prompt(5, 1), 20, seed=1)
    harness.drain()
    error = harness.answers[bad].error
    assert error is not None and (error.code, error.status) == ("grammar_too_complex", 400)
    assert harness.answers[good].tokens == alone(prompt=prompt(5, 1), max_tokens=20, seed=1)
    assert not harness.core._requests.grammars._compiled, "its states are used up"
    harness.assert_empty()


def test_a_slow_compiler_stalls_nobody_and_waits_for_nobody() -> None:
    """While it works, others run; what waits for it can be aborted, can expire, and ends with the engine."""
    gate = threading.Event()

    def slow() -> Grammars:
        gate.wait(30)
        return load()

    harness = engine(load_grammars=slow)
    fields: dict[str, Any] = {"grammar": regex("ab"), "stop_token_ids": (END,)}
    parked = harness.add(prompt(4), 20, **fields)
    aborted = harness.add(prompt(4), 20, **fields)
    expiring = harness.add(prompt(4), 20, deadline_ms=20, **fields)
    good = harness.add(prompt(5, 1), 20, seed=1)
    harness.abort(aborted)
    harness.turn(30)
    assert harness.answers[good].finish is FinishReason.LENGTH
    assert parked not in harness.answers
    assert harness.scheduler.load().waiting >= 1 and harness.mailbox.waits[-1] == 0
    while expiring not in harness.answers:
        harness.turn()
    error = harness.answers[expiring].error
    assert error is not None and error.code == "deadline_exceeded"
    gate.set()
    harness.drain()
    assert text_of(harness.answers[parked]) == "ab" and aborted not in harness.answers
    harness.assert_empty()
    harness.close()


class Small(Bytes):
    """As many tokens as a tiny model has; the last one is the end."""

    vocab_size = 257
    eos_token_ids = (256,)
    special_ids = frozenset({256})
    special_tokens = ()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_real_models_rows(depth: int, tmp_path: Path) -> None:
    """Greedy and seeded, with logprobs, of the model's own distribution: neighbours are not touched."""
    tiny_llama(tmp_path)
    settings = Settings(max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, async_depth=depth)
    runner = CPUModelRunner.load(settings, tmp_path)
    asked = [
        {"prompt": [token % 257 for token in prompt(7, i)], "max_tokens": 12, "logprobs": 3, "seed": i}
        | {"temperature": 0.0 if i % 2 else 0.8}
        for i in range(6)
    ]
    bound = {"grammar": regex("[a-d]{4}x"), "stop_token_ids": (256,)}
    tokens = []
    for grammars in ({}, bound):
        harness = Harness(settings, runner, load_grammars=lambda: Grammars(Small()))  # type: ignore[arg-type]
        told: dict[int, list[float]] = {}
        add = harness.core._outbox.add_logprobs

        def note(client: int, number: int, logprobs: Any, told: Any = told, add: Any = add) -> None:
            told.setdefault(number, []).extend(np.frombuffer(logprobs.chosen + logprobs.values, "<f4"))
            add(client, number, logprobs)

        harness.core._outbox.add_logprobs = note  # type: ignore[method-assign]
        numbers = [harness.add(**fields, **(grammars if i < 2 else {})) for i, fields in enumerate(asked)]
        harness.drain()
        harness.assert_empty()
        harness.close()
        runner = CPUModelRunner(runner._model, runner.facts, 8)
        tokens.append([harness.answers[number].tokens for number in numbers])
        assert all(-9999 < value <= 0 for values in told.values() for value in values)
    plain, mixed = tokens
    assert mixed[2:] == plain[2:]
    for answer in mixed[:2]:
        assert answer[-1] == 256 and re.fullmatch("[a-d]{4}x", bytes(answer[:-1]).decode())


def test_an_engine_without_a_vocabulary_refuses_grammars() -> None:
    harness = engine(load_grammars=None)
    number = harness.add(prompt(4), grammar=regex("ab"))
    harness.drain()
    error = harness.answers[number].error
    assert error is not None and error.code == "unsupported"


def test_a_grammar_is_compiled_once_and_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    true_compile = Grammars.compile
    monkeypatch.setattr(
        Grammars, "compile", lambda self, text: compiled.append(text) or true_compile(self, text)
    )
    monkeypatch.setattr("servelite.engine.grammars._CACHED", 2)
    harness = engine()
    for pattern in ("a", "a", "b", "a", "c", "d", "a"):
        harness.add(prompt(4), 9, grammar=regex(pattern), stop_token_ids=(END,))
        harness.drain()
    assert compiled == [regex(pattern) for pattern in "abcda"]
    harness.close()


def test_masks_hold_the_rows_that_are_bound_and_no_token_beyond_the_tokenizer() -> None:
    harness = engine()
    frames: list[bytes] = []
    masks = RequestGrammars.masks

    def spy(self: RequestGrammars, *arguments: Any) -> Any:
        frame, dead = masks(self, *arguments)
        frames.append(frame)
        return frame, dead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestGrammars, "masks", spy)
        harness.add(prompt(4), 9)
        harness.add(prompt(4), 9, grammar=regex("[^a]{4}"), stop_token_ids=(END,))
        harness.drain()
    harness.close()
    rows, packed = unpack_masks(frames[0])
    allowed = np.flatnonzero(unpack_bits(packed, 1000)[0])
    assert len(rows) == 1 and 0 < allowed.max() < END and ord("a") not in allowed and ord("b") in allowed
