"""Stopping on a signal: how soon, and the second Ctrl-C. tests/run/test_resume.py stops whole runs."""

import itertools
import json
import os
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.processes import run_job
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.run import preemption
from utils.run.preemption import SIGNALS, StopRequests


@pytest.fixture
def set_clock(monkeypatch):
    def set_to(seconds):
        monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: seconds))

    set_to(time.monotonic())
    return set_to


def interrupts(number):
    """Send the signal; return whether it ends the training at once."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("first", SIGNALS, ids=lambda number: number.name)
def test_a_second_ctrl_c_stops_at_once(first, one_rank, set_clock, capfd, monkeypatch):
    """But not a copy of the first one that a launcher passes on, nor any other signal."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # the tests may run under nohup
    requests = StopRequests(one_rank)
    before = signal.getsignal(signal.SIGINT)
    set_clock(100)
    with requests.listen():
        assert not requests.poll() and not interrupts(first) and requests.poll()
        set_clock(101)
        assert not interrupts(signal.SIGINT)
        set_clock(101.1)
        assert not interrupts(signal.SIGTERM) and not interrupts(signal.SIGUSR1)
        assert requests.name() == first.name
        assert interrupts(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("Ctrl-C again stops at once, without saving") == 1


@pytest.mark.parametrize("torchrun", [False, True])
def test_under_nohup_the_end_of_the_session_is_ignored_unless_torchrun_passes_it_on(one_rank, torchrun, monkeypatch):
    """torchrun ends itself at SIGHUP, also under nohup."""
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "1"} if torchrun else {})
    requests, before = StopRequests(one_rank), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with requests.listen():
        signal.raise_signal(signal.SIGHUP)
        assert requests.poll() is torchrun
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_the_own_copy_of_another_ranks_ctrl_c_is_not_a_second_one(set_clock, monkeypatch):
    """A terminal's Ctrl-C reaches the ranks of a job at slightly different times."""
    requests = StopRequests(World(1, 1, 2, torch.device("cpu")))
    monkeypatch.setattr(requests, "_compare", lambda _: [signal.SIGINT, 10**6])
    set_clock(100)
    with requests.listen():
        assert requests.poll()
        set_clock(100.5)
        assert not interrupts(signal.SIGINT)
        set_clock(102)
        assert interrupts(signal.SIGINT)


def test_the_interval_doubles_at_most():
    """While the host runs ahead of a GPU, batches seem to take no time. The flags are compared after 1, 3, 7, 15."""
    requests = StopRequests(World(1, 1, 2, torch.device("cpu")))
    requests._compare = Mock(return_value=[0, 1])
    assert not any(requests.poll() for _ in range(20)) and requests._compare.call_count == 4


def stop_in_the_middle(folder, pace):
    """Signal rank 0 or 1, or both, after several numbers of batches; write down when each rank stopped, by a clock that
    only batches advance, and the number of all-reduces."""

    def stop_after(world, batches, signalled):
        clock = [0.0]
        preemption.time = SimpleNamespace(monotonic=lambda: clock[0])
        requests = StopRequests(world)
        requests._compare = Mock(wraps=requests._compare)
        with requests.listen():
            for before in pace[:-1]:
                requests.start_loop()
                for _ in range(before[-1]):
                    clock[0] += before[world.rank]
                    assert not requests.poll()
            requests.start_loop()
            for number in itertools.count(1):
                clock[0] += pace[-1][world.rank]
                if number == batches and (world.rank == signalled or batches == 2 > world.rank):
                    signal.raise_signal(signal.SIGTERM)
                if requests.poll():
                    assert requests.name() == "SIGTERM"
                    return number, clock[0], requests._compare.call_count
        raise AssertionError

    def action(world):
        rows = [(batches, stop_after(world, batches, batches % 2)) for batches in (*range(1, 10), 150, 1000)]
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(rows))

    return run_ranks(action, "cpu", 60)


@pytest.mark.parametrize(("name", "pace"), {
    # seconds of a batch on each of three ranks, and batches, in loops that follow each other; the last has the signal
    "fast": [(0.01, 0.02, 0.01, 0)], "slow": [(10.0, 10.0, 10.0, 0)],
    "training after three batches": [(0.2, 0.2, 0.2, 3), (3.0, 3.0, 3.0, 0)]}.items())  # fmt: skip
def test_ranks_stop_after_the_same_batch_within_two_seconds_or_the_batch(tmp_path, name, pace):
    ended = run_job(tmp_path, 3, stop_in_the_middle, tmp_path, pace)
    assert [process.status for process in ended] == [0, 0, 0], ended
    assert not any("asked to stop" in other.errors for other in ended[1:])  # only the main rank prints
    rows, *others = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3))
    seconds = max(pace[-1][:3])
    for (batches, (stopped, _, sent)), *rest in zip(rows, *others, strict=True):
        assert all(other[1][0] == stopped for other in rest)
        if seconds > 0.5:
            assert stopped == batches
        else:
            assert (stopped - batches) * seconds <= 2.0
            assert sent <= 10 + stopped * seconds * 2  # not an all-reduce after every batch
