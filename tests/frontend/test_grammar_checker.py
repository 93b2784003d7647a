"""A check of a grammar that exceeds its limits ends its process, and harms no other check."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from servelite.frontend import grammar_checker, grammar_process
from servelite.frontend.errors import APIError
from servelite.frontend.grammar_checker import MAX_PROCESSES, Check, GrammarChecker
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


def slow(i: int = 0) -> str:
    """Half a second."""
    return grammar_text(
        GrammarKind.JSON_SCHEMA,
        {
            "type": "object",
            "$ref": "#/$defs/0",
            "$defs": {
                **{str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(4000)},
                "4000": {"const": i},
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


def checked(checker: GrammarChecker, grammar: str, field: str = "f") -> str:
    return checker.check(grammar, field).result(60)


def refusal(checker: GrammarChecker, grammar: str, field: str = "f") -> APIError:
    with pytest.raises(APIError) as caught:
        checked(checker, grammar, field)
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
    assert checked(checker, RIGHT) == RIGHT and len(starts) == 2
    assert gone(starts[0])


def test_what_takes_too_long_is_refused(
    checker: GrammarChecker, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "CHECK_SECONDS", 0.05)
    error = refusal(checker, slow(), "structured_outputs")
    assert (error.status, error.param) == (400, "structured_outputs.json") and gone(starts[0])
    assert error.message.startswith("structured_outputs.json takes more than 0.05 s")
    loose = grammar_text(GrammarKind.LOOSE_SCHEMA, json.loads(slow())["value"])  # it need not be enforced
    assert checked(checker, loose) == grammar_text(GrammarKind.JSON_SCHEMA, {"type": "object"})
    monkeypatch.undo()
    assert checked(checker, slow(), "g")


def test_a_fault_of_our_own_is_no_ones_limit(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty:
        def compile(self, text: str) -> None:
            raise KeyError(text)

    checked = grammar_process._checked(Check(RIGHT, "f", False, 5.0), Faulty())  # type: ignore[arg-type]
    assert checked.error == (500, "f could not be checked.", "f", "internal_error")
    assert "KeyError" in caplog.text


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker, starts: list[int]) -> None:
    for pattern in "abc":
        checked(checker, grammar_text(GrammarKind.REGEX, pattern))
        os.kill(starts[-1], signal.SIGKILL)
    assert len(starts) == 3


def test_one_that_says_nothing_is_replaced(
    checker: GrammarChecker, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(checker, RIGHT)
    monkeypatch.setattr(grammar_checker, "_SILENT_SECONDS", 5)
    os.kill(starts[0], signal.SIGSTOP)
    assert checked(checker, grammar_text(GrammarKind.REGEX, "b")) and gone(starts[0])


def test_short_grammars_wait_for_no_long_ones(checker: GrammarChecker, starts: list[int]) -> None:
    over: list[str] = []

    def check(name: str, grammar: str) -> Future[str]:
        future = checker.check(grammar, "f")
        future.add_done_callback(lambda _: over.append(name))
        return future

    waiting = [check(f"slow {i}", slow(i)) for i in range(MAX_PROCESSES + 3)]
    while not any(future.running() for future in waiting):
        time.sleep(0.001)
    check("short", RIGHT).result(60)
    assert not all(future.done() for future in waiting)
    assert waiting[-1].cancel()  # its client has left
    for future in waiting[:-1]:
        future.result(60)
    assert over.index("short") < MAX_PROCESSES + 3 and len(starts) <= MAX_PROCESSES
    check("known", RIGHT).result(0)


def test_a_keyword_that_no_standard_has_is_told_where_it_is_passed_over(checker: GrammarChecker) -> None:
    items = {"type": "array", "min_items": 1}
    grammar = grammar_text(GrammarKind.JSON_SCHEMA, {"items": items})
    assert "min_items" in refusal(checker, grammar).message
    told: list[str] = []
    lenient = GrammarChecker(Bytes(), told.append)  # type: ignore[arg-type]
    try:
        plain = grammar_text(GrammarKind.JSON_SCHEMA, {"items": {"type": "array"}})
        assert checked(lenient, grammar) == plain
        wrong = grammar_text(GrammarKind.JSON_SCHEMA, {"items": items, "not": {}})
        assert "'not'" in refusal(lenient, wrong).message
    finally:
        lenient.close()
    assert told == ["f.items.min_items"]


def test_what_is_remembered_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "REMEMBERED_CHARS", 8 * len(RIGHT))
    for pattern in "abcdefga":  # each twice: as it was asked for, and as it is followed
        checked(checker, grammar_text(GrammarKind.REGEX, pattern))
    assert [check.grammar[-3] for check in checker._remembered] == ["e", "f", "g", "a"]
    assert checker._chars == 8 * len(RIGHT)


def test_the_end(checker: GrammarChecker, starts: list[int]) -> None:
    """Checks under way end with an error, what waits is cancelled, and none begins."""
    under_way = [checker.check(slow(i), "f") for i in range(MAX_PROCESSES)]
    while not all(future.running() for future in under_way):
        time.sleep(0.001)
    waits = checker.check(slow(MAX_PROCESSES), "f")
    threads = set(checker._threads)
    checker.close()
    for future in under_way:
        with pytest.raises(RuntimeError):
            future.result(60)
    with pytest.raises(CancelledError):
        waits.result(60)
    for thread in threads:
        thread.join(60)
    assert all(map(gone, starts)) and threads.isdisjoint(threading.enumerate())


def test_a_process_that_does_not_live_is_no_fault_of_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel is out of memory."""
    with monkeypatch.context() as patch:
        true_popen = grammar_checker.subprocess.Popen
        patch.setattr(
            grammar_checker.subprocess,
            "Popen",
            lambda command, **more: true_popen(["/bin/sh", "-c", "kill -9 $$"], **more),
        )
        error = refusal(checker, RIGHT)
        assert (error.status, error.param) == (503, "f")
    assert checked(checker, RIGHT) == RIGHT


def test_a_tokenizer_without_an_end_token_follows_no_grammar(checker: GrammarChecker) -> None:
    checker._tokenizer.eos_token_ids = ()
    assert "no end token" in refusal(checker, RIGHT).message
