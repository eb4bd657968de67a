"""Which tokens a scoring engine has to compute, and in which forwards, so that shared prefixes cost once.

The sequences to score become a prefix tree. Small subtrees are packed side by side into one row whose
mask lets a token see its own path alone; the prefix of a large subtree (few-shot examples) is computed
first and its keys and values are kept for all that follows it. Nothing here touches torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

MIN_FORWARD_TOKENS = 128
"""Smaller forwards than this are not worth another worker."""
MIN_TRUNK_TOKENS = 48
"""A shorter prefix is computed again in each forward: that is cheaper than attending to kept keys and values."""


@dataclass(frozen=True)
class Span:
    """Positions `low`..`high` - 1 of a sequence, whose next tokens are to be scored.

    `slot` is where the first of them belongs among the scores of the sequence.
    """

    sequence: int
    low: int
    high: int
    slot: int


@dataclass
class Node:
    """A piece of the tree: the tokens from depth `start` on that all sequences below it share."""

    start: int
    tokens: IntArray
    children: dict[int, Node] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    total: int = 0
    """Tokens of the whole subtree."""

    @property
    def end(self) -> int:
        """Depth after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """A node's place within a forward: its first row there, and which piece it continues (-1: none)."""

    node: Node
    row: int
    parent: int


@dataclass
class Forward:
    """One forward of a model over `size` tokens in one row.

    `past` is the number of an earlier forward whose keys and values precede it, None for none; the kept
    ones of that forward include its own past. A `chain` holds one path and needs no mask but the causal one.
    """

    pieces: list[Piece]
    past: int | None
    past_length: int
    kept: bool = False

    @property
    def size(self) -> int:
        """Tokens computed."""
        return sum(len(piece.node.tokens) for piece in self.pieces)

    @property
    def chain(self) -> bool:
        """Whether the pieces are one path."""
        return all(piece.parent == i - 1 for i, piece in enumerate(self.pieces))

    def tokens(self) -> IntArray:
        """Token ids [size]."""
        return np.concatenate([piece.node.tokens for piece in self.pieces])

    def positions(self) -> IntArray:
        """Depth of each token in its own sequence [size]."""
        return np.concatenate([np.arange(p.node.start, p.node.end) for p in self.pieces])

    def visible(self) -> BoolArray:
        """Which tokens each token may see [size, past_length + size]."""
        count = len(self.pieces)
        above = np.zeros((count, count), dtype=np.bool_)
        for i, piece in enumerate(self.pieces):
            if piece.parent >= 0:
                above[i] = above[piece.parent]
            above[i, i] = True
        lengths = [len(piece.node.tokens) for piece in self.pieces]
        of = np.repeat(np.arange(count), lengths)
        depth = self.positions()
        # Depth grows along a path, so among tokens of the same path "not deeper" means "not later".
        own = above[of[:, None], of[None, :]] & (depth[None, :] <= depth[:, None])
        past = np.ones((len(of), self.past_length), dtype=np.bool_)
        return np.concatenate([past, own], axis=1)

    def spans(self) -> Iterator[tuple[Span, int]]:
        """Yield each span with the row of its first position."""
        for piece in self.pieces:
            for span in piece.node.spans:
                yield span, piece.row + span.low - piece.node.start


def build_tree(sequences: Sequence[IntArray], first_scored: Sequence[int]) -> Node:
    """Return the root (without tokens) of the prefix tree of `sequences`, in the order they were given.

    The last token of each is only ever a target, so it is no part of the tree; `first_scored` is the
    position of the first token to score, at least 1.
    """
    root = Node(0, np.empty(0, dtype=np.int64))
    inputs = [ids[:-1] for ids in sequences]
    for ids in inputs:
        _insert(root, ids)
    for number, (ids, first) in enumerate(zip(inputs, first_scored, strict=True)):
        for node in _path(root, ids):
            low, high = max(first - 1, node.start), min(len(ids), node.end)
            if low < high:
                node.spans.append(Span(number, low, high, low - (first - 1)))
    return root


def _insert(root: Node, ids: IntArray) -> None:
    node, at = root, 0
    while at < len(ids):
        key = int(ids[at])
        child = node.children.get(key)
        if child is None:
            node.children[key] = Node(at, ids[at:])
            return
        common = _common(child.tokens, ids[at:])
        if at + common < len(ids) and common < len(child.tokens):
            child = _split(node, key, common)
        node, at = child, at + common


