"""Grammars in llguidance's dialect of Lark, written rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from servelite.tokenizer.grammar_text import GrammarKind, grammar_text, json_rule

SplitControls = Callable[[str], Sequence[str | int]]
"""A text with its control tokens as IDs."""

LONG: Final = 1000  # characters that a text without quotes has at least: more take long to compile
_SPACE: Final = r"[\s\x1c-\x1f]*"
_NUMBER: Final = r"-?[0-9][0-9.eE+\-]*"
_WRITTEN: Final = {
    "integer": _NUMBER,
    "fraction": _NUMBER,
    "boolean": "[tT]rue|[fF]alse",
    "null": "null|None",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""What a text is like that would be read as another type where that is allowed too."""
_SPECIAL: Final = re.compile(r"[.+*?()|\[\]{}^$/\\]")  # in regular expressions, and what ends one


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


class Lark:
    """A grammar in llguidance's dialect of Lark, rule by rule."""

    def __init__(self, split: SplitControls) -> None:
        self._split = split
        self._rules: list[str] = []
        self._named = 0
        self.chars = 0  # in rules

    def define(self, name: str, body: str) -> None:
        """The rule `name`."""
        self._rules.append(f"{name}: {body}")
        self.chars += len(body)

    def name(self) -> str:
        """A new rule's name."""
        self._named += 1
        return f"r{self._named}"

    def rule(self, body: str) -> str:
        """A new rule; returns its name."""
        name = self.name()
        self.define(name, body)
        return name

    def literal(self, text: str) -> str:
        """`text`, in which a control token's name stands for the token; "" is nothing."""
        parts = self._split(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

    def text_before(
        self,
        end: str,
        before: str = "",
        least: int = 0,
        most: int | None = None,
        unlike: Collection[str] = (),
    ) -> str:
        """Any text, then `before` and `end`.

        Args:
            end: the text does not hold it.
            least: characters of the text; `most` as well.
            unlike: names in `_WRITTEN` of what the text may not be, but for white space around it.
        """
        control = isinstance(self._split(end)[0], int)  # which no text can hold
        if least and not (control or before):  # a longer one takes more to compile than the library allows
            most = min(LONG if most is None else most, LONG)
        escaped = _escaped(end)
        last = _escaped(before) + ("" if control else escaped)
        body = f"/(?s:.{{{least},{'' if most is None else most}}}){last}/"
        self._named += 1
        if not (control or before or least or unlike):  # the first end that comes is the one
            self._rules.append(f"r{self._named}[lazy]: {body}")
            return f"r{self._named}"
        if not control:
            body += f" & ~/(?s:.*){escaped}(?s:.+)/"
        if unlike:
            kinds = "|".join(sorted({_WRITTEN[kind] for kind in unlike}))
            body += f" & ~/{_SPACE}({kinds}){_SPACE}{last}/"
        self._rules.append(f"T{self._named}: {body}")
        return f"T{self._named} {self.literal(end)}" if control else f"T{self._named}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema."""
        return self.rule(json_rule(dict(schema)))

    def finish(self, start: str) -> str:
        """The whole grammar, as it travels."""
        return grammar_text(GrammarKind.LARK, "\n".join([f"start: {start}", *self._rules]) + "\n")
