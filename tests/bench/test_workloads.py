"""Workloads: the same requests for everyone, prompts whose text is exact, and presets that build."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.bench.arrivals import Arrivals
from quanteval.bench.lengths import Fixed, Lognormal, Uniform
from quanteval.bench.prompts import PREFIX_TOKENS, PlannedRequest, PromptMaker
from quanteval.bench.workload import Workload, clip
from quanteval.engines.fake import ByteTokenizer
from quanteval.errors import ConfigError
from quanteval.resources import presets
from quanteval.targets import build


def first(iterator, count=60):
    return list(itertools.islice(iterator, count))


# --------------------------------------------------------------------------- what is planned


def test_a_load_point_has_the_same_requests_whatever_was_sent_before():
    workload = Workload(seed=3)
    point = first(workload.requests("closed_4"))
    first(workload.requests("closed_8"))
    assert first(Workload(seed=3).requests("closed_4")) == point
    assert first(Workload(seed=4).requests("closed_4")) != point
    assert len({r.request_id for r in point}) == len({r.place for r in point}) == len(point)


def test_repetitions_have_the_same_lengths_and_other_texts():
    one, two = (first(Workload().requests("p", repetition)) for repetition in (0, 1))
    assert [(r.prompt_tokens, r.output_tokens) for r in one] == [
        (r.prompt_tokens, r.output_tokens) for r in two
    ]
    assert not {r.place for r in one} & {r.place for r in two}
    assert not {r.request_id for r in one} & {r.request_id for r in two}
    named = first(Workload().requests("q", lengths="p"))
    assert [r.prompt_tokens for r in named] == [r.prompt_tokens for r in one]
    assert [r.place for r in named] != [r.place for r in one]


def test_an_open_point_has_roles_by_time_and_one_trace_for_every_rate():
    workload = Workload(arrivals=Arrivals("constant"))
    arriving = workload.arriving("open_2", 2.0, measured_from_s=1.0, measured_to_s=3.0)
    roles = [(at_s, request.role) for request, at_s in first(arriving, 8)]
    assert roles == [
        (0.0, "ramp"), (0.5, "ramp"), (1.0, "measured"), (1.5, "measured"), (2.0, "measured"),
        (2.5, "measured"), (3.0, "filler"), (3.5, "filler"),
    ]  # fmt: skip
    slow, fast = (
        first(Workload().arriving(f"open_{rate}", rate, trace="search")) for rate in (1.0, 4.0)
    )
    assert [t for _, t in slow] == pytest.approx([4 * t for _, t in fast])
    assert [r.prompt_tokens for r, _ in slow] == [r.prompt_tokens for r, _ in fast]


def test_the_fingerprint_is_plain_json_and_covers_every_field():
    changes = {
        "prompts": Uniform(1, 9), "outputs": Fixed(3), "arrivals": Arrivals("constant"),
        "buckets": (100,), "shared_prefix": 0.5, "exact_text": False, "corpus_file": __file__, "seed": 1,
    }  # fmt: skip
    assert set(changes) == set(vars(Workload()))
    before = Workload().fingerprint()
    assert json.loads(json.dumps(before)) == before
    for name, value in changes.items():
        assert Workload(**{**vars(Workload()), name: value}).fingerprint() != before, name


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(2, 10**5))
def test_what_a_context_does_not_hold_is_clipped_to_it(prompt, output, context):
    cut = clip(prompt, output, context)
    assert 1 <= cut[0] <= prompt
    assert 1 <= cut[1] <= output
    if prompt + output <= context:
        assert cut == (prompt, output)
    else:
        assert sum(cut) == context


def test_what_was_clipped_is_told():
    workload = Workload(prompts=Uniform(1, 1000), outputs=Fixed(100))
    assert workload.clipped(1100) == ""
    assert workload.clipped(600).startswith("50.0% of the requests, up to 1100 tokens long")
    assert max(r.prompt_tokens for r in first(workload.requests("p", max_context=600))) <= 500
    with pytest.raises(ConfigError, match="holds no prompt"):
        workload.clipped(1)


def test_buckets_are_named_shortest_first():
    assert Workload(buckets=(10, 100)).bucket_names() == ["1-10", "11-100", "101+"]
    assert Workload(buckets=()).bucket_names() == ["1+"]
    names = Workload().bucket_names()
    assert {r.bucket for r in first(Workload().requests("p"))} == set(names)


@pytest.mark.parametrize(
    "fields", [{"buckets": (5, 5)}, {"buckets": (0,)}, {"shared_prefix": 1.0}, {"seed": -1}]
)
def test_workloads_that_mean_nothing_are_refused(fields):
    with pytest.raises(ValueError, match="must"):
        Workload(**fields)


def test_lengths_without_a_kind_are_refused():
    node = {"_target_": "quanteval.bench.workload.Workload", "prompts": {}}
    with pytest.raises(ConfigError, match="by its _target_"):
        build(node)


@pytest.mark.parametrize("name", sorted(presets("workload")))
def test_presets_state_every_field(name):
    node = yaml.safe_load(presets("workload")[name].read_text())
    workload = build(node)
    assert set(node) - {"_target_"} == set(vars(workload))
    assert workload.fingerprint() == build(node).fingerprint()
    assert workload.loop == "open"
    assert {r.bucket for r in first(workload.requests("p"), 200)} == set(workload.bucket_names())


def test_the_default_preset_is_the_default():
    assert build(yaml.safe_load(presets("workload")["default"].read_text())) == Workload()


# --------------------------------------------------------------------------- what is sent


class Merging(ByteTokenizer):
    """Bytes, but that "th", "he" and a space with the letter after it are tokens: cuts move the ids around them."""

    MERGED = ("th", "he", *(f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"))

    @property
    def vocab_size(self):
        return 258 + len(self.MERGED)

    def encode(self, text):
        ids, i = [], 0
        while i < len(text):
            pair = text[i : i + 2]
            if pair in self.MERGED:
                ids.append(258 + self.MERGED.index(pair))
                i += 2
            else:
                ids += text[i].encode()
                i += 1
        return tuple(ids)

    def decode(self, token_ids):
        pieces = [
            self.MERGED[i - 258].encode() if i >= 258 else bytes([i] if i < 256 else [])
            for i in token_ids
        ]
        return b"".join(pieces).decode("utf-8", "replace")


EXACT, EXACT_BOS = (PromptMaker(Merging(add_bos=bos), 0, exact_text=True) for bos in (False, True))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**50), 2**50), st.floats(0, 0.9))
def test_an_exact_text_tokenizes_back_to_exactly_its_ids(tokens, place, shared):
    for maker in (EXACT, EXACT_BOS):
        planned = PlannedRequest("r", "b", tokens, 3, place, shared_tokens=int(tokens * shared))
        prompt = maker.request(planned).prompt
        assert len(prompt.token_ids) == tokens
        assert maker._tokenizer.raw(prompt.text).token_ids == prompt.token_ids
        assert maker.request(planned).prompt == prompt


def test_cuts_anywhere_would_not_be_exact():
    maker = PromptMaker(Merging(), 0)
    prompts = [maker.request(PlannedRequest("r", "b", 50, 3, i)).prompt for i in range(100)]
    assert any(Merging().encode(p.text) != p.token_ids for p in prompts)


def test_a_tokenizer_that_gives_nothing_back_is_refused():
    class Shouting(ByteTokenizer):
        def decode(self, token_ids):
            return super().decode(token_ids).upper()

    maker = PromptMaker(Shouting(), 0, exact_text=True)
    with pytest.raises(ConfigError, match='exactly "400" tokens'):
        maker.request(PlannedRequest("r", "b", 400, 3, 0))


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_of_every_load_point_share_less_than_a_page(exact):
    workload = Workload(prompts=Fixed(40), exact_text=exact)
    maker = workload.maker(Merging(add_bos=True))
    planned = [
        r
        for name in ("a", "b", "c")
        for repetition in (0, 1)
        for r in first(workload.requests(name, repetition), 300)
    ]
    starts = [maker.request(r).prompt.token_ids[:16] for r in planned]
    assert len(set(starts)) == len(starts)


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    workload = Workload(prompts=Fixed(80), shared_prefix=0.5)
    maker = workload.maker(Merging())
    prompts = [maker.request(r).prompt.token_ids for r in first(workload.requests("p"), 50)]
    assert len({p[:40] for p in prompts}) == 1
    assert len({p[40 : 40 + PREFIX_TOKENS] for p in prompts}) == len(prompts)


def test_a_salt_moves_every_prompt():
    request = next(Workload().requests("p"))
    makers = [Workload().maker(Merging(), salt) for salt in ("", "1", "2", "2")]
    prompts = [maker.request(request).prompt.token_ids for maker in makers]
    assert prompts[2] == prompts[3]
    assert len({p[:PREFIX_TOKENS] for p in prompts}) == 3


def test_prompts_come_from_a_text_of_one_s_own(tmp_path):
    text = "".join(f"Sentence number {i} is short. " for i in range(400))
    (tmp_path / "own.txt").write_text(text)
    workload = Workload(corpus_file=str(tmp_path / "own.txt"), prompts=Lognormal(100, 0.5, 20, 300))
    maker = workload.maker(ByteTokenizer())
    for request in first(workload.requests("p"), 20):
        assert set(maker.request(request).prompt.text) <= set(text)
    huge = PlannedRequest("r", "b", 5 * len(text), 1, 0)
    assert len(maker.request(huge).prompt.token_ids) == 5 * len(text)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x80")
    for name, says in (
        ("short", "has 9 tokens"),
        ("bytes", "cannot be read"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            Workload(corpus_file=str(tmp_path / f"{name}.txt")).maker(ByteTokenizer())


def test_times_are_told_for_open_loops_alone():
    assert Workload(arrivals=Arrivals("closed")).loop == "closed"
    with pytest.raises(ConfigError, match="have no times"):
        Workload(arrivals=Arrivals("closed")).times("p", 1.0)
    assert next(Workload().times("p", 1.0)) < math.inf