def _common(a: IntArray, b: IntArray) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _split(parent: Node, key: int, at: int) -> Node:
    """Cut a child in two and return the upper part, which takes its place."""
    lower = parent.children[key]
    upper = Node(lower.start, lower.tokens[:at])
    lower.start, lower.tokens = lower.start + at, lower.tokens[at:]
    upper.children[int(lower.tokens[0])] = lower
    parent.children[key] = upper
    return upper


def _path(root: Node, ids: IntArray) -> Iterator[Node]:
    node = root
    while node.end < len(ids):
        node = node.children[int(ids[node.end])]
        yield node


_Level = tuple[Iterator[Node], int | None, int]
"""Subtrees still to be placed, the forward they continue, and its length with its own past."""


def plan(root: Node, budget: int, workers: int = 1) -> list[Forward]:
    """Return the forwards that compute a tree, each of at most `budget` tokens.

    Only a path that nothing branches off, or a kept prefix, may be longer: it is one forward by itself.
    With several workers a small tree is cut so that each gets about the same.
    """
    _count(root)
    rounds = -(-root.total // (budget * workers))
    # A little more than an even share: subtrees are not cut, so no pack is quite full.
    budget = min(
        budget, max(MIN_FORWARD_TOKENS, -(-21 * root.total // (20 * workers * rounds or 1)))
    )
    forwards: list[Forward] = []
    stack = [_below(root, None, 0)]
    groups: list[list[Node]] = [[]]

    def flush(past: int | None, length: int) -> None:
        if groups[-1]:
            forwards.append(_packed(groups[-1], past, length))
            groups[-1] = []

    while stack:
        nodes, past, length = stack[-1]
        node = next(nodes, None)
        if node is None:
            flush(past, length)
            stack.pop()
            groups.pop()
            continue
        if node.total <= budget:
            if sum(other.total for other in groups[-1]) + node.total > budget:
                flush(past, length)
            groups[-1].append(node)
        elif not node.children:
            flush(past, length)
            forwards.append(_packed([node], past, length))
        elif len(node.tokens) < MIN_TRUNK_TOKENS:
            flush(past, length)
            stack.append((iter(_pushed_down(node)), past, length))
            groups.append([])
        else:
            flush(past, length)
            trunk = Forward([Piece(node, 0, -1)], past, length, kept=True)
            forwards.append(trunk)
            stack.append(_below(node, len(forwards) - 1, length + len(node.tokens)))
            groups.append([])
    return forwards


def _below(node: Node, past: int | None, length: int) -> _Level:
    return iter(list(node.children.values())), past, length


def _pushed_down(node: Node) -> list[Node]:
    """Return the children, each with the node's own tokens before its own; the first keeps its spans."""
    out: list[Node] = []
    for child in node.children.values():
        joined = Node(node.start, np.concatenate([node.tokens, child.tokens]), child.children)
        joined.spans = child.spans if out else [*node.spans, *child.spans]
        joined.total = child.total + len(node.tokens)
        out.append(joined)
    return out


def _count(root: Node) -> None:
    """Fill in the subtree sizes, leaves first."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    for node in reversed(order):
        node.total = len(node.tokens) + sum(child.total for child in node.children.values())


def _packed(nodes: Iterable[Node], past: int | None, length: int) -> Forward:
    """Lay whole subtrees out in one row, each node after the one it continues."""
    pieces: list[Piece] = []
    row = 0
    stack = [(node, -1) for node in reversed(list(nodes))]
    while stack:
        node, parent = stack.pop()
        pieces.append(Piece(node, row, parent))
        row += len(node.tokens)
        here = len(pieces) - 1
        stack.extend((child, here) for child in reversed(list(node.children.values())))
    return Forward(pieces, past, length)


def plan_alone(sequences: Sequence[IntArray], first_scored: Sequence[int]) -> list[Forward]:
    """Return one forward a sequence, for models whose mask cannot be chosen."""
    forwards = []
    for number, (ids, first) in enumerate(zip(sequences, first_scored, strict=True)):
        spans = [Span(number, first - 1, len(ids) - 1, 0)]
        forwards.append(Forward([Piece(Node(0, ids[:-1], {}, spans), 0, -1)], None, 0))
    return forwards
