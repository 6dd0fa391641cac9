"""Finds stop strings in text that comes in pieces, and says how much of it may be shown.

An Aho-Corasick automaton over characters: its state is the longest end of the text that begins some stop string,
and that end is what has to be held back. The match that ends first wins, of those the longest, so that the answer
does not depend on how the text was cut into pieces. Amortised O(1) for each character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton: immutable, shared by any number of texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]  # characters of a state: what is held back in it
        self.matched: list[str] = [""]  # longest stop string that ends in a state
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        target = self._next[state].get(character)
        while target is None and state:
            state = self._back[state]
            target = self._next[state].get(character)
        return target or 0

    def _add(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            target = self._next[state].get(character)
            if target is None:
                target = self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(depth)
                self.matched.append("")
            state = target
        self.matched[state] = stop

    def _link(self) -> None:
        """`_back`: the longest proper end of a state's text that is a state too."""
        self._back = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._next[state].items():
                self._back[target] = self.step(self._back[state], character)
                queue.append(target)
            if not self.matched[state]:
                self.matched[state] = self.matched[self._back[state]]
