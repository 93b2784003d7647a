"""Prompts of a wanted length without a tokenizer: words that nearly every vocabulary has as one token.

Two short requests tell how many tokens the server itself counts for a word, and how many it adds
(a begin token, a chat template); from then on lengths are right to the token where the words are one
token each, and close where they are not.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from servelite.bench.target import Target

_TEXT: Final = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue side
    kind head house service friend father power hour game line end member law car city community name
    president team minute idea body information back parent face level office door health person art war
    history party result change reason research girl moment air teacher force education foot boy age policy
    music mind sense nation plan college interest death experience effect use class control field
    development role rate heart drug show leader light voice wife price report decision son view town road
    arm difference value building action season tax director position player record paper space ground form
    event official matter center site project activity star table need court oil cost industry figure street
    image phone data picture practice piece land product doctor wall patient worker news test movie north
    love support technology step baby computer type attention film tree source organization hair look window
    culture brother energy period course summer less open long small large next early young important few
    public bad same able good new first last great little own other old high different"""
WORDS: Final = tuple(_TEXT.split())
_WARM_UP_OUTPUT: Final = 16  # tokens
_FEW, _MANY = 50, 250  # words of the two requests that measure


@dataclass(frozen=True)
class Lengths:
    """A number of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class WordScale:
    """A prompt of n words has about `offset + per_word * n` tokens."""

    per_word: float = 1.0
    offset: float = 0.0

    @classmethod
    def measured(cls, target: Target, source: random.Random) -> WordScale:
        """By the server's own counts; one token a word where it gives none.

        Raises:
            BenchError: the server does not answer.
        """
        few = target.prompt_tokens(words(source, _FEW))
        many = target.prompt_tokens(words(source, _MANY))
        if few is None or many is None or many <= few:
            return cls()
        per_word = (many - few) / (_MANY - _FEW)
        return cls(per_word, few - per_word * _FEW)

    def words_for(self, tokens: int) -> int:
        """How many words make a prompt of `tokens`, at least 1."""
        return max(1, round((tokens - self.offset) / self.per_word))


def words(source: random.Random, count: int) -> str:
    """`count` of the words."""
    return " ".join(source.choices(WORDS, k=count))


@dataclass(frozen=True)
class Request:
    """One request to send."""

    payload: bytes
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Makes the requests of a run. The same seed makes the same requests, in the same order."""

    target: Target
    scale: WordScale
    prompt: Lengths
    output: Lengths
    prefix: int  # tokens that all prompts begin with, counted in addition to `prompt`
    seed: int

    def requests(self, part: str) -> Iterator[Request]:
        """The endless requests of one part of the run: no two parts have a prompt in common."""
        source = random.Random(f"{self.seed} {part}")
        shared = ""
        if self.prefix:
            own = random.Random(f"{self.seed} prefix")
            shared = words(own, self.scale.words_for(self.prefix + round(self.scale.offset))) + " "
        while True:
            text = shared + words(source, self.scale.words_for(self.prompt.draw(source)))
            limit = self.output.draw(source)
            yield Request(self.target.request(text, limit), limit)

    def warm_up(self, count: int) -> list[Request]:
        """Requests with short answers and without the shared beginning, which is not to be known yet."""
        short = Lengths(min(self.output.low, _WARM_UP_OUTPUT), min(self.output.high, _WARM_UP_OUTPUT))
        plain = dataclasses.replace(self, prefix=0, output=short)
        return list(itertools.islice(plain.requests("warm-up"), count))

    def request(self, part: str, prompt_tokens: int, max_tokens: int) -> Request:
        """One request of its own lengths, without the shared beginning."""
        source = random.Random(f"{self.seed} {part}")
        text = words(source, self.scale.words_for(prompt_tokens))
        return Request(self.target.request(text, max_tokens), max_tokens)
