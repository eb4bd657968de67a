"""What suites promise: fields that matter are fingerprinted, typos and unusable rows are named, and
a run that was cut short goes on."""

from __future__ import annotations

import dataclasses
import resource
import signal

import pytest
import torch

from quanteval.engines.fake import ByteTokenizer, FakeEngine
from quanteval.errors import ConfigError, EngineError, RecordError
from quanteval.interfaces import Completion, HiddenStates, OutputHead, Sample, TaskContext
from quanteval.records import Artifact, Precision
from quanteval.resources import task_folders
from quanteval.sandbox import Limits
from quanteval.tasks.code import CodeTask, PromptForm
from quanteval.tasks.distributions import Store, compare, save_head
from quanteval.tasks.divergence import DivergenceTask
from quanteval.tasks.loading import Source, load_rows, make_samples
from quanteval.tasks.perplexity import PerplexityTask

SOURCE = Source(jsonl="rows.jsonl")
ARTIFACT = Artifact(
    scheme="fp32", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
    weights_digest="", path="", format="transformers", bytes_on_disk=0, build_s=0.0,
    precision=Precision(
        weight_bits=32, activation_bits=32, weight_format="float32", compute="float", quantized=False
    ),
)  # fmt: skip
PROBLEM = Sample(
    "p0",
    {
        "task_id": "p0",
        "prompt": 'def double(x):\n    """Return twice x."""\n',
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    },
)
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"


def code_task(**fields):
    return CodeTask(name="t", version="1", source=SOURCE, **fields)


def score_of(answer, **fields):
    with FakeEngine(default_answer=answer).serve(ARTIFACT) as session:
        (score,) = code_task(max_tokens=9000, **fields).evaluate(
            session, [PROBLEM], TaskContext(None, None, True)
        )
    return score


# --------------------------------------------------------------------------- suites


@pytest.mark.parametrize("name", sorted(task_folders()))
def test_every_suite_has_a_readme_under_its_own_name(name):
    first = (task_folders()[name] / "README.md").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# {name}"


BASES = {
    "code": code_task(),
    "perplexity": PerplexityTask(name="t", version="1", source=SOURCE),
    "divergence": DivergenceTask(name="t", version="1", source=SOURCE),
}
CHANGES = {
    "code": {
        "version": "2",
        "max_tokens": 99,
        "prompt": PromptForm(instruction="Write {prompt}"),
        "sandbox": Limits(cpu_s=9),
        "format": "mbpp",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
    },
    "perplexity": {
        "version": "2",
        "window": 999,
        "stride": 99,
        "bos": "never",
        "max_tokens_per_document": 99,
        "keep_logprobs": True,
        "text_field": "other",
        "counted_field": "other",
        "mode": "harness",
    },
    "divergence": {
        "version": "2",
        "max_tokens": 99,
        "text_field": "other",
        "greedy_tokens": 9,
        "greedy_prompt_tokens": 9,
    },
}
# Fields that cannot be changed alone; tests/tasks/test_code.py changes them.
ELSEWHERE = {"stop", "samples_per_problem", "language"}
LEFT_OUT = {
    "name": "u",
    "folder": "/elsewhere",
    "description": "x",
    "licence": "x",
    # What they choose is in the digest of the samples.
    "source": Source(hub="a/b"),
    "id_field": "k",
    "limit": 3,
}


@pytest.mark.parametrize("kind", sorted(BASES))
def test_the_fingerprint_has_every_field_that_matters_and_no_other(kind):
    base, samples = BASES[kind], [PROBLEM]
    fields = {f.name for f in dataclasses.fields(base)}
    assert fields == {*CHANGES[kind], *LEFT_OUT, *(ELSEWHERE if kind == "code" else ())}
    before = base.fingerprint(samples)
    for field, value in CHANGES[kind].items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) != before, field
    for field, value in LEFT_OUT.items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) == before, field
    moved = Sample("p1", PROBLEM.data)
    changed = Sample("p0", {**PROBLEM.data, "prompt": "?"})
    assert base.fingerprint([moved]) != before != base.fingerprint([changed])
    assert base.fingerprint([PROBLEM, moved]) != base.fingerprint([moved, PROBLEM])


def test_stop_strings_matter_in_the_raw_form_only():
    for form, matters in (("raw", True), ("chat", False)):
        base = code_task(prompt=PromptForm(form))
        other = dataclasses.replace(base, stop=("\n\n",))
        assert (base.fingerprint([PROBLEM]) != other.fingerprint([PROBLEM])) is matters


# --------------------------------------------------------------------------- code


