"""Metric sums, and the log files of a run."""

import json
import math
import re
import sys

import pytest
import torch
from torch import nn

from utils.run.clock import ACTIVITIES, Clock
from utils.run.logger import RunLogger
from utils.training.metrics.sums import MetricSums

TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")
EPOCH = dict.fromkeys((*TAGS, "images_per_sec", "epoch_seconds", "seconds"), 0.5)


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 5, generator=generator), torch.randint(5, (size,), generator=generator)


def test_averages_are_per_image_for_any_division_into_batches_and_log_points(one_rank):
    sums, logits, labels, windows = MetricSums(one_rank.device), [], [], []
    for outputs, targets in batches(7, 1, 4):
        sums.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
        logits.append(outputs)
        labels.append(targets)
        windows.append(sums.average_since_last(one_rank))
    outputs, targets = torch.cat(logits), torch.cat(labels)
    average = sums.average(one_rank)
    assert average["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert average["acc1"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert average["images"] == 12 and [window["images"] for window in windows] == [7, 1, 4]
    assert sum(window["loss"] * window["images"] for window in windows) / 12 == pytest.approx(average["loss"])
    sums.reset()
    sums.add(torch.ones(()), outputs, targets)  # in the next epoch
    assert sums.average_since_last(one_rank) == {"loss": 1, "acc1": average["acc1"], "images": 12}
    sums.load(sums.sums.clone(), sums.logged, micro_batches=7)  # of a checkpoint within an epoch
    assert sums.finite_micro_batches() == 7


@pytest.mark.parametrize(("mixed", "not_finite"), [(False, math.inf), (True, math.nan)])
def test_sums_are_bitwise_equal_to_simple_operations(one_rank, mixed, not_finite):
    """MetricSums uses as few kernels as possible. It finds the first loss that is not finite."""
    sums, expected = MetricSums(one_rank.device), torch.zeros(4, dtype=torch.float64)
    for number, (outputs, targets) in enumerate(batches(*[7, 129, 2048] * 100)):
        loss = nn.functional.cross_entropy(outputs, targets) * (not_finite if number == 290 else 1)
        own = nn.functional.one_hot(targets, 5).float()
        labels = own.lerp(own.roll(1, 0), 0.4) if mixed else targets  # the class with the larger weight counts
        sums.add(loss, outputs, labels)
        expected[0] += loss.double() * len(targets)
        expected[1] += (outputs.argmax(1) == targets).sum()
        expected[2] += len(targets)
        expected[3] += torch.isfinite(expected[0])
        assert torch.equal(sums.sums, expected) or number >= 290
    assert sums.sums.tolist()[1:] == expected.tolist()[1:] and sums.finite_micro_batches() == 290
    assert not math.isfinite(sums.average(one_rank)["loss"])


def make_logger(folder, **changes):
    return RunLogger(folder, **{"enabled": True, "to_screen": False} | changes).open()


def test_lines_reach_a_pipe_and_the_log_file_once_from_the_main_rank(tmp_path, capsys):
    for enabled in (True, False):
        with make_logger(tmp_path, enabled=enabled, to_screen=True) as log:
            log.say("hello")
    printed = capsys.readouterr().out
    assert printed.count("hello") == 1 and printed == (tmp_path / "train.log").read_text()


def test_the_log_has_loss_accuracy_rate_speed_and_time_left(tmp_path):
    """In addition to the tutorial's lines in their format, with significant digits only."""
    values = EPOCH | {"loss/train": 1.23456789, "acc1/valid": 0.45678901, "learning_rate": 0.0123456}
    with make_logger(tmp_path) as log:
        step = {"loss": 1.23456789, "learning_rate": 0.0123456, "images_per_sec": 98765.4321}
        log.log_step(3, 20, 80, step, 3723.4, None)
        log.log_epoch(3, 80, values | {"images_per_sec": 98765.4321, "epoch_seconds": 12.3456789}, left=86400.0)
        log.log_epoch(4, 90, values | {"loss/valid": math.nan}, left=0.0)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - Epoch: 3, ", lines[0])
    assert [line.partition(" - INFO - ")[2] for line in lines[:5]] == [
        "Epoch: 3, Iteration: 20, Avg img/sec: 98770",
        "step 80  loss 1.2346  lr 0.01235  1:02:03 left",
        "Time taken for epoch 3 is 12.35 sec",
        "train acc1=0.5000, valid acc1=0.4568",
        "epoch   3  train loss 1.2346 acc1 50.00%  valid loss 0.5000 acc1 45.68%  lr 0.0123  98800 images/s  12.3 s  "
        "1 day, 0:00:00 left",
    ]
    assert not lines[-1].endswith("left")  # the run is over
    step, _, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert step["step"] == 80 and last["loss/valid"] is None  # JSON has no NaN


def test_time_left_is_forecast_by_the_pace_since_the_first_log_point(monkeypatch):
    clock, now = Clock(), [0.0]
    monkeypatch.setattr(clock, "seconds", lambda *names: now[0] if names == ACTIVITIES else 0.0)
    now[0] = 50.0  # compilation; the run resumes in mid-epoch
    assert clock.time_left(0.5, 3) is None
    now[0] = 54.0
    assert clock.time_left(0.7, 3) == pytest.approx(2.3 * 20)
    now[0] = 75.0  # with the validation of the first epoch
    assert clock.time_left(1.0, 3) == pytest.approx(2 * 50) and clock.time_left(3, 3) == 0


@pytest.mark.parametrize("launched", [True, False])
def test_a_terminal_has_a_progress_bar_but_not_under_open_mpi(tmp_path, monkeypatch, capsys, launched):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("utils.run.logger.REDRAW_SECONDS", -1)
    with make_logger(tmp_path, to_screen=True) as log:
        log.start_bar("epoch 1/2", 4)
        log.log_step(1, 2, 2, {"loss": 1.0, "learning_rate": 0.1, "images_per_sec": 680.5}, 60.0, None)
        log.advance_bar(2)
        log.log_epoch(1, 4, EPOCH)
    printed = capsys.readouterr().out
    bar = f"\repoch 1/2 [{15 * '#'}{15 * '.'}] 2/4  0:01:00 left  loss 1.000  680.5 images/s\r"
    assert (bar in printed.replace("\x1b[K", "")) is not launched
    assert ("Avg img/sec" in printed) is launched and "epoch   1  train loss 0.5000" in printed
