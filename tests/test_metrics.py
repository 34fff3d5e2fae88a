"""Sums, windows and files of a run's metrics."""

import json
import logging
import math

import pytest
import torch
from torch import nn

from utils.run.logger import RunLogger
from utils.training.metrics import MetricSums

EPOCH = dict.fromkeys(
    ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate", "epoch_seconds", "seconds"), 0.5
)


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 5, generator=generator), torch.randint(5, (size,), generator=generator)


def test_averages_are_by_image_however_the_epoch_is_cut(alone):
    sums, logits, labels = MetricSums(alone.device), [], []
    for outputs, targets in batches(7, 1, 4):
        sums.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
        logits.append(outputs)
        labels.append(targets)
    outputs, targets = torch.cat(logits), torch.cat(labels)
    average = sums.average(alone)
    assert average["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert average["acc1"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert average["images"] == 12


def test_windows_add_up_to_the_whole(alone):
    sums, windows = MetricSums(alone.device), []
    for outputs, targets in batches(3, 5, 2):
        sums.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
        windows.append(sums.average_since_last(alone))
    assert [window["images"] for window in windows] == [3, 5, 2]
    whole = sum(window["loss"] * window["images"] for window in windows) / 10
    assert sums.average(alone)["loss"] == pytest.approx(whole)


def test_first_loss_that_is_not_finite_is_found(alone):
    sums = MetricSums(alone.device)
    for loss in (1.0, 2.0, math.inf, 1.0):
        sums.add(torch.tensor(loss), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    assert sums.finite_batches() == 2
    assert not math.isfinite(sums.average(alone)["loss"])


def make_logger(folder, done=0, **changes):
    """Opened after `done` epochs of one step and one second each."""
    logger = RunLogger(folder, **{"enabled": True, "to_screen": False, "to_tensorboard": False} | changes)
    return logger.open(epoch=done, step=done, seconds=done)


def test_other_ranks_write_nothing(tmp_path):
    with make_logger(tmp_path, enabled=False) as log:
        log.say("hello")
        log.log_epoch(1, 10, EPOCH)
        log.log_step(1, 0, 1, {"loss": 1.0, "learning_rate": 0.1, "images_per_sec": 10.0})
    assert not list(tmp_path.iterdir())


def test_lines_reach_a_pipe_once_and_the_log_file(tmp_path, capsys):
    before = list(logging.getLogger("train").handlers)
    for _ in range(2):  # a second logger must not inherit the first one's handlers
        with make_logger(tmp_path, to_screen=True) as log:
            log.log_step(3, 20, 80, {"loss": 1.0, "learning_rate": 0.1, "images_per_sec": 680.5})
    assert capsys.readouterr().out.count("INFO - Epoch: 3, Iteration: 20, Avg img/sec: 680.5") == 2
    assert (tmp_path / "train.log").read_text().count("Avg img/sec: 680.5") == 2
    assert logging.getLogger("train").handlers == before  # pytest's own may be among them
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 80


def test_resumed_run_marks_the_repeated_epochs_of_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # files of one second are read in the order of their names, whose last number counts the writers of a process
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    for first_epoch, loss in ((0, 9.0), (1, 2.0)):
        with make_logger(tmp_path, done=first_epoch, to_tensorboard=True) as log:
            for epoch in range(first_epoch + 1, 4):
                log.log_epoch(epoch, epoch, EPOCH | {"loss/train": loss})
    scalars = EventAccumulator(str(tmp_path / "tb_logs")).Reload().Scalars("loss/train")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 9.0), (2, 2.0), (3, 2.0)]
