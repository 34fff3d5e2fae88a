"""examples/reframe/node.py, run by ReFrame (extra `reframe`) on its generic system."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import make_command, without_launcher

pytest.importorskip("reframe", reason='ReFrame is not installed: pip install ".[reframe]"')
SMALL = "Ladder.options=--configs=quickstart --iters=2 --trials=1 --set=batch_size=32"


def reframe(folder, *options):
    """Run the checks with ReFrame's files in `folder`; return the output."""
    script = Path(sysconfig.get_path("scripts"), "reframe")
    command = [str(script), "-c", str(ROOT / "examples/reframe/node.py"), "-r", f"--prefix={folder}", "--nocolor"]
    environment = without_launcher(os.environ) | {"HOME": str(folder), "TMPDIR": str(folder)}
    ended = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(("check", "prints", "outcome"), [
    ("Doctor", "echo 'ok    torch  found'; echo 'ok: 1 ok, 0 warn, 0 fail'", "PASSED"),
    ("Doctor", "echo 'warn  cores  few'; echo 'warn: 0 ok, 1 warn, 0 fail'; exit 1", "PASSED"),
    ("Doctor", "echo 'fail  data  none'; echo 'fail: 0 ok, 0 warn, 1 fail'; exit 2", "pattern '^fail' found"),
    ("Doctor", "exit 1", "not found in 'rfm_job.out'"), ("Ladder", "exit 1", "the ladder has written no report"),
    ("Ladder", """echo '{"results": {"rungs": {"quickstart": {"full": {"median": 5}}}}}' >ladder.json""", "5 images/s"),
])  # fmt: skip
def test_what_the_command_prints_decides(check, prints, outcome, tmp_path):
    make_command(tmp_path, "python", prints)
    output = reframe(tmp_path, "-n", check, "-S", f"{check}.executable={tmp_path}/python")
    assert outcome in output
    assert ("PASSED" in output) == (outcome == "PASSED")


@pytest.mark.slow
def test_both_checks_run_on_this_machine(tmp_path):
    output = reframe(tmp_path, "--exec-policy=serial", "-S", SMALL)
    assert "Ran 2/2 test case(s) from 2 check(s) (0 failure(s)" in output, output
    assert "P: quickstart: " in output
