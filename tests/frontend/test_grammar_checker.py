"""A check of a grammar that exceeds its limits ends its process, and harms no other check."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from servelite.frontend import grammar_checker
from servelite.frontend.errors import APIError
from servelite.frontend.grammar_checker import GrammarChecker
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from tests.engine.test_grammars import Bytes

RIGHT = grammar_text(GrammarKind.REGEX, "a")
PATTERNS = [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]  # the automaton of all doubles with each
CHAIN = {f"d{i}": PATTERNS[i] | {"$ref": f"#/$defs/d{i + 1}"} for i in range(28)} | {"d28": {}}
MANY = grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string", "allOf": PATTERNS})
OTHERS = [
    grammar_text(GrammarKind.JSON_SCHEMA, {"$defs": CHAIN, "$ref": "#/$defs/d0"}),
    grammar_text(
        GrammarKind.GRAMMAR, "start: T\nT: " + " & ".join(f"/(?s:.*){one['pattern']}/" for one in PATTERNS)
    ),
]
SLOW = grammar_text(  # half a second
    GrammarKind.JSON_SCHEMA,
    {
        "$ref": "#/$defs/0",
        "$defs": {
            **{str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(4000)},
            "4000": {"type": "integer"},
        },
    },
)


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(Bytes())  # type: ignore[arg-type]
    yield checker
    checker.close()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process IDs of those that were started."""
    started: list[int] = []
    true_popen = grammar_checker.subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        process = true_popen(*args, **kwargs)
        started.append(process.pid)
        return process

    monkeypatch.setattr(grammar_checker.subprocess, "Popen", popen)
    return started


def loose(grammar: str) -> str:
    value = json.loads(grammar)["value"]
    return grammar_text(GrammarKind.LOOSE_SCHEMA, {"type": "object", **value})


def refusal(checker: GrammarChecker, grammar: str) -> APIError:
    with pytest.raises(APIError) as caught:
        checker.check(grammar, "f")
    return caught.value


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("grammar", [MANY, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_what_takes_too_much_memory_is_refused(
    checker: GrammarChecker, grammar: str, starts: list[int]
) -> None:
    error = refusal(checker, grammar)
    assert (error.status, error.param, error.code) == (400, "f", "invalid_grammar")
    assert "256 MiB" in error.message
    assert refusal(checker, grammar).message == error.message and len(starts) == 1  # remembered
    assert checker.check(RIGHT, "f") == RIGHT and len(starts) == 2
    assert gone(starts[0])


def test_what_takes_too_long_is_refused(
    checker: GrammarChecker, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(RIGHT, "f")
    monkeypatch.setattr(grammar_checker, "CHECK_SECONDS", 0.01)
    assert "more than 0.01 s" in refusal(checker, SLOW).message and gone(starts[0])
    with pytest.raises(APIError) as caught:
        checker.check(SLOW, "structured_outputs")
    error = caught.value
    assert error.param == "structured_outputs.json" and error.message.startswith(f"{error.param} takes")
    monkeypatch.undo()
    assert checker.check(SLOW, "g")


def test_a_schema_that_need_not_be_enforced_is_left_out(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(RIGHT, "f")
    monkeypatch.setattr(grammar_checker, "CHECK_SECONDS", 0.01)
    assert checker.check(loose(SLOW), "f") == grammar_text(GrammarKind.JSON_SCHEMA, {"type": "object"})


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker, starts: list[int]) -> None:
    for pattern in "abc":
        checker.check(grammar_text(GrammarKind.REGEX, pattern), "f")
        os.kill(starts[-1], signal.SIGKILL)
    assert len(starts) == 3


def test_a_keyword_that_no_standard_has_is_told_where_it_is_passed_over(checker: GrammarChecker) -> None:
    grammar = grammar_text(GrammarKind.JSON_SCHEMA, {"items": {"type": "array", "min_items": 1}, "not": {}})
    right = grammar_text(GrammarKind.JSON_SCHEMA, {"items": {"type": "array", "min_items": 1}})
    assert "min_items" in refusal(checker, right).message
    told: list[str] = []
    lenient = GrammarChecker(Bytes(), told.append)  # type: ignore[arg-type]
    try:
        assert lenient.check(right, "f") == grammar_text(
            GrammarKind.JSON_SCHEMA, {"items": {"type": "array"}}
        )
        assert "'not'" in refusal(lenient, grammar).message
    finally:
        lenient.close()
    assert told == ["f.items.min_items"]


def test_what_is_remembered_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "REMEMBERED_CHARS", 8 * len(RIGHT))
    for pattern in "abcdefga":  # each twice: as it was asked for, and as it is followed
        checker.check(grammar_text(GrammarKind.REGEX, pattern), "f")
    assert [check.grammar[-3] for check in checker._remembered] == ["e", "f", "g", "a"]
    assert checker._chars == 8 * len(RIGHT)


def test_one_process_for_all_threads(checker: GrammarChecker, starts: list[int]) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(checker.check(RIGHT, "f"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [RIGHT] * 4 and len(starts) == 1


def test_the_end(checker: GrammarChecker, starts: list[int]) -> None:
    """A check under way ends with an error, and none begins."""
    checker.check(RIGHT, "f")
    failed: list[BaseException] = []

    def check() -> None:
        try:
            checker.check(SLOW, "f")
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    checker.close()
    thread.join()
    assert len(failed) == 1 and len(starts) == 1 and gone(starts[0])


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="did not start"):
            checker.check(RIGHT, "f")
    assert checker.check(RIGHT, "f") == RIGHT


def test_a_tokenizer_without_an_end_token_follows_no_grammar(checker: GrammarChecker) -> None:
    checker._tokenizer.eos_token_ids = ()
    assert "no end token" in refusal(checker, RIGHT).message
