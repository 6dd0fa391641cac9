"""Text of a model that only counts: each token is its number and a space."""

from __future__ import annotations

from collections.abc import Sequence


class NumberText:
    """TextStream without a tokenizer; stop strings end the text in front of them."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = stop
        self._text = ""
        self._taken = 0
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Takes new tokens; returns the stop string that has matched."""
        for token in token_ids:
            self._text += f"{token} "
            for stop in self._stop:
                if (at := self._text.find(stop)) >= 0:
                    self._text = self._text[:at]
                    self._ended = True
                    return stop
        return None

    def take(self) -> str:
        """Text that no stop string can take back."""
        held = max((len(s) - 1 for s in self._stop), default=0) if not self._ended else 0
        piece = self._text[self._taken : max(self._taken, len(self._text) - held)]
        self._taken += len(piece)
        return piece

    def finish(self) -> str:
        """The rest."""
        piece = self._text[self._taken :]
        self._taken += len(piece)
        return piece


class SilentText:
    """TextStream of answers whose text nobody reads."""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Nothing matches."""
        return None

    def take(self) -> str:
        """Nothing."""
        return ""

    def finish(self) -> str:
        """Nothing."""
        return ""
