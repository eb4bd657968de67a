"""A session as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model=SessionLM(session), ...)`.

Texts become token ids as that library's own HFLM makes them, so that log-likelihoods, prompts and scores
are those of HFLM on the same weights. Importing this module imports lm_eval.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import Prompt, Request, Sampling, ScoreRequest, Session, TokenLogprobs
from quanteval.tasks.pairing import Pair, total

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise ConfigError(
        f"this needs the package \"{error.name or 'lm_eval'}\": pip install 'quanteval[lm-eval]'"
    ) from None

MAX_NEW_TOKENS = 256
"""What HFLM generates at most when a task does not say."""
HONOURED = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"})
NEUTRAL: Mapping[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
"""Generation arguments that change nothing at these values."""


class SessionLM(TemplateLM):  # type: ignore[misc]
    """One of our sessions behind `lm_eval.api.model.LM`.

    `max_length` is HFLM's: the tokens that enter the model at once. A scored sequence has one more, which
    is only predicted; the default is `session.max_context`. `prefix_token_id` stands before texts without a
    context: the begin token, or the end token where there is none.
    """

    def __init__(
        self, session: Session, *, max_length: int | None = None, prefix_token_id: int | None = None
    ) -> None:
        super().__init__()
        longest = session.max_context
        if max_length is not None and not 1 <= max_length <= longest:
            raise ConfigError(
                f'max_length "{max_length}" must be from 1 to {longest}, what the session holds'
            )
        self._session = session
        self._max_length = max_length or longest
        self._prefix = prefix_token_id
        tokenizer = session.tokenizer
        self._adds_tokens = tokenizer.raw("a").token_ids != tokenizer.encode("a")
        self._numbers = itertools.count()
        self._known: tuple[str, tuple[int, ...]] | None = None

    # ---- what lm_eval asks of a model

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text; -1 where the tokenizer has none."""
        return min(self._session.tokenizer.eos_token_ids, default=-1)

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context. ConfigError where there is none."""
        return self._session.tokenizer.prefix_token_id if self._prefix is None else self._prefix

    @property
    def max_length(self) -> int:
        """Tokens that enter the model at once."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say how many."""
        return MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, by which lm_eval names its cache of requests."""
        return self._session.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Name the tokenizer whose one template is used; UnsupportedError for a template by name."""
        if isinstance(chat_template, str):
            raise UnsupportedError(f'chat template "{chat_template}": only the default one is used')
        return f"of tokenizer {self.tokenizer_name}" if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages once; without a generation prompt the last one is the answer's beginning.

        As in HFLM, a template that refuses the messages gets them without the system message.
        """
        from jinja2 import TemplateError

        messages: list[Any] = list(chat_history)
        begun = "" if add_generation_prompt else messages.pop()["content"]
        try:
            return self._session.tokenizer.chat(messages).text + begun
        except TemplateError:
            rest = [message for message in messages if message["role"] != "system"]
            return self._session.tokenizer.chat(rest).text + begun

    # ---- token ids

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; the special tokens that the tokenizer adds by itself are there once at most."""
        return list(self._ids(string, add_special_tokens))

    def _ids(self, text: str, special: bool | None = None) -> tuple[int, ...]:
        tokenizer = self._session.tokenizer
        if special:
            return tokenizer.raw(text).token_ids
        plain = tokenizer.encode(text)
        # A rendered chat template has its begin token already.
        has_begin = plain[:1] == (self.prefix_token_id,)
        if special is False or has_begin or not self._adds_tokens:
            return plain
        return tokenizer.raw(text).token_ids

    def pair(self, context: str, continuation: str) -> Pair:
        """Return a context and its continuation as ids, split as TemplateLM.loglikelihood splits them."""
        if context == "":
            ids = self._ids(continuation, False)
            begins = ids[:1] == (self.prefix_token_id,)
            return Pair(ids if begins else (self.prefix_token_id, *ids), 1)
        kept = context.rstrip()
        # White space that ends a context belongs to the token after it.
        continuation = context[len(kept) :] + continuation
        if self._known is None or self._known[0] != kept:
            self._known = (kept, self._ids(kept))
        before = self._known[1]
        scored = self._ids(kept + continuation)[len(before) :]
        # Nothing but white space, and no begin token: HFLM fails here.
        before = before or (self.prefix_token_id,)
        return Pair(before + scored, len(before))

    def windows(self, text: str) -> list[Pair]:
        """Return the windows that score each token of a text once, after the prefix token.

        A tokenizer that begins texts with a token of its own has that token scored too, as HFLM does.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = get_rolling_token_windows(
            token_list=list(self._ids(text)),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        pairs = map(make_disjoint_window, found)
        return [Pair((*before, *scored), len(before)) for before, scored in pairs]

    # ---- scoring

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether greedy decoding gives it) of each continuation."""
        results = self._score([self.pair(*request.args) for request in requests])
        answers = [answer([result]) for result in results]
        for request, found in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, found)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair((*before, *scored), len(before)) for _, before, scored in requests]
        return [answer([result]) for result in self._score(pairs)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood in nats of each text; 0 for one without tokens."""
        windows = [self.windows(*request.args) for request in requests]
        results = iter(self._score([pair for pairs in windows for pair in pairs]))
        answers = [answer([next(results) for _ in pairs])[0] for pairs in windows]
        for request, found in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return answers

    def _score(self, pairs: Sequence[Pair]) -> list[TokenLogprobs]:
        """Score all in one call, those that begin alike side by side; results in the order given."""
        fitted = [self.fit(pair) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda place: fitted[place].token_ids)
        call = next(self._numbers)
        names = {f"lm_eval-{call}-{place}": place for place in order}
        found = self._session.loglikelihood(
            ScoreRequest(name, fitted[place].token_ids, fitted[place].first_scored)
            for name, place in names.items()
        )
        return _in_order(((result.request_id, result) for result in found), names)

    def fit(self, pair: Pair) -> Pair:
        """Return a pair that the model can score, its context cut at the beginning where it is too long.

        EngineError for a continuation that has no tokens, or more than fit.
        """
        if pair.scored < 1:
            raise EngineError("a continuation adds no token of its own to its context")
        if pair.scored > self.max_length:
            raise EngineError(f"{pair.scored} tokens to score are more than {self.max_length}")
        return pair.fitted(self.max_length + 1)

    # ---- generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the first of its stop strings.

        EngineError when one fails: lm_eval has no way to say so of a single answer.
        """
        made = [self.request("", *request.args[:2]) for request in requests]
        order = sorted(range(len(made)), key=lambda place: made[place].prompt.token_ids)
        call = next(self._numbers)
        names = {f"lm_eval-{call}-{place}": place for place in order}
        found = self._session.generate(
            Request(name, made[place].prompt, made[place].sampling) for name, place in names.items()
        )
        completions = _in_order(((done.request_id, done) for done in found), names)
        texts = []
        for request, done in zip(requests, completions, strict=True):
            if done.error is not None or done.finish_reason not in ("stop", "length"):
                raise EngineError(f"a generation failed: {done.error or done.finish_reason}")
            texts.append(done.text)
            self.cache_hook.add_partial("generate_until", request.args, done.text)
        return texts

    def request(
        self, request_id: str, context: str, arguments: Mapping[str, Any], seed: int = 0
    ) -> Request:
        """Return a generation; its context is cut at the beginning where it leaves no room for the answer."""
        sampling = self.sampling(arguments, seed)
        ids = self._ids(context)[-(self.max_length - sampling.max_tokens) :]
        return Request(request_id, Prompt(context, ids), sampling)

    def sampling(self, arguments: Mapping[str, Any], seed: int = 0) -> Sampling:
        """Return a task's generation arguments as ours.

        UnsupportedError for one that we do not honour, ConfigError when no room is left for a context.
        """
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given = normalize_gen_kwargs(dict(arguments), MAX_NEW_TOKENS)
        for key, value in given.items():
            if key not in HONOURED and (key not in NEUTRAL or NEUTRAL[key] != value):
                raise UnsupportedError(
                    f'generation argument "{key}: {value}" is not honoured here; leave it out'
                )
        if given["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f'max_gen_toks "{given["max_gen_toks"]}" leaves no room for a prompt in {self.max_length} '
                "tokens: set a smaller one in generation_kwargs"
            )
        sampled = bool(given["do_sample"]) and float(given.get("temperature", 0.0)) > 0
        return Sampling(
            max_tokens=given["max_gen_toks"],
            temperature=float(given["temperature"]) if sampled else 0.0,
            top_p=float(given.get("top_p", 1.0)) if sampled else 1.0,
            top_k=int(given.get("top_k") or 0) if sampled else 0,
            seed=seed if sampled else 0,
            stop=tuple(stop for stop in handle_stop_sequences(given["until"], eos=None) if stop),
        )


def answer(results: Sequence[TokenLogprobs]) -> tuple[float, bool]:
    """Return the summed log-likelihood of all scored tokens, and whether each was the likeliest."""
    return float(sum(map(total, results))), all(bool(each.is_top1.all()) for each in results)


def _in_order(found: Iterable[tuple[str, Any]], places: Mapping[str, int]) -> list[Any]:
    """Return results by their requests' places. EngineError when one is missing or was never asked for."""
    by_place: dict[int, Any] = {}
    for name, result in found:
        if name not in places or places[name] in by_place:
            raise EngineError(f'"{name}" was answered twice or never asked')
        by_place[places[name]] = result
    if len(by_place) < len(places):
        raise EngineError(f"{len(places) - len(by_place)} requests got no answer")
    return [by_place[place] for place in range(len(places))]
