"""`python -m servelite.frontend.grammar_process FD`: started by `GrammarChecker` only, and killed by it."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from servelite.frontend.errors import APIError
from servelite.frontend.grammar_check import compile_check
from servelite.frontend.grammar_checker import CHECK_BYTES, Check, Checked
from servelite.ipc.process import ExitCode, die_with_parent, set_title
from servelite.tokenizer.byte_vocabulary import ByteVocabulary
from servelite.tokenizer.compile_thread import compile_thread
from servelite.tokenizer.grammar import Grammars


def main() -> int:
    """Check one grammar after the other, until the other end of the line is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # who started it decides when to end
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    line = Connection(int(sys.argv[1]))
    set_title("servelite: grammars")
    try:
        return compile_thread("check").submit(_serve, line).result()
    except (EOFError, OSError):
        return ExitCode.OK
    except MemoryError:
        os._exit(ExitCode.MEMORY)  # there is none left to end in good order


def _serve(line: Connection) -> int:
    grammars = Grammars(msgspec.msgpack.decode(line.recv_bytes(), type=ByteVocabulary))
    decoder = msgspec.msgpack.Decoder(Check)
    _limit_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # those who check nothing go first
    while True:
        check = decoder.decode(line.recv_bytes())
        # Of all threads' CPU time; its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, check.seconds)
        checked = _checked(check, grammars)
        signal.setitimer(signal.ITIMER_PROF, 0)
        line.send_bytes(msgspec.msgpack.encode(checked))


def _checked(check: Check, grammars: Grammars) -> Checked:
    unknown = list[str]()
    take = unknown.append if check.takes_unknown else None
    try:
        return Checked(compile_check(check.grammar, grammars, check.field, take), unknown=tuple(unknown))
    except APIError as error:
        return Checked(error=(error.status, error.message, error.param, error.code))
    except MemoryError:
        raise
    except Exception:
        logging.exception("a grammar could not be checked: %s", check.field)
        return Checked(error=(500, f"{check.field} could not be checked.", check.field, "internal_error"))


def _limit_memory() -> None:
    """From now on, of what was not yet asked for; see getrlimit(2), RLIMIT_DATA."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmData"))
    limit = int(line.split()[1]) * 1024 + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
