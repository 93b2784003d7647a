"""Finding stop strings in a text that arrives in pieces.

An Aho-Corasick automaton over characters: its state is the longest end of the text so far that begins
some stop string, which is exactly the text that must be held back. Linear in the text and in the stop
strings, whatever they are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """The text so far, up to the first stop string. Empty strings among `stops` count for nothing."""

    __slots__ = ("_depth", "_edges", "_fail", "_first", "_found", "_held", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]  # how many characters lead to a state
        self._found: list[str | None] = [None]  # the longest stop string that ends in a state
        self._fail = [0]  # the state of the longest proper end of a state's text
        for stop in stops:
            self._insert(stop)
        self._link()
        firsts = "".join(sorted({stop[0] for stop in stops if stop}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._state = 0
        self._held = ""  # always as long as the state is deep

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            the text that no stop string can begin in (what was held is in it), and the stop string
            that is complete, if one is: the text then ends before it, and the rest is dropped.
        """
        at = 0
        if self._state == 0:
            match = self._first.search(text)
            if match is None:
                return text, None
            at = match.start()
        edges, fail, found, state = self._edges, self._fail, self._found, self._state
        text, at = self._held + text, len(self._held) + at
        for position in range(at, len(text)):
            character = text[position]
            while state and character not in edges[state]:
                state = fail[state]
            state = edges[state].get(character, 0)
            if (stop := found[state]) is not None:
                self._state, self._held = 0, ""
                return text[: position + 1 - len(stop)], stop
        self._state = state
        safe = len(text) - self._depth[state]
        self._held = text[safe:]
        return text[:safe], None

    def release(self) -> str:
        """What is held, at the text's end."""
        held, self._state, self._held = self._held, 0, ""
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
                self._fail.append(0)
                self._edges[state][character] = following
            state = following
        if state:
            self._found[state] = stop

    def _link(self) -> None:
        """Set the failure links, breadth first: a link leads to a shallower state, already linked."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._edges[state].items():
                link = self._fail[state]
                while link and character not in self._edges[link]:
                    link = self._fail[link]
                self._fail[following] = self._edges[link].get(character, 0)
                if self._found[following] is None:
                    self._found[following] = self._found[self._fail[following]]
                queue.append(following)
