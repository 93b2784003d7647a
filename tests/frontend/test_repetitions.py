"""How long a run without a choice is: told about right for expressions and grammars."""

from __future__ import annotations

import json
import time

import pytest

from servelite.frontend.repetitions import run_of_expression, run_of_grammar


@pytest.mark.parametrize(
    ("pattern", "run"),
    [
        ("abc", 3),
        ("x{100000}", 100_000),
        ("(ab){300}{7}", 4_200),
        ("x{10,}", 10),
        ("x{0,100000}", 0),
        ("[a-z]{100000}", 0),
        ("a(b|cd)e", 4),
        ("(a|b{50})c", 51),
    ],
)
def test_expressions(pattern: str, run: int) -> None:
    assert run_of_expression(pattern) == run


def test_grammars() -> None:
    assert run_of_grammar('start: "ab" T\nT: /x{500}/') == 502
    assert run_of_grammar('start: a{40}\na: "xyz"') == 120
    assert run_of_grammar('start: "a" start?') <= 2


def test_the_words_of_a_schema_are_no_text_of_an_answer() -> None:
    schema = {"enum": [f'some "%json {{}} phrase" {i}' for i in range(2000)]}
    rule = "%json " + json.dumps(schema)
    assert run_of_grammar(f'start: "<call>" a "</call>"\na: {rule}\nb: {rule}') == 6 + 7
    assert run_of_grammar('start: "a %json { b" /x{20}/') >= 20  # no schema: it is in a text


def test_what_is_not_closed_is_read_once() -> None:
    """Each of them took minutes, or for ever, when it was read again from each of its characters."""
    began = time.thread_time()
    for text in ("[" * 100_000, "[[:a" * 50_000, r"\p{" * 50_000):
        run_of_expression(text)
    for text in ("/" + "[a]" * 20_000, r"/\/" * 20_000, r"\"" * 30_000, '"\\"' * 20_000):
        run_of_grammar(f"start: {text}")
    assert time.thread_time() - began < 4
