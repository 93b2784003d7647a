"""Signals that the tests' process was started with ignored or blocked; its children would inherit them.

A shell starts what runs in the background (`make test &`, some CI runners) with SIGINT and SIGQUIT
ignored: a server that a test ends by SIGINT would live on.
"""

from __future__ import annotations

import signal

# Python ignores these two itself, and gives its children the default.
_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}


def reset() -> None:
    """Unblock every signal and give the ignored ones back their default."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    for number in signal.valid_signals() - _PYTHONS:
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
