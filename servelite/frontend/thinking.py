"""A limit on how long a model thinks, as rules of a grammar: so many tokens, then the one that ends it.

Rules of tokens, not of text: what is counted is tokens, and the end is one, whatever else spells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from servelite.frontend.errors import bad_request
from servelite.frontend.parsers.formats import Begin, ReasoningFormat
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text

FIELD: Final = "thinking_token_budget"


class ThinkingTokens(NamedTuple):
    """The tokens that open and close a model's reasoning."""

    opening: int
    closing: int


def count_reasoning(answer: Sequence[int], closing: int) -> int:
    """How many tokens of an answer that begins with reasoning belong to it, its end included."""
    return answer.index(closing) + 1 if closing in answer else len(answer)


@dataclass(frozen=True)
class ThinkingLimit:
    """At most `tokens` between the token that opens the reasoning and the one that closes it."""

    tokens: int
    opening: int
    closing: int

    @property
    def rule(self) -> str:
        """From behind the opening to behind the closing token, in llguidance's Lark."""
        thoughts = f"<[^{self.closing}]>{{0,{self.tokens}}} " if self.tokens else ""
        return f"{thoughts}<[{self.closing}]>"

    def grammar(self, begin: Begin) -> str:
        """Of a whole answer that is free otherwise, as it travels. It does not think a second time."""
        rest = f"<[^{self.opening}]>*"
        before = self.rule if begin is Begin.INSIDE else f"(<[{self.opening}]> {self.rule})?"
        return grammar_text(GrammarKind.LARK, f"start: {before} rest\nrest: {rest}\n")


def thinking_tokens(
    form: ReasoningFormat | None, added_id: Callable[[str], int | None]
) -> ThinkingTokens | None:
    """A model's; None: there is none, or it has no such tokens.

    Args:
        added_id: the token that is spelled so.
    """
    if form is None:
        return None
    opening, closing = added_id(form.opening), added_id(form.closing)
    return None if opening is None or closing is None else ThinkingTokens(opening, closing)


def thinking_limit(budget: int, tokens: ThinkingTokens | None) -> ThinkingLimit:
    """The limit in a model's own tokens, as `thinking_tokens` has them; raises `APIError` (400)."""
    if tokens is None:
        raise bad_request(
            f"{FIELD}: this model's reasoning does not begin and end with tokens of its own, "
            "or it is not set apart (--reasoning-parser)",
            FIELD,
            "unsupported_value",
        )
    return ThinkingLimit(budget, *tokens)
