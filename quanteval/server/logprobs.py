"""Log-probabilities of completions, from a session's scores; what was generated is scored afterwards like a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import UnsupportedError
from quanteval.interfaces import GivesTopLogprobs, ScoreRequest, Session, TokenLogprobs
from quanteval.server.protocol import Ask, echo_logprobs

Tops = list[dict[int, float]]
ROWS = 64
"""Positions whose whole distributions are held at a time."""


def choice_logprobs(
    session: Session, ask: Ask, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[dict[str, Any] | None]:
    """Return the `logprobs` of each (prompt, output); with `echo` those of the prompt come first.

    Blocks while the session computes. `top_logprobs` is null where the session does not tell what
    else was probable; `is_top1` says for each token whether it was the most probable one.
    """
    requests = {}
    for i, (prompt, output) in enumerate(sequences):
        first = 1 if ask.echo else len(prompt)
        if len(prompt) + len(output) > first:
            requests[i] = ScoreRequest(f"score-{i}", (*prompt, *output), first)
    wanted = list(requests.values())
    scores = dict(zip(requests, session.loglikelihood(wanted), strict=True)) if wanted else {}
    tops: dict[int, Tops] = {}
    if ask.logprobs and wanted:
        found = _tops(session, wanted, ask.logprobs)
        tops = {} if found is None else dict(zip(requests, found, strict=True))
    return [
        _choice(session, ask, prompt, output, scores.get(i), tops.get(i))
        for i, (prompt, output) in enumerate(sequences)
    ]


def _choice(
    session: Session,
    ask: Ask,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    scores: TokenLogprobs | None,
    tops: Tops | None,
) -> dict[str, Any]:
    shown = (*prompt, *output) if ask.echo else output

    def name(i: int) -> str:
        return f"token_id:{i}" if ask.tokens_as_ids else session.tokenizer.decode((i,))

    values: list[float | None] = [] if scores is None else [float(v) for v in scores.logprobs]
    top1: list[bool | None] = [] if scores is None else [bool(v) for v in scores.is_top1]
    heads: list[dict[str, float] | None] = [None] * len(values)
    if tops is not None and scores is not None:
        ids = shown[len(shown) - len(values) :]
        heads = [
            {name(i): v for i, v in _with_own(top, own, float(value), bool(best)).items()}
            for top, own, value, best in zip(
                tops, ids, scores.logprobs, scores.is_top1, strict=True
            )
        ]
    missing: list[None] = [None] * (len(shown) - len(values))
    answer = echo_logprobs([name(i) for i in shown], [*missing, *values], [*missing, *heads])
    answer["is_top1"] = [*missing, *top1]
    if tops is None:
        answer["top_logprobs"] = None
    return answer


def _with_own(top: dict[int, float], own: int, value: float, best: bool) -> dict[int, float]:
    """Return the head of a distribution with the token itself in it, consistent to the last bit."""
    rest = {i: min(v, value) if best else v for i, v in top.items() if i != own}
    return {own: value, **rest} if best else {**rest, own: value}


def _tops(session: Session, requests: Sequence[ScoreRequest], k: int) -> list[Tops] | None:
    """Return the `k` most probable ids at each scored position; None where the session does not tell."""
    if isinstance(session, GivesTopLogprobs):
        return [_zipped(t.ids, t.logprobs) for t in session.top_logprobs(requests, k)]
    try:
        head = session.output_head()
        return [_rebuilt(states.values, head, k) for states in session.hidden_states(requests)]
    except UnsupportedError:
        return None


def _zipped(ids: NDArray[np.int64], logprobs: NDArray[np.float64]) -> Tops:
    return [
        {int(i): float(v) for i, v in zip(row, values, strict=True)}
        for row, values in zip(ids, logprobs, strict=True)
    ]


def _rebuilt(hidden: Any, head: Any, k: int) -> Tops:
    """Rebuild the distributions from hidden states and take their heads."""
    tops: Tops = []
    for start in range(0, len(hidden), ROWS):
        # In float32, as the scores are: products in bfloat16 would tie what lies close.
        logits = hidden[start : start + ROWS].float() @ head.weight.float().T
        if head.bias is not None:
            logits = logits + head.bias
        if head.softcap is not None:
            logits = head.softcap * (logits / head.softcap).tanh()
        values, ids = logits.double().log_softmax(-1).topk(min(k, logits.shape[-1]))
        tops += _zipped(ids.numpy(), values.numpy())
    return tops
