"""The bytes that each token stands for in text.

Two decoders are known: ByteLevel (each character of a token is one byte) and SentencePiece's sequence (a sign for
the space, `<0xNN>` for single bytes, perhaps one leading space taken off). Special tokens stand for nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from executor_svc.gguf_tokenizer import SPACE
from jitney.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself if printable in Latin-1, else the next free from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class Pieces:
    """Token id -> bytes, worked out once for each id. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest for a decoder that is not known."""
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        decoder: Any = tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        steps = state.get("decoders", [state])
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        if not self.byte_level and kinds not in (
            ["Replace", "ByteFallback", "Fuse"],
            ["Replace", "ByteFallback", "Fuse", "Strip"],
        ):
            raise InvalidRequest(
                f"the tokenizer decodes by {' + '.join(kinds)}; known are ByteLevel and SentencePiece's sequence",
                field="decoder",
                value=kinds,
            )
        self.strips_leading_space = kinds[-1] == "Strip"

    def of(self, token_id: int) -> bytes:
        """Bytes of one token; none for a special or unknown one."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._work_out(token_id)
        return piece

    def _work_out(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and added.special:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            values = [_ALPHABET.get(c) for c in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        single = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(single[1], 16)]) if single else token.replace(SPACE, " ").encode()
