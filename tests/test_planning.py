"""`quanteval plan`: facts from stored runs, forecasts of whole policies, and how they are shown."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from quanteval.config import compose, make_plan
from quanteval.errors import ConfigError
from quanteval.evidence import SuiteFacts
from quanteval.planning import (
    Seen,
    Suite,
    plan,
    plan_text,
    planning_of,
    suite_facts,
    suites_of,
)
from quanteval.policy import load_policy
from quanteval.records import Manifest, Score, TaskRecord
from quanteval.report.planning import planning_text
from quanteval.report.text import WIDTH
from quanteval.stats import accept_probability, log_perplexity_ratio
from quanteval.store import RunDirectory, file_sha256, write_atomic, write_record
from tests.gate import evidence as make

CODE = {
    "_target_": "quanteval.rules.non_inferiority.NonInferiority",
    "kind": "code",
    "margin": "5 points",
}


def policy(**rules):
    more = rules.pop("more", {})
    return load_policy({"name": "mine", "rules": {"code": CODE, **rules}, **more})


def flipped(n, broken, fixed):
    """Return a baseline that solves half, and a variant with so many lost and gained."""
    x = (np.arange(n) < n // 2).astype(float)
    y = x.copy()
    y[:broken] = 0
    y[n - fixed :] = 1
    return x, y


def learn(candidates, again=None, n=100, **more):
    """Return the facts of a task with these (broken, fixed) seen in a run."""
    seen = Seen(
        "before",
        make.scores(values=flipped(n, 0, 0)[0]),
        tuple(make.scores(values=flipped(n, *change)[1]) for change in candidates),
        None if again is None else make.scores(values=flipped(n, *again)[1]),
    )
    suite = Suite("code", tuple(f"s{i}" for i in range(n)))
    return suite_facts({"code": suite}, {"code": seen}, **more)["code"]


# --------------------------------------------------------------------------- facts


def test_without_a_run_flips_are_assumed_or_given():
    suites = {"code": Suite("code", ("a", "b")), "prose": Suite("perplexity", ("a",) * 12)}
    facts = suite_facts(suites, {})
    assert (facts["code"].n, facts["code"].flip_rate, facts["code"].source) == (2, 0.05, "assumed")
    assert facts["prose"].spread is None
    assert suite_facts(suites, {}, 0.1)["code"].source == "given"


def test_flips_are_those_of_candidates_that_were_not_shown_to_be_worse():
    found = learn([(4, 4), (2, 4), (40, 0), (10, 10)])
    assert found.score == 0.5
    assert found.flip_rate == pytest.approx(0.08)
    assert found.source == "median of 3 candidates without 1 that lost in before"
    assert learn([(1, 3), (15, 12)]).flip_rate == pytest.approx(0.04), "the smaller of two"


def test_the_repeated_baseline_is_the_least_that_can_flip():
    assert learn([(4, 4)], again=(1, 1)).flip_rate == pytest.approx(0.08)
    noisy = learn([(1, 1)], again=(4, 4))
    assert noisy.flip_rate == pytest.approx(0.08)
    assert noisy.source == "repeated baseline of before"
    assert learn([(40, 0)], again=(3, 3)).flip_rate == pytest.approx(0.06)
    assert learn([(40, 0)]).source == "assumed"


def test_no_flip_seen_counts_as_half_a_flip_and_what_is_given_wins():
    assert learn([(0, 0)]).flip_rate == pytest.approx(0.005)
    given = learn([(4, 4)], flips=0.2)
    assert (given.flip_rate, given.source, given.score) == (0.2, "given", 0.5)


def test_several_samples_of_a_problem_are_one_unit_and_worth_less_than_a_flip():
    x = make.scores(values=[1, 1, 0, 0], problem_ids=("p", "p", "q", "q"))
    y = make.scores(values=[1, 0, 0, 0], problem_ids=("p", "p", "q", "q"))
    suite = Suite("code", ("s0", "s1", "s2", "s3", "s4", "s5"))
    found = suite_facts({"code": suite}, {"code": Seen("before", x, (y,))})["code"]
    assert found.n == 3
    assert found.score == 0.5
    assert found.flip_rate == pytest.approx(0.25 / 2)


def test_the_spread_of_perplexities_is_scaled_to_the_documents_planned():
    rng = np.random.default_rng(1)
    x = 300 + rng.normal(0, 20, 16)
    y = x + rng.normal(1, 3, 16)
    seen = Seen("before", make.perplexity(x), (make.perplexity(y),))
    suite = Suite("perplexity", tuple(f"s{i}" for i in range(64)))
    found = suite_facts({"prose": suite}, {"prose": seen})["prose"]
    se = log_perplexity_ratio(x, y, np.full(16, 100.0)).se
    assert found.spread == pytest.approx(se / 2)
    assert found.source == "candidate in before"


def test_scores_that_cannot_be_used_teach_nothing():
    odd = make.scores(values=[math.nan, 1.0])
    suite = {"code": Suite("code", ("s0", "s1"))}
    assert suite_facts(suite, {"code": Seen("before", odd, (odd,))})["code"].source == "assumed"
    short = make.scores(values=[1.0])
    good = make.scores(values=[1.0, 0.0])
    assert suite_facts(suite, {"code": Seen("before", good, (short,))})["code"].source == "assumed"


# --------------------------------------------------------------------------- policies


def test_all_required_rules_together_are_the_product_and_advisory_ones_do_not_count():
    facts = {"a": SuiteFacts("a", "code", 164), "b": SuiteFacts("b", "code", 500)}
    loose = {**CODE, "margin": "10 points", "task": "a", "kind": None, "required": False}
    found = planning_of(policy(loose=loose), facts, "cpu")
    one, other = (accept_probability(n, 0.05, 0, 0.05) for n in (164, 500))
    assert found.together.accept_harmless == pytest.approx(one * other)
    assert found.together.counted == ("code on a", "code on b")
    assert found.together.shared == ()
    assert found.required == (True, True, False)


def test_rules_on_one_task_depend_on_each_other():
    facts = {"a": SuiteFacts("a", "code", 164)}
    found = planning_of(policy(loose={**CODE, "margin": "6 points"}), facts, "cpu")
    chances = [f.accept_harmless for f in found.forecasts]
    assert found.together.shared == ("a",)
    assert found.together.accept_harmless == pytest.approx(math.prod(chances))
    assert found.together.at_most == min(chances)
    assert "to 81.3 % of runs (rules that share a depend" in " ".join(planning_text(found).split())


def test_what_has_nothing_to_check_or_to_plan_is_said():
    facts = {"humaneval": SuiteFacts("humaneval", "code", 164)}
    ratio = {"_target_": "quanteval.rules.perplexity.PerplexityRatio", "max_ratio": 1.02}
    found = planning_of(
        policy(
            prose={**ratio, "kind": "perplexity"},
            gone={**ratio, "task": "humanevall", "required": False},
            ran={"_target_": "quanteval.rules.guards.EffectivePrecision"},
        ),
        facts,
        "cpu",
    )
    assert found.unplanned == ("ran",)
    assert found.warnings == (
        'prose: has nothing to check, no task of kind "perplexity" is chosen',
        'gone: no task "humanevall" is chosen; did you mean "humaneval"?',
    )
    pooled = {
        "_target_": "quanteval.rules.pooled.Pooled",
        "kind": "code",
        "margin": "5 points",
        "weights": {"a": 1},
    }
    odd = planning_of(policy(pooled=pooled), facts, "cpu")
    assert odd.warnings == ("pooled: nothing can be said of it on these tasks",)
    none = planning_of(policy(), {"p": SuiteFacts("p", "perplexity", 60)}, "cpu")
    assert none.together is None
    assert none.warnings[-1] == "can accept nothing: no required quality rule has a task here"
    assert "nothing is known of them yet" not in planning_text(none)


def test_waivers_devices_and_early_stops_are_heeded():
    waiver = {"rule": "loose", "owner": "me", "reason": "known", "until": "2999-01-01"}
    more = {
        "waivers": [waiver],
        "sequential": True,
        "devices": {"cuda": {"rules": {"code": {"margin": "9 points"}}}},
    }
    facts = {"a": SuiteFacts("a", "code", 164)}
    mine = policy(loose={**CODE, "margin": "1 point"}, more=more)
    found = planning_of(mine, facts, "cuda")
    assert found.together.counted == ("code on a",)
    assert [f.margin for f in found.forecasts] == ["9 points", "1 point"]
    assert any("5 looks" in note for note in found.notes)
    assert any("waived by me" in note for note in found.notes)


# --------------------------------------------------------------------------- stored runs


ARGUMENTS = [
    "engine=fake",
    "scheme=[fp32,bf16]",
    "task=[pyeasy]",
    "bench=none",
    "task.pyeasy.limit=80",
]


def store(root, name, changes, *, limit=80, **config):
    """Write a run of pyeasy's first problems: the baseline solves half, the variants differ by (broken, fixed)."""
    chosen = make_plan(compose([*ARGUMENTS, f"task.pyeasy.limit={limit}"]))
    task = chosen.tasks["pyeasy"].object
    samples = task.samples()
    run = RunDirectory(root / name)
    for variant, change in changes.items():
        lines = [
            Score(
                sample_id=sample.sample_id, prompt_sha256="p", value=value, weight=1, status="ok",
                finish_reason="stop", output_tokens=3,
            ).model_dump_json()
            for sample, value in zip(samples, flipped(len(samples), *change)[1], strict=True)
        ]  # fmt: skip
        folder = run.variant(variant)
        write_atomic(folder.scores("pyeasy"), "\n".join(lines) + "\n")
        record = TaskRecord(
            task="pyeasy", kind="code", suite_version=task.version, fingerprint="f",
            inputs=task.fingerprint(samples), status="complete", samples_expected=len(samples),
            journal_sha256=file_sha256(folder.scores("pyeasy")),
        )  # fmt: skip
        write_record(folder.task_record("pyeasy"), record)
    manifest = Manifest(
        run_id=name, created_at="", command=[], config={**chosen.config, **config},
        baseline="fp32", variants=[v for v in changes if v != "again"], tasks=["pyeasy"],
        again="again" if "again" in changes else "", policy_name="", policy={}, environment={}, fingerprint="",
    )  # fmt: skip
    write_record(run.manifest, manifest)
    return run


