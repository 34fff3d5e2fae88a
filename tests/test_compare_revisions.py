"""The comparison of two revisions finds a changed bit, and no difference if nothing changed."""

import subprocess
import sys

import pytest
import torch

from tests.compare_revisions import DIFFERENT, EQUAL, NOT_COMPARED, differences
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_changed_learning_rate_is_found_and_a_revision_that_cannot_train_is_skipped(tmp_path):
    """In a separate repository with the files of this one, in one commit."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=tmp_path, input=archive.stdout, check=True)
    for command in ("init -q", "add .", "-c user.name=x -c user.email=x@x commit -qm all"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)

    def compare():
        command = [sys.executable, "tests/compare_revisions.py", "HEAD", "--runs", "average"]
        return subprocess.run(command, cwd=tmp_path, check=False).returncode

    assert compare() == EQUAL
    with (tmp_path / "utils/training/optimizers/schedule.py").open("a") as schedule:
        schedule.write("\n\nSchedule.factor = lambda *_: 0.5  # type: ignore\n")
    assert compare() == DIFFERENT
    (tmp_path / "train.py").write_text("raise SystemExit(1)\n")
    assert compare() == NOT_COMPARED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.5])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
    ],
)
def test_each_kind_of_difference_is_named(first, second):
    assert list(differences({"x": first}, {"x": second}, ""))
    assert not list(differences({"x": first}, {"x": first}, ""))