def test_prompts_are_these_tokens():
    with FakeEngine().serve(ARTIFACT) as session:
        chat = code_task().render(session, PROBLEM)
        raw = code_task(prompt=PromptForm("raw")).render(session, PROBLEM)
        kept = code_task(prompt=PromptForm("raw", strip=False)).render(session, PROBLEM)
    asks = (
        "<user>Complete the following Python function. Reply with the whole function in a code "
        'block.\n\n```python\ndef double(x):\n    """Return twice x."""\n```\n<assistant>'
    )
    assert chat.token_ids == tuple(asks.encode())
    assert raw.token_ids == tuple(b'def double(x):\n    """Return twice x."""')
    assert kept.token_ids == (*raw.token_ids, ord("\n"))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (RIGHT, "passed"),
        ("- So:\n\n  " + RIGHT.replace("\n", "\n  "), "passed"),
        (RIGHT.replace("def ", "from __future__ import annotations\ndef "), "passed"),
        ("```python\n\n    return x + x\n```", "passed"),
        ("```python\ndef double(x):\n    return x\n```", "wrong"),
        ("```python\ndef double(x):\n    return " + " + ".join(["x"] * 1500) + "\n```", "unparsable"),
        ("```python\ndef double(x):\n    return x" + ".y()" * 1500 + "\n```", "unparsable"),
    ],
    ids=["plain", "in a list", "future", "body", "wrong", "endless sum", "endless calls"],
)  # fmt: skip
def test_each_answer_is_scored_and_none_ends_the_task(answer, outcome):
    score = score_of(answer)
    assert score.outcome == outcome
    assert score.value == float(outcome == "passed")
    assert score.status == "ok"


def test_a_stop_string_is_sent_in_the_raw_form_and_cuts_there():
    answer = "\n    return 2 * x\n\nprint(double(1))\n)))"
    assert score_of(answer, prompt=PromptForm("raw")).output == "\n    return 2 * x\n"
    assert score_of(answer, prompt=PromptForm("raw")).outcome == "passed"
    assert score_of(answer).output == answer


# --------------------------------------------------------------------------- loading


def write(folder, text):
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    return load_rows(SOURCE, str(folder))


def test_rows_come_as_they_are_written(tmp_path):
    text = (
        '{"id": "2020-01-01", "text": "2021-05-06T10:00:00"}\n\n{"id": 2, "more": {"a": [1, "é"]}}'
    )
    assert write(tmp_path, text) == [
        {"id": "2020-01-01", "text": "2021-05-06T10:00:00"},
        {"id": 2, "more": {"a": [1, "é"]}},
    ]


