"""tools.chaos: what it draws, that it finds out what goes wrong, and a small campaign."""

import time

import pytest

from tests.conftest import ROOT
from tools.attempts import Job
from tools.chaos.__main__ import EPOCHS, MOST_FAULTS, STEPS_PER_EPOCH, main, meet_faults
from tools.chaos.faults import KINDS, Fault, decode, draw, encode

STEPS = EPOCHS * STEPS_PER_EPOCH

# A run that meets its fault and ends as it is told, with these words; the next start finds it finished.
PROGRAM = """
import json, os, pathlib, sys
(folder,) = [pathlib.Path(word.split("=")[1]) for word in sys.argv if word.startswith("--run-dir=")]
folder.mkdir(exist_ok=True)
with (folder / "metrics.jsonl").open("a") as metrics:
    for kind in ["start", "end"]:
        metrics.write(json.dumps({"kind": kind}) + "\\n")
print("chaos: USR1, rank 0, step 7.")
print(os.environ["SAID"])
sys.exit(int(os.environ["STATUS"]))
"""


def test_the_same_seed_and_number_draw_the_same_and_all_kinds_come():
    drawn = [draw(3, number, STEPS, 2, MOST_FAULTS) for number in range(300)]
    assert drawn == [draw(3, number, STEPS, 2, MOST_FAULTS) for number in range(300)]
    assert {fault.kind for starts in drawn for faults in starts for fault in faults} == KINDS.keys()
    for starts in drawn:
        steps = [fault.step for faults in starts for fault in faults]
        assert steps == sorted(set(steps)) and 1 <= len(steps) <= MOST_FAULTS
        assert not any(KINDS[fault.kind].statuses for faults in starts for fault in faults[:-1])
        assert not any(KINDS[fault.kind].before for fault in starts[0])
        assert not starts[-1] or not KINDS[starts[-1][-1].kind].statuses
    assert decode(encode(drawn[0][0])) == drawn[0][0]


@pytest.mark.parametrize(
    ("status", "said", "wrong"),
    [
        (75, "stopped on SIGUSR1 in epoch 1", []),
        (1, "stopped on SIGUSR1 in epoch 1", ["status 1 after ['USR1'], expected (75,)"]),
        (75, "stopped", ["USR1 is not named ('stopped on SIGUSR1')"]),
        (75, "stopped on SIGUSR1\nerror: one\nerror: two", ["several messages: ['error: one', 'error: two']"]),
    ],
)
def test_an_end_that_is_not_the_expected_one_is_found_out(tmp_path, status, said, wrong):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"STATUS": str(status), "SAID": said}
    job = Job([], 1, 60, time.monotonic() + 60, program, environment)
    met, found = meet_faults(job, [[Fault("USR1", 7, 0)]], tmp_path / "run")
    assert [problem.split(":")[0] for problem in found] == [problem.split(":")[0] for problem in wrong]
    assert [(fault.kind, named) for fault, named in met] == [("USR1", "SIGUSR1" in said)]


def test_a_start_that_left_no_record_is_found_out(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('"start", "end"', '"start", "start", "end"'))
    job = Job([], 1, 60, time.monotonic() + 60, program, {"STATUS": "75", "SAID": "stopped on SIGUSR1"})
    _, found = meet_faults(job, [[Fault("USR1", 7, 0)]], tmp_path / "run")
    assert found == ["2 starts in metrics.jsonl, 1 that trained"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_campaign(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    status = main(["--faults=1", "--seed=1", f"--work-dir={tmp_path}"])
    out = capfd.readouterr().out
    assert status == 0, out
    assert "verdict: every run ended as the uninterrupted one" in out
    assert list(tmp_path.iterdir()) == []
