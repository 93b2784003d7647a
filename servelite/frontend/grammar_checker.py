"""Grammars are checked in processes of their own.

How long the compiler takes over a grammar, and how much memory, only compiling it tells, and nothing stops
it in the midst of that. So a check has limits of CPU time, memory and stack. What exceeds them ends its
process and is a 400. A process is started when a check finds none free.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from typing import Final

import msgspec

from servelite.frontend.errors import QUEUE_FULL, APIError, bad_request
from servelite.frontend.grammars import place_of
from servelite.ipc.process import child_environment
from servelite.tokenizer.byte_vocabulary import ByteVocabulary
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_PROCESSES: Final = 3
CHECK_SECONDS: Final = 5.0  # of CPU time, for one check
CHECK_BYTES: Final = 256 << 20  # of memory, likewise
REMEMBERED_CHARS: Final = 16 << 20  # of grammars whose check is remembered
_SILENT_SECONDS: Final = 20.0  # until a process that says nothing is given up
_TRIES: Final = 3  # of one check, where processes die that may not have died of it


class Check(msgspec.Struct, frozen=True):
    """See `GrammarChecker.check`."""

    grammar: str
    field: str
    takes_unknown: bool
    seconds: float


class Checked(msgspec.Struct, frozen=True):
    """The grammar as the engine can follow it, or the error that it is."""

    grammar: str = ""
    error: tuple[int, str, str | None, str | None] | None = None  # status, message, param, code
    unknown: tuple[str, ...] = ()  # keywords that were passed over, by their place


@dataclass(order=True)
class _Job:
    """A check that waits. Short grammars go first: hardly any of them takes long."""

    size: int
    number: int
    asked: Check | None = field(compare=False)  # None: the thread that takes it ends
    future: Future[str] = field(compare=False, default_factory=Future)


class GrammarChecker:
    """Checks against one vocabulary; the last are remembered, right or wrong."""

    def __init__(self, tokenizer: Tokenizer, unknown: Callable[[str], None] | None = None) -> None:
        """`unknown`: called with the place of each keyword of a schema that no standard has; None: it is an
        error."""
        self._tokenizer = tokenizer
        self._unknown = unknown
        self._jobs: PriorityQueue[_Job] = PriorityQueue()  # bounded by admission
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []  # one for each process that there may be
        self._processes: list[_Process] = []  # those that live
        self._free: list[_Process] = []  # of them; the one that was used last goes first
        self._closed = False
        self._remembered: OrderedDict[Check, Checked] = OrderedDict()
        self._chars = 0  # of it
        self._lock = threading.Lock()  # of all but the jobs

    def check(self, grammar: str, field: str) -> Future[str]:
        """A grammar as the engine can follow it. Any thread. A check that is cancelled before it begins does
        not begin.

        Args:
            field: to name where it is wrong.

        Raises:
            APIError: by the future. 400; it cannot be followed, or its check exceeds the limits. 503; the
                processes that should have checked it have died.
        """
        asked = Check(grammar, field, self._unknown is not None, CHECK_SECONDS)
        job = _Job(len(grammar), next(self._numbers), asked)
        known = self._recall(asked)
        if known is not None:
            self._tell(job.future, known)
        elif not any(token < self._tokenizer.vocab_size for token in self._tokenizer.eos_token_ids):
            text = f"{field} is not supported: this model's tokenizer has no end token"
            job.future.set_exception(bad_request(text, field))
        else:
            self._jobs.put(job)
            with self._lock:
                if not self._threads and not self._closed:
                    for i in range(MAX_PROCESSES):
                        name = f"check-grammar-{i}"
                        self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                        self._threads[-1].start()
        return job.future

    def _work(self) -> None:
        while (job := self._jobs.get()).asked is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                checked = self._recall(job.asked)  # another may have asked the same meanwhile
                if checked is None:
                    checked = self._ask(job.asked)
                    self._remember(job.asked, checked)
                self._tell(job.future, checked)
            except Exception as error:
                job.future.set_exception(error)

    def _tell(self, future: Future[str], checked: Checked) -> None:
        if self._unknown is not None:
            for place in checked.unknown:
                self._unknown(place)
        if checked.error is None:
            future.set_result(checked.grammar)
        else:
            status, message, param, code = checked.error
            future.set_exception(APIError(status, message, param=param, code=code))

    def _recall(self, asked: Check) -> Checked | None:
        with self._lock:
            if asked in self._remembered:
                self._remembered.move_to_end(asked)
            return self._remembered.get(asked)

    def _remember(self, asked: Check, checked: Checked) -> None:
        with self._lock:
            if asked not in self._remembered:
                self._chars += len(asked.grammar) + len(checked.grammar)
            self._remembered[asked] = checked
            while self._chars > REMEMBERED_CHARS:
                old, made = self._remembered.popitem(last=False)
                self._chars -= len(old.grammar) + len(made.grammar)

    def _ask(self, asked: Check) -> Checked:
        for _ in range(_TRIES):
            process, used = self._take()
            try:
                checked = process.ask(asked)
            except (EOFError, OSError):
                code = process.end()
                with self._lock:
                    self._processes.remove(process)
                    if self._closed:
                        raise RuntimeError("no grammar is checked any more") from None
                log.warning("a process that checked a grammar (%s) ended with code %d", asked.field, code)
                # One killed from outside, or by what earlier grammars have left in its memory, tells nothing.
                if code == -signal.SIGPROF or not (used or code == -signal.SIGKILL):
                    return _refused(asked)
            else:
                with self._lock:
                    self._free.append(process)
                return checked
        raise APIError(
            503,
            f"{asked.field} could not be checked: the processes for that have died; try again later",
            param=asked.field,
            code=QUEUE_FULL,
            headers=(("retry-after", "1"),),
        )

    def _take(self) -> tuple[_Process, bool]:
        """A process, and whether it has been used before."""
        with self._lock:
            if self._free:
                return self._free.pop(), True
        # Not under the lock, which others wait for: it takes a while.
        process = _Process(ByteVocabulary.of(self._tokenizer))
        with self._lock:
            self._processes.append(process)
            if self._closed:
                process.end()
        return process, False

    def close(self) -> None:
        """End the processes; checks under way end with an error, and those that wait are cancelled."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.end()
        try:
            while True:
                self._jobs.get_nowait().future.cancel()
        except Empty:
            for _ in self._threads:
                self._jobs.put(_Job(-1, next(self._numbers), None))


