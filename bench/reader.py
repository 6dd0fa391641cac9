"""A client that only reads: it opens the streams of one connection and throws away what comes.

The clients of a server are elsewhere, as a rule. One in Python that unpacks each message costs as much as the server's
side of a stream; beside the server on two cores that would be measured too. So this speaks the little of HTTP/2
(RFC 9113) that a reader needs: it acknowledges settings and pings, opens the window once, and counts ended streams.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
WINDOW = (1 << 31) - 1
FIRST_WINDOW = (1 << 16) - 1
READ_BYTES = 1 << 16


class Reader:
    """One connection to host:port. Blocks."""

    def __init__(self, target: str, path: str) -> None:
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = b"".join(
            b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value  # literal, not kept (RFC 7541, 6.2.2)
            for name, value in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", path.encode()),
                (b":authority", target.encode()),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
            )
        )
        self._next_stream = 1
        self._left = b""
        self.messages = 0  # frames of data that came: about one a message
        opening = _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, WINDOW))
        opening += _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - FIRST_WINDOW))
        self._socket.sendall(PREFACE + opening)

    def run(self, requests: Sequence[bytes]) -> None:
        """Sends these messages, each as a call of its own, and reads until all have ended."""
        opening = b""
        for request in requests:
            message = struct.pack(">BI", 0, len(request)) + request
            opening += _frame(HEADERS, END_HEADERS, self._next_stream, self._headers)
            opening += _frame(DATA, END_STREAM, self._next_stream, message)
            self._next_stream += 2
        self._socket.sendall(opening)
        left = len(requests)
        while left:
            for kind, flags, payload in self._frames():
                if kind == DATA:
                    self.messages += 1
                elif kind == HEADERS:
                    left -= flags & END_STREAM
                elif kind in (SETTINGS, PING) and not flags & ACK:
                    self._socket.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
                elif kind in (RST_STREAM, GOAWAY):
                    raise ConnectionError(f"the server has ended a stream: {payload!r}")

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Kind, flags and content of those that have come whole, after one read."""
        read = self._socket.recv(READ_BYTES)
        if not read:
            raise ConnectionError("the server has closed the connection")
        data, at = self._left + read, 0
        while at + 9 <= len(data):
            length = int.from_bytes(data[at : at + 3], "big")
            if at + 9 + length > len(data):
                break
            yield data[at + 3], data[at + 4], data[at + 9 : at + 9 + length]
            at += 9 + length
        self._left = data[at:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
