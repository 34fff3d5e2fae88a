"""tools.timeline: the step that it chooses, its lanes, the file that it writes, and files that are no traces."""

import gzip
import json

import pytest

from tools.timeline import main, read_timeline


def event(name, start, duration, category="cpu_op", thread=1, correlation=None):
    row = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "pid": 1, "tid": thread}
    return row | ({} if correlation is None else {"args": {"correlation": correlation}})


def iteration(number, start, length):
    """A step of two ranks on the CPU; the all-reduce overlaps the backward pass and the next iteration."""
    ranges = {
        f"iteration {number}": (0, length), "data": (0, 1000), "zero_grad": (1000, 100),
        "forward/loss/backward": (1200, length - 2200), "optimizer.step": (length - 900, 800)}  # fmt: skip
    operators = {
        "aten::copy_": (100, 500), "aten::conv2d": (1200, 1000), "aten::contiguous": (1300, 200),
        "aten::batch_norm": (2200, 300), "autograd::engine::evaluate_function: AddmmBackward0": (2600, 400),
        "aten::mm": (2700, 200), "c10d::allreduce_": (2900, 50), "aten::add_": (length - 800, 600),
        "aten::mul": (length - 100, 50)}  # fmt: skip
    rows = [event(name, start + at, duration, "user_annotation") for name, (at, duration) in ranges.items()]
    rows += [event(name, start + at, duration) for name, (at, duration) in operators.items()]
    sums = ((2, 2950, 700), (3, 3100, length - 2600))
    return rows + [event("gloo:all_reduce", start + at, long, "user_annotation", rank) for rank, at, long in sums]


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose trace holds steps of 9, 5, 8 and 6 ms."""
    trace = tmp_path / "two-ranks/profile/rank0.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    starts = [(0, 9000), (9000, 5000), (14000, 8000), (22000, 6000)]
    rows = [row for number, place in enumerate(starts) for row in iteration(number, *place)]
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))
    return tmp_path / "two-ranks"


def test_the_median_step_has_its_lanes_in_order(folder):
    title, _, lanes = read_timeline(folder)
    assert title == "two-ranks: iteration 3, 6.00 ms: the median length among 4"
    ranges = ["data", "zero_grad", "forward/loss/backward", "optimizer.step", "backward pass"]
    assert list(lanes) == [*ranges, "operators", "all-reduces", "all-reduces, thread 2"]
    assert lanes["operators"] == {
        "copy": [(0.1, 0.5)], "convolution": [(1.2, 1.0)], "layout transpose": [(1.3, 0.2)],
        "batch norm": [(2.2, 0.3)], "matrix product": [(2.6, 0.4), (2.7, 0.2)], "communication": [(2.9, 0.05)],
        "optimizer": [(5.2, 0.6)], "other": [(5.9, 0.05)]}  # fmt: skip
    assert lanes["backward pass"] == {"range": [(2.6, 0.4)]}
    # the one that began in iteration 2, and the one that ends after iteration 3, are cut
    both = lanes["all-reduces"]["communication"] + lanes["all-reduces, thread 2"]["communication"]
    assert sorted(both) == [(0.0, 0.5), (2.95, 0.7), (3.1, 2.9)]


def test_a_gpus_step_lasts_from_its_first_work_to_the_next_steps(tmp_path):
    rows = [event("late", 99_000, 9, "kernel"), event("nccl:all_reduce", 14_000, 9, "user_annotation")]  # left out
    for number, first in enumerate((1000, 13_000, 23_000)):  # steps of 12, 10 and 9.5 ms; the host needs 2 ms
        host, gpu = 2000 * number, first
        rows += [
            event(f"iteration {number}", host, 2000, "user_annotation"),
            event("data", host, 500, "user_annotation"),
            event("cudaMemcpyAsync", host + 100, 10, "cuda_runtime", correlation=10 * number),
            event("Memcpy HtoD (Pinned -> Device)", host + 300, 500, "gpu_memcpy", 20, 10 * number),
            event("optimizer.step", host + 1500, 500, "user_annotation"),
        ]
        kernels = {"sm90_xmma_fprop": 6000, "cudnn::nchwToNhwcKernel": 500, "ncclDevKernel_AllReduce_Sum_f32": 2000}
        kernels["multi_tensor_apply_kernel<Add>"] = 1000
        for place, (name, length) in enumerate(kernels.items(), start=1):
            launch = host + (1600 if name.startswith("multi") else 600 + place)
            rows.append(event("cudaLaunchKernel", launch, 1, "cuda_runtime", correlation=10 * number + place))
            stream = 24 if name.startswith("nccl") else 7
            rows.append(event(name, gpu, length, "kernel", stream, 10 * number + place))
            gpu += length
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": rows}))
    title, _, lanes = read_timeline(path)
    assert title == "trace.json: iteration 1, 10.00 ms: the median length among 3"
    work = {"convolution": [(0.0, 6.0)], "layout transpose": [(6.0, 0.5)], "optimizer": [(8.5, 1.0)]}
    assert list(lanes.items()) == [("all-reduces", {"communication": [(6.5, 2.0)]}), ("GPU stream 7", work)]


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_two_runs_are_drawn(suffix, begins, folder, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    picture = tmp_path / f"steps{suffix}"
    assert main([str(folder), str(folder), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(begins)
    assert capsys.readouterr().out.count("two-ranks: iteration 3") == 2


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file or directory"), (b"[1]", "not a trace"), (b'{"traceEvents": []}', "holds no training steps"),
])  # fmt: skip
def test_a_wrong_file_is_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "wrong.json.gz"
    if content is not None:
        path.write_bytes(gzip.compress(content))
    assert main([str(path), f"--out={tmp_path}/steps.png"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ") and message in error and error.count("\n") == 1
    path.write_bytes(gzip.compress(b'{"traceEvents": [')[:-9])
    assert main([str(path), f"--out={tmp_path}/steps.png"]) == 2
