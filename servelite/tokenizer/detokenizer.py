"""Incremental detokenizing: token IDs in, text that is safe to send out.

Held back: the bytes of an unfinished character, and text that may begin a stop string. Each token is
looked at once; nothing is decoded twice. What comes out does not depend on how the IDs were divided
into pushes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from servelite.tokenizer.stop_strings import StopMatcher
from servelite.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. Without a stop string, all texts it returns add up to `Tokenizer.decode`.

    Attributes:
        stopped: the stop string that was found; it and all text after it are dropped (with
            `include_stop` only what comes after it). Where several are found, the one that is
            complete first; of those complete at the same character, the longest.
        stop_token_count: how many of the pushed tokens there are up to and including the one that
            completed the stop string; 0 while there is none.
    """

    __slots__ = (
        "_count", "_include_stop", "_matcher", "_min_tokens", "_pending", "_pieces", "_skipped", "_strip",
        "_tokenizer", "stop_token_count", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """Begin an answer.

        Args:
            min_tokens: stop strings are not looked for in the text of that many first tokens.
            kept: control tokens that are text even if the others are skipped.
        """
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        self._matcher = StopMatcher(stop) if any(stop) else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pending = b""  # an unfinished character's bytes, at most 3
        self._strip = tokenizer.strips_leading_space  # until the first character is out
        self._count = 0  # tokens pushed
        self.stopped: str | None = None
        self.stop_token_count = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is now certain, "" where none is."""
        if self._matcher is None:
            return self._text(ids)
        out: list[str] = []
        for index in ids:
            if self.stopped is not None:
                break
            self._count += 1
            if text := self._text((index,)):
                out.append(self._match(text) if self._count > self._min_tokens else text)
        return "".join(out)

    def finish(self) -> str:
        """The text that was held back, at an answer's normal end; nothing after a stop string."""
        if self.stopped is not None:
            return ""
        pending, self._pending = self._pending, b""
        text = self._stripped(pending.decode(errors="replace"))
        if self._matcher is None:
            return text
        text = self._match(text)
        return text if self.stopped is not None else text + self._matcher.release()

    def _text(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete, stop strings aside."""
        pieces, skipped = self._pieces, self._skipped
        out = ""
        for index in ids:
            if index in skipped:
                continue
            try:
                piece = pieces[index] if index >= 0 else ""
            except IndexError:
                continue
            if piece is None:
                piece = self._tokenizer.piece(index)
            if type(piece) is str and not self._pending:
                out += piece
            else:
                data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
                text, used = utf_8_decode(data, "replace", False)
                self._pending = data[used:]
                out += text
        return self._stripped(out) if self._strip else out

    def _stripped(self, text: str) -> str:
        """`text` without the space that a SentencePiece text begins with."""
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _match(self, text: str) -> str:
        """Look for stop strings in `text`; the part of it, and of what was held, that is safe."""
        assert self._matcher is not None
        safe, found = self._matcher.push(text)
        if found is not None:
            self.stopped = found
            self.stop_token_count = self._count
            if self._include_stop:
                safe += found
        return safe
