"""tests.system.faults.chaos: the plan of faults and the detection of problems."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.system.faults import chaos
from tests.system.faults.chaos import EPOCHS, MOST_FAULTS, STEPS_PER_EPOCH, check_start
from tests.system.faults.kinds import KINDS, Fault, plan_faults

STEPS = EPOCHS * STEPS_PER_EPOCH


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


@pytest.mark.parametrize(("status", "output", "wrong"), [
    (75, "stopped on SIGUSR1 in epoch 1", []),
    (1, "stopped on SIGUSR1 in epoch 1", ["status 1 after ['USR1'], expected (75,)"]),
    (75, "stopped", ["USR1 is not named ('stopped on SIGUSR1')"]),
    (75, "stopped on SIGUSR1\nerror: one\nerror: two", ["several messages"])])  # fmt: skip
def test_an_unexpected_end_is_reported(status, output, wrong):
    found = check_start([Fault("USR1", 7, 0)], status, output, nproc=1, finished=False)
    assert [problem.partition(":")[0] for problem in found] == wrong


def test_the_unexpected_end_of_a_start_is_a_problem_of_its_run(tmp_path, monkeypatch):
    fault, log = Fault("USR1", 7, 0), tmp_path / "run.output"
    log.write_text(f"{fault.mark}\nstopped on SIGUSR1 in epoch 1")
    ended = SimpleNamespace(wait=lambda: 1, has_begun=lambda: False, log=log)
    monkeypatch.setattr(chaos, "Attempt", lambda job, folder: nullcontext(ended))
    met, (problem,) = chaos.meet_faults(chaos.ForkedRun([], 1, 60), [[fault]], tmp_path / "run")
    assert met == [fault] and problem.startswith("status 1 after ['USR1'], expected (75,)")
