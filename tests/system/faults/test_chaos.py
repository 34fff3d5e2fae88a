"""tests.system.faults.chaos: the plan of faults and the detection of problems."""

import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.system.faults.chaos import EPOCHS, MOST_FAULTS, STEPS_PER_EPOCH, ForkedRun, meet_faults
from tests.system.faults.kinds import KINDS, Fault, plan_faults

STEPS = EPOCHS * STEPS_PER_EPOCH

# Mocks a run that meets its fault: prints `message`, writes records of these kinds and exits with this status.
PROGRAM = """
import json, pathlib, sys
folder, status, message, kinds = sys.argv[1:]
pathlib.Path(folder).mkdir(exist_ok=True)
with pathlib.Path(folder, "metrics.jsonl").open("a") as metrics:
    for kind in kinds.split():
        metrics.write(json.dumps({"kind": kind}) + "\\n")
print("chaos: USR1, rank 0, step 7.")
print(message)
sys.exit(int(status))
"""


@dataclass(frozen=True)
class ScriptedRun(ForkedRun):
    """Starts PROGRAM; `train_arguments` are its status, message and kinds of records."""

    def start(self, folder, environment, output):
        with output.open("wb") as file:
            return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), *self.train_arguments], stdout=file)


def test_the_same_seed_and_number_give_the_same_faults_and_all_kinds_occur():
    plans, again = ([plan_faults(3, number, STEPS, 2, MOST_FAULTS) for number in range(300)] for _ in range(2))
    assert plans == again
    assert {fault.kind for starts in plans for faults in starts for fault in faults} == KINDS.keys()
    for starts in plans:
        steps = [fault.step for faults in starts for fault in faults]
        assert steps == sorted(set(steps)) and 1 <= len(steps) <= MOST_FAULTS
        assert not any(KINDS[fault.kind].statuses for faults in starts for fault in faults[:-1])
        assert not any(KINDS[fault.kind].before for fault in starts[0])
        assert not starts[-1] or not KINDS[starts[-1][-1].kind].statuses


@pytest.mark.parametrize(
    ("status", "message", "wrong"),
    [
        (75, "stopped on SIGUSR1 in epoch 1", []),
        (1, "stopped on SIGUSR1 in epoch 1", ["status 1 after ['USR1'], expected (75,)"]),
        (75, "stopped", ["USR1 is not named ('stopped on SIGUSR1')"]),
        (75, "stopped on SIGUSR1\nerror: one\nerror: two", ["several messages: ['error: one', 'error: two']"]),
    ],
)
def test_an_unexpected_end_is_reported(tmp_path, status, message, wrong):
    run = ScriptedRun([str(status), message, "start end"], 1, 60, time.monotonic() + 60)
    met, found = meet_faults(run, [[Fault("USR1", 7, 0)]], tmp_path / "run")
    assert [problem.split(":")[0] for problem in found] == [problem.split(":")[0] for problem in wrong]
    assert [fault.kind for fault in met] == ["USR1"]
