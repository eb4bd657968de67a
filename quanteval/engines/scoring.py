"""Log-probabilities and hidden states from plain forwards of one loaded torch model.

Requests are read ahead and packed (see `packing`), so that a prefix that several share is computed once.
On a CPU the forwards are spread over threads of one core each: on a busy machine several cores at work on
one small matrix product wait for each other. The output head is applied only where a token is scored, in
float32 whatever the model's dtype, a piece of the vocabulary at a time: bfloat16 logits lie 0.06 to 0.5 nats
apart, which turns answers whose likelihoods are close.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quanteval.engines.batching import cache_argument
from quanteval.engines.packing import (
    MIN_TRUNK_TOKENS,
    Forward,
    build_tree,
    plan,
    plan_alone,
)
from quanteval.errors import QuantevalError
from quanteval.interfaces import HiddenStates, ScoreRequest, TokenLogprobs

WINDOW_REQUESTS = 4096
WINDOW_TOKENS = 1 << 21
FORWARDS_A_TURN = 6
"""Forwards of each worker between two chances for others to use the model."""
VOCABULARY_PIECE = 8192
HEAD_ROWS = 512
PROBE_TOLERANCE = 0.15
"""Largest error of packed scores that rounding may cause, as a share of what a wrong mask would do."""


@dataclass(frozen=True)
class Head:
    """The output head of a loaded model, and how its logits come about."""

    model: Any
    rebuilds: bool
    """Whether logits are head(final hidden states), with the softcap; else the model itself is asked."""
    softcap: float | None

    @property
    def exact(self) -> bool:
        """Whether products with the weight can be computed here in float32."""
        import torch

        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        return (
            self.rebuilds
            and type(head) is torch.nn.Linear
            and isinstance(weight, torch.Tensor)
            and type(weight) in (torch.nn.Parameter, torch.Tensor)
            and weight.is_floating_point()
            and weight.element_size() >= 2
        )

    def cap(self, logits: Any) -> Any:
        """Apply the softcap."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def blocks(self, hidden: Any) -> Iterator[tuple[int, Any]]:
        """Yield (first token id, float32 logits [rows, some of the vocabulary]) of hidden states [rows, d]."""
        import torch

        head = self.model.get_output_embeddings()
        if not self.exact:
            yield 0, self.cap(head(hidden)).float()
            return
        mixed = hidden.is_cuda and hidden.dtype != torch.float32
        hidden = hidden if mixed else hidden.float()
        bias = None if head.bias is None else head.bias.float()
        for first in range(0, head.weight.shape[0], VOCABULARY_PIECE):
            weight = head.weight[first : first + VOCABULARY_PIECE].T
            product = torch.mm(hidden, weight, out_dtype=torch.float32) if mixed else None
            logits = hidden @ weight.float() if product is None else product
            if bias is not None:
                logits += bias[first : first + VOCABULARY_PIECE]
            yield first, self.cap(logits)


@dataclass
class _Wanted:
    """What a forward is to yield: unique rows, and for each scored token its row, target and place."""

    rows: NDArray[np.int64]
    of: NDArray[np.int64]
    targets: NDArray[np.int64]
    places: list[tuple[int, int, int]]
    """(sequence, slot, count) of each run of scored tokens."""


def _wanted(forward: Forward, sequences: Sequence[NDArray[np.int64]]) -> _Wanted:
    rows, targets, places = [], [], []
    for span, row in forward.spans():
        count = span.high - span.low
        rows.append(np.arange(row, row + count))
        targets.append(sequences[span.sequence][span.low + 1 : span.high + 1])
        places.append((span.sequence, span.slot, count))
    if not rows:
        empty = np.empty(0, dtype=np.int64)
        return _Wanted(empty, empty, empty, [])
    unique, of = np.unique(np.concatenate(rows), return_inverse=True)
    return _Wanted(unique, of, np.concatenate(targets), places)


@dataclass
class _Scores:
    """The scores of one sequence while its parts come in."""

    logprobs: NDArray[np.float64]
    is_top1: NDArray[np.bool_]
    missing: int

    @classmethod
    def of_length(cls, length: int) -> _Scores:
        return cls(np.empty(length), np.empty(length, dtype=np.bool_), length)


