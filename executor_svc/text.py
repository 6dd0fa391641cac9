"""The text of one answer, token by token: always valid UTF-8, never a part of a stop string.

Joined, the pieces are what decoding all tokens at once gives: a character spread over several tokens comes when it
is whole, bytes that are no UTF-8 become U+FFFD, special tokens give nothing. Text that may still become a stop
string is held back. O(1) amortised for each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from executor_svc.pieces import Pieces
from executor_svc.stop_strings import StopStrings

_new_decoder = codecs.getincrementaldecoder("utf-8")


class AnswerText:
    """A TextStream (executor_svc/request.py). One thread at a time."""

    def __init__(self, pieces: Pieces, stops: StopStrings | None = None, hidden_ids: Collection[int] = ()) -> None:
        """`hidden_ids` give no text (stop token ids)."""
        self._pieces = pieces
        self._stops = stops
        self._hidden = hidden_ids
        self._skip = 0  # bytes of text to come that the reader has already
        self._decoder = _new_decoder("replace")
        self._strip = pieces.strips_leading_space
        self._state = 0
        self._held = ""  # may still become a stop string
        self._ready: list[str] = []
        self._matched: str | None = None

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Takes new tokens; returns the stop string that the text up to them has matched, if one has."""
        for token_id in token_ids:
            if self._matched is not None:
                break
            if token_id not in self._hidden:
                self._feed(self._decoder.decode(self._pieces.of(token_id)))
        return self._matched

    def take(self) -> str:
        """Text that is now certain; each piece once."""
        text = "".join(self._ready)
        self._ready.clear()
        return self._after_skipped(text) if self._skip else text

    def finish(self) -> str:
        """The rest of the text, once no more tokens come; nothing behind a matched stop string."""
        if self._matched is None:
            self._feed(self._decoder.decode(b"", final=True))
        if self._matched is None:
            self._ready.append(self._held)
            self._held = ""
        return self.take()

    def _feed(self, text: str) -> None:
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        if not text:
            return
        if self._stops is None:
            self._ready.append(text)
            return
        stops, state, held = self._stops, self._state, len(self._held)
        text = self._held + text
        for end in range(held + 1, len(text) + 1):
            state = stops.step(state, text[end - 1])
            if stops.matched[state]:
                self._matched = stops.matched[state]
                self._ready.append(text[: end - len(self._matched)])
                self._held = ""
                return
        self._state = state
        certain = len(text) - stops.depth[state]
        self._ready.append(text[:certain])
        self._held = text[certain:]

    def restart_after(self, received_bytes: int) -> bool:
        """For a resumed answer, after its tokens were pushed and before any `take`: takes away the text that the
        reader has. False if the text so far does not have a character's end there."""
        certain = "".join(self._ready).encode()
        if not ends_character(certain + self._held.encode(), received_bytes):
            return False
        self._ready = [certain[received_bytes:].decode()]
        self._skip = max(0, received_bytes - len(certain))
        return True

    def _after_skipped(self, text: str) -> str:
        data = text.encode()
        rest = data[self._skip :].decode("utf-8", "ignore")
        self._skip = max(0, self._skip - len(data))
        return rest


def ends_character(data: bytes, at: int) -> bool:
    """Whether UTF-8 text may be cut after `at` bytes."""
    return at == len(data) or (at < len(data) and data[at] & 0xC0 != 0x80)