def planned(root, *more, **options):
    (suite,) = plan([*ARGUMENTS, f"output_root={root}", *more], **options).suites
    return suite


def test_the_newest_run_of_the_same_suite_model_and_engine_is_used(tmp_path):
    store(tmp_path, "old", {"fp32": (0, 0), "bf16": (10, 10)})
    newest = store(tmp_path, "new", {"fp32": (0, 0), "bf16": (4, 4)})
    other = store(tmp_path, "other", {"fp32": (0, 0), "bf16": (1, 1)}, model="other")
    for time, run in ((1, tmp_path / "old"), (2, newest.path), (3, other.path)):
        os.utime(run / "manifest.json", (time, time))
    suite = planned(tmp_path)
    assert (suite.n, suite.score, suite.flip_rate) == (80, 0.5, 0.1)
    assert suite.source == "candidate in new"
    assert planned(tmp_path, run="old").flip_rate == 0.25
    assert planned(tmp_path, run="other").source == "candidate in other"
    with pytest.raises(ConfigError, match='no run "olf"'):
        planned(tmp_path, run="olf")


def test_a_run_of_fewer_or_more_of_the_same_samples_tells_too(tmp_path):
    store(tmp_path, "small", {"fp32": (0, 0), "bf16": (2, 2), "again": (0, 1)}, limit=40)
    assert planned(tmp_path).flip_rate == 0.1
    assert planned(tmp_path, "task.pyeasy.limit=20").flip_rate == 0.1
    assert planned(tmp_path, "task.pyeasy.limit=20").n == 20