def test_a_folder_s_name_is_no_pattern(tmp_path):
    odd = tmp_path / "a[1]*"
    odd.mkdir()
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "rows.jsonl").write_text('{"id": "another"}\n')
    assert write(odd, '{"id": "mine"}\n') == [{"id": "mine"}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"id": 1}\n{"id": ', "line 2 is not JSON"),
        ('{"id": 1}\n[1]\n', "line 2 is no JSON object"),
    ],
)
def test_files_without_usable_rows_are_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        write(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "rows.jsonl" in str(caught.value)


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        load_rows(SOURCE, str(tmp_path))


@pytest.mark.parametrize("row", [{"text": "x"}, {"id": None, "text": "x"}])
def test_a_row_without_an_id_is_named(row):
    with pytest.raises(ConfigError, match='row 0 has no "id"'):
        make_samples([row], "id", None)


@pytest.mark.parametrize("kind", [PerplexityTask, DivergenceTask])
@pytest.mark.parametrize(
    "row", ['{"id": "a"}', '{"id": "a", "text": null}', '{"id": "a", "text": 3}']
)
def test_a_document_without_a_text_is_refused_before_anything_is_scored(tmp_path, kind, row):
    write(tmp_path, row + "\n")
    with pytest.raises(ConfigError, match='sample "a" has no text under "text"'):
        kind(name="t", version="1", source=SOURCE, folder=str(tmp_path)).samples()


def test_arguments_that_a_loader_does_not_take_are_named():
    loader = "quanteval.tasks.loaders.pydoc_topics"
    with pytest.raises(ConfigError, match=r"pydoc_topics.*minimum"):
        load_rows(Source(loader=loader, arguments={"minimum": 1}), "")
    with pytest.raises(ConfigError, match="__doc__"):
        load_rows(Source(loader="quanteval.tasks.loaders.__doc__"), "")


# --------------------------------------------------------------------------- divergence


class Hidden:
    """A session whose hidden states are a table by token; `softcap` and `noise` set it apart."""

    max_context = 1000
    tokenizer = ByteTokenizer()

    def __init__(self, noise=0.0, softcap=None, writes=lambda document: tuple(b"same text")):
        torch.manual_seed(0)
        self.writes = writes
        self.table, self.noise = torch.randn(260, 8), noise
        self.head = OutputHead(torch.randn(50, 8), torch.randn(50), softcap)
        self.asked: list[str] = []

    def output_head(self):
        return self.head

    def hidden_states(self, requests):
        for request in requests:
            self.asked.append(request.request_id)
            rows = self.table[list(request.token_ids[:-1])]
            yield HiddenStates(request.request_id, rows + self.noise)

    def generate(self, requests):
        for request in requests:
            assert request.sampling.temperature == 0
            ids = self.writes(request.request_id.split()[0])[: request.sampling.max_tokens]
            yield Completion(request.request_id, self.tokenizer.decode(ids), ids, "stop")


SUITE = DivergenceTask(name="t", version="1", source=SOURCE)
DOCUMENTS = [Sample(f"d{i}", {"text": f"text number {i}"}) for i in range(4)]


def diverge(session, samples, place, *, is_baseline):
    context = TaskContext(place / "cand", place / "base", is_baseline)
    return list(SUITE.evaluate(session, samples, context))


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_a_baseline_that_was_cut_short_goes_on(tmp_path, softcap):
    diverge(Hidden(softcap=softcap), DOCUMENTS[:2], tmp_path, is_baseline=True)
    with pytest.raises(ConfigError, match="run the baseline with this task first"):
        diverge(Hidden(0.1, softcap), DOCUMENTS, tmp_path, is_baseline=False)
    rest = Hidden(softcap=softcap)
    diverge(rest, DOCUMENTS[2:], tmp_path, is_baseline=True)
    assert rest.asked == ["d2", "d3"]
    # Stored and read back, head, bias and softcap give what they give in memory.
    candidate = Hidden(0.1, softcap)
    for sample, score in zip(
        DOCUMENTS, diverge(candidate, DOCUMENTS, tmp_path, is_baseline=False), strict=True
    ):
        rows = candidate.table[list(sample.data["text"].encode()[:-1])]
        kl, agree = compare(candidate.head, rows, candidate.head, rows + 0.1)
        assert score.series["kl"] == kl
        assert score.numbers["top1_agree"] == agree
        assert score.value > 0


def test_the_same_model_again_has_no_divergence_at_all(tmp_path):
    diverge(Hidden(), DOCUMENTS, tmp_path, is_baseline=True)
    again = diverge(Hidden(), DOCUMENTS, tmp_path, is_baseline=False)
    assert [s.value for s in again] == [0.0] * 4
    assert [s.numbers["top1_agree"] for s in again] == [s.weight for s in again]


def test_the_first_diverging_token_of_what_both_write(tmp_path):
    diverge(Hidden(), DOCUMENTS, tmp_path, is_baseline=True)
    texts = {"d0": b"same text", "d1": b"same tent", "d2": b"same", "d3": b"same text and more"}
    candidate = Hidden(writes=lambda document: tuple(texts[document]))
    scores = diverge(candidate, DOCUMENTS, tmp_path, is_baseline=False)
    assert [(s.numbers["greedy_same"], s.numbers["first_divergence"]) for s in scores] == [
        (1.0, 9.0), (0.0, 7.0), (0.0, 4.0), (0.0, 9.0),
    ]  # fmt: skip
    assert [(s.output, s.output_tokens) for s in scores] == [
        (text.decode(), len(text)) for text in texts.values()
    ]


def test_greedy_continuations_begin_with_the_documents_first_tokens(tmp_path):
    asked = []

    class Spy(Hidden):
        def generate(self, requests):
            requests = list(requests)
            asked.extend(requests)
            return super().generate(requests)

    suite = dataclasses.replace(SUITE, greedy_prompt_tokens=4, greedy_tokens=3)
    session = Spy()
    session.tokenizer = ByteTokenizer(add_bos=True)
    context = TaskContext(tmp_path, tmp_path, True)
    scores = list(suite.evaluate(session, DOCUMENTS[:1], context))
    (request,) = asked
    assert request.prompt.token_ids == (257, *b"text")
    assert request.prompt.text == "text"
    assert request.sampling.max_tokens == 3
    assert scores[0].output == "sam"
    without = dataclasses.replace(SUITE, greedy_tokens=0)
    (score,) = without.evaluate(
        Spy(), DOCUMENTS[:1], TaskContext(tmp_path / "b", tmp_path / "b", True)
    )
    assert (score.output, score.output_tokens) == (None, 0)
    assert "greedy_same" not in score.numbers
    assert len(asked) == 1


def test_a_continuation_that_failed_is_an_error(tmp_path):
    class Broken(Hidden):
        def generate(self, requests):
            for request in requests:
                yield Completion(request.request_id, "", (), "error", "out of pages")

    scores = diverge(Broken(), DOCUMENTS[:2], tmp_path, is_baseline=True)
    assert [(s.status, s.detail) for s in scores] == [("error", "out of pages")] * 2


def test_ids_that_differ_are_named_with_their_sample(tmp_path):
    diverge(Hidden(), DOCUMENTS, tmp_path, is_baseline=True)
    other = [*DOCUMENTS[:2], Sample("d2", {"text": "something else"})]
    with pytest.raises(EngineError, match='"d2": baseline and candidate have different token ids'):
        diverge(Hidden(), other, tmp_path, is_baseline=False)


def test_nan_and_what_the_candidate_excludes_are_errors_with_their_place(tmp_path):
    diverge(Hidden(), DOCUMENTS[:1], tmp_path, is_baseline=True)
    for value, says in ((float("nan"), "KL nan at token 0"), (float("-inf"), "KL inf at token 0")):
        broken = Hidden()
        bias = broken.head.bias.clone()
        bias[7] = value
        broken.head = dataclasses.replace(broken.head, bias=bias)
        (score,) = diverge(broken, DOCUMENTS[:1], tmp_path, is_baseline=False)
        assert (score.status, score.detail) == ("error", says)


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(RecordError, match=r'cannot write ".*head"'):
            save_head(Store(tmp_path), OutputHead(torch.zeros(100, 100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