@dataclass
class _Kept:
    """Keys and values that later forwards continue, by number of the forward that made them."""

    futures: dict[int, Future[Any]] = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)

    def used(self, number: int | None) -> None:
        """Forget a cache when the last forward that continues it has ended."""
        if number is not None:
            self.users[number] -= 1
            if not self.users[number]:
                self.futures.pop(number, None)


class Scorer:
    """Scores sequences on one model; `free` is entered while forwards run, to keep the model to itself.

    `batch_tokens` bounds a packed forward, `workers` is the number of threads; sequences longer than
    `longest_packed` tokens are computed alone (sliding windows). Nothing is packed until `packs` is set,
    which is for models that pass `can_pack`.
    """

    def __init__(
        self,
        head: Head,
        free: Callable[[], AbstractContextManager[None]],
        *,
        batch_tokens: int,
        workers: int,
        longest_packed: int,
    ) -> None:
        self._head = head
        self._model = head.model
        self._called = head.model.base_model if head.rebuilds else head.model
        self._free = free
        self._batch_tokens = batch_tokens
        self._workers = workers
        self.packs = False
        self._longest_packed = longest_packed
        self._pool = _single_core_threads(workers)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- log-probabilities

    def logprobs(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Yield the scores in the order asked; requests are read ahead as far as a window reaches."""
        for window in _windows(requests):
            yield from self._window(window)

    def _window(self, window: Sequence[ScoreRequest]) -> Iterator[TokenLogprobs]:
        sequences = [np.asarray(request.token_ids, dtype=np.int64) for request in window]
        scores = [_Scores.of_length(len(r.token_ids) - r.first_scored) for r in window]
        following = 0
        for done in self._turns(self._plan(window, sequences), sequences):
            for wanted, logprobs, hits in done:
                _spread(wanted, logprobs, hits, scores)
            while following < len(window) and not scores[following].missing:
                found = scores[following]
                yield TokenLogprobs(window[following].request_id, found.logprobs, found.is_top1)
                following += 1

    def _plan(
        self, window: Sequence[ScoreRequest], sequences: Sequence[NDArray[np.int64]]
    ) -> list[Forward]:
        firsts = [request.first_scored for request in window]
        if not self.packs or any(len(ids) > self._longest_packed for ids in sequences):
            return plan_alone(sequences, firsts)
        return plan(build_tree(sequences, firsts), self._batch_tokens, self._workers)

    def _turns(
        self, forwards: Sequence[Forward], sequences: Sequence[NDArray[np.int64]]
    ) -> Iterator[list[tuple[_Wanted, NDArray[np.float64], NDArray[np.bool_]]]]:
        """Run forwards, some at a time, and yield what they scored."""
        kept = _Kept(users=Counter(f.past for f in forwards if f.past is not None))
        size = FORWARDS_A_TURN * self._workers
        for start in range(0, len(forwards), size):
            turn = range(start, min(start + size, len(forwards)))
            with self._free():
                running = []
                for number in turn:
                    forward = forwards[number]
                    before = None if forward.past is None else kept.futures[forward.past]
                    wanted = _wanted(forward, sequences)
                    future = self._pool.submit(self._score, forward, wanted, before)
                    if forward.kept:
                        kept.futures[number] = future
                    running.append((forward, wanted, future))
                done = []
                for forward, wanted, future in running:
                    logprobs, hits, _ = future.result()
                    kept.used(forward.past)
                    done.append((wanted, logprobs, hits))
            yield done

    def _score(
        self, forward: Forward, wanted: _Wanted, before: Future[Any] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], Any]:
        """Return log-probabilities and hits of the wanted tokens, and the cache where it is kept."""
        import torch

        # Forwards are started in order, so the one waited for has begun or ended.
        cache = None if before is None else before.result()[2]
        with torch.no_grad():
            hidden, made = self._forward(forward, cache, wanted.rows)
            logprobs, hits = self._of_rows(hidden, wanted)
        return logprobs, hits, made if forward.kept else None

    def _forward(self, forward: Forward, cache: Any, rows: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return final hidden states (logits where they cannot be rebuilt) of `rows`, and the cache."""
        import torch

        device = self._model.device
        ids = torch.from_numpy(forward.tokens())[None].to(device)
        wanted = torch.from_numpy(rows).to(device)
        more: dict[str, Any] = {"use_cache": False}
        if not forward.chain or forward.past is not None:
            more["attention_mask"] = self._mask(forward)
            more["position_ids"] = torch.from_numpy(forward.positions())[None].to(device)
        if forward.kept or forward.past is not None:
            cache = _continued(cache)
            more |= {"use_cache": True, cache_argument(self._called.forward): cache}
        if self._head.rebuilds:
            states = self._called(input_ids=ids, **more).last_hidden_state[0, wanted]
        else:
            states = self._called(input_ids=ids, logits_to_keep=wanted, **more).logits[0]
        return states, cache

    def _mask(self, forward: Forward) -> Any:
        """Return an additive mask [1, 1, size, past + size] in the served dtype."""
        import torch

        visible = torch.from_numpy(forward.visible()).to(self._model.device)
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=self._model.device)
        return mask.masked_fill_(~visible, torch.finfo(self._model.dtype).min)[None, None]

    def _of_rows(
        self, hidden: Any, wanted: _Wanted
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return log-probability and whether it was the argmax of each wanted token."""
        logprobs = np.empty(len(wanted.targets))
        hits = np.empty(len(wanted.targets), dtype=np.bool_)
        for start in range(0, len(hidden), HEAD_ROWS):
            chosen = (wanted.of >= start) & (wanted.of < start + HEAD_ROWS)
            logprobs[chosen], hits[chosen] = self._of_block(
                hidden[start : start + HEAD_ROWS], wanted.of[chosen] - start, wanted.targets[chosen]
            )
        return logprobs, hits

    def _of_block(
        self, hidden: Any, of: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        import torch

        device = hidden.device
        rows, ids = torch.from_numpy(of).to(device), torch.from_numpy(targets).to(device)
        highest = torch.full((len(hidden),), -torch.inf, device=device)
        total = torch.zeros(len(hidden), dtype=torch.float64, device=device)
        argmax = torch.zeros(len(hidden), dtype=torch.long, device=device)
        target = torch.empty(len(ids), device=device)
        blocks = self._head.blocks(hidden) if self._head.rebuilds else [(0, hidden.float())]
        for first, logits in blocks:
            peak, where = logits.max(-1)
            higher = torch.maximum(highest, peak)
            argmax = torch.where(peak > highest, where + first, argmax)
            # A running sum of exp(logit - highest so far), so that no full vocabulary is ever held.
            total = total * (highest - higher).double().exp() + (
                (logits - higher[:, None]).exp_().sum(-1, dtype=torch.float64)
            )
            highest = higher
            here = (ids >= first) & (ids < first + logits.shape[-1])
            target[here] = logits[rows[here], ids[here] - first]
        norm = highest.double() + total.log()
        values = (target.double() - norm[rows]).clamp(max=0.0)
        return values.cpu().numpy(), (argmax[rows] == ids).cpu().numpy()

    # ---- whether masks can be chosen

    def can_pack(self, vocab_size: int) -> bool:
        """Try packed forwards, with and without kept keys, on a few made-up sequences.

        Right ones agree with sequences computed alone far better than they would if a sequence saw its
        neighbour, which is what happens when a model ignores the mask.
        """
        try:
            return self._packs_right(vocab_size)
        except Exception as error:
            # Models differ in what masks and caches they take, and in what they raise for others.
            logging.getLogger(__name__).warning("sequences are scored one by one: %s", error)
            return False

    def _packs_right(self, vocab_size: int) -> bool:
        ids = [
            int(i) for i in np.random.default_rng(0).integers(1, vocab_size, 3 * MIN_TRUNK_TOKENS)
        ]
        prefix, first, second = (
            tuple(ids[i * MIN_TRUNK_TOKENS : (i + 1) * MIN_TRUNK_TOKENS]) for i in range(3)
        )
        ask = [
            ScoreRequest(str(i), prefix + end, len(prefix)) for i, end in enumerate((first, second))
        ]
        blind = ScoreRequest("blind", prefix + first + second, len(prefix) + len(first))
        sequences = [np.array(r.token_ids) for r in (*ask, blind)]
        firsts = [r.first_scored for r in (*ask, blind)]
        alone = self._scores_of(plan_alone(sequences, firsts), sequences, firsts)
        effect = float(np.abs(alone[1] - alone[2]).mean())
        for budget in (1, 10 * MIN_TRUNK_TOKENS):
            tree = build_tree(sequences[:2], firsts[:2])
            found = self._scores_of(plan(tree, budget), sequences[:2], firsts[:2])
            error = max(float(np.abs(a - b).mean()) for a, b in zip(found, alone, strict=False))
            if not error <= max(PROBE_TOLERANCE * effect, 1e-3):
                return False
        return True

    def _scores_of(
        self,
        forwards: Sequence[Forward],
        sequences: Sequence[NDArray[np.int64]],
        firsts: Sequence[int],
    ) -> list[NDArray[np.float64]]:
        pairs = zip(sequences, firsts, strict=True)
        scores = [_Scores.of_length(len(ids) - first) for ids, first in pairs]
        for done in self._turns(forwards, sequences):
            for part in done:
                _spread(*part, scores)
        return [score.logprobs for score in scores]

    # ---- hidden states

    def hidden(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """Yield final hidden states before each scored token, on the CPU, in the served dtype."""
        source = iter(requests)
        while turn := list(islice(source, FORWARDS_A_TURN * self._workers)):
            with self._free():
                futures = [self._pool.submit(self._states, request) for request in turn]
                states = [future.result() for future in futures]
            for request, values in zip(turn, states, strict=True):
                yield HiddenStates(request.request_id, values)

    def _states(self, request: ScoreRequest) -> Any:
        import torch

        ids = torch.tensor([request.token_ids[:-1]], device=self._model.device)
        with torch.no_grad():
            out = self._model.base_model(input_ids=ids, use_cache=False)
        return out.last_hidden_state[0, request.first_scored - 1 :].cpu().clone()


def _windows(requests: Iterable[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
    """Cut a stream of requests into lists of at most WINDOW_REQUESTS and about WINDOW_TOKENS tokens."""
    window: list[ScoreRequest] = []
    tokens = 0
    source = iter(requests)
    while True:
        try:
            request = next(source, None)
        except QuantevalError:
            # What was asked before the request that is refused is still answered.
            if window:
                yield window
            raise
        if request is None:
            break
        window.append(request)
        tokens += len(request.token_ids)
        if len(window) == WINDOW_REQUESTS or tokens >= WINDOW_TOKENS:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def _spread(
    wanted: _Wanted,
    logprobs: NDArray[np.float64],
    hits: NDArray[np.bool_],
    scores: Sequence[_Scores],
) -> None:
    """Put the scores of one forward where they belong."""
    at = 0
    for sequence, slot, count in wanted.places:
        part = scores[sequence]
        part.logprobs[slot : slot + count] = logprobs[at : at + count]
        part.is_top1[slot : slot + count] = hits[at : at + count]
        part.missing -= count
        at += count


def _continued(cache: Any) -> Any:
    """Return a cache that goes on from `cache` and leaves it as it is; a new one for None."""
    from transformers import DynamicCache

    if cache is None:
        return DynamicCache()
    # A dynamic layer joins old and new tensors into new ones, so shared tensors are never written to.
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _single_core_threads(workers: int) -> ThreadPoolExecutor:
    """Return a pool whose threads compute on one core each; one worker alone keeps torch's own setting."""
    import torch

    if workers == 1:
        return ThreadPoolExecutor(1, "score")
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "score", initializer=torch.set_num_threads, initargs=(1,))
    barrier = threading.Barrier(workers)
    for future in [pool.submit(barrier.wait) for _ in range(workers)]:
        future.result()
    # torch also remembers the number for threads that start later.
    torch.set_num_threads(before)
    return pool
