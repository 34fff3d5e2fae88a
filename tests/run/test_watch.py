"""Waiting for input, slow ranks, and the classes that are confused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.run.clock import Clock
from utils.run.meters import StepWatch, slow_ranks
from utils.training.metrics.confusion import Confusion, worst_classes


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test advances: clock.now += seconds."""
    clock = SimpleNamespace(now=100.0)
    stopped = SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now)
    for module in ("utils.run.meters", "utils.run.clock"):
        monkeypatch.setattr(f"{module}.time", stopped)
    return clock


@pytest.mark.parametrize(("steps", "slow"), [
    ([1.0, 1.0, 1.02, 1.15], {}), ([1.0, 1.0, 1.3, 1.0], {2: 1.3}),
    ([1.0, 1.16], {1: 1.16}),  # of two ranks one is held to the other
    ([1.0], {}),
    ([0.0, 0.0], {}),  # nothing was timed
])  # fmt: skip
def test_a_rank_is_slow_by_the_median_of_the_others(steps, slow):
    assert slow_ranks(steps) == pytest.approx(slow)


def running():
    clock = Clock()
    clock.switch("train")
    return clock


def four_batches(wait):
    for number in range(4):
        wait()
        yield torch.full((2, 3, 4, 4), float(number)), torch.zeros(2, dtype=torch.int64)


def epoch(watch, model, clock, waiting):
    """Each step waits for input, computes for 2 seconds, and waits for the other ranks for 5."""

    def wait():
        clock.now += waiting

    windows = []
    for images, _ in watch.batches(four_batches(wait)):
        for _ in range(2):  # micro-batches
            clock.now += 1
            model(images).sum().backward()
        clock.now += 5
        watch.clock.count_step(0, 2)
        windows.append(watch.clock.close_window().data_wait)
    return windows


def test_waiting_for_input_is_measured_and_reported_once(one_rank, clock):
    """A rank's own time ends with the first layer's gradient: under DDP, later time is the wait for other ranks."""
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Conv2d(1, 1, 1))
    watch = StepWatch(model, one_rank, running())
    assert epoch(watch, model, clock, waiting=3) == [0.3] * 4
    assert [end - start for start, end in watch._spans[:-1]] == [3 + 2] * 4
    remarks = watch.remarks()
    assert len(remarks) == 1 and "takes 30% of the time; try more num_data_workers" in remarks[0]
    epoch(watch, model, clock, waiting=3)
    assert watch.remarks() == [] and len(watch._spans) == 4 + 1, "of this epoch only"
    watch = StepWatch(model, one_rank, running())
    epoch(watch, model, clock, waiting=0.75)
    assert watch.remarks() == [], "a tenth at most"


def test_batches_after_the_last_log_point_count_too_but_the_start_of_workers_does_not(one_rank, clock):
    """As in an epoch that is shorter than log_freq."""
    watch, found = StepWatch(nn.Conv2d(3, 1, 1), one_rank, running()), []
    waits = iter([5.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 0.3])

    def wait():
        clock.now += next(waits)

    for _ in range(2):
        for number, _ in enumerate(watch.batches(four_batches(wait))):
            clock.now += 2.0
            watch.clock.count_step(0, 2)
            if number == 0:
                watch.clock.close_window()
        watch.clock.close_window()  # as the Trainer does at the end of an epoch
        found.append(watch.remarks())
    assert found[0] == [] and len(found[1]) == 1 and "takes 10% of the time" in found[1][0]


def test_a_rank_that_has_become_slow_is_named_once_by_the_epochs_steps(one_rank, clock):
    watch, remarks = StepWatch(nn.Conv2d(3, 1, 1), one_rank, running()), []
    for steps, seconds, waited in ((10, 1.0, 0.1), (9, 1.5, 0.1), (10, 1.5, 0.1), (10, 1.5, 0.2)):
        watch.world = SimpleNamespace(all_gather=lambda mine, s=seconds, w=waited: [mine, ("other", mine[1] and s, w)])
        watch._spans = [[0.0, 1.0]] * (steps - 1) + [[0.0, 9.0], [0.0]]
        remarks.append(watch.remarks())
    assert [len(remark) for remark in remarks] == [0, 0, 1, 1] and "takes 20% of the time of rank 1" in remarks[3][0]
    assert remarks[2][0].startswith("Rank 1 on other is slow: it needs 1.50 times the median")


def test_worst_classes_and_their_confusions(one_rank):
    confusion = Confusion(3, one_rank.device)
    outputs = torch.eye(3)
    confusion.add(outputs[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 0]))
    confusion.add(outputs[[0]], torch.tensor([1]))
    counts = confusion.collect(one_rank)
    assert counts.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    cat = ("cat", pytest.approx(2 / 3), "dog", pytest.approx(1 / 3))
    assert worst_classes(counts, ("cat", "dog", "absent")) == [("dog", 0.5, "cat", 0.5), cat]
