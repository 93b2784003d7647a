"""How many characters an expression or a grammar lays down with no choice between them.

All streams wait for masks, and each mask in the midst of such a run costs as much as the run is long: about
0.2 us a character, as the library writes it out each time to find its tokens. Where there is a choice in each
turn, or in how many, nothing of the kind is: `[a-z]{100000}` and `x{0,100000}` are as fast as `x`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

MAX_RUN: Final = 10_000  # characters

# What is not closed goes to the end: so each character is read once, however the text is made.
_IN_EXPRESSION: Final = re.compile(
    r"(?P<choice>\[\^?\]?(?:\[:\^?\w+:\]|\\.?|[^\]\\])*+(?:\]|\Z)|\.|\\[pP](?:\{[^}]{0,50}\}|.)|\\[dDwWsSbBAz])"
    r"|(?P<one>\\[xuU]\{[^}]{0,50}\}|\\x..|\\u.{4}|\\.|[^\\()|*+?{])"
    r"|(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:?))?)|(?P<close>\))|(?P<bar>\|)|(?P<few>[*+?])"
    r"|(?P<times>\{(?P<least>\d+)(?P<comma>,)?(?P<most>\d*)\})|(?P<literal>\{)",
    re.DOTALL,
)
_IN_RULE: Final = re.compile(
    r'"(?P<text>(?:\\.?|[^"\\])*+)(?:"i?|\Z)'
    r"|/(?P<expression>(?:\\.?|\[(?:\\.?|[^\]\\\n])*+\]?|[^/\\\[\n])++)(?:/[a-z]*)?"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<open>[(\[])|(?P<close>\))|(?P<optional>\])|(?P<bar>\|)|(?P<few>[*+?])"
    r"|(?P<times>[{~]\s*(?P<least>\d+)\s*(?P<comma>,|\.\.)?\s*(?P<most>\d*)\s*\}?)|(?P<choice><[^<>]*>)"
    r"|//[^\n]*",
    re.DOTALL,
)
_RULE: Final = re.compile(r"^[ \t]*[!?]?([A-Za-z_]\w*)(?:::\w+)?(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.M)

_SCHEMA: Final = re.compile(r"%json\s*\{")
_DECODE: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class _Run:
    """A part of an expression: its longest run, and whether it is all of the part."""

    length: int
    whole: bool = True


_ENDLESS: Final = 10**12  # characters; more are not told apart
_CHOICE: Final = _Run(0, False)


def run_of_expression(pattern: str) -> int:
    """The longest run of a regular expression, about; what is no expression has some number too."""
    return _longest(_IN_EXPRESSION.finditer(pattern), {}).length


def run_of_grammar(text: str) -> int:
    """The longest run of a grammar in Lark, about. Rules without end count once; JSON Schemas not at all."""
    text = without_schemas(text)
    heads = [*_RULE.finditer(text)]
    ends = [*(head.start() for head in heads[1:]), len(text)]
    bodies = {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=False)}
    runs: dict[str, _Run] = {}
    waiting = ["start"]
    while waiting:  # no recursion: a chain of rules is as long as the client likes
        name = waiting[-1]
        found = [*_IN_RULE.finditer(bodies.get(name, ""))]
        later = [one["name"] for one in found if one["name"] in bodies and one["name"] not in runs]
        if name not in runs and later:
            runs[name] = _CHOICE  # until its own rules are known; and for good where it is one of them
            waiting += later
        else:
            waiting.pop()
            runs[name] = _longest(found, runs)
    return runs["start"].length


def without_schemas(text: str) -> str:
    """A grammar with a choice in the place of each schema, whose words are no text of an answer."""
    kept, at = list[str](), 0
    for found in _SCHEMA.finditer(text):
        if found.start() >= at:
            try:
                _, end = _DECODE(text, found.end() - 1)
            except (ValueError, RecursionError):
                continue
            kept += text[at : found.start()], "<json>"
            at = end
    return "".join([*kept, text[at:]])


def _longest(parts: Iterable[re.Match[str]], runs: Mapping[str, _Run]) -> _Run:
    """The run of a sequence of parts."""
    alternatives: list[list[list[_Run]]] = [[[]]]  # of each group that is open
    for part in parts:
        kind, current = part.lastgroup, alternatives[-1][-1]
        if part.groupdict().get("least") is not None:
            if current:
                current[-1] = _repeated(current[-1], part)
        elif kind == "open":
            alternatives.append([[]])
        elif kind in ("close", "optional"):
            if len(alternatives) > 1:
                group = _group(alternatives.pop())
                alternatives[-1][-1].append(group if kind == "close" else _Run(group.length, False))
        elif kind == "bar":
            alternatives[-1].append([])
        elif kind == "few":
            if current:
                current[-1] = _Run(current[-1].length, False)
        elif kind is not None:
            current.append(_part(kind, part, runs))
    return _group([one for group in alternatives for one in group])


def _part(kind: str, part: re.Match[str], runs: Mapping[str, _Run]) -> _Run:
    if kind == "name":
        return runs.get(part["name"], _CHOICE)
    if kind == "expression":
        return _longest(_IN_EXPRESSION.finditer(part["expression"]), {})
    return _CHOICE if kind == "choice" else _Run(len(part["text"]) if kind == "text" else 1)


def _repeated(run: _Run, times: re.Match[str]) -> _Run:
    least = min(int(times["least"][:13]), _ENDLESS)
    exactly = times["comma"] is None or times["most"] == times["least"]
    return _Run(run.length * least if run.whole else run.length, run.whole and exactly)


def _group(alternatives: list[list[_Run]]) -> _Run:
    runs = [
        _Run(min(sum(one.length for one in parts), _ENDLESS), all(one.whole for one in parts))
        for parts in alternatives
    ]
    return runs[0] if len(runs) == 1 else _Run(max(one.length for one in runs), False)
