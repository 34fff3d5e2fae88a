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
SOLUTIONS = ROOT / "exercises/solutions"
BLANK = "raise NotImplementedError"


def count_outcomes(paths: Sequence[Path], folder: Path) -> dict[str, Counter[str]]:
    """Run the tests of all files in one process; return how many tests of each file passed and failed."""
    report = folder / "report.xml"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, paths)],
        check=False,
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    print(done.stdout[-10_000:], done.stderr)
    outcomes: dict[str, Counter[str]] = {path.stem: Counter() for path in paths}
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


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_the_blank_fails_and_the_solution_passes(path: Path, tmp_path: Path) -> None:
    shipped, solved = tmp_path / path.name, tmp_path / f"{path.stem}_solved.py"
    shipped.write_text(path.read_text("utf-8"), "utf-8")
    solved.write_text(solve(shipped.read_text("utf-8"), (SOLUTIONS / path.name).read_text("utf-8")), "utf-8")
    assert BLANK not in solved.read_text("utf-8")

    outcomes = count_outcomes([shipped, solved], tmp_path)
    assert outcomes[shipped.stem]["failed"] >= 1
    assert outcomes[solved.stem] == {"passed": outcomes[shipped.stem].total()}


def test_every_exercise_is_listed() -> None:
    assert len(EXERCISES) >= 8
    listed = (ROOT / "exercises/README.md").read_text("utf-8")
    assert all(f"[{path.name}]({path.name})" in listed for path in EXERCISES)
