"""A profiled run has the tutorial's ranges, a trace and a summary; hand-made traces check the summary's numbers."""

import gzip
import json

import torch

from train import Trainer
from utils.run.profile import RANGES, capture, describe_trace, find_ranges, read_trace
from utils.training.profiler import Profiler

ITERATIONS = 3


def test_a_profiled_run_has_the_tutorials_ranges_and_a_summary(tiny, one_rank, tmp_path):
    changes = {"limit_train_batches": None, "profiling_iters_per_epoch": ITERATIONS}
    Trainer(tiny("bs256-amp-nhwc-prof", **changes), one_rank, tmp_path, "prof", "auto").train()
    events = read_trace(tmp_path / "profile/rank0.pt.trace.json.gz")
    ranges = find_ranges(events)
    assert set(ranges) == set(RANGES) - {"graph replay"}
    assert {name: len(occurrences) for name, occurrences in ranges.items()} == dict.fromkeys(ranges, ITERATIONS)
    names = [event.name for event in events if event.category == "user_annotation"]
    assert names.count("PROFILE") == names.count("epoch 2") == 1
    assert [event.name for event in ranges["iteration"]] == [f"iteration {number}" for number in range(ITERATIONS)]
    for name in ("data", "zero_grad", "forward/loss/backward", "optimizer.step"):
        for inner, outer in zip(ranges[name], ranges["iteration"], strict=True):
            assert outer.start <= inner.start and inner.end <= outer.end

    summary = (tmp_path / "profile/summary.txt").read_text()
    log = (tmp_path / "train.log").read_text()
    assert all(line in log for line in summary.splitlines())
    for word in (f"Profile of {ITERATIONS} iterations", *ranges, "aten::", "layout transposes", "waiting for input"):
        assert word in summary
    parts = [float(line.split()[0]) for line in summary.partition("top operators:")[2].splitlines() if "::" in line]
    assert 0 < sum(parts) < 101 and parts == sorted(parts, reverse=True)


def event(name, category, start, duration, correlation=None, thread=1):
    arguments = {} if correlation is None else {"correlation": correlation}
    row = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration}
    return row | {"pid": 1, "tid": thread, "args": arguments}


def describe(tmp_path, rows, **own_times):
    """Return the lines of the summary, with single spaces."""
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*rows, {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "ts": 0}]}, file)
    return {" ".join(line.split()) for line in describe_trace(read_trace(path), own_times).splitlines()}


def test_gpu_summary_counts_kernels_in_the_range_that_launched_them(tmp_path):
    rows = [
        event("iteration 0", "user_annotation", 0, 1000),
        event("data", "user_annotation", 0, 100),
        event("forward/loss/backward", "user_annotation", 100, 500),
        event("optimizer.step", "user_annotation", 600, 350),
        event("iteration 0", "gpu_user_annotation", 0, 1000, thread=7),
        event("cudaLaunchKernel", "cuda_runtime", 150, 5, 1),
        event("cudaLaunchKernel", "cuda_runtime", 300, 5, 2, thread=2),  # autograd's thread
        event("cudaMemcpyAsync", "cuda_runtime", 240, 5, 4),
        event("cudaLaunchKernel", "cuda_runtime", 700, 5, 3),
        event("cudaStreamSynchronize", "cuda_runtime", 750, 50),
        event("conv", "kernel", 200, 300, 1, thread=7),
        event("copy", "gpu_memcpy", 250, 50, 4, thread=8),  # in another stream, while the first one is busy
        event("cudnn::nchwToNhwcKernel", "kernel", 600, 100, 2, thread=7),
        event("sgd", "kernel", 800, 100, 3, thread=7),
    ]
    assert describe(tmp_path, rows) >= {
        "forward/loss/backward 0.500 50.0 % 0.450",
        "optimizer.step 0.350 35.0 % 0.100",
        "30.0 % conv",
        "launch gaps: the GPU is idle 50.0 % of the time, 2 gaps, the longest 0.10 ms",
        "layout transposes: 10.0 %",
        "waiting for input: 10.0 %",
    }


def test_gpu_work_after_the_host_has_finished_counts(tmp_path):
    """With CUDA graphs: the host launches four steps of 100 in a time of 40. Later launches do not count."""
    rows = []
    for step in range(4):
        rows += [event(name, "user_annotation", 10 * step, 9) for name in (f"iteration {step}", "graph replay")]
        rows.append(event("cudaGraphLaunch", "cuda_runtime", 10 * step, 5, step))
        rows.append(event("conv", "kernel", 100 * step, 60, step, thread=7))
        rows.append(event("sgd", "kernel", 100 * step + 60, 40, step, thread=7))
    rows += [
        event("cudaStreamSynchronize", "cuda_runtime", 45, 355),
        event("cudaLaunchKernel", "cuda_runtime", 50, 5, 9),
        event("sums", "kernel", 400, 100, 9, thread=7),
    ]
    lines = describe(tmp_path, rows)
    assert lines >= {
        "Profile of 4 iterations, 0.10 ms each", "60.0 % conv", "40.0 % sgd", "graph replay 0.009 9.0 % 0.100",
        "launch gaps: the GPU is idle 0.0 % of the time, 0 gaps, the longest 0.00 ms",
    } and not [line for line in lines if "sums" in line]  # fmt: skip


def test_a_cpu_summary_has_the_operators_own_times(tmp_path):
    rows = [event("iteration 0", "user_annotation", 0, 1000), event("aten::contiguous", "cpu_op", 0, 100)]
    expected = {"45.0 % convolution", "15.0 % copy", "layout transposes: 10.0 %"}
    assert describe(tmp_path, rows, convolution=450.0, copy=150.0) >= expected


def test_under_nsys_only_ranges_are_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    profiler = Profiler(torch.device("cpu"))
    with capture(profiler, tmp_path, print):
        assert profiler.running
    assert list(tmp_path.iterdir()) == [] and not profiler.running
