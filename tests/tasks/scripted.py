"""A session that scores by a table: what a continuation's tokens are worth is looked up by its text."""

from __future__ import annotations

import re

import numpy as np

from quanteval.engines.fake import ByteTokenizer
from quanteval.interfaces import Prompt, TokenLogprobs


class Scripted:
    """`worth` maps a continuation's text to its log-likelihood, spread evenly over its tokens.

    A tuple has the value of a sequence asked alone, then that of one asked with others. What was asked is
    kept, call by call.
    """

    def __init__(self, worth, *, add_bos=False, max_context=10_000, default=-9.0, top1=()):
        self.worth, self.default, self.top1 = worth, default, top1
        self.tokenizer = ByteTokenizer(add_bos=add_bos)
        self.max_context = max_context
        self.calls: list[list] = []
        self.pulled_ahead = 0

    def loglikelihood(self, requests):
        alone = isinstance(requests, list) and len(requests) == 1
        call: list = []
        self.calls.append(call)
        for request in requests:
            call.append(request)
            assert 1 <= request.first_scored < len(request.token_ids) <= self.max_context
            text = self.tokenizer.decode(request.token_ids[request.first_scored :])
            value = self.worth.get(text, self.default)
            value = value[0 if alone else 1] if isinstance(value, tuple) else value
            count = len(request.token_ids) - request.first_scored
            yield TokenLogprobs(
                request.request_id,
                np.full(count, value / count),
                np.full(count, text in self.top1),
            )


class PieceTokenizer:
    """Words with the space before them are one token, as in most vocabularies; ids are made up as needed."""

    def __init__(self, begin=None):
        self._ids = {"<s>": 0, "</s>": 1}
        self.begin = begin
        self.eos_token_ids = frozenset({1})

    @property
    def bos_token_id(self):
        return 0 if self.begin else None

    @property
    def prefix_token_id(self):
        return 0

    def encode(self, text):
        pieces = re.findall(r"<s>|</s>| ?\w+|\s+|[^\w\s]+", text)
        return tuple(self._ids.setdefault(piece, len(self._ids)) for piece in pieces)

    def raw(self, text):
        ids = self.encode(text)
        return Prompt(text, (0, *ids) if self.begin and ids[:1] != (0,) else ids)

    def decode(self, ids):
        known = {number: piece for piece, number in self._ids.items()}
        return "".join(known[i] for i in ids if i > 1)
