"""The tutorial's exercises: the tests of each fail as it is shipped, and pass with its solution."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT

EXERCISES = sorted((ROOT / "exercises").glob("*.py"))
BLANK = "raise NotImplementedError"
Outcomes = dict[str, Counter[str]]  # by exercise: how many tests passed and failed


def run_tests(paths: Sequence[Path], folder: Path) -> Outcomes:
    report = folder / "report.xml"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, paths)], check=False, cwd=ROOT)
    outcomes: Outcomes = {path.stem: Counter() for path in paths}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2]
        outcomes[name]["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return outcomes


def solve(exercise: str, solution: str) -> str:
    """Return the exercise's text with each function and class of the solution instead of its own."""
    solved = {node.name: node for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = exercise.splitlines()
    for node in reversed(ast.parse(exercise).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in solved:
            first = min(part.lineno for part in [*node.decorator_list, node])
            lines[first - 1 : node.end_lineno] = ast.unparse(solved.pop(node.name)).splitlines()
    assert not solved, f"the exercise has no {', '.join(solved)}"
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def as_shipped(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_tests(EXERCISES, tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("solved")
    for path in EXERCISES:
        text = solve(path.read_text("utf-8"), (path.parent / "solutions" / path.name).read_text("utf-8"))
        assert BLANK not in text
        (folder / path.name).write_text(text, "utf-8")
    return run_tests([folder / path.name for path in EXERCISES], folder)


@pytest.mark.parametrize("name", [path.stem for path in EXERCISES])
def test_the_blank_fails_and_the_solution_passes(name: str, as_shipped: Outcomes, solved: Outcomes) -> None:
    assert as_shipped[name]["failed"] >= 1
    assert solved[name]["passed"] == as_shipped[name].total() and not solved[name]["failed"]


def test_every_exercise_is_listed() -> None:
    assert len(EXERCISES) >= 8
    listed = (ROOT / "exercises/README.md").read_text("utf-8")
    assert all(f"[{path.name}]({path.name})" in listed for path in EXERCISES)
