"""A line on the terminal that says how far a run is; nothing where standard error is no terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

_BAR: Final = 24
_EVERY_S: Final = 0.1


class ProgressLine:
    """One line, overwritten in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()

    def show(self, label: str, share: float, text: str) -> None:
        """`share`: of the work that is done, 0 to 1."""
        if not self._shown:
            return
        full = round(min(share, 1.0) * _BAR)
        line = f"{label} [{'#' * full}{'.' * (_BAR - full)}] {text}"
        columns = shutil.get_terminal_size().columns
        self._stream.write("\r\x1b[K" + line[: columns - 1])
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away, so that results can be printed in its place."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    @contextlib.contextmanager
    def of(self, label: str) -> Iterator[Callable[[float], None]]:
        """Gives what is to be called with the share of the work that is done, however often."""
        last = 0.0

        def watch(share: float) -> None:
            nonlocal last
            if self._shown and time.monotonic() - last >= _EVERY_S:
                last = time.monotonic()
                self.show(label, share, f"{share:.0%}")

        try:
            yield watch
        finally:
            self.clear()
