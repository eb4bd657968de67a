"""lm_eval's tasks through our sessions: the library's own HFLM on the same weights gives the same."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quanteval.config import compose, make_plan
from quanteval.engines.fake import ByteTokenizer, FakeEngine
from quanteval.engines.transformers import TransformersEngine
from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import Calibration, TaskContext, hash_token_ids
from quanteval.schemes.none import Unquantized
from quanteval.targets import build
from quanteval.tasks.lm_eval import LmEvalTask
from tests.tiny import make_tiny_model

pytest.importorskip("lm_eval")

FOLDER = Path(__file__).parent / "lm_eval_tasks"
NAMES = ["qe_choice", "qe_colour", "qe_fill", "qe_last_word", "qe_text", "qe_sum"]
MAX_LENGTH = 200


def task(name, **fields):
    return LmEvalTask(**{"name": "t", "task": name, "include_path": str(FOLDER), **fields})


def scores_of(suite, session, tmp_path, samples=None):
    context = TaskContext(tmp_path, tmp_path, is_baseline=True)
    samples = suite.samples() if samples is None else samples
    return {score.sample_id: score for score in suite.evaluate(session, samples, context)}


@pytest.fixture(scope="module")
def artifact(tiny_source, tmp_path_factory):
    return Unquantized("float32").quantize(
        tiny_source, tmp_path_factory.mktemp("a"), Calibration(), "cpu"
    )


@pytest.fixture
def fake(artifact):
    with FakeEngine(default_answer="It is = 5.\nQ: more").serve(artifact) as session:
        yield session


# --------------------------------------------------------------------------- against HFLM


class Pair:
    """The same tiny model served by us and by lm_eval's own HFLM."""

    def __init__(self, session, folder, prefix):
        from lm_eval.models.huggingface import HFLM

        self.session, self.prefix, self.known = session, prefix, {}
        self.hflm = HFLM(
            pretrained=str(folder),
            device="cpu",
            dtype="float32",
            batch_size=4,
            max_length=MAX_LENGTH,
        )

    @property
    def ours(self):
        from quanteval.tasks.lm_eval_model import SessionLM

        return SessionLM(self.session, max_length=MAX_LENGTH, prefix_token_id=self.prefix)

    def expected(self, form):
        """What the library says with its own model; computed once for each form."""
        if form not in self.known:
            self.known[form] = run_library(self.hflm, names_for(form), **FORMS[form])
        return self.known[form]


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no bos"])
def pair(request, tmp_path_factory):
    from quanteval.models import resolve_model

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), add_bos=request.param)
    made = Unquantized("float32").quantize(
        resolve_model(str(folder)), tmp_path_factory.mktemp("a"), Calibration(), "cpu"
    )
    engine = TransformersEngine(kv_cache_tokens=512, page_tokens=16, batching="padded")
    with engine.serve(made) as session:
        # HFLM puts the vocabulary's begin token before texts without a context.
        yield Pair(session, folder, None if request.param else 0)


def run_library(model, names, folder=FOLDER, **arguments):
    import lm_eval
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        # It asks pip and the system what is installed, for a second each time.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        return lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            **arguments,
        )


