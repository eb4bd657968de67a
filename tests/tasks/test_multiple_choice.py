"""Multiple choice on a session that scores by a table: known log-likelihoods give known answers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.fake import BEGIN, ByteTokenizer
from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import Sample, TaskContext, hash_token_ids
from quanteval.tasks.loading import Source
from quanteval.tasks.multiple_choice import (
    SCORES,
    MultipleChoiceTask,
    batch_noise,
    decide,
    lengths_of,
)
from quanteval.tasks.pairing import Asked, Context, Pair, Pairer, Solved, ask
from quanteval.tasks.prompting import FewShot, load_examples
from tests.tasks.scripted import PieceTokenizer, Scripted

SOURCE = Source(jsonl="rows.jsonl")


def choice_task(**fields):
    return MultipleChoiceTask(name="t", version="1", source=SOURCE, **{"noise_probe": 0, **fields})


def question(key, choices, answer=0, **fields):
    row = {"id": key, "question": f"Q{key}:", "choices": list(choices), "answer": answer, **fields}
    return Sample(key, row)


def evaluate(suite, session, samples):
    scores = list(suite.evaluate(session, samples, TaskContext(None, None, True)))
    assert sorted(s.sample_id for s in scores) == sorted(s.sample_id for s in samples)
    return {score.sample_id: score for score in scores}


# --------------------------------------------------------------------------- pairs


def raw_pair(tokenizer, context, continuation):
    return Pairer(tokenizer).pair(Context(context), "raw", continuation)


@pytest.mark.parametrize(
    ("context", "continuation", "scored"),
    [
        ("Q: x\nA:", " yes", " yes"),
        ("Q: x\nA: ", "yes", " yes"),  # the space goes to the answer,
        ("Q: x\n\n", "yes", "\n\nyes"),  # and so does any other white space
        ("naïve", " café", " café"),
        ("", "yes", "yes"),
        ("  ", "yes", "  yes"),
    ],
)
@pytest.mark.parametrize("add_bos", [True, False])
def test_white_space_between_goes_to_the_continuation(context, continuation, scored, add_bos):
    tokenizer = ByteTokenizer(add_bos=add_bos)
    pair = raw_pair(tokenizer, context, continuation)
    assert pair.token_ids[pair.first_scored :] == tuple(scored.encode())
    whole = tuple((context + continuation).encode())
    begins = add_bos or not context.strip()
    assert pair.token_ids == ((BEGIN, *whole) if begins else whole)
    assert pair.scored == len(scored.encode())


def test_ids_are_those_of_the_whole_less_those_of_the_context():
    tokenizer = PieceTokenizer(begin=True)
    pair = raw_pair(tokenizer, "the ca", "t sat")
    # 'cat' is one token of the whole; as many as the context has alone are taken off.
    assert pair.token_ids == (0, *tokenizer.encode("the ca"), *tokenizer.encode(" sat"))
    assert pair.first_scored == 3
    # Nothing is left of a continuation that merges into the context.
    assert raw_pair(tokenizer, "the ca", "t").scored == 0


@pytest.mark.parametrize("begin", [True, False])
def test_a_begin_token_that_the_text_spells_out_is_not_doubled(begin):
    tokenizer = PieceTokenizer(begin)
    assert raw_pair(tokenizer, "<s>one two", " three").token_ids.count(0) == 1
    assert raw_pair(tokenizer, "", "<s>one two").token_ids.count(0) == 1
    assert raw_pair(tokenizer, "", " three") == Pair((0, *tokenizer.encode(" three")), 1)


def test_without_context_and_prefix_token_there_is_nothing_to_condition_on():
    class Bare(ByteTokenizer):
        @property
        def prefix_token_id(self):
            raise ConfigError("none")

    assert raw_pair(Bare(), "a", "b") == Pair((97, 98), 1)
    with pytest.raises(ConfigError, match='"b" has no context'):
        raw_pair(Bare(), "", "b")


PIECES = st.lists(
    st.sampled_from(["a", "Ab", " ", "\n", "  ", "é", "漢字", ":", "<s>", "x1", "\t", "\u00a0"]),
    max_size=6,
).map("".join)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.parametrize("begin", [True, False])
def test_pairs_are_lm_evaluation_harness_s(begin):
    from lm_eval.api.model import TemplateLM

    tokenizer = PieceTokenizer(begin)

    class Theirs(TemplateLM):
        eot_token_id = 1
        prefix_token_id = 0
        _loglikelihood_tokens = generate_until = loglikelihood_rolling = lambda *_, **__: None

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            plain = add_special_tokens is False or string.startswith("<s>")
            return list(tokenizer.encode(string) if plain else tokenizer.raw(string).token_ids)

        def loglikelihood(self, requests, disable_tqdm=True):
            raise NotImplementedError

    other = Theirs()

    @given(PIECES.filter(str.strip), PIECES.filter(bool))
    def compare(context, continuation):
        before, scored = other._encode_pair(context, continuation)
        assert raw_pair(tokenizer, context, continuation) == Pair((*before, *scored), len(before))

    compare()


def test_a_chat_prompt_is_kept_and_the_answer_begins_the_turn():
    for add_bos in (True, False):
        tokenizer = ByteTokenizer(add_bos=add_bos)
        context = Context("Q?", "Be brief. ", (Solved("P?", " p"),), "\n\n")
        pair = Pairer(tokenizer).pair(context, "chat", " yes")
        prompt = tokenizer.chat(context.messages())
        assert prompt.text == "<user>Be brief. P?\n<assistant>p\n<user>Q?\n<assistant>"
        assert pair.token_ids == (*prompt.token_ids, *b"yes")
        assert pair.first_scored == len(prompt.token_ids)
        assert Pairer(tokenizer).text(context, "chat") == prompt.text
    assert context.text() == "Be brief. P? p\n\nQ?"


# --------------------------------------------------------------------------- decisions


def test_each_score_divides_by_its_own_length():
    choices = ["aaaaaaaa", "漢字漢", "é b c"]  # 8, 3 and 5 characters; 8, 9 and 6 bytes
    worth = {" aaaaaaaa": -8.0, " 漢字漢": -3.9, " é b c": -5.0}
    # acc: -8 -3.9 -5; per character: -1 -1.3 -1; per byte: -1 -.433 -.833; per token: 9, 10 and 7 bytes
    score = evaluate(choice_task(), Scripted(worth), [question("a", choices, 1)])["a"]
    assert score.series == {"loglikelihoods": [pytest.approx(v) for v in worth.values()],
                            "tokens": [9.0, 10.0, 7.0]}  # fmt: skip
    assert score.numbers["acc"] == 1.0
    assert score.numbers["acc_norm"] == 0.0
    assert score.numbers["acc_norm_bytes"] == 1.0
    assert score.numbers["gold_logprob"] == pytest.approx(-3.9)
    assert score.numbers["tokens"] == 10.0
    assert score.numbers["margin"] == pytest.approx(1.1)
    assert (score.value, score.outcome, score.output) == (1.0, "right", "漢字漢")
    assert (score.weight, score.status, score.finish_reason) == (1.0, "ok", "none")
    per_character = evaluate(
        choice_task(score="acc_norm"), Scripted(worth), [question("a", choices, 1)]
    )["a"]
    assert (per_character.value, per_character.outcome) == (0.0, "wrong")
    assert per_character.output in ("aaaaaaaa", "é b c")
    assert per_character.numbers["margin"] == pytest.approx(0.0, abs=1e-12)
    assert per_character.numbers["gold_logprob"] == pytest.approx(-3.9)


@given(
    st.lists(
        st.tuples(st.floats(-50, 0), st.text(max_size=8), st.integers(1, 9)), min_size=1, max_size=6
    ),
    st.data(),
)
def test_decisions_are_numpy_s_argmax(answers, data):
    values, choices, tokens = zip(*answers, strict=True)
    for score in SCORES:
        lengths = lengths_of(score, choices, tokens)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.array(values) / np.array(lengths, dtype=float)
        scaled[np.array(lengths) == 0] = -np.inf
        noise = data.draw(st.floats(0, 2))
        best, near = decide(values, lengths, noise)
        assert best == int(np.argmax(scaled))
        others = [v for i, v in enumerate(scaled) if i != best and math.isfinite(v)]
        if others and math.isfinite(scaled[best]):
            assert near.margin == scaled[best] - max(others) >= 0
        else:
            assert (near.margin, near.near_tie) == (math.inf, False)
        if near.margin == 0:
            assert near.near_tie
        if score == "acc" and near.margin != 2 * noise:
            assert near.near_tie == (near.margin < 2 * noise)


def test_the_first_of_equals_wins_and_is_a_near_tie():
    score = evaluate(choice_task(), Scripted({}), [question("a", ["xx", "yy"], 0)])["a"]
    assert (score.value, score.output) == (1.0, "xx")
    assert (score.numbers["margin"], score.numbers["near_tie"]) == (0.0, 1.0)
    other = evaluate(choice_task(), Scripted({}), [question("a", ["xx", "yy"], 1)])["a"]
    assert other.value == 0.0


def test_an_empty_answer_cannot_win_per_character_but_can_by_likelihood():
    # Like lm-evaluation-harness: the space before it is scored, and its length is 0.
    worth = {" ": -1.0, " yes": -6.0}
    score = evaluate(choice_task(), Scripted(worth), [question("a", ["", "yes"], 1)])["a"]
    assert [score.numbers[name] for name in SCORES] == [0.0, 1.0, 1.0, 0.0]
    assert score.output == ""
    nothing = choice_task(choice="{{ choice }}")
    failed = evaluate(nothing, Scripted({}), [question("a", ["", "yes"])])["a"]
    assert (failed.status, failed.value, failed.outcome) == ("error", 0.0, "error")
    assert "no token of its own" in failed.detail


def test_a_lone_answer_is_right_beyond_doubt():
    score = evaluate(choice_task(), Scripted({}), [question("a", ["x"])])["a"]
    assert (score.value, score.numbers["margin"], score.numbers["near_tie"]) == (1.0, math.inf, 0.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_an_error_and_spares_the_rest(value):
    worth = {" bad": value, " good": -1.0}
    scores = evaluate(
        choice_task(),
        Scripted(worth),
        [question("a", ["good", "bad"]), question("b", ["good", "so"])],
    )
    assert (scores["a"].status, scores["a"].value) == ("error", 0.0)
    assert scores["a"].detail == f"log-likelihood {value} of answer 1"
    assert (scores["b"].status, scores["b"].value) == ("ok", 1.0)


# --------------------------------------------------------------------------- asking


def test_all_is_asked_in_one_lazy_call_with_answers_side_by_side():
    samples = [question(str(i), ["x", "y", "z"]) for i in range(20)]
    session = Scripted({})
    scores = choice_task().evaluate(session, samples, TaskContext(None, None, True))
    assert next(scores).sample_id == "0"
    assert [r.request_id for r in session.calls[0]] == ["0#0", "0#1", "0#2"]
    list(scores)
    assert len(session.calls) == 1
    assert [r.request_id for r in session.calls[0]] == [f"{i}#{j}" for i in range(20) for j in range(3)]  # fmt: skip


def test_a_session_that_reads_ahead_changes_nothing():
    class Ahead(Scripted):
        def loglikelihood(self, requests):
            yield from super().loglikelihood(list(requests))

    samples = [
        question(str(i), ["x" * i, "y"] if i != 3 else ["x" * 200, "y"]) for i in range(1, 6)
    ]
    suite = choice_task(noise_probe=2)
    plain = evaluate(suite, Scripted({}, max_context=100), samples)
    ahead = evaluate(suite, Ahead({}, max_context=100), samples)
    strip = lambda s: s.model_copy(update={"elapsed_s": 0.0})  # noqa: E731
    assert {k: strip(s) for k, s in plain.items()} == {k: strip(s) for k, s in ahead.items()}
    assert [plain[str(i)].status for i in range(1, 6)] == ["ok", "ok", "error", "ok", "ok"]


def test_a_missing_or_swapped_result_is_refused():
    samples = [question(str(i), ["x", "y"]) for i in range(3)]

    class Lossy(Scripted):
        def __init__(self, change):
            super().__init__({})
            self.change = change

        def loglikelihood(self, requests):
            return iter(self.change(list(super().loglikelihood(requests))))

    for change in (lambda r: r[:-1], lambda r: r[::-1], lambda r: [r[0], *r], lambda r: []):
        with pytest.raises(EngineError):
            evaluate(choice_task(), Lossy(change), samples)


def test_batch_noise_is_measured_on_the_first_questions_and_marks_near_ties():
    worth = {" a": (-3.0, -3.05), " b": -3.08, " c": -3.3, " d": -4.0}
    samples = [
        question("0", ["a", "d"]),
        question("1", ["b", "a"]),
        question("2", ["a", "b"]),
        question("3", ["b", "c"]),
    ]
    session = Scripted(worth)
    scores = evaluate(choice_task(noise_probe=2), session, samples)
    # Alone first, one sequence a call; then everything, those included, in one.
    assert [len(call) for call in session.calls] == [1, 1, 1, 1, 8]
    for score in scores.values():
        assert score.numbers["batch_noise"] == pytest.approx(0.05)
    assert [scores[str(i)].numbers["near_tie"] for i in range(4)] == [0.0, 1.0, 1.0, 0.0]
    assert scores["1"].value == 0.0  # what counts is the suite's own pass
    # A suite that is asked in parts is probed once, and again on another session.
    suite = choice_task(noise_probe=2)
    again = Scripted(worth)
    evaluate(suite, again, samples[:3])
    (last,) = evaluate(suite, again, samples[3:]).values()
    assert [len(call) for call in again.calls] == [1, 1, 1, 1, 6, 2]
    assert last.numbers["batch_noise"] == pytest.approx(0.05)
    other = Scripted({})
    (quiet,) = evaluate(suite, other, samples[3:]).values()
    assert (len(other.calls), quiet.numbers["batch_noise"]) == (3, 0.0)
    unmeasured = evaluate(choice_task(noise_probe=0), Scripted(worth), samples)
    assert "batch_noise" not in unmeasured["0"].numbers
    assert unmeasured["2"].numbers["near_tie"] == 0.0
    assert len(evaluate(choice_task(noise_probe=99), Scripted(worth), samples)) == 4
    assert list(choice_task(noise_probe=8).evaluate(Scripted({}), [], TaskContext(None, None, True))) == []  # fmt: skip


def test_noise_is_scaled_with_the_answers_lengths():
    # 10 characters: 0.3 nats of noise on each side are 0.06 per character.
    assert decide([-10.0, -10.5], [10, 10], 0.3)[1].near_tie
    assert not decide([-10.0, -11.0], [10, 10], 0.3)[1].near_tie
    assert batch_noise([[1.0, 2.0]], [[1.5, 2.0]]) == 0.5
    assert batch_noise([[], []], [[], []]) is None
    assert batch_noise([[math.nan, -math.inf, 1.0]], [[1.0, -math.inf, 1.25]]) == 0.25


def test_what_does_not_fit_is_an_error_unless_it_may_be_cut():
    samples = [question("long", ["x", "yy"], 1, more="w" * 50), question("short", ["x", "yy"])]
    suite = choice_task(prompt="{{ more | default('') }}{{ question }}")
    session = Scripted({" yy": -1.0}, add_bos=True, max_context=30)
    scores = evaluate(suite, session, samples)
    assert (scores["long"].status, scores["long"].value, scores["long"].weight) == ("error", 0, 1)
    assert "60 tokens are more than the 30" in scores["long"].detail
    assert "\n" not in scores["long"].detail
    assert scores["long"].prompt_sha256
    assert scores["short"].status == "ok"
    cut = evaluate(dataclasses.replace(suite, on_overlong="truncate"), session, samples)["long"]
    assert (cut.status, cut.value) == ("ok", 1.0)
    assert cut.numbers["cut_tokens"] == 30.0
    asked = session.calls[-1][1].token_ids
    assert bytes(asked) == b"w" * 21 + b"Qlong: yy"
    none = evaluate(
        dataclasses.replace(suite, on_overlong="truncate"),
        Scripted({}, max_context=30),
        [question("a", ["x" * 40, "y"])],
    )["a"]
    assert (none.status, "leave no context" in none.detail) == ("error", True)


def test_a_sequence_may_fill_the_context_but_not_with_its_answer_alone():
    pairs = [Pair(tuple(range(10)), 2), Pair((1, 2), 1)]
    sample = question("a", ["x", "y"])
    assert ask(sample, pairs, 10, truncate=False) == Asked(sample, tuple(pairs))
    cut = ask(sample, pairs, 9, truncate=True)
    assert cut.pairs == (Pair(tuple(range(1, 10)), 1), pairs[1])
    assert (cut.failure, cut.cut) == ("", 1)
    assert "8 tokens to score leave no context" in ask(sample, pairs, 8, truncate=True).failure


def test_the_hash_is_of_each_sequence_with_its_bounds():
    sample = question("a", ["x", "y"])
    one = Asked(sample, (Pair((1, 2), 1), Pair((3,), 1)))
    other = Asked(sample, (Pair((1,), 1), Pair((2, 3), 1)))
    assert one.sha256 != other.sha256 != Asked(sample, (Pair((1, 2, 3), 1),)).sha256
    assert Asked(sample, (Pair((1, 2), 1),)).sha256 == hash_token_ids([1, 2])


# --------------------------------------------------------------------------- prompts


def test_an_answer_may_have_a_context_of_its_own():
    suite = choice_task(prompt="{{ choice }}", choice=" {{ rest }}")
    sample = question("a", ["Ann asked Bea so Ann", "Ann asked Bea so Bea"], 1, rest="answered.")
    session = Scripted({})
    evaluate(suite, session, [sample])
    assert [bytes(r.token_ids) for r in session.calls[0]] == [
        b"Ann asked Bea so Ann answered.",
        b"Ann asked Bea so Bea answered.",
    ]
    assert {r.first_scored for r in session.calls[0]} == {20}


def pool(*rows):
    return [{"id": f"e{i}", **row} for i, row in enumerate(rows)]


@pytest.fixture
def with_examples(monkeypatch):
    rows = pool(
        {"question": "1+1=", "choices": ["3", "2"], "answer": 1, "subject": "sums"},
        {"question": "Sky?", "choices": ["blue", "red"], "answer": 0, "subject": "colours"},
        {"question": "2+2=", "choices": ["4", "5"], "answer": 0, "subject": "sums"},
    )
    monkeypatch.setattr("quanteval.tasks.prompting.load_rows", lambda source, folder: rows)
    return rows


def test_examples_come_first_with_their_right_answers(with_examples):
    shots = FewShot(
        count=2, source=SOURCE, group_field="subject", description="On {{ subject }}.\n\n"
    )
    suite = choice_task(shots=shots, choices=("A", "B"))
    sample = question("q", ["3", "7"], 1, subject="sums")
    session = Scripted({})
    assert suite.render(session, sample, 1) == ("On sums.\n\n1+1= B\n\n2+2= A\n\nQq:", " B")
    chat = dataclasses.replace(suite, form="chat")
    assert chat.render(session, sample, 0) == (
        "<user>On sums.\n\n1+1=\n<assistant>B\n<user>2+2=\n<assistant>A\n<user>Qq:\n<assistant>",
        "A",
    )
    other = question("r", ["3", "7"], subject="sums")
    evaluate(chat, session, [sample, other])
    asked = [bytes(request.token_ids).decode() for request in session.calls[0]]
    texts = [chat.render(session, each)[0] for each in (sample, other)]
    assert asked == [text + letter for text in texts for letter in "AB"]


def test_questions_of_a_group_are_asked_side_by_side(with_examples):
    shots = FewShot(count=1, source=SOURCE, group_field="subject")
    subjects = ["sums", "colours", "sums", "colours", "sums"]
    samples = [question(str(i), ["a", "b"], subject=s) for i, s in enumerate(subjects)]
    session = Scripted({})
    evaluate(choice_task(shots=shots), session, samples)
    assert [r.request_id[0] for r in session.calls[0]][::2] == ["0", "2", "4", "1", "3"]


def test_examples_come_from_the_questions_folder_unless_they_have_their_own(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        "quanteval.tasks.prompting.load_rows", lambda source, folder: seen.append(source) or []
    )
    asked = Source(loader="a.b", arguments={"path": str(tmp_path), "split": "test"})
    dev = Source(loader="a.b", arguments={"path": None, "split": "dev"})
    own = Source(loader="a.b", arguments={"path": "/dev.csv", "split": "dev"})
    other = Source(loader="a.c", arguments={"split": "dev"})
    for source in (dev, own, other):
        load_examples(FewShot(count=1, source=source), asked, "")
    load_examples(FewShot(count=1, source=dev), dev, "")
    paths = [(s.arguments or {}).get("path") for s in seen]
    assert paths == [str(tmp_path), "/dev.csv", None, None]
    assert seen[0].arguments == {"path": str(tmp_path), "split": "dev"}
    # A file holds the questions themselves.
    file = Source(loader="a.b", arguments={"path": str(tmp_path / "test.csv")})
    with pytest.raises(ConfigError, match=r"shots\.source\.arguments\.path=FILE"):
        load_examples(FewShot(count=1, source=dev), file, "")
    assert load_examples(FewShot(source=dev), file, "") == []


# --------------------------------------------------------------------------- contracts


CHANGES = {
    "version": "2",
    "prompt": "{{ question }}?",
    "choices": ("a", "b"),
    "choice": "{{ choice }}",
    "answer": "{{ 1 - answer }}",
    "form": "chat",
    "shots": FewShot(description="Hello. "),
    "score": "acc_norm",
    "on_overlong": "truncate",
    "noise_probe": 3,
}
LEFT_OUT = {
    "name": "u",
    "folder": "/elsewhere",
    "source": Source(hub="a/b"),
    "id_field": "k",
    "limit": 3,
    "description": "x",
    "licence": "x",
}


def test_the_fingerprint_has_every_field_that_matters_and_no_other():
    base, samples = choice_task(), [question("a", ["x", "y"])]
    assert {f.name for f in dataclasses.fields(base)} == {*CHANGES, *LEFT_OUT}
    before = base.fingerprint(samples)
    for field, value in CHANGES.items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) != before, field
    for field, value in LEFT_OUT.items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) == before, field
    assert base.fingerprint([question("a", ["x", "z"])]) != before


def test_the_examples_contents_are_fingerprinted_not_their_place(with_examples):
    samples = [question("a", ["x", "y"], subject="sums")]

    def inputs(path):
        source = Source(loader="a.b", arguments={"path": path})
        return choice_task(shots=FewShot(count=1, source=source)).fingerprint(samples)

    before = inputs("/here")
    assert before == inputs("/there")
    assert "/here" not in str(before)
    with_examples[2]["answer"] = 1
    assert inputs("/here") != before


def test_an_example_without_answers_is_named_too(with_examples, tmp_path):
    row = {"id": "r1", "question": "?", "choices": ["x", "y"], "answer": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    suite = choice_task(folder=str(tmp_path), shots=FewShot(count=1, source=SOURCE))
    assert len(suite.samples()) == 1
    with_examples[2]["answer"] = 2
    with pytest.raises(ConfigError, match='sample "example 2": "2" under "answer"'):
        dataclasses.replace(suite).samples()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"choices": ["x"], "answer": 1}, '"1" under "answer" is no index of 1 answers'),
        ({"choices": ["x", "y"], "answer": -1}, "without published answers"),
        ({"choices": ["x", "y"], "answer": "B"}, '"B" under "answer"'),
        ({"choices": ["x", "y"], "answer": 0.9}, '"0.9" under "answer"'),
        ({"choices": ["x", "y"], "answer": None}, '"None" under "answer"'),
        ({"choices": [], "answer": 0}, 'no list of answers under "choices"'),
        ({"choices": "xy", "answer": 0}, 'no list of answers under "choices"'),
        ({"answer": 0}, 'no list of answers under "choices"'),
    ],
)
def test_a_row_without_answers_is_named_before_anything_is_scored(row, says, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "r1", "question": "?", **row}))
    with pytest.raises(ConfigError, match='sample "r1"') as caught:
        choice_task(folder=str(tmp_path)).samples()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_fields_are_refused():
    for fields, says in (
        ({"prompt": "{{ question"}, "prompt: template"),
        ({"choices": ("{{", "b")}, "choices: template"),
        ({"noise_probe": -1}, 'noise_probe "-1"'),
        ({"limit": 0}, 'limit "0"'),
    ):
        with pytest.raises(ValueError, match=says):
            choice_task(**fields)


def test_answers_by_template_and_as_digits():
    sample = question("a", ["x", "y"], "1")
    assert evaluate(choice_task(), Scripted({" y": -1.0}), [sample])["a"].value == 1.0
    lettered = Sample("a", {**sample.data, "answer": "B"})
    suite = choice_task(answer="{{ 'AB'.index(answer) }}")
    assert evaluate(suite, Scripted({" y": -1.0}), [lettered])["a"].value == 1.0
