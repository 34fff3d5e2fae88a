"""Metric sums, and the log files of a run."""

import json
import logging
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.run.logging.logger import RunLogger
from utils.timing.clock import TimeLeft
from utils.training.metrics.sums import MetricSums

TAGS = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")
EPOCH = dict.fromkeys((*TAGS, "images_per_sec", "epoch_seconds", "seconds"), 0.5)


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 5, generator=generator), torch.randint(5, (size,), generator=generator)


def test_averages_are_per_image_for_any_division_into_batches(one_rank):
    sums, logits, labels = MetricSums(one_rank.device), [], []
    for outputs, targets in batches(7, 1, 4):
        sums.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
        logits.append(outputs)
        labels.append(targets)
    outputs, targets = torch.cat(logits), torch.cat(labels)
    average = sums.average(one_rank)
    assert average["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert average["acc1"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert average["images"] == 12


@pytest.mark.parametrize(("mixed", "not_finite"), [(False, math.inf), (True, math.nan)])
def test_sums_are_bitwise_equal_to_simple_operations(one_rank, mixed, not_finite):
    """MetricSums uses as few kernels as possible. It finds the first loss that is not finite."""
    sums, expected = MetricSums(one_rank.device), torch.zeros(4, dtype=torch.float64)
    for number, (outputs, targets) in enumerate(batches(*[7, 129, 2048] * 100)):
        loss = nn.functional.cross_entropy(outputs, targets) * (not_finite if number == 290 else 1)
        labels = nn.functional.one_hot(targets, 5) * 0.5 if mixed else targets
        sums.add(loss, outputs, labels)
        expected[0] += loss.double() * len(targets)
        expected[1] += (outputs.argmax(1) == targets).sum()
        expected[2] += len(targets)
        expected[3] += torch.isfinite(expected[0])
        assert torch.equal(sums.sums, expected) or number >= 290
    assert sums.sums.tolist()[1:] == expected.tolist()[1:] and sums.finite_batches() == 290
    assert not math.isfinite(sums.average(one_rank)["loss"])


def test_windows_add_up_to_the_epoch(one_rank):
    sums, windows = MetricSums(one_rank.device), []
    for outputs, targets in batches(3, 5, 2):
        sums.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
        windows.append(sums.average_since_last(one_rank))
    assert [window["images"] for window in windows] == [3, 5, 2]
    whole = sum(window["loss"] * window["images"] for window in windows) / 10
    assert sums.average(one_rank)["loss"] == pytest.approx(whole)


def make_logger(folder, **changes):
    logger = RunLogger(folder, **{"enabled": True, "to_screen": False, "to_tensorboard": False} | changes)
    return logger.open(epoch=0, step=0)


def test_other_ranks_write_nothing(tmp_path):
    with make_logger(tmp_path, enabled=False) as log:
        log.say("hello")
        log.log_epoch(1, 10, EPOCH)
        log.log_step(1, 0, 1, {"loss": 1.0, "learning_rate": 0.1, "images_per_sec": 10.0})
    assert not list(tmp_path.iterdir())


def test_lines_reach_a_pipe_once_and_the_log_file(tmp_path, capsys):
    before = list(logging.getLogger("train").handlers)
    for _ in range(2):  # a second logger must not inherit the first's handlers
        with make_logger(tmp_path, to_screen=True) as log:
            log.log_step(3, 20, 80, {"loss": 1.0, "learning_rate": 0.1, "images_per_sec": 680.5})
    assert capsys.readouterr().out.count("INFO - Epoch: 3, Iteration: 20, Avg img/sec: 680.5") == 2
    assert (tmp_path / "train.log").read_text().count("Avg img/sec: 680.5") == 2
    assert logging.getLogger("train").handlers == before  # pytest's own may be among them
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 80


def test_the_log_has_loss_accuracy_rate_speed_and_time_left(tmp_path):
    """In addition to the tutorial's lines in their format, with significant digits only."""
    values = EPOCH | {"loss/train": 1.23456789, "acc1/valid": 0.45678901, "learning_rate": 0.0123456}
    with make_logger(tmp_path) as log:
        step = {"loss": 1.23456789, "learning_rate": 0.0123456, "images_per_sec": 98765.4321}
        log.log_step(3, 20, 80, step, left=3723.4)
        log.log_epoch(3, 80, values | {"images_per_sec": 98765.4321, "epoch_seconds": 12.3456789}, left=86400.0)
        log.log_epoch(4, 90, values, left=0.0)
    lines = [line.partition(" - INFO - ")[2] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert lines[:3] == [
        "Epoch: 3, Iteration: 20, Avg img/sec: 98770",
        "step 80  loss 1.2346  lr 0.01235  1:02:03 left",
        "Time taken for epoch 3 is 12.35 sec",
    ]
    assert re.fullmatch(r"train acc1=0\.\d{4}, valid acc1=0\.4568", lines[3])
    assert re.fullmatch(
        r"epoch   3  train loss 1\.2346 acc1 .\d\.\d\d%  valid loss \d\.\d{4} acc1 45\.68%  "
        r"lr 0\.0123  98800 images/s  12\.3 s  1 day, 0:00:00 left",
        lines[4],
    )
    assert not lines[-1].endswith("left")  # the run is over


def test_time_left_covers_the_whole_run():
    clock = [0.0]
    left = TimeLeft(3, 10, SimpleNamespace(elapsed=lambda: clock[0]))
    left.start_epoch(4)  # a resumed epoch, whose first batch takes long
    clock[0] = 50.0
    assert left.seconds(0, 5) is None
    clock[0] = 54.0
    assert left.seconds(0, 7) == pytest.approx(3 * 2 + 2 * 10 * 2)
    left.end_epoch()
    assert left.seconds(1, 0) is None
    left.start_epoch(0)
    clock[0] = 55.0
    assert left.seconds(1, 1) is None
    clock[0] = 54.0 + 30.0  # the whole second epoch, with validation
    left.end_epoch()
    assert left.seconds(2, 0) == pytest.approx(30.0)
    left.start_epoch(0)
    assert left.seconds(2, 5) == pytest.approx(15.0)


@pytest.mark.parametrize("launched", [True, False])
def test_a_progress_bar_uses_no_random_numbers_and_is_off_under_open_mpi(tmp_path, monkeypatch, launched):
    """The state of Python's generator is in checkpoints, and a bar redraws at arbitrary times."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    before = random.getstate()
    with RunLogger(tmp_path, enabled=True, to_screen=True, to_tensorboard=False).open(epoch=0, step=0) as log:
        assert (log.progress is None) == launched
        log.start_bar("epoch 1", 5)
        log.advance_bar(2)
        log.say("a line")
        if log.progress is not None:
            log.progress.refresh()
    assert random.getstate() == before