FORMS = {
    "plain": {},
    "shots": {"num_fewshot": 2, "fewshot_random_seed": 7},
    "chat": {"num_fewshot": 1, "apply_chat_template": True, "system_instruction": "Be brief."},
    "one turn": {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": False},
}


def names_for(form):
    """Return the tasks that have examples to draw where the form asks for some."""
    return NAMES if form == "plain" else ["qe_choice", "qe_colour", "qe_sum"]


@pytest.mark.parametrize("form", FORMS)
def test_a_session_is_a_model_of_lm_eval(pair, form):
    theirs = pair.expected(form)
    ours = run_library(pair.ours, names_for(form), **FORMS[form])
    for name in names_for(form):
        expected, found = theirs["results"][name], ours["results"][name]
        assert expected.keys() == found.keys()
        for metric, value in expected.items():
            if not isinstance(value, str):
                assert found[metric] == pytest.approx(value, rel=1e-4), (name, metric)
        for one, other in zip(theirs["samples"][name], ours["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            for left, right in zip(one["resps"], other["resps"], strict=True):
                assert_same(left[0], right[0])


def assert_same(expected, found):
    if isinstance(expected, tuple):
        assert found[0] == pytest.approx(expected[0], abs=1e-4)
        assert found[1] == expected[1]
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3, rel=1e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_the_library(pair, form, tmp_path):
    fields = {**FORMS[form], "max_length": MAX_LENGTH, "prefix_token_id": pair.prefix}
    fields["fewshot_seed"] = fields.pop("fewshot_random_seed", 1234)
    for name in names_for(form):
        suite = task(name, **fields)
        scores = scores_of(suite, pair.session, tmp_path)
        logged = pair.expected(form)["samples"][name]
        first = [each for each in logged if each["filter"] == logged[0]["filter"]]
        assert len(scores) == len(first)
        for each in first:
            score = scores[f"{name}/{each['doc_id']}"]
            assert score.status in ("ok", "truncated"), score.detail
            if suite.kind == "perplexity":
                assert score.value == pytest.approx(-each["resps"][0][0], rel=1e-5)
                assert score.numbers["words"] == each["word_perplexity"][1]
                assert score.numbers["bytes"] == each["byte_perplexity"][1]
                continue
            metrics = {m: pytest.approx(each[m], abs=1e-4) for m in each["metrics"]}
            assert {k: v for k, v in score.numbers.items() if k != "cut_tokens"} == metrics
            if suite.kind == "generate":
                assert score.output == each["resps"][0][0]
            else:
                found = score.series["loglikelihoods"]
                np.testing.assert_allclose(found, [r[0][0] for r in each["resps"]], atol=1e-4)


def test_words_and_bits_of_a_text_agree_with_the_library(pair, tmp_path):
    suite = task("qe_text", max_length=MAX_LENGTH, prefix_token_id=pair.prefix)
    scores = scores_of(suite, pair.session, tmp_path).values()
    theirs = pair.expected("plain")["results"]["qe_text"]
    total = sum(score.value for score in scores)
    words, octets = (sum(score.numbers[key] for score in scores) for key in ("words", "bytes"))
    assert math.exp(total / words) == pytest.approx(theirs["word_perplexity,none"], rel=1e-5)
    assert total / octets / math.log(2) == pytest.approx(theirs["bits_per_byte,none"], rel=1e-5)


PIECES = ["a", "b c", " ", "\n", "\t", "é", "<s>", "<|end|>", "日"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(context=TEXTS, continuation=TEXTS.filter(bool))
@example(context="", continuation="<s>a")
@example(context="<s>a ", continuation="b")
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
def test_ids_are_those_of_hflm(pair, context, continuation):
    hflm, ours = pair.hflm, pair.ours
    assert ours.tok_encode(context) == hflm.tok_encode(context)
    if context.strip() or not context:
        seen = []
        hflm_tokens, hflm._loglikelihood_tokens = (
            hflm._loglikelihood_tokens,
            lambda requests, **_: seen.extend(requests),
        )
        try:
            hflm.loglikelihood([type("R", (), {"args": (context, continuation)})()])
        finally:
            hflm._loglikelihood_tokens = hflm_tokens
        ((_, before, scored),) = seen
        made = ours.pair(context, continuation)
        assert made.token_ids == (*before, *scored)
        assert made.scored == len(scored)


def test_a_long_context_is_cut_as_in_hflm(pair, tmp_path):
    from lm_eval.api.instance import Instance

    asked = [
        Instance("loglikelihood", {}, ("word " * count, "and the end"), 0) for count in (10, 60, 90)
    ]
    expected, found = pair.hflm.loglikelihood(asked), pair.ours.loglikelihood(asked)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    wanted = [Instance("generate_until", {}, ("word " * 60, {"until": [], "max_gen_toks": 30}), 0)]
    assert pair.hflm.generate_until(wanted) == pair.ours.generate_until(wanted)
    suite = task("qe_sum", num_fewshot=3, max_length=60)
    cuts = [s.numbers["cut_tokens"] for s in scores_of(suite, pair.session, tmp_path).values()]
    whole = "Q: 1 + 1\nA: 2\n\nQ: 3 + 4\nA: 7\n\nQ: 5 + 5\nA: 10\n\nQ: 2 + 3\nA:"
    assert cuts[0] == len(pair.ours.tok_encode(whole)) - (60 - 24)
    suite, lost = task("qe_choice", max_length=60), []
    for score in scores_of(suite, pair.session, tmp_path).values():
        cut = int(score.numbers.get("cut_tokens", 0))
        assert score.detail == (f"the context lost {cut} tokens at its beginning" if cut else "")
        assert len(score.series["tokens"]) == len(score.series["loglikelihoods"])
        lost.append(cut)
    assert max(lost) > 0


def test_the_longest_window_is_the_whole_context(pair, monkeypatch):
    from lm_eval.api.instance import Instance

    from quanteval.tasks.lm_eval_model import SessionLM

    assert SessionLM(pair.session).max_length == pair.session.max_context == 512
    ours = SessionLM(pair.session, prefix_token_id=pair.prefix, max_length=511)
    monkeypatch.setattr(pair.hflm, "_max_length", 511)
    asked = [Instance("loglikelihood_rolling", {}, ("some words " * 120,), 0)]
    expected, found = (model.loglikelihood_rolling(asked) for model in (pair.hflm, ours))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_begun_answer_continues_the_chat(pair):
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I choose"}]
    rendered = pair.ours.apply_chat_template(history, add_generation_prompt=False)
    assert rendered == pair.hflm.apply_chat_template(history, add_generation_prompt=False)
    assert rendered.count("<s>") == 1
    ids = pair.ours.tok_encode(rendered)
    assert ids == pair.hflm.tok_encode(rendered)
    assert ids.count(0) == 1


# --------------------------------------------------------------------------- on a scripted session


def test_known_answers_score_exactly(artifact, tmp_path):
    answers = {"2 + 3\nA:": "It is = 5.", "4 + 5\nA:": "= 8", "6 + 6\nA:": "", "20 - 3": "the 17"}
    with FakeEngine(answers=answers).serve(artifact) as session:
        strict = scores_of(task("qe_sum"), session, tmp_path)
        flexible = scores_of(task("qe_sum", filter="flexible"), session, tmp_path)
    assert [score.value for score in strict.values()] == [1, 0, 0, 0]
    assert [s.outcome for s in strict.values()] == ["right", "wrong", "empty", "wrong"]
    assert [score.value for score in flexible.values()] == [1, 0, 0, 1]
    first = strict["qe_sum/0"]
    assert (first.output, first.detail) == ("It is = 5.", "filtered: 5")
    assert first.prompt_sha256 == hash_token_ids(tuple(b"Q: 2 + 3\nA:"))
    assert first.numbers == {"exact_match": 1.0}


def test_the_likeliest_answer_is_right_where_it_should_be(fake, tmp_path):
    for score in scores_of(task("qe_choice"), fake, tmp_path).values():
        likelihoods = score.series["loglikelihoods"]
        row = next(s for s in task("qe_choice").samples() if s.sample_id == score.sample_id).data
        assert len(likelihoods) == len(row["choices"])
        right = likelihoods.index(max(likelihoods)) == row["right"]
        assert score.value == score.numbers["acc"] == right
        assert score.outcome == ("right" if right else "wrong")
    normed = scores_of(task("qe_choice", metric="acc_norm"), fake, tmp_path)
    assert all(score.value == score.numbers["acc_norm"] for score in normed.values())


def test_a_group_is_one_suite_with_categories(fake, tmp_path):
    suite = task("qe_both", limit=2)
    samples = suite.samples()
    assert [sample.sample_id for sample in samples] == [
        "qe_choice/0", "qe_choice/1", "qe_colour/0", "qe_colour/1",
    ]  # fmt: skip
    assert [s.data["category"] for s in samples] == ["qe_choice"] * 2 + ["qe_colour"] * 2
    assert list(scores_of(suite, fake, tmp_path)) == [sample.sample_id for sample in samples]
    assert suite.kind == "multiple_choice"
    assert "category" not in task("qe_choice").samples()[0].data
    # A tag stands for the same tasks.
    assert task("qe_asked", limit=2).samples() == samples


def test_any_subset_in_any_order_gets_the_same_prompts(fake, tmp_path):
    """A run that is continued, or stops early, asks what a whole run asks."""
    suite = task("qe_both", num_fewshot=2)
    samples = suite.samples()
    whole = scores_of(suite, fake, tmp_path)
    part = scores_of(suite, fake, tmp_path, [samples[i] for i in (7, 3, 4, 0)])
    assert list(part) == [samples[i].sample_id for i in (7, 3, 4, 0)]
    for sample_id, score in part.items():
        assert score.prompt_sha256 == whole[sample_id].prompt_sha256
    assert scores_of(suite, fake, tmp_path, []) == {}
    other = scores_of(task("qe_both", num_fewshot=2, fewshot_seed=5), fake, tmp_path)
    assert {s.prompt_sha256 for s in other.values()} != {s.prompt_sha256 for s in whole.values()}


@pytest.mark.parametrize("name", ["qe_choice", "qe_text", "qe_sum"])
def test_everything_is_asked_in_one_lazy_call(fake, name, tmp_path):
    calls, asked = [], []
    method = "generate" if name == "qe_sum" else "loglikelihood"
    complete = getattr(fake, method)

    def watched(requests):
        calls.append(method)
        return complete(asked.append(request) or request for request in requests)

    setattr(fake, method, watched)
    suite = task(name)
    scores = suite.evaluate(fake, suite.samples(), TaskContext(tmp_path, tmp_path, True))
    next(scores)
    assert len(asked) < 6
    rest = list(scores)
    assert len(rest) == len(suite.samples()) - 1
    assert calls == [method]
    assert len({request.request_id for request in asked}) == len(asked)


def test_neighbours_begin_alike_and_results_keep_their_order(fake):
    from lm_eval.api.instance import Instance

    from quanteval.tasks.lm_eval_model import SessionLM

    seen = []
    score = fake.loglikelihood
    fake.loglikelihood = lambda requests: score(seen.append(r) or r for r in requests)
    pairs = [("b", " x"), ("a", " y"), ("b", " z"), ("a", " w"), ("", "w")]
    together = SessionLM(fake).loglikelihood([Instance("loglikelihood", {}, p, 0) for p in pairs])
    assert [r.token_ids[0] for r in seen] == sorted(r.token_ids[0] for r in seen)
    for one, found in zip(pairs, together, strict=True):
        assert SessionLM(fake).loglikelihood([Instance("loglikelihood", {}, one, 0)]) == [found]
    assert SessionLM(fake).loglikelihood([]) == []
    assert SessionLM(fake).loglikelihood_rolling([Instance("", {}, ("",), 0)]) == [0.0]
    assert SessionLM(fake).generate_until([]) == []
    with pytest.raises(EngineError, match="adds no token"):
        SessionLM(fake).loglikelihood([Instance("loglikelihood", {}, ("a", ""), 0)])


def test_failures_of_single_documents_are_errors_not_gaps(artifact, tmp_path):
    with FakeEngine(failing=("qe_sum/1#0.0",)).serve(artifact) as session:
        failed = scores_of(task("qe_sum"), session, tmp_path)["qe_sum/1"]
    assert (failed.status, failed.outcome, failed.value, failed.weight) == ("error", "error", 0, 1)
    assert failed.detail == "scripted failure"
    with FakeEngine().serve(artifact) as session:
        scores = scores_of(task("qe_fails"), session, tmp_path)
        assert [score.status for score in scores.values()] == ["ok", "error", "ok", "ok"]
        assert scores["qe_fails/1"].detail == "ValueError: no nine, please"
        # The last question has two answers only.
        two = task("qe_choice", overrides={"doc_to_text": "{{question}} {{choices[2]}}"})
        broken = list(scores_of(two, session, tmp_path).values())
        assert [score.status for score in broken] == ["ok"] * 5 + ["error"]
        assert (broken[-1].value, broken[-1].prompt_sha256) == (0.0, hash_token_ids(()))
        assert "UndefinedError" in broken[-1].detail
    with FakeEngine(default_answer="word " * 30).serve(artifact) as session:
        assert {s.status for s in scores_of(task("qe_sum"), session, tmp_path).values()} == {
            "truncated"
        }


def test_a_text_that_cannot_be_scored_has_no_value(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr("quanteval.engines.fake._fraction", lambda *_: math.nan)
    with FakeEngine().serve(artifact) as session:
        for score in scores_of(task("qe_text"), session, tmp_path).values():
            assert score.status == "error"
            assert math.isnan(score.value)
        assert {s.value for s in scores_of(task("qe_choice"), session, tmp_path).values()} == {0.0}


def test_repeats_are_asked_where_the_filter_looks_at_them(artifact, tmp_path):
    seen = []
    with FakeEngine(default_answer="5").serve(artifact) as session:
        generate = session.generate
        session.generate = lambda requests: generate(seen.append(r) or r for r in requests)
        scores = scores_of(task("qe_vote"), session, tmp_path)
        assert len(seen) == 3 * len(scores) == 12
        assert len({request.sampling.seed for request in seen}) == 12
        assert {(r.sampling.temperature, r.sampling.top_p) for r in seen} == {(0.9, 0.9)}
        assert scores["qe_vote/0"].value == 1
        seen.clear()
        once = task("qe_vote", overrides={"filter_list": None})
        assert len(scores_of(once, session, tmp_path)) == len(seen) == 4


@pytest.mark.parametrize("changed", [{"answer": 0}, {"missing": 1}])
def test_answers_that_were_not_asked_for_are_errors(fake, changed, tmp_path):
    generate = fake.generate
    if "missing" in changed:
        fake.generate = lambda requests: iter([*generate(requests)][1:])
    else:
        fake.generate = lambda requests: iter([*generate(requests)] * 2)
    with pytest.raises(EngineError, match=r"got no answer|answered twice"):
        scores_of(task("qe_sum"), fake, tmp_path)


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"task": "qe_runs_code"}, UnsupportedError, r"without a sandbox; .*task=\[humaneval\]"),
        ({"task": "qe_mixed"}, ConfigError, "mixes kinds"),
        ({"task": "qe_vowels"}, ConfigError, '"vowels" is better when lower.*"longest"'),
        ({"task": "qe_vowels", "metric": "pair"}, ConfigError, "computed over all samples"),
        ({"task": "qe_sum", "metric": "exact"}, ConfigError, 'did you mean "exact_match"'),
        ({"task": "qe_sum", "filter": "stric"}, ConfigError, 'did you mean "strict"'),
        ({"task": "qe_text", "metric": "bits_per_byte"}, ConfigError, "leave it out"),
        ({"task": "qe_sum", "num_fewshot": 4}, ConfigError, "has 3 examples"),
        ({"task": "qe_prefix", "num_fewshot": 1}, ConfigError, "overrides.num_fewshot"),
        ({"task": "qe_sum", "include_path": "/nowhere"}, ConfigError, "is not a folder"),
        ({"task": "qe_sum", "id_field": "question_id"}, ConfigError, 'has no "question_id"'),
        ({"task": "qe_colour", "id_field": "right"}, ConfigError, "two documents have the id"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused_in_one_line(fields, error, match):
    with pytest.raises(error, match=match) as caught:
        task(fields["task"], **{k: v for k, v in fields.items() if k != "task"}).samples()
    assert "\n" not in str(caught.value)


def test_generation_arguments_that_are_not_honoured_are_refused(fake, tmp_path):
    with pytest.raises(UnsupportedError, match='"num_beams: 4" is not honoured'):
        scores_of(task("qe_beams"), fake, tmp_path)
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        scores_of(task("qe_sum", max_length=24), fake, tmp_path)
    with pytest.raises(ConfigError, match="must be from 1 to"):
        scores_of(task("qe_sum", max_length=(1 << 20) + 1), fake, tmp_path)


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(ConfigError, match='did you mean "qe_choice"') as caught:
        task("qe_chioce").samples()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="lm-eval ls tasks"):
        task("zzzzqqqq", include_path="").samples()


def test_a_missing_package_is_said_in_one_line(tmp_path):
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from quanteval.tasks.lm_eval import LmEvalTask\n"
        "from quanteval.errors import ConfigError\n"
        "for step in (LmEvalTask(name='t', task='x').samples, lambda: __import__('quanteval.tasks.lm_eval_model')):\n"
        "    try:\n        step()\n    except ConfigError as error:\n        print(error)\n"
        "loaded = {'torch', 'datasets', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'quanteval[lm-eval]'") == 2


def test_data_that_cannot_be_had_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "far.yaml").write_text(
        (FOLDER / "choice.yaml").read_text().split("custom_dataset")[0]
        + "dataset_path: nobody/nothing\ntest_split: test\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    with pytest.raises(
        Exception, match='cannot load the data "nobody/nothing" of lm_eval'
    ) as caught:
        task("qe_choice", include_path=str(tmp_path)).samples()
    assert "\n" not in str(caught.value)
    assert "overrides.dataset_path" in str(caught.value)


# --------------------------------------------------------------------------- as a suite


def test_the_fingerprint_holds_what_scores_depend_on(tmp_path):
    def inputs(**fields):
        suite = task("qe_sum", **fields)
        found = suite.fingerprint(suite.samples())
        assert json.loads(json.dumps(found)) == found
        return found

    first = inputs()
    assert first == inputs()
    assert str(FOLDER) not in json.dumps(first)
    assert first["version"].startswith("3.0 of lm_eval 0.")
    others = [
        inputs(num_fewshot=1),
        inputs(num_fewshot=1, fewshot_seed=3),
        inputs(filter="flexible"),
        inputs(limit=2),
        inputs(apply_chat_template=True),
        inputs(system_instruction="Be kind."),
        inputs(version="mine"),
        inputs(overrides={"generation_kwargs": {"max_gen_toks": 3}}),
        inputs(overrides={"process_results": None, "doc_to_text": "{{question}}"}),
    ]
    seen = [json.dumps(each, sort_keys=True) for each in (first, *others)]
    assert len(set(seen)) == len(seen)
    # A function is known by the file that defines it, not by its name.
    code = json.dumps(task("qe_fails").fingerprint([]))
    assert "fails_on_the_second" in code
    assert "sha256" in code


def test_overrides_are_merged_key_by_key(fake, tmp_path):
    seen = []
    generate = fake.generate
    fake.generate = lambda requests: generate(seen.append(r) or r for r in requests)
    scores_of(task("qe_sum", overrides={"generation_kwargs": {"max_gen_toks": 3}}), fake, tmp_path)
    assert {(r.sampling.max_tokens, r.sampling.stop) for r in seen} == {(3, ("\n", "Q:"))}


def test_a_suite_of_the_users_own(tmp_path, fake):
    """A folder with a task.yaml, YAML files of lm_eval in a subfolder, and other data beside them."""
    suite = tmp_path / "mine"
    (suite / "lm_eval").mkdir(parents=True)
    node = yaml.safe_load(
        """
        _target_: quanteval.tasks.lm_eval.LmEvalTask
        name: mine
        task: my_task
        include_path: lm_eval
        id_field: key
        overrides: {dataset_kwargs: {data_files: {test: rows.jsonl}}}
        """
    )
    (suite / "lm_eval" / "my.yaml").write_text(
        "task: my_task\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_choice: [' no', ' yes']\ndoc_to_target: a\n"
        "metric_list: [{metric: acc}]\n"
    )
    rows = [{"key": "k1", "q": "Is it?", "a": 0}, {"key": "k2", "q": "Is it so?", "a": 1}]
    (suite / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = build({**node, "folder": str(suite)}, where="task.mine")
    assert [sample.sample_id for sample in made.samples()] == ["my_task/k1", "my_task/k2"]
    assert len(scores_of(made, fake, tmp_path)) == 2
    assert str(tmp_path) not in json.dumps(made.fingerprint(made.samples()))


def test_a_folder_with_a_suite_of_ours_is_no_folder_of_theirs(tmp_path):
    (tmp_path / "task.yaml").write_text("_target_: x.y\nname: mine\ntask: my_task\n")
    with pytest.raises(ConfigError, match=r'"task.yaml", which is a suite .* folder of their own'):
        task("my_task", include_path=str(tmp_path)).samples()


def test_nothing_goes_to_standard_output(capfd, fake, tmp_path):
    suite = task("qe_sum", overrides={"metadata": {"version": 9}})
    scores_of(suite, fake, tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "this is not for standard output" in err
    assert "defaulting" not in err


def test_a_chat_prompt_has_its_template_once(fake, tmp_path):
    seen = []
    generate = fake.generate
    fake.generate = lambda requests: generate(seen.append(r) or r for r in requests)
    suite = task("qe_sum", apply_chat_template=True, system_instruction="Be brief.", num_fewshot=1)
    scores_of(suite, fake, tmp_path)
    text = seen[0].prompt.text
    assert text.startswith("<system>Be brief.\n<user>Q: ")
    assert text.endswith("<user>Q: 2 + 3\nA:\n<assistant>")
    assert text.count("<assistant>") == 2
    fake.tokenizer = ByteTokenizer(chat_template=False)
    with pytest.raises(ConfigError, match="no chat template"):
        scores_of(suite, fake, tmp_path)


def test_the_examples_of_the_document_are_valid():
    text = (Path(__file__).parents[2] / "docs" / "lm_eval.md").read_text(encoding="utf-8")
    nodes = [yaml.safe_load(body) for body in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    assert [build(node).name for node in nodes] == ["arc", "mine"]
    (command,) = re.findall(r"^quanteval run (.*)$", text, re.M)
    plan = make_plan(compose(shlex.split(command)))
    assert {name: (made.object.task, made.object.limit) for name, made in plan.tasks.items()} == {
        "arc": ("arc_easy", 500)
    }
    fields = {field.name for field in dataclasses.fields(LmEvalTask)}
    shown = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.M)))
    common = {"name", "folder", "description", "licence"}
    assert fields - common <= set(shown)


@pytest.mark.model
def test_arc_easy_agrees_item_by_item(embedded_model, shared_data, tmp_path):
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = (shared_data / "arc" / "arc_easy.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    (folder / "arc.yaml").write_text(
        f"task: ten_of_arc\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'arc.jsonl'}}}}}\n"
        'doc_to_text: "{{query}}\\nAnswer:"\ndoc_to_choice: choices\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (folder / "arc.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    theirs = run_library(
        HFLM(pretrained=str(embedded_model.path), device="cpu", dtype="float32", batch_size=4),
        ["ten_of_arc"],
        folder=folder,
    )["samples"]["ten_of_arc"]
    made = Unquantized("float32").quantize(embedded_model, tmp_path / "a", Calibration(), "cpu")
    with TransformersEngine(batching="padded").serve(made) as session:
        scores = scores_of(task("ten_of_arc", include_path=str(folder)), session, tmp_path)
    assert len(scores) == len(theirs) == 10
    for each in theirs:
        score = scores[f"ten_of_arc/{each['doc_id']}"]
        assert score.numbers == {"acc": each["acc"], "acc_norm": each["acc_norm"]}
        expected = [response[0][0] for response in each["resps"]]
        np.testing.assert_allclose(score.series["loglikelihoods"], expected, atol=1e-3)
