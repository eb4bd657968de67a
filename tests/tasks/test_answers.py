"""Judges of answers: known outputs are judged exactly, and GSM8K's as lm-evaluation-harness does."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.errors import ConfigError, QuantevalError
from quanteval.targets import build
from quanteval.tasks import answers
from quanteval.tasks.answers import (
    Answer,
    Callable,
    EvaluateMetric,
    Match,
    NumericMatch,
    RegexMatch,
)
from quanteval.tasks.numerals import numbers_in

HERE = str(Path(__file__).parent)


def outcome(answer, output, *targets):
    judged = answer.judge(output, {}, targets)
    assert judged.value == float(judged.outcome == "right")
    return judged.outcome


# --------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("options", "output", "target", "right"),
    [
        ({}, " Paris\n", "Paris", True),
        ({}, "paris", "Paris", False),
        ({}, "Paris.", "Paris", False),
        ({"strip": False}, " Paris", "Paris", False),
        ({}, "", "", True),
        ({}, "cafe\u0301", "caf\u00e9", True),
        ({"ignore_case": True}, "STRASSE", "straße", True),
        ({"ignore_punctuation": True}, "“Paris!”", "Paris", True),
        ({"ignore_articles": True}, "The  Hague", "hague", False),
        ({"ignore_articles": True, "ignore_case": True}, "The  Hague", "hague", True),
        ({"ignore_articles": True}, "a theatre", "theatre", True),
        ({"ignore": (",", r"\.$")}, "1,234.", "1234", True),
        ({"mode": "starts_with"}, "19 apples", "19", True),
        ({"mode": "starts_with"}, "190 apples", "19", False),
        ({"mode": "starts_with"}, "is 19", "19", False),
        ({"mode": "contains"}, "It is **48213**.", "48213", True),
        ({"mode": "contains"}, "It is 482135.", "48213", False),
        ({"mode": "contains"}, "It is 148213.", "48213", False),
        ({"mode": "contains"}, "C++ it is", "C++", True),
        ({"mode": "contains"}, "答案是北京市", "北京", False),
        ({"mode": "contains", "whole_words": False}, "答案是北京市", "北京", True),
    ],
)
def test_texts_match_after_what_does_not_matter(options, output, target, right):
    assert outcome(Match(**options), output, target) == ("right" if right else "wrong")


def test_any_target_counts():
    assert outcome(Match(), "b", "a", "b") == "right"
    assert outcome(Match(), "c", "a", "b") == "wrong"


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"ignore_articles": True, "ignore_case": True}, "A"),
        ({"ignore_punctuation": True}, "?"),
        ({"mode": "contains"}, ""),
        ({"mode": "starts_with"}, " "),
    ],
)
def test_a_target_of_which_nothing_is_left_is_an_error_not_a_match(options, target):
    judged = Match(**options).judge("", {}, [target])
    assert (judged.outcome, judged.value) == ("error", 0.0)
    assert f'"{target}"' in judged.detail


def test_no_target_is_an_error():
    for answer in (Match(), NumericMatch(), RegexMatch("."), EvaluateMetric("x")):
        assert getattr(answer, "needs_target") is True  # noqa: B009
    assert Match().judge("x", {}, []).outcome == "error"
    assert NumericMatch().judge("1", {}, []).outcome == "error"


@given(st.text())
def test_a_text_matches_itself_in_every_mode(text):
    for mode in ("equal", "starts_with", "contains"):
        judged = Match(mode=mode).judge(text, {}, [text])
        assert judged.outcome == (
            "right" if text.strip() or (mode, text) == ("equal", "") else "error"
        )


# --------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("options", "output", "found"),
    [
        ({"pattern": "[0-9]+"}, "a 1 b 22", "1"),
        ({"pattern": "[0-9]+", "which": "last"}, "a 1 b 22", "22"),
        ({"pattern": r"answer is (\w+)"}, "the answer is yes.", "yes"),
        ({"pattern": r"(a+)|(b+)", "which": "last"}, "aa bb", "bb"),
        ({"pattern": r"(?P<x>a)(?P<y>b)", "group": "y"}, "ab", "b"),
        ({"pattern": r"(a)(b)", "group": 0}, "ab", "ab"),
        ({"pattern": r"<(.*?)>"}, "< spaced >", "spaced"),
        ({"pattern": r"x(y?)"}, "x", ""),
        ({"pattern": "z"}, "nothing", ""),
    ],
)
def test_a_pattern_takes_the_answer_out(options, output, found):
    answer = RegexMatch(**options)
    assert answer.extract(output) == found
    assert outcome(answer, output, found or "x") == ("right" if found else "no_answer")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"pattern": "(a"}, r'pattern "\(a" is no regular expression'),
        ({"pattern": "a", "group": 1}, 'group "1"'),
        ({"pattern": "(?P<x>a)", "group": "y"}, 'group "y"'),
        ({"pattern": "a", "match": {"ignore": ["["]}}, 'ignore "\\[" is no regular expression'),
        ({"pattern": "a", "match": {"case": True}}, 'unknown key "case"'),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_when_built(node, says):
    with pytest.raises(ConfigError, match=says):
        build({"_target_": "quanteval.tasks.answers.RegexMatch", **node}, where="answer")


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("19", ["19"]),
        ("It is 19.", ["19"]),
        ("It is 19.50.", ["19.5"]),
        ("$1,234,567.89", ["1234567.89"]),
        ("-$5, $-5, €-5 and -5", ["-5", "-5", "-5", "-5"]),
        ("−7 (minus), +7", ["-7", "7"]),
        ("10-5 is 5; 10 - 5 = 5; x-5", ["10", "5", "5", "10", "5", "5", "5"]),
        ("= -5, (-5), 2*-3", ["-5", "-5", "2", "-3"]),
        ("1,2345", ["1", "2345"]),
        ("1, 2, 3", ["1", "2", "3"]),
        ("1'234 or 1\u202f234", ["1234", "1234"]),
        (".5 and 0.5 but ...5", ["0.5", "0.5", "5"]),
        ("3/4 or 1,000 / 3", ["3/4", "1000/3"]),
        ("5/0 is nothing", []),
        ("1.5e3, 2E-2, 1.5 x 10^3, 3×10^{−2}, 2 * 10**4", ["1500", "1/50", "1500", "3/100", "20000"]),
        ("5e, 5kg, 1st", ["5", "5", "1"]),
        ("H2O, GPT4, v1.2.3 and 1.2.3", []),
        ("12:30", ["12", "30"]),
        ("1e999999999 " + "9" * 5000, []),
        ("答案是5。", ["5"]),
        ("", []),
    ],
)  # fmt: skip
def test_numbers_are_read_with_their_exact_values(text, values):
    assert [number.value for number in numbers_in(text)] == [Fraction(value) for value in values]


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, min_value=-(10**15), max_value=10**15, places=4
    )
)
def test_what_python_writes_is_read_back(number):
    for text in (f"{number}", f"{number:,}", f"so: {number:,f}. Done", f"({number})"):
        assert [n.value for n in numbers_in(text)] == [Fraction(number)]


@given(st.text(alphabet="0123456789.,-$/ex%^*+ \n"))
def test_reading_numbers_never_fails(text):
    list(numbers_in(text))


@pytest.mark.parametrize(
    ("options", "output", "target", "found"),
    [
        ({}, "3 + 4 = 7", "7", "right"),
        ({"which": "first"}, " 7\n12 + 3 = 15", "7", "right"),
        ({}, "I do not know", "7", "no_answer"),
        ({}, "", "7", "no_answer"),
        ({}, "7.0", "7", "right"),
        ({}, "0.30", "0.3", "right"),
        ({}, "1,000", "1000", "right"),
        ({}, "10000000000000001", "10000000000000000", "wrong"),
        ({}, "0.5", "1/2", "right"),
        ({}, "50%", "50", "right"),
        ({}, "50%", "0.5", "right"),
        ({}, "0.5", "50%", "right"),
        ({}, "0.5%", "50%", "wrong"),
        ({}, "50 percent", "50%", "right"),
        ({}, "0.5", "50", "wrong"),
        ({"marker": "####"}, "so 12\n#### 7 apples", "7", "right"),
        ({"marker": "answer is", "which": "first"}, "The Answer is 7, not 8", "7", "right"),
        ({"marker": "answer is"}, "the answer is 6. No, the answer is 7", "7", "right"),
        ({"marker": "####"}, "7", "7", "no_answer"),
        ({"marker": "####"}, "#### 7", "3 + 4 = 7\n#### 7", "right"),
        ({"rel_tol": 0.01}, "101", "100", "right"),
        ({"rel_tol": 0.01}, "101.01", "100", "wrong"),
        ({"abs_tol": 0.1}, "0.1", "0", "right"),
        ({}, "7", "seven", "error"),
    ],
)
def test_numbers_are_compared_by_value(options, output, target, found):
    assert outcome(NumericMatch(**options), output, target) == found


# --------------------------------------------------------------------------- lm-evaluation-harness

STRICT = r"#### (\-?[0-9\.\,]+)"
FLEXIBLE = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
GSM8K = Match(ignore=IGNORED, ignore_case=True, strip=False)
JUDGES = {
    "strict": (RegexMatch(STRICT, match=GSM8K), {"regex_pattern": STRICT}),
    "flexible": (
        RegexMatch(FLEXIBLE, which="last", match=GSM8K),
        {"regex_pattern": FLEXIBLE, "group_select": -1},
    ),
}
ODD = [
    "#### 18", "####18", "#### -18", "#### $18", "#### 18.", "#### 1,8", "#### 18.0", "#### 18\n#### 19",
    "the answer is 18", "the answer is $18.", "18, then 19", "18 19", "1,234.50.", "....", "$.,", "-", "--18",
    "#### .", "#### ,.", "", " ", "\n\n#### 18\n", "#### \n18", "#### 18 eggs", "x #### 1 #### 18", "1 8",
    "٣", "#### ١٨", "$18.00", "18%", "-18", "−18", "18 .", "#### 18 .", "#### 18,\n", "#### 18.\n",
]  # fmt: skip


def theirs(arguments, output, target):
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    ((found,),) = RegexFilter(**arguments).apply([[output]], [{}])
    score = exact_match_hf_evaluate(
        [found], [target], regexes_to_ignore=list(IGNORED), ignore_case=True
    )
    return float(score["exact_match"])


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval")


@pytest.mark.parametrize("name", JUDGES)
def test_gsm8k_is_judged_as_by_lm_evaluation_harness(harness, name):
    judge, arguments = JUDGES[name]
    targets = ["She has 16 - 3 = 13\n#### 18", "#### 1,234.50", "#### -18", "18", ""]
    seen = set()

    def agree(output):
        for target in targets:
            ours = judge.judge(output, {}, [target]).value
            assert ours == theirs(arguments, output, target), (output, target)
            seen.add(ours)

    for output in ODD:
        agree(output)
    assert seen == {0.0, 1.0}
    settings(max_examples=200, deadline=None)(
        given(st.text(alphabet="#-$0189., \nx", max_size=30))(agree)
    )()


def test_gsm8k_s_own_solutions_are_right(shared_data, harness):
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        for judge, arguments in JUDGES.values():
            ours = judge.judge(row["answer"], {}, [row["answer"]]).value
            assert ours == theirs(arguments, row["answer"], row["answer"]) == 1.0
        number = NumericMatch(marker="####", which="first")
        assert outcome(number, row["answer"], row["answer"]) == "right"


# --------------------------------------------------------------------------- metrics of `evaluate`


@pytest.fixture(scope="module")
def overlap(tmp_path_factory):
    """Return a maker of judges by the metric beside this file; its copy is kept out of the user's cache."""
    pytest.importorskip("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
            patch.delitem(sys.modules, name)
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        answers._load_metric.cache_clear()
        yield lambda **fields: EvaluateMetric("word_overlap", **fields).relative_to(HERE)
        answers._load_metric.cache_clear()
        for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
            del sys.modules[name]


def test_a_metric_s_figure_is_the_value(overlap):
    metric = overlap(key="overlap")
    judged = metric.judge("one two four", {}, ["one two three", "five", "one six"])
    assert judged.value == pytest.approx(2 / 3)
    assert judged.outcome == "wrong"
    assert outcome(metric, "three two one", "one two three") == "right"
    assert outcome(metric, " ", "one") == "wrong"
    together = overlap(key="overlap", name="many", reference_form="list")
    assert together.judge("one two", {}, ["one three", "two"]).value == 1.0
    assert overlap(key="missing", higher_is_better=False).judge("one", {}, ["one two"]).value == 0.5
    scaled = overlap(key="overlap", arguments={"worth": 100.0}, scale=100.0)
    assert scaled.judge("one", {}, ["one two"]).value == 0.5
    assert scaled.judge("one", {}, ["one"]).outcome == "right"
    assert overlap(key="words", scale=4.0).judge("one two", {}, ["one"]).value == 0.5


@pytest.mark.parametrize(
    ("fields", "output", "says"),
    [
        ({"key": "overlap"}, "crash", "RuntimeError: told to fail"),
        ({"key": "overlap", "arguments": {"worth": 100.0}}, "one", "more than the scale"),
        ({"key": "overlap", "arguments": {"worth": float("nan")}}, "one", "the result is nan"),
        ({}, "one", r"3 numbers under \"any key\" \(overlap, missing, words, kind\): set key"),
        ({"key": "kind"}, "one", "0 numbers"),
        ({"key": "other"}, "one", "0 numbers"),
        ({"key": "overlap", "arguments": {"value": 1}}, "one", "TypeError"),
    ],
)
def test_a_metric_that_fails_is_that_answer_s_error(overlap, fields, output, says):
    judged = overlap(**fields).judge(output, {}, ["one"])
    assert (judged.value, judged.outcome) == (0.0, "error")
    assert pytest.importorskip("re").search(says, judged.detail)
    assert "\n" not in judged.detail


def test_the_metric_s_code_is_fingerprinted_and_its_place_is_not(overlap, tmp_path):
    here = overlap(key="overlap").fingerprint()
    assert here == overlap(key="overlap").fingerprint()
    assert HERE not in str(here)
    json.dumps(here)
    folder = tmp_path / "suite" / "word_overlap"
    folder.mkdir(parents=True)
    text = (Path(__file__).parent / "word_overlap" / "word_overlap.py").read_text(encoding="utf-8")
    (folder / "word_overlap.py").write_text(text + "\nMORE = 1\n", encoding="utf-8")
    there = EvaluateMetric("word_overlap", key="overlap").relative_to(str(folder.parent))
    assert there.fingerprint() != here


def test_what_cannot_be_loaded_is_one_clear_line(overlap, monkeypatch):
    def unreachable(*arguments, **keywords):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("evaluate.load", unreachable)
    with pytest.raises(
        QuantevalError, match=r'"no_such_metric" is no metric module here'
    ) as caught:
        EvaluateMetric("no_such_metric").fingerprint()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="trust_remote_code: true"):
        EvaluateMetric("someone/metric").fingerprint()
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ConfigError, match=r"quanteval\[evaluate\]"):
        EvaluateMetric("another_metric").judge("x", {}, ["x"])


