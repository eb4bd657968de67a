"""Text of a growing list of tokens: characters whose bytes are not all there, and stop strings, are held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"


class TextStream:
    """Turns tokens into pieces of text that, joined, are the text of all tokens.

    Only the tokens since the last whole character, and those before it as their context, are decoded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""
        """Text of the context, which has been given out."""
        self._context = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Return what is certain now that these tokens have come."""
        self._ids += token_ids
        text = self._decode(self._ids)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._given):
            return ""
        piece = text[len(self._given) :]
        # The tokens just told become the context of the next, which may be written differently after it.
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._given = self._decode(self._ids)
        return piece

    def end(self) -> str:
        """Return what was held back, incomplete as it is."""
        return self._decode(self._ids)[len(self._given) :]


class StopFilter:
    """Lets text through until a stop string comes; what may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the text that no stop string can begin in any more; none once `stopped`."""
        if self.stopped or not self._stops:
            return "" if self.stopped else piece
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0

    def end(self) -> str:
        """Return what was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return "" if self.stopped else held
