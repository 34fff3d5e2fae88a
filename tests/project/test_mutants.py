"""The mutation test distinguishes killed, surviving, stale and untested mutants."""

import subprocess

import pytest

from tests.mutants import __main__ as driver
from tests.mutants.__main__ import HERE, ROOT, main, read_mutants

TABLE = """\
sums.py:
- {name: adds one more, old: return 1 + 1, new: return 1 + 2, tests: check_sums.py, k: right}
- {name: survives, old: return 2 + 2, new: return 2 + 3, tests: check_sums.py, k: right}
- {name: is stale, old: return 9, new: return 8, tests: check_sums.py, k: right}
- {name: has no test, old: return 1 + 1, new: return 1 + 2, tests: check_sums.py, k: nothing}
- {name: has a test that fails anyway, old: return 1 + 1, new: return 1 + 2, tests: check_wrong.py}
- {name: is not asked for, old: return 1 + 1, new: return 1 + 2, tests: check_sums.py}
"""
FILES = {
    "sums.py": "def two():\n    return 1 + 1\n\n\ndef four():\n    return 2 + 2\n",
    "check_sums.py": "import sums\n\n\ndef test_right():\n    assert sums.two() == 2\n",
    "check_wrong.py": "def test_wrong():\n    assert False\n",
    "pytest.ini": "[pytest]\npython_files = check_*.py\n",
}
MUTANTS = read_mutants(HERE)


def test_each_state_is_reported(tmp_path, capsys):
    tables, tree = tmp_path / "tables", tmp_path / "tree"
    for folder, files in ((tables, {"sums.yaml": TABLE}), (tree, FILES)):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    for command in ("git init -q", "git add ."):
        subprocess.run(command.split(), cwd=tree, check=True)
    assert main(["--only", "adds", "surv", "stale", "no test", "fails anyway"], tables, tree) == 2
    *lines, score = capsys.readouterr().out.splitlines()
    states = {line.split(": ")[1].split(" (")[0]: line.split()[0] for line in lines}
    assert states == {
        "adds one more": "killed", "survives": "survived", "is stale": "stale", "has no test": "untested",
        "has a test that fails anyway": "untested"}  # fmt: skip
    assert score.startswith("sums: 1 of 5 killed")
    assert (tree / "sums.py").read_text() == FILES["sums.py"]


@pytest.mark.parametrize(("states", "status"), [(["killed"] * 2, 0), (["killed", "survived"], 1)])
def test_only_a_survivor_and_a_mutant_without_a_test_fail(monkeypatch, states, status):
    monkeypatch.setattr(driver, "run_all", lambda *_: states)
    monkeypatch.setattr(driver, "read_mutants", lambda _: [{"table": "sums"}] * 2)
    assert main([]) == status


def test_no_mutant_is_stale():
    counts = [((ROOT / mutant["file"]).read_text("utf-8").count(mutant["old"]), mutant["name"]) for mutant in MUTANTS]
    assert [name for count, name in counts if count != 1] == []
