"""Scores of packed sequences are those of plain forwards, on architectures that differ in what matters."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from quanteval.engines import packing, scoring
from quanteval.engines.scoring import Head, Scorer
from quanteval.errors import EngineError
from quanteval.interfaces import ScoreRequest

VOCABULARY = 300


def make(kind: str, **more):
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "initializer_range": 0.2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes, **more),
        "qwen2": lambda: transformers.Qwen2Config(**sizes),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=40),
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes, sliding_window=40, final_logit_softcapping=5.0, attn_logit_softcapping=None
        ),
        "phi3": lambda: transformers.Phi3Config(**sizes, pad_token_id=0),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=1024,
            initializer_range=0.2,
        ),
        "mamba": lambda: transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, initializer_range=0.2
        ),
    }[kind]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def softcap(model):
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


@contextlib.contextmanager
def scorer(model, *, rebuilds=True, workers=1, batch_tokens=64, longest=10_000):
    made = Scorer(
        Head(model, rebuilds, softcap(model)), contextlib.nullcontext,
        batch_tokens=batch_tokens, workers=workers, longest_packed=longest,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def some_requests():
    """Return sequences with long and short shared prefixes, equal ones, and one that is a prefix of another."""
    rng = np.random.default_rng(1)
    shots = tuple(int(i) for i in rng.integers(1, VOCABULARY, 70))
    out = []
    for question in range(6):
        asked = shots + tuple(int(i) for i in rng.integers(1, VOCABULARY, 12))
        for choice in range(3):
            ids = asked + tuple(int(i) for i in rng.integers(1, VOCABULARY, 1 + choice))
            out.append(ScoreRequest(f"q{question}/{choice}", ids, len(asked)))
    out.append(ScoreRequest("again", out[0].token_ids, 1))
    out.append(ScoreRequest("prefix", shots[:30], 4))
    out.append(ScoreRequest("long", tuple(int(i) for i in rng.integers(1, VOCABULARY, 200)), 1))
    return out


def plain(model, request):
    with torch.no_grad():
        logits = model(torch.tensor([request.token_ids]), use_cache=False).logits[0].float()
    ids = torch.tensor(request.token_ids)
    first = request.first_scored
    logprobs = logits.log_softmax(-1)[first - 1 : -1].gather(-1, ids[first:, None])[:, 0]
    return logprobs.numpy(), (logits.argmax(-1)[first - 1 : -1] == ids[first:]).numpy()


def check(model, found, wanted, atol=2e-5):
    assert [f.request_id for f in found] == [r.request_id for r in wanted]
    for score, request in zip(found, wanted, strict=True):
        logprobs, hits = plain(model, request)
        np.testing.assert_allclose(score.logprobs, logprobs, atol=atol)
        np.testing.assert_array_equal(score.is_top1, hits)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi3"])
def test_packed_scores_are_those_of_plain_forwards(kind, workers):
    model = make(kind)
    with scorer(model, workers=workers) as live:
        assert live.can_pack(VOCABULARY)
        live.packs = True
        check(model, list(live.logprobs(some_requests())), some_requests())


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_beyond_a_sliding_window_sequences_are_computed_alone(kind):
    model = make(kind)
    wanted = some_requests()
    short = [ScoreRequest(r.request_id, r.token_ids[-30:], 5) for r in wanted]
    with scorer(model, longest=40) as live:
        live.packs = True
        check(model, list(live.logprobs(wanted)), wanted)
        check(model, list(live.logprobs(short)), short)


def test_a_model_without_attention_is_not_packed():
    model = make("mamba")
    with scorer(model) as live:
        assert not live.can_pack(VOCABULARY)
        check(model, list(live.logprobs(some_requests())), some_requests())


def test_a_model_that_ignores_the_mask_is_found_out():
    model = make("llama")
    base = model.base_model
    real = base.forward

    def blind(*args, attention_mask=None, **kwargs):
        return real(*args, **kwargs)

    with scorer(model) as live:
        assert live.can_pack(VOCABULARY)
        base.forward = blind
        assert not live.can_pack(VOCABULARY)


def test_a_model_that_ignores_positions_is_found_out():
    model = make("llama")
    base = model.base_model
    real = base.forward

    def blind(*args, position_ids=None, **kwargs):
        return real(*args, **kwargs)

    base.forward = blind
    with scorer(model) as live:
        assert not live.can_pack(VOCABULARY)


def test_without_rebuilding_the_models_own_logits_are_taken():
    model = make("llama")
    with scorer(model, rebuilds=False) as live:
        assert live.can_pack(VOCABULARY)
        live.packs = True
        check(model, list(live.logprobs(some_requests())), some_requests())


def test_the_vocabulary_in_pieces_gives_the_same(monkeypatch):
    model = make("llama")
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    for piece in (7, VOCABULARY - 1, VOCABULARY, 10_000):
        monkeypatch.setattr(scoring, "VOCABULARY_PIECE", piece)
        with scorer(model) as live:
            check(model, list(live.logprobs(some_requests())), some_requests())


def test_bfloat16_scores_are_not_on_a_grid():
    model = make("llama").to(torch.bfloat16)
    with scorer(model) as live:
        (score,) = live.logprobs(some_requests()[-1:])
    # A difference of two bfloat16 numbers would repeat itself among 199 scores of this size.
    assert len(np.unique(score.logprobs)) == len(score.logprobs)
    assert (score.logprobs <= 0).all()


def test_infinite_and_undefined_logits_come_through():
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with scorer(model) as live:
        (score,) = live.logprobs(some_requests()[-1:])
    assert np.isnan(score.logprobs).all()


def test_nothing_and_one_token(monkeypatch):
    model = make("llama")
    with scorer(model) as live:
        live.packs = True
        assert list(live.logprobs([])) == []
        check(
            model,
            list(live.logprobs([ScoreRequest("a", (3, 4), 1)])),
            [ScoreRequest("a", (3, 4), 1)],
        )


def test_windows_bound_what_is_read_ahead(monkeypatch):
    monkeypatch.setattr(scoring, "WINDOW_REQUESTS", 2)
    model = make("llama")
    taken = []

    def source():
        for request in some_requests():
            taken.append(request.request_id)
            yield request

    with scorer(model) as live:
        live.packs = True
        found = live.logprobs(source())
        next(found)
        assert len(taken) == 2
        check(model, [*live.logprobs(some_requests())], some_requests())


def test_a_refused_request_does_not_lose_those_before_it():
    model = make("llama")

    def source():
        yield from some_requests()[:2]
        raise EngineError("too long")

    got = []
    with scorer(model) as live, pytest.raises(EngineError, match="too long"):
        for score in live.logprobs(source()):
            got.append(score.request_id)
    assert got == ["q0/0", "q0/1"]


def test_kept_keys_are_forgotten_after_their_last_use():
    model = make("llama")
    wanted = some_requests()
    with scorer(model) as live:
        live.packs = True
        list(live.logprobs(wanted))
        sequences = [np.array(r.token_ids) for r in wanted]
        forwards = live._plan(wanted, sequences)
        assert any(f.kept for f in forwards)
        kept = scoring._Kept(users=scoring.Counter(f.past for f in forwards if f.past is not None))
        for number, forward in enumerate(forwards):
            if forward.kept:
                kept.futures[number] = None
            kept.used(forward.past)
        assert not kept.futures


def test_threads_leave_torchs_setting_alone():
    before = torch.get_num_threads()
    model = make("llama")
    with scorer(model, workers=3) as live:
        list(live.logprobs(some_requests()))
        assert torch.get_num_threads() == before
        assert {live._pool.submit(torch.get_num_threads).result() for _ in range(9)} == {1}


def test_hidden_states_rebuild_the_logits():
    model = make("qwen2")
    wanted = some_requests()
    with scorer(model, workers=2) as live:
        for states, request in zip(live.hidden(wanted), wanted, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([request.token_ids])).logits[0]
                rebuilt = model.lm_head(states.values)
            torch.testing.assert_close(
                rebuilt, logits[request.first_scored - 1 : -1], atol=1e-5, rtol=0
            )


def test_the_longest_shared_prefix_of_the_probe_is_kept():
    """The probe must exercise kept keys, or it proves nothing about them."""
    ids = list(range(3 * packing.MIN_TRUNK_TOKENS))
    size = packing.MIN_TRUNK_TOKENS
    sequences = [np.array(ids[:size] + ids[i * size : (i + 1) * size]) for i in (1, 2)]
    forwards = packing.plan(packing.build_tree(sequences, [size] * 2), 1)
    assert forwards[0].kept
