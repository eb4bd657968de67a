"""Distributions over the next token, as engines can give them, and the divergence between two of a kind.

In process the final hidden states rebuild the exact logits; a server tells the most probable tokens, and the
mass of the rest. Both are stored compactly; logits themselves never are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import ConfigError, EngineError, RecordError, UnsupportedError
from quanteval.interfaces import (
    GivesTopLogprobs,
    OutputHead,
    ScoreRequest,
    Session,
    hash_token_ids,
)

BLOCK = 128
TOP_K = 20
"""Most probable tokens asked of a server: what vLLM allows unless it is told otherwise."""
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Divergence:
    """KL(baseline || candidate) of each token in nats, and at how many both argmaxes agree."""

    kl: list[float]
    agree: int


class Form(Protocol):
    """How distributions are observed, stored and compared."""

    @property
    def name(self) -> str:
        """One line that tells it from the other form; baseline and candidate must have the same."""
        ...

    @property
    def caveat(self) -> str:
        """What a reader of the divergence must know; '' for an exact one."""
        ...

    def observe(self, requests: Iterable[ScoreRequest]) -> Iterator[Tensors]:
        """Yield what is kept of each sequence, in the order asked."""
        ...

    def compare(self, baseline: Tensors, candidate: Tensors) -> Divergence:
        """Return the divergence of two observations of one sequence."""
        ...


def open_form(session: Session, store: Store, is_baseline: bool) -> Form:
    """Return the best form the session can give; the baseline leaves in `store` what comparing needs.

    UnsupportedError when it gives none, ConfigError when the baseline left another.
    """
    form = _form_of(session, store, is_baseline)
    if is_baseline:
        store.write("form", {"k": np.array([TOP_K])}, {"form": form.name})
    elif (stored := store.read("form")[1].get("form")) != form.name:
        raise ConfigError(
            f'the baseline stored "{stored}", but this engine gives "{form.name}": '
            "measure both through the same engine"
        )
    return form


def _form_of(session: Session, store: Store, is_baseline: bool) -> Form:
    try:
        head = session.output_head()
    except UnsupportedError as error:
        if not isinstance(session, GivesTopLogprobs):
            raise
        try:
            return TopTokens(session, TOP_K).probed()
        except UnsupportedError as second:
            raise UnsupportedError(f"{error}; {second}") from None
    if is_baseline:
        save_head(store, head)
        return HiddenForm(session, head, head)
    return HiddenForm(session, head, load_head(store))


# --------------------------------------------------------------------------- exact: hidden states


@dataclass(frozen=True)
class HiddenForm:
    """Final hidden states; with both heads they are the exact logits."""

    session: Session
    head: OutputHead
    baseline_head: OutputHead

    name = "final hidden states"
    caveat = ""

    def observe(self, requests: Iterable[ScoreRequest]) -> Iterator[Tensors]:
        """Yield hidden states [T, d]."""
        for states in self.session.hidden_states(requests):
            yield {"hidden": states.values}

    def compare(self, baseline: Tensors, candidate: Tensors) -> Divergence:
        """Rebuild both logits and compare over the full vocabulary."""
        return Divergence(
            *compare(self.baseline_head, baseline["hidden"], self.head, candidate["hidden"])
        )


def save_head(store: Store, head: OutputHead) -> None:
    """Keep the baseline's head."""
    tensors = {"weight": head.weight}
    if head.bias is not None:
        tensors["bias"] = head.bias
    store.write("head", tensors, {} if head.softcap is None else {"softcap": repr(head.softcap)})


def load_head(store: Store) -> OutputHead:
    """Return the baseline's head."""
    tensors, metadata = store.read("head")
    softcap = float(metadata["softcap"]) if "softcap" in metadata else None
    return OutputHead(tensors["weight"], tensors.get("bias"), softcap)


def logits(head: OutputHead, hidden: Any) -> Any:
    """Return the head's logits of hidden states, in the served dtype, then as float32."""
    from torch.nn import functional

    out = functional.linear(hidden, head.weight, head.bias)
    if head.softcap is not None:
        out = (out / head.softcap).tanh() * head.softcap
    return out.float()


def compare(
    baseline_head: OutputHead, baseline: Any, candidate_head: OutputHead, candidate: Any
) -> tuple[list[float], int]:
    """Return KL(baseline || candidate) of each token in nats, and how often both argmaxes agree.

    `baseline` and `candidate` are hidden states [T, d]. The full vocabulary is used.
    """
    import torch

    kl: list[float] = []
    agree = 0
    with torch.no_grad():
        for start in range(0, len(baseline), BLOCK):
            p = logits(baseline_head, baseline[start : start + BLOCK])
            q = logits(candidate_head, candidate[start : start + BLOCK])
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
            kl += [float(v) for v in kl_of_logits(p, q)]
    return kl, agree


def kl_of_logits(p: Any, q: Any) -> Any:
    """Return KL(p || q) in nats of each row of two logit tensors [T, V], in float64; never below 0.

    Rounding can make a tiny divergence slightly negative: such values are 0.
    """
    import torch

    p, q = p.log_softmax(-1), q.log_softmax(-1)
    # A token the baseline excludes adds nothing, whatever the candidate gives it.
    terms = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - q))
    values = terms.sum(-1, dtype=torch.float64)
    return torch.where(values < 0, torch.zeros_like(values), values)


