"""A profiled run has the tutorial's ranges, a trace and a summary; hand-made rows check the summary's numbers."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tools.timeline import read_trace
from train import Trainer
from utils.run.clock import Clock
from utils.run.profile import RANGES, TRANSPOSES, capture, summarise

ITERATIONS = 3


def test_a_profiled_run_has_the_tutorials_ranges_and_a_summary(tiny, one_rank, tmp_path, monkeypatch):
    changes = {"limit_train_batches": None, "profiling_iters_per_epoch": ITERATIONS}
    path, close, written = tmp_path / "profile/rank0.pt.trace.json.gz", Clock.close_window, []
    monkeypatch.setattr(Clock, "close_window", lambda clock: (written.append(path.exists()), close(clock))[1])
    (trainer := Trainer(tiny("bs256-amp-nhwc-prof", **changes), one_rank, tmp_path, "prof", "auto")).train()
    assert written and not any(written), "writing it is no training time"
    names = [row.get("name") for row in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert names.count("PROFILE") == names.count("epoch 2") == 1
    ranges = {name: [event for event in read_trace(path) if event.group == name] for name in RANGES}
    assert ranges.pop("graph replay") == []
    assert {name: len(occurrences) for name, occurrences in ranges.items()} == dict.fromkeys(ranges, ITERATIONS)
    assert [event.name for event in ranges["iteration"]] == [f"iteration {number}" for number in range(ITERATIONS)]
    for name in ("data", "zero_grad", "forward/loss/backward", "optimizer.step"):
        for inner, outer in zip(ranges[name], ranges["iteration"], strict=True):
            assert outer.start <= inner.start and inner.end <= outer.end

    summary = (tmp_path / "profile/summary.txt").read_text()
    assert all(line in (tmp_path / "train.log").read_text() for line in summary.splitlines())
    for word in (f"Profile of {ITERATIONS} iterations", *ranges, "aten::", "layout transposes", "waiting for input"):
        assert word in summary
    parts = [float(line.split()[0]) for line in summary.partition("top operators:\n")[2].splitlines()[:-2]]
    assert len(parts) == 8 and 0 < sum(parts) < 101 and parts == sorted(parts, reverse=True)
    trainer.world, trainer.run.epoch, trainer.run.folder = replace(one_rank, rank=1), 1, tmp_path / "other rank"
    with trainer._profile():
        assert not trainer.run.folder.exists()


def row(key, own, total=None, device="CPU", count=1, annotation=False):
    """A row of torch.profiler's key_averages()."""
    return SimpleNamespace(
        key=key, count=count, device_type=SimpleNamespace(name=device), is_user_annotation=annotation,
        self_cpu_time_total=own, cpu_time_total=own if total is None else total, self_device_time_total=own,
    )  # fmt: skip


HOST = [
    row("iteration 0", 100, 900, annotation=True),
    row("iteration 1", 100, 1100, annotation=True),
    row("data", 200, annotation=True, count=4),
    row("forward/loss/backward", 1000, annotation=True, count=2),
    row("aten::convolution_backward", 600),
    row("aten::contiguous", 20, 120),  # with the copy that it calls
    row("aten::copy_", 100),
]
GPU = [
    row("iteration 0", 5000, device="CUDA", annotation=True),  # only the span of its kernels
    row("conv", 2400, device="CUDA"),
    row("cudnn::nchwToNhwcKernel", 400, device="CUDA"),
    row("Memcpy HtoD", 1200, device="CUDA"),
]
RANGE_LINES = ["range host ms share", "iteration 1.000 100.0 %", "data 0.050 10.0 %"]
RANGE_LINES += ["forward/loss/backward 0.500 50.0 %"]
ON_CPU = ["top operators:", "30.0 % aten::convolution_backward", "5.0 % aten::copy_", "1.0 % aten::contiguous"]
ON_GPU = ["GPU work: 2.00 ms per iteration", "top kernels:", "60.0 % conv", "30.0 % Memcpy HtoD"]
ON_GPU += ["10.0 % cudnn::nchwToNhwcKernel"]


@pytest.mark.parametrize(("rows", "work", "transposes"), [(HOST, ON_CPU, 6.0), (HOST + GPU, ON_GPU, 10.0)])
def test_a_summary_has_the_ranges_the_largest_operators_or_kernels_and_two_shares(rows, work, transposes):
    assert all(TRANSPOSES.search(f"cudnn::{name}Kernel") for name in ("nhwcToNchw", "nchw2nhwc", "nhwc2nchw"))
    lines = [" ".join(line.split()) for line in summarise(rows)]
    shares = [f"layout transposes: {transposes} %", "waiting for input: 10.0 %"]
    assert lines == ["Profile of 2 iterations, 1.00 ms each", *RANGE_LINES, *work, *shares]


def test_under_nsys_only_ranges_are_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    with torch.profiler.profile() as profile, capture(tmp_path, False, print):
        pass
    assert list(tmp_path.iterdir()) == [] and "PROFILE" in {row.key for row in profile.key_averages()}
