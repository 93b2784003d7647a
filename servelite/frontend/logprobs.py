"""Log probabilities as the engine sends them, and as OpenAI and vLLM write them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from operator import add
from typing import Any, Final

import msgspec

from servelite.ipc.messages import TokenLogprobs
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.tokenizer import Tokenizer

LEAST: Final = -9999.0
"""What OpenAI writes for a token that is all but impossible; JSON has no infinity."""

Logprobs = bytes | dict[str, Any]
"""A choice's `logprobs`: the JSON of a chat's, which is written once a token; or as a value."""

_encode: Final = msgspec.json.encode
_MAX_ENTRIES: Final = 1 << 15  # some 100 bytes each


class LogprobTable:
    """Logprobs of consecutive tokens, in the order of the tokens: each entry once, none missing.

    Kept in columns, as the engine sends them: nothing is taken out before it is asked for.

    Attributes:
        first: index of the first token that has an entry (a prompt's is 1: its first token follows none).
    """

    __slots__ = ("_chosen", "_ids", "_k", "_values", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self._k = 0  # likeliest alternatives of each token: as many as were asked for
        self._chosen = array("f")  # each token's own logprob
        self._ids = array("i")  # k a token
        self._values = array("f")  # k a token

    def take(self, part: TokenLogprobs) -> None:
        """Append what is new of `part`.

        Raises:
            ValueError: there is a gap.
        """
        known = self.first + len(self._chosen) - part.first_index
        chosen, ids, values, self._k = part.chosen, part.ids, part.values, part.k
        if known:  # else, as nearly always, all of them are new
            if known < 0:
                raise ValueError(f"the logprobs of {-known} tokens before token {part.first_index}")
            bytes_known = 4 * known * part.k
            chosen, ids, values = chosen[4 * known :], ids[bytes_known:], values[bytes_known:]
        self._chosen.frombytes(chosen)
        self._ids.frombytes(ids)
        self._values.frombytes(values)

    def at(self, index: int) -> tuple[float, list[int], list[float]] | None:
        """(own logprob, likeliest IDs, their logprobs) of token `index`, None where it has none."""
        place, k = index - self.first, self._k
        if not 0 <= place < len(self._chosen):
            return None
        own = self._chosen[place]
        if own < LEAST:
            own = LEAST
        if not k:
            return own, [], []
        ids, values = self._ids[k * place : k * (place + 1)], self._values[k * place : k * (place + 1)]
        if values[-1] < LEAST:  # the least of them
            return own, ids.tolist(), [max(value, LEAST) for value in values]
        return own, ids.tolist(), values.tolist()


class ChatEntries(dict[int, bytes]):
    """Tokens' entries in a chat's `logprobs`, up to the log probability, by token ID."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        data = self._tokenizer.token_bytes(token)
        fields = {"token": data.decode(errors="replace"), "bytes": list(data)}
        if len(self) == _MAX_ENTRIES:
            self.clear()
        self[token] = entry = _encode(fields)[:-1] + b',"logprob":'
        return entry


@lru_cache(maxsize=1)
def chat_entries(tokenizer: Tokenizer) -> ChatEntries:
    """The process's own: what is found for one answer serves the next."""
    return ChatEntries(tokenizer)


def chat_logprobs(entries: ChatEntries, tokens: Sequence[int], table: LogprobTable, start: int) -> bytes:
    """The `logprobs` of a chat's choice, for `tokens`, the first of which is token `start`."""
    parts = []
    for index, token in enumerate(tokens, start):
        found = table.at(index)
        if found is None:
            continue
        own, ids, values = found
        entry = entries[token] + _encode(own)
        if ids:
            numbers = _encode(values)[1:-1].split(b",")
            tops = b"},".join(map(add, map(entries.__getitem__, ids), numbers))
            parts.append(b'%b,"top_logprobs":[%b}]}' % (entry, tops))
        else:
            parts.append(entry + b',"top_logprobs":[]}')
    return b'{"content":[' + b",".join(parts) + b'],"refusal":null}'


class LegacyLogprobs:
    """The `logprobs` of a choice of `/v1/completions`, part by part: it counts characters."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def begin_answer(self, offset: int) -> None:
        """The tokens that follow are an answer's, whose text begins at character `offset`."""
        self._offset = offset
        self._detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self._skip_special_tokens)

    def part(self, tokens: Sequence[int], table: LogprobTable, start: int) -> dict[str, Any]:
        """Of `tokens`, the first of which is token `start` of the table's text."""
        texts, own, tops, offsets = [], [], [], []
        for index, token in enumerate(tokens, start):
            found = table.at(index)
            texts.append(_legacy_text(self._tokenizer.piece(token)))
            own.append(None if found is None else found[0])
            tops.append(None if found is None else self._tops(token, *found))
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token,)))
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, token: int, own: float, ids: list[int], values: list[float]) -> dict[str, float]:
        """The likeliest tokens and the chosen one, which may make one more."""
        piece = self._tokenizer.piece
        tops = {_legacy_text(piece(i)): value for i, value in zip(ids, values, strict=True)}
        tops.setdefault(_legacy_text(piece(token)), own)
        return tops


def join_legacy(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _legacy_text(piece: str | bytes) -> str:
    """A token's text; one that is no whole character as OpenAI writes it, so that no two are alike."""
    return piece if isinstance(piece, str) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], table: LogprobTable
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token a dict by token ID; None for the first."""
    rows: list[dict[str, Any] | None] = []
    for index, token in enumerate(tokens):
        found = table.at(index)
        if found is None:
            rows.append(None)
            continue
        own, ids, values = found
        ranked: dict[int, tuple[float, int | None]] = {
            i: (v, rank) for rank, (i, v) in enumerate(zip(ids, values, strict=True), 1)
        }
        ranked.setdefault(token, (own, None))
        rows.append(
            {
                str(i): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(i).decode(errors="replace"),
                }
                for i, (value, rank) in ranked.items()
            }
        )
    return rows