# --------------------------------------------------------------------------- functions


def checker(output, row, least=1):
    """What a suite's own checker looks like."""
    if output == "crash":
        raise KeyError("row")
    if output == "plain":
        return len(output) >= least
    value = {"half": 0.5, "two": 2.0, "nan": float("nan")}[output]
    return {"value": value, "outcome": "partly", "detail": "half of it", "kept": 3, "met": True}


@pytest.fixture
def function(monkeypatch):
    monkeypatch.setattr("quanteval.tasks.answers._checker_of_tests", checker, raising=False)
    return "quanteval.tasks.answers._checker_of_tests"


def test_a_function_judges(function):
    assert outcome(Callable(function), "plain") == "right"
    assert outcome(Callable(function, {"least": 9}), "plain") == "wrong"
    judged = Callable(function).judge("half", {}, [])
    assert (judged.value, judged.outcome, judged.detail) == (0.5, "partly", "half of it")
    assert judged.numbers == {"kept": 3.0, "met": 1.0}
    assert Callable(function).fingerprint() != Callable(function, version="2").fingerprint()


@pytest.mark.parametrize(
    ("output", "says"), [("crash", "KeyError"), ("two", "returned 2.0"), ("nan", "returned nan")]
)
def test_a_function_that_fails_is_that_answer_s_error(function, output, says):
    judged = Callable(function).judge(output, {}, [])
    assert (judged.value, judged.outcome) == (0.0, "error")
    assert says in judged.detail