def test_changed_data_are_another_suite(tmp_path):
    run = store(tmp_path, "edited", {"fp32": (0, 0), "bf16": (4, 4)})
    path = run.variant("fp32").task_record("pyeasy")
    record = json.loads(path.read_text())
    record["inputs"]["data"] = "other"
    path.write_text(json.dumps(record))
    assert planned(tmp_path).source == "assumed"
    found = plan([*ARGUMENTS, f"output_root={tmp_path}"], run="edited")
    assert found.notes == ('run "edited" has no complete scores of pyeasy with these samples',)


@pytest.mark.parametrize("what", ["manifest", "record", "journal"])
def test_a_torn_run_is_ignored_and_the_next_one_is_taken(tmp_path, what):
    store(tmp_path, "whole", {"fp32": (0, 0), "bf16": (4, 4)})
    torn = store(tmp_path, "torn", {"fp32": (0, 0), "bf16": (1, 1)})
    path = {
        "manifest": torn.manifest,
        "record": torn.variant("bf16").task_record("pyeasy"),
        "journal": torn.variant("bf16").scores("pyeasy"),
    }[what]
    path.write_bytes(path.read_bytes()[:-30])
    os.utime(tmp_path / "whole" / "manifest.json", (1, 1))
    found = plan([*ARGUMENTS, f"output_root={tmp_path}"])
    assert found.suites[0].source == "candidate in whole"
    (note,) = found.notes
    assert "torn" in note
    assert "was ignored" in note
    named = plan([*ARGUMENTS, f"output_root={tmp_path}"], run="torn")
    assert named.suites[0].source == "assumed"
    assert len(named.notes) == 1


