"""How many tokens a growing text holds, for servers that send text and tell neither ids nor counts.

The count is that of the whole text tokenized anew, but only its last stretch really is: what lies
before is settled once its tokens and those of the rest are shown to add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SETTLE_CHARACTERS = 512
"""How long the open stretch may grow before part of it is settled."""


class Retokenizer:
    """Counts the tokens of a text that arrives in pieces."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._open = ""
        self._settled = 0
        self._try_at = SETTLE_CHARACTERS
        self.count = 0

    def add(self, piece: str) -> int:
        """Add a piece and return the number of tokens of all the text so far; it can fall."""
        if piece:
            self._open += piece
            tokens = len(self._encode(self._open))
            self.count = self._settled + tokens
            if len(self._open) >= self._try_at:
                self._settle(tokens)
        return self.count

    def _settle(self, tokens: int) -> None:
        """Settle what lies before a late word, when the two sides tokenize as the whole does."""
        cut = self._open.rfind(" ", 0, len(self._open) - SETTLE_CHARACTERS // 8)
        if cut > 0:
            before = len(self._encode(self._open[:cut]))
            if before + len(self._encode(self._open[cut:])) == tokens:
                self._settled += before
                self._open = self._open[cut:]
        # A text that cannot be cut here is tried again only once it has doubled.
        self._try_at = max(SETTLE_CHARACTERS, 2 * len(self._open))
