"""The expressions of `format` allow nothing that it does not mean, and what is usual."""

from __future__ import annotations

import base64
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.grammar_check import compile_check
from servelite.frontend.string_formats import FORMATS, MAX_LENGTHS
from servelite.tokenizer.grammar import GrammarError
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from tests.engine.test_grammars import END, load
from tests.frontend.test_grammars import text_by

_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:([\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)
_LABEL = re.compile(r"(?!..--)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def hostname(text: str) -> bool:
    return len(text) <= 253 and all(map(_LABEL.fullmatch, text.split(".")))


def of_version(version: int) -> Callable[[str], bool]:
    return lambda text: str(uuid.UUID(text)) == text.lower() and uuid.UUID(text).version == version


REFERENCES: dict[str, Callable[[str], Any]] = {
    "date-time": lambda text: len(text) > 19 and date.fromisoformat(text[:10]) and _TIME.fullmatch(text[11:]),
    "time": _TIME.fullmatch,
    "date": lambda text: len(text) == 10 and date.fromisoformat(text),
    "duration": re.compile(r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)").fullmatch,
    "email": lambda text: hostname(text.partition("@")[2]) and re.match(r"[^.@:\s]+(\.[^.@:\s]+)*@", text),
    "hostname": hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6": ipaddress.IPv6Address,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipvanyaddress": ipaddress.ip_address,
    "ipvanyinterface": ipaddress.ip_interface,
    "uri": _URI.fullmatch,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    **{f"uuid{version}": of_version(version) for version in (1, 3, 4, 5, 6, 7, 8)},
    "base64": lambda text: base64.b64encode(base64.b64decode(text, validate=True)).decode() == text,
    "base64url": lambda text: base64.urlsafe_b64encode(base64.urlsafe_b64decode(text)).decode() == text,
}
REFERENCES["byte"] = REFERENCES["base64"]
ASKING = [name for name, expression in FORMATS.items() if expression]

TEXTS = [
    *[
        "2024-02-29",
        "0400-02-29",
        "12:34:56Z",
        "12:34:56.5+01:00",
        "2023-12-31T23:59:59-11:30",
        "2024-02-29T00:00:00.123456Z",
        "P1Y2M3DT4H5M6S",
    ],
    *[
        "P3W",
        "PT1M",
        "a.b+c@d.example",
        "a@b",
        "a-b.c",
        "x" * 63 + ".y",
        "1.2.3.4",
        "10.0.0.255",
        "255.0.10.199/32",
    ],
    *["1:2:3:4:5:6:7:8", "::", "::1", "1::", "ab::CD:0/64", "1:2:3:4:5:6::/128", "1::3:4:5:6:7"],
    *[
        "https://u@h.com:80/a%20b?q=1#f",
        "urn:a:b",
        "mailto:a@b",
        "file:///x",
        "http://[::1]/",
        "YWI=",
        "YQ==",
        "_-+/",
    ],
    *[str(uuid.UUID(int=random.Random(v).getrandbits(128), version=v)) for v in (1, 3, 4, 5)],
    *[
        "01234567-89ab-6def-8000-0123456789AB",
        "01234567-89ab-7def-9000-0123456789ab",
        "f" * 8 + "-1-8000-b" * 2,
    ],
    "01234567-89ab-8def-b000-0123456789ab",
]
WRONG = {
    "date": ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01", "2023-13-01"],
    "time": ["23:59:60Z", "24:00:00Z", "12:00:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2016-12-31T23:59:60Z"],
    "hostname": ["a-", "xn--x", "x" * 64, ".".join(["x" * 50] * 5), "a..b"],
    "ipv6": ["1:2:3:4:5:6:7::", "1::2::3", ":1"],
    "uuid4": ["01234567-89ab-7def-9000-0123456789ab"],
    "base64": ["YR==", "YQ", "_-_-"],
}


def right(name: str, text: str) -> bool:
    try:
        return bool(REFERENCES[name](text))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ASKING)
def test_an_expression_is_what_its_format_means(name: str) -> None:
    """On texts that are right for one of them, and on such with a few characters changed."""
    expression, rng = re.compile(FORMATS[name]), random.Random(1)
    right_ones = [text for text in TEXTS if right(name, text)]
    assert right_ones and all(map(expression.fullmatch, right_ones))
    tried = [*WRONG.get(name, []), *TEXTS]
    for _ in range(3000):
        changed = list(rng.choice(TEXTS))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randint(0, 1)] = rng.choice("0129afzTZ:-./@=% ")
        tried.append("".join(changed))
    for text in tried:
        if expression.fullmatch(text) and len(text) <= MAX_LENGTHS.get(name, len(text)):
            assert right(name, text), text
    assert not any(map(expression.fullmatch, (text for text in WRONG.get(name, []) if len(text) < 254)))


@pytest.mark.parametrize("name", ASKING)
def test_a_grammar_follows_a_format(name: str) -> None:
    made = compile_check(
        grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string", "format": name}), load(), "f"
    )
    for text in TEXTS:
        if right(name, text):
            load().compile(made).accept([*json.dumps(text).encode(), END])
    for text in WRONG.get(name, []):
        with pytest.raises(GrammarError):
            load().compile(made).accept([*json.dumps(text).encode(), END])
    for seed in range(4):
        drawn = text_by(made, seed)
        assert drawn is None or right(name, json.loads(drawn)), drawn


def test_a_format_beside_a_pattern_and_on_what_is_no_string() -> None:
    both = {"type": "string", "format": "date", "pattern": "-29$"}
    made = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, both), load(), "f")
    load().compile(made).accept([*b'"2024-02-29"', END])
    for text in ("2023-02-29", "2024-02-28"):
        with pytest.raises(GrammarError):
            load().compile(made).accept([*json.dumps(text).encode(), END])
    by_pattern = {"type": "string", "format": "includes", "allOf": [{"pattern": "^a"}, {"pattern": "b"}]}
    zod = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, by_pattern), load(), "f")
    load().compile(zod).accept([*b'"acb"', END])
    with pytest.raises(APIError, match="which is not enforced"):
        compile_check(
            grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string", "format": "e164"}), load(), "f"
        )
    for name, expression in FORMATS.items():
        free = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, {"format": name}), load(), "f")
        load().compile(free).accept([*b"17", END])
        if not expression:
            load().compile(free).accept([*b'"C:/x y"', END])
        with pytest.raises(APIError, match="strings only"):
            compile_check(
                grammar_text(GrammarKind.JSON_SCHEMA, {"type": "integer", "format": name}), load(), "f"
            )
