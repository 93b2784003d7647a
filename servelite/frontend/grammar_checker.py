"""Grammars are checked in a process of their own.

How long the compiler takes over a grammar, and how much memory, only compiling it tells, and nothing stops
it in the midst of that. So a check has limits of time, memory and stack. What exceeds them ends the process
and is a 400; the next check starts another process, as the first one did.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.grammars import place_of
from servelite.ipc.process import child_environment
from servelite.tokenizer.byte_vocabulary import ByteVocabulary
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 10.0
CHECK_BYTES: Final = 256 << 20  # of memory, for one check
_START_SECONDS: Final = 60.0
REMEMBERED_CHARS: Final = 16 << 20  # of grammars whose check is remembered


class Check(msgspec.Struct, frozen=True):
    """See `GrammarChecker.check`."""

    grammar: str
    field: str
    takes_unknown: bool


class Checked(msgspec.Struct, frozen=True):
    """The grammar as the engine can follow it, or the error that it is."""

    grammar: str = ""
    error: tuple[int, str, str | None, str | None] | None = None  # status, message, param, code
    unknown: tuple[str, ...] = ()  # keywords that were passed over, by their place


class GrammarChecker:
    """Checks against one vocabulary, one grammar after the other; the last are remembered, right or wrong."""

    def __init__(self, tokenizer: Tokenizer, unknown: Callable[[str], None] | None = None) -> None:
        """`unknown`: called with the place of each keyword of a schema that no standard has; None: it is an
        error."""
        self._tokenizer = tokenizer
        self._unknown = unknown
        self._process: _Process | None = None
        self._closed = False
        self._turn = threading.Lock()  # who speaks with the process
        self._remembered: OrderedDict[Check, Checked] = OrderedDict()
        self._chars = 0  # of it
        self._lock = threading.Lock()  # of these two

    def check(self, grammar: str, field: str) -> str:
        """A grammar as the engine can follow it. Any thread; waits for the process.

        Args:
            field: to name where it is wrong.

        Raises:
            APIError: 400; it cannot be followed, or its check exceeds the limits.
            OSError, RuntimeError: the process does not start.
        """
        if not any(token < self._tokenizer.vocab_size for token in self._tokenizer.eos_token_ids):
            raise bad_request(f"{field} is not supported: this model's tokenizer has no end token", field)
        asked = Check(grammar, field, self._unknown is not None)
        checked = self._recall(asked)
        if checked is None:
            with self._turn:
                checked = self._recall(asked)
                if checked is None:
                    checked = self._ask(asked)
                    self._remember(asked, checked)
        if self._unknown is not None:
            for place in checked.unknown:
                self._unknown(place)
        if checked.error is not None:
            status, message, param, code = checked.error
            raise APIError(status, message, param=param, code=code)
        return checked.grammar

    def _recall(self, asked: Check) -> Checked | None:
        with self._lock:
            if asked in self._remembered:
                self._remembered.move_to_end(asked)
            return self._remembered.get(asked)

    def _remember(self, asked: Check, checked: Checked) -> None:
        with self._lock:
            self._remembered[asked] = checked
            self._chars += len(asked.grammar) + len(checked.grammar)
            while self._chars > REMEMBERED_CHARS:
                old, made = self._remembered.popitem(last=False)
                self._chars -= len(old.grammar) + len(made.grammar)

    def _ask(self, asked: Check) -> Checked:
        used = self._process is not None
        try:
            return self._started().ask(asked)
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            if self._closed:
                raise RuntimeError("the server ends") from None
            assert self._process is not None
            log.warning("the check of a grammar (%s) was ended: %s", asked.field, self._process.end(error))
            self._process = None
            # What earlier grammars have left in its memory is not this one's fault.
            if used and not isinstance(error, TimeoutError):
                return self._ask(asked)
        read = json.loads(asked.grammar)
        if read["kind"] == GrammarKind.LOOSE_SCHEMA:
            kept = {"type": "object"} if read["value"].get("type") == "object" else {}
            return Checked(grammar_text(GrammarKind.JSON_SCHEMA, kept))
        place = place_of(asked.field, read["kind"])
        text = f"{place} takes more than {CHECK_SECONDS:g} s or {CHECK_BYTES >> 20} MiB to compile"
        return Checked(error=(400, f"{text}; give a smaller one", place, "invalid_grammar"))

    def _started(self) -> _Process:
        if self._closed:
            raise RuntimeError("no grammar is checked any more")
        if self._process is None:
            self._process = _Process(ByteVocabulary.of(self._tokenizer))
        return self._process

    def close(self) -> None:
        """End the process; a check under way ends with an error."""
        self._closed = True
        if self._process is not None:
            self._process.end()


class _Process:
    """`python -m servelite.frontend.grammar_process`; used by one thread at a time, but for `end`."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        from multiprocessing.connection import Connection  # 15 ms that a server without grammars saves

        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "servelite.frontend.grammar_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment() | {"OMP_NUM_THREADS": "1"},
                process_group=0,
            )
        self._line = Connection(ours.detach())
        self._decoder = msgspec.msgpack.Decoder(Checked)
        try:
            self._line.send_bytes(msgspec.msgpack.encode(vocabulary))
            self._receive(_START_SECONDS)
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process that checks grammars did not start: {self.end(error)}") from None

    def ask(self, check: Check) -> Checked:
        """Raises `TimeoutError`; `EOFError` or another `OSError`: it has died."""
        self._line.send_bytes(msgspec.msgpack.encode(check))
        return self._decoder.decode(self._receive(CHECK_SECONDS))

    def _receive(self, seconds: float) -> bytes:
        if not self._line.poll(seconds):
            raise TimeoutError(f"it took {seconds:g} s")
        return self._line.recv_bytes()

    def end(self, error: Exception | None = None) -> str:
        """Kill it; says how it ended."""
        time_is_up = isinstance(error, TimeoutError)
        if time_is_up or error is None:
            self._process.kill()
        code = self._process.wait()
        return str(error) if time_is_up else f"exit code {code}"