def test_only_functions_of_allowed_packages_are_called():
    with pytest.raises(ConfigError, match="is not allowed"):
        Callable("os.system").fingerprint()
    with pytest.raises(ConfigError, match="is no function"):
        Callable("quanteval.tasks.answers.RIGHT_FROM").fingerprint()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Match(), Match(ignore_case=True)),
        (Match(), Match(mode="contains")),
        (RegexMatch("a"), RegexMatch("b")),
        (RegexMatch("a"), RegexMatch("a", match=Match(strip=False))),
        (NumericMatch(), NumericMatch(rel_tol=0.1)),
        (NumericMatch(), Match()),
    ],
)
def test_what_matters_is_fingerprinted(one, other):
    assert isinstance(one, Answer)
    assert one.fingerprint() != other.fingerprint()
    json.dumps(one.fingerprint())


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"_target_": "quanteval.tasks.answers.NumericMatch", "rel_tol": -1}, 'rel_tol "-1.0"'),
        ({"_target_": "quanteval.tasks.answers.EvaluateMetric", "path": ""}, 'path ""'),
        ({"_target_": "quanteval.tasks.answers.EvaluateMetric", "path": "x", "scale": 0}, "scale"),
        ({"_target_": "quanteval.tasks.answers.Match", "mode": "near"}, "mode"),
    ],
)
def test_fields_without_sense_are_refused(node, says):
    with pytest.raises(ConfigError, match=says):
        build(node, where="answer")
