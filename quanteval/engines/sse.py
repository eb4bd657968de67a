"""Server-sent events from bytes as they come: the part of the standard that streamed answers use.

Covers every line end, comments, data on several lines and cuts anywhere. Ids and retry times,
which only matter to a client that reconnects, are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from quanteval.errors import EngineError

MAX_EVENT_BYTES = 64 << 20
"""A line or event longer than this is no answer of a language model."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data, and its name where the server gives one."""

    data: bytes
    name: bytes = b""


class EventParser:
    """Turns pieces of a stream into events; the pieces may be cut anywhere."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._held = 0
        self._data: list[bytes] = []
        self._name = b""
        self._after_return = False
        self._first = True

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events that this piece completes. EngineError for a line without end."""
        if not piece:
            return []
        if (
            piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and piece.find(b"\n") == len(piece) - 2
            and not (self._rest or self._data or self._name or self._after_return)
            and b"\r" not in piece
        ):
            self._first = False
            return [Event(piece[6:-2])]  # nearly every piece is one whole event
        if self._after_return or b"\r" in piece:
            piece = self._plain_line_ends(piece)
        if b"\n" not in piece:
            self._rest.append(piece)
            self._hold(len(piece))
            return []
        if self._rest:
            self._rest.append(piece)
            piece = b"".join(self._rest)
            self._rest.clear()
        if self._first:
            self._first = False
            piece = piece.removeprefix(BYTE_ORDER_MARK)
        self._held = 0
        events: list[Event] = []
        lines = piece.split(b"\n")
        last = lines.pop()
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                events.append(Event(data, self._name))
                self._data.clear()
                self._name = b""
            else:
                self._name = b""
        if last:
            self._rest.append(last)
        self._hold(len(last) + sum(map(len, self._data)))
        return events

    def finish(self) -> list[Event]:
        """Return the event that a stream ended on without its blank line, if there is one."""
        return self.feed(b"\n\n")

    def _plain_line_ends(self, piece: bytes) -> bytes:
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_return = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._name = line[6:].removeprefix(b" ")
        elif line == b"data":
            self._data.append(b"")
        elif line.startswith(b"error:"):
            # Not in the standard, but some servers report a failure in a field of this name.
            self._data.append(line[6:].removeprefix(b" "))
            self._name = b"error"

    def _hold(self, more: int) -> None:
        self._held += more
        if self._held > MAX_EVENT_BYTES:
            raise EngineError(
                f"the server sent {self._held} bytes without ending an event: this is no answer"
            )