def _refused(asked: Check) -> Checked:
    """The answer to a grammar that exceeds the limits."""
    read = json.loads(asked.grammar)
    if read["kind"] == GrammarKind.LOOSE_SCHEMA:
        kept = {"type": "object"} if read["value"].get("type") == "object" else {}
        return Checked(grammar_text(GrammarKind.JSON_SCHEMA, kept))
    place = place_of(asked.field, read["kind"])
    text = f"{place} takes more than {asked.seconds:g} s or {CHECK_BYTES >> 20} MiB to compile"
    return Checked(error=(400, f"{text}; give a smaller one", place, "invalid_grammar"))


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
        self._vocabulary: ByteVocabulary | None = vocabulary
        self._decoder = msgspec.msgpack.Decoder(Checked)

    def ask(self, check: Check) -> Checked:
        """Raises `EOFError` or `OSError`: it has died, or says nothing."""
        if self._vocabulary is not None:
            self._line.send_bytes(msgspec.msgpack.encode(self._vocabulary))
            self._vocabulary = None
        self._line.send_bytes(msgspec.msgpack.encode(check))
        if not self._line.poll(_SILENT_SECONDS):
            raise TimeoutError
        return self._decoder.decode(self._line.recv_bytes())

    def end(self) -> int:
        """Kill it, if it has not ended; its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()
