"""PROF: profile one epoch, and summarise it as text; docs/performance.md describes the output.

Under Nsight Systems only the NVTX ranges are marked, since only one tool can listen to the driver. The ranges do not
wait for the GPU, which would change the timing.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

TRACE_FILE = "rank0.pt.trace.json.gz"  # in the folder profile/ of a run
# the tutorial's ranges; `iteration 7` counts as `iteration`
RANGES = ("iteration", "data", "zero_grad", "forward/loss/backward", "optimizer.step", "graph replay")
# Kernels of cuDNN and PyTorch, and PyTorch's CPU operators, that only change a memory layout. On a CPU, oneDNN reorders
# inside its convolutions, which a profile does not show.
TRANSPOSES = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|aten::contiguous$", re.IGNORECASE)
TOP = 8
MEMORY_EVENTS = 100_000  # allocations in the snapshot, the newest


@contextmanager
def capture(folder: Path | None, cuda: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Mark the range PROFILE, for which `nsys --nvtx-capture=PROFILE` waits. Without nsys, write a trace to
    `folder`/profile (None: none) and its summary to `say`."""
    from utils.training.step import mark  # here, since tools.timeline --help needs no torch

    under_nsys = "NSYS_PROFILING_SESSION_ID" in os.environ
    with _record(folder / "profile", cuda, say) if folder and not under_nsys else nullcontext(), mark("PROFILE"):
        yield


@contextmanager
def _record(folder: Path, cuda: bool, say: Callable[[str], None]) -> Iterator[None]:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    with torch.profiler.profile() as profile:  # of the CPU and of a GPU
        yield
        if cuda:
            torch.cuda.synchronize()
    if cuda:
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    profile.export_chrome_trace(str(folder / TRACE_FILE))
    summary = summarise(profile.key_averages())
    (folder / "summary.txt").write_text("\n".join([*summary, ""]), encoding="utf-8")
    for line in summary:
        say(line)
    say(f"Trace for ui.perfetto.dev: {folder / TRACE_FILE}    this summary: {folder / 'summary.txt'}")


def summarise(averages: Iterable[Any]) -> list[str]:
    """Describe the `key_averages()` of torch.profiler, with times in microseconds: the host's time in each range, and
    the largest GPU kernels, or on a CPU the largest operators without those that they call.

    The host runs ahead of a GPU, so kernels are shares of all GPU work, and ranges and operators of the iterations."""
    ranges = {name: [0, 0.0] for name in RANGES}  # occurrences, time
    work: dict[str, list[tuple[float, float, str]]] = {"CPU": [], "CUDA": []}  # own time, time with calls, name
    for row in averages:
        device, found = row.device_type.name, ranges.get(re.sub(r" \d+$", "", row.key))
        if not row.is_user_annotation:
            gpu_time = row.self_device_time_total
            both = (row.self_cpu_time_total, row.cpu_time_total) if device == "CPU" else (gpu_time, gpu_time)
            work[device].append((*both, row.key))
        elif found is not None and device == "CPU":
            found[0] += row.count
            found[1] += row.cpu_time_total
    count, total = ranges["iteration"]
    if not count:
        return ["The profile holds no iteration."]
    lines = [f"Profile of {count} iterations, {total / 1e3 / count:.2f} ms each"]
    lines.append(f"  {'range':24} {'host ms':>10} {'share':>7}")
    for name, (number, spent) in ranges.items():
        if number:
            lines.append(f"  {name:24} {spent / 1e3 / number:10.3f} {100 * spent / total:5.1f} %")
    kind, device, whole = "operators", "CPU", total
    if work["CUDA"]:
        kind, device, whole = "kernels", "CUDA", sum(own for own, _, _ in work["CUDA"])
        lines.append(f"GPU work: {whole / 1e3 / count:.2f} ms per iteration")
    largest = sorted(work[device], reverse=True)[:TOP]
    lines += [f"top {kind}:", *(f"  {100 * own / whole:5.1f} %  {name[:90]}" for own, _, name in largest)]
    transposes = sum(spent for _, spent, name in work[device] if TRANSPOSES.search(name))
    lines.append(f"layout transposes: {100 * transposes / whole:.1f} %")
    return [*lines, f"waiting for input: {100 * ranges['data'][1] / total:.1f} %"]
