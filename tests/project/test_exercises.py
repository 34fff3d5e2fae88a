"""The tutorial's exercises: the tests of each pass with its solution, and fail as it is shipped and with mistakes."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT

EXERCISES = sorted((ROOT / "docs/course/exercises").glob("*.py"))
MISTAKES = YAML(typ="safe").load(Path(__file__).with_name("mistakes.yaml"))


def count_outcomes(answers, folder):
    """Run the tests of all answers, {name: text}, in one process; return how many of each passed and failed."""
    for name, text in answers.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
    paths, report = [folder / f"{name}.py" for name in answers], folder / "report.xml"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, paths)], check=False, cwd=ROOT)
    outcomes = {name: Counter() for name in answers}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2]
        outcomes[name]["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return outcomes


def solve(exercise, solution):
    """Return the exercise's text with each function and class of the solution instead of its own."""
    solved = {node.name: node for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = exercise.splitlines()
    for node in reversed(ast.parse(exercise).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in solved:
            first = min(part.lineno for part in [*node.decorator_list, node])
            lines[first - 1 : node.end_lineno] = ast.unparse(solved.pop(node.name)).splitlines()
    assert not solved, f"the exercise has no {', '.join(solved)}"
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_only_the_solution_passes(path, tmp_path):
    exercise, solution = path.read_text("utf-8"), (path.parent / "solutions" / path.name).read_text("utf-8")
    answers = {"blank": exercise, "solved": solve(exercise, solution)}
    assert "raise NotImplementedError" not in answers["solved"]
    for number, (part, mistake) in enumerate(MISTAKES[path.stem]):
        assert part in solution, f"the solution of {path.name} has no {part!r}"
        answers[f"mistake_{number}"] = solve(exercise, solution.replace(part, mistake))
    outcomes = count_outcomes(answers, tmp_path)
    assert outcomes.pop("solved") == {"passed": outcomes["blank"].total()}
    assert not [name for name, counts in outcomes.items() if not counts["failed"]]


def test_every_exercise_is_listed():
    assert len(EXERCISES) >= 8
    listed = (ROOT / "docs/course/exercises/README.md").read_text("utf-8")
    assert all(f"[{path.name}]({path.name})" in listed for path in EXERCISES)