# --------------------------------------------------------------------------- from servers: top tokens


@dataclass(frozen=True)
class TopTokens:
    """The `k` most probable tokens of each position; the rest is known only as one mass."""

    session: GivesTopLogprobs
    k: int

    @property
    def name(self) -> str:
        """The number of tokens is part of it: a larger one sees more of the divergence."""
        return f"{self.k} most probable tokens"

    @property
    def caveat(self) -> str:
        """It is a bound."""
        return f"lower bound: from the {self.name}, the rest as one"

    def probed(self) -> TopTokens:
        """Ask once for two tokens' worth, so that an engine that cannot says so before anything is stored."""
        list(self.session.top_logprobs([ScoreRequest("top probe", (0, 0))], self.k))
        return self

    def observe(self, requests: Iterable[ScoreRequest]) -> Iterator[Tensors]:
        """Yield ids [T, k] and log-probabilities [T, k]."""
        for top in self.session.top_logprobs(requests, self.k):
            yield {"ids": top.ids.astype(np.int32), "logprobs": top.logprobs.astype(np.float64)}

    def compare(self, baseline: Tensors, candidate: Tensors) -> Divergence:
        """Compare over the tokens both name, all others as one; see `kl_of_tops`."""
        names = ("ids", "logprobs")
        return kl_of_tops(*(baseline[n] for n in names), *(candidate[n] for n in names))


def kl_of_tops(
    p_ids: NDArray[Any], p_logprobs: NDArray[Any], q_ids: NDArray[Any], q_logprobs: NDArray[Any]
) -> Divergence:
    """Return a lower bound of KL(p || q) of each position from two lists of most probable tokens, all [T, k].

    Tokens in both lists count one by one and all others together as one outcome. Joining outcomes never raises a
    divergence (the log-sum inequality; Cover and Thomas, Elements of Information Theory, 2.7), so the value is at
    most the true one. The first of the most probable ids is each side's argmax.
    """
    kl: list[float] = []
    agree = 0
    for row in range(len(p_ids)):
        p = dict(zip(p_ids[row].tolist(), p_logprobs[row].tolist(), strict=True))
        q = dict(zip(q_ids[row].tolist(), q_logprobs[row].tolist(), strict=True))
        shared = [token for token in p if token in q and math.isfinite(p[token])]
        total = math.fsum(math.exp(p[t]) * (p[t] - q[t]) for t in shared)
        rest_p = 1 - math.fsum(math.exp(p[t]) for t in shared)
        rest_q = 1 - math.fsum(math.exp(q[t]) for t in shared)
        # Servers round their log-probabilities: a rest below that is none.
        if rest_p > ROUNDING:
            total += rest_p * math.log(rest_p / max(rest_q, ROUNDING))
        kl.append(max(total, 0.0) if not math.isnan(total) else total)
        agree += max(p, key=p.__getitem__) == max(q, key=q.__getitem__)
    return Divergence(kl, agree)


ROUNDING = 1e-6


# --------------------------------------------------------------------------- on disk


class Store:
    """The baseline's distributions and head on disk, a file each, whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, sample_id: str, ids: Sequence[int], tensors: Tensors, greedy: Sequence[int]
    ) -> None:
        """Keep a document's distributions and its greedy continuation."""
        metadata = {"ids": hash_token_ids(ids), "greedy": json.dumps(list(greedy))}
        self.write(_file_name(sample_id), tensors, metadata)

    def load(self, sample_id: str, ids: Sequence[int]) -> tuple[Tensors, tuple[int, ...]]:
        """Return a document's distributions and the ids of its greedy continuation."""
        tensors, metadata = self.read(_file_name(sample_id))
        if metadata.get("ids") != hash_token_ids(ids):
            raise EngineError(
                f'"{sample_id}": baseline and candidate have different token ids, so their '
                "distributions cannot be compared"
            )
        return tensors, tuple(json.loads(metadata.get("greedy", "[]")))

    def write(self, name: str, tensors: Tensors, metadata: dict[str, str]) -> None:
        """Write a file of tensors, whole or not at all."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            contiguous = {key: _tensor(value) for key, value in tensors.items()}
            save_file(contiguous, temporary, metadata)
            temporary.replace(self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise RecordError(f'cannot write "{self.folder / name}": {error}') from None

    def read(self, name: str) -> tuple[Tensors, dict[str, str]]:
        """Return the tensors and the metadata of a file. ConfigError when the baseline left none."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            raise ConfigError(
                f'the baseline stored no "{name}" under "{self.folder}": run the baseline with this task first'
            )
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                return tensors, dict(file.metadata() or {})
        except SafetensorError as error:
            raise RecordError(f'"{path}" is damaged ({error}): run the baseline again') from None


def _tensor(value: Any) -> Any:
    import torch

    return torch.as_tensor(value).contiguous()


def _file_name(sample_id: str) -> str:
    """Return a file's name for any sample id."""
    return hash_token_ids(tuple(sample_id.encode()))[:24]