# --------------------------------------------------------------------------- what is printed


def test_the_text_has_units_fits_the_terminal_and_agrees_with_the_json(tmp_path):
    arguments = ["gate=strict", "task=[pyeasy,pydoc]", f"output_root={tmp_path}"]
    text = plan_text(arguments, flips=0.08)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "pyeasy: 164 problems, baseline's score not known, 8.0 % flips (given)" in text
    assert "  smallest margin certified" in text
    assert " points\n" in text
    assert "perplexity: pydoc (60 documents), margin ratio 1.01" in text
    found = json.loads(plan_text(arguments, flips=0.08, as_json=True))
    assert found["power"] == 0.8
    assert {f["rule"] for f in found["forecasts"]} == {"code_together", "code", "perplexity"}
    assert all("required" in f for f in found["forecasts"])
    assert 0 < found["together"]["accept_harmless"] <= found["together"]["at_most"] < 1


def test_relative_margins_and_ratios_are_in_their_own_unit():
    facts = {
        "a": SuiteFacts("a", "code", 2000, 0.5),
        "p": SuiteFacts("p", "perplexity", 60, spread=0.001, source="candidate in x"),
    }
    ratio = {
        "_target_": "quanteval.rules.perplexity.PerplexityRatio",
        "max_ratio": 1.02,
        "kind": "perplexity",
    }
    mine = policy(share={**CODE, "margin": "5 % of baseline"}, prose=ratio)
    text = planning_text(planning_of(mine, facts, "cpu"))
    assert " % of baseline\n" in text
    assert "ratio 1.002" in text
    assert "documents needed at this margin about 10" in " ".join(text.split())
    hostile = planning_of(mine, {"a": replace(facts["a"], source="\x1b[2J\nx")}, "cpu")
    assert "\x1b" not in planning_text(hostile)


@pytest.mark.parametrize("flips", [-0.1, 5.0, math.nan])
def test_flips_must_be_a_share(flips):
    with pytest.raises(ConfigError, match="must be a share from 0 to 1"):
        plan([], flips=flips)


def test_wrong_overrides_are_the_users_errors(tmp_path):
    with pytest.raises(ConfigError, match="no task"):
        plan(["task=[nowhere]", f"output_root={tmp_path}"])


def test_sizes_are_those_of_the_configuration():
    chosen = make_plan(compose(["task=[pyeasy,pydoc]", "task.pyeasy.limit=7"]))
    sizes = {name: len(suite.sample_ids) for name, suite in suites_of(chosen).items()}
    assert sizes == {"pyeasy": 7, "pydoc": 60}


def test_planning_loads_no_model_library(tmp_path):
    code = (
        "import sys\nfrom quanteval.planning import plan_text\n"
        "plan_text(['task=[pyeasy,pydoc,divergence_pydoc]'])\n"
        "loaded = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
