"""PROF: profile one epoch, and summarise the trace as text; docs/performance.md describes the output.

Under Nsight Systems only the NVTX ranges are marked, since only one tool can listen to the driver. The ranges do not
wait for the GPU, which would change the timing: the summary counts the kernels launched in a range.
"""

import gzip
import json
import os
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from utils.training.profiler import Profiler

TRACE_FILE = "rank0.pt.trace.json.gz"  # in the folder profile/ of a run
# the tutorial's ranges; `iteration 7` counts as `iteration`
RANGES = ("iteration", "data", "zero_grad", "forward/loss/backward", "optimizer.step", "graph replay")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Kernels of cuDNN and PyTorch, and PyTorch's CPU operators, that only change a memory layout. On a CPU, oneDNN reorders
# inside its convolutions, which a trace does not show.
TRANSPOSES = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|aten::contiguous$", re.IGNORECASE)
TOP = 8
MEMORY_EVENTS = 100_000  # allocations in the snapshot, the newest


@contextmanager
def capture(profiler: "Profiler", folder: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Mark the range PROFILE, for which `nsys --nvtx-capture=PROFILE` waits. Without nsys, write a trace to
    `folder`/profile (None: none) and its summary to `say`."""
    records = folder is not None and "NSYS_PROFILING_SESSION_ID" not in os.environ
    profiler.running = True
    try:
        recording = _record(folder / "profile", profiler.cuda, say) if folder and records else nullcontext()
        with recording, profiler.range("PROFILE"):
            yield
    finally:
        profiler.running = False


@contextmanager
def _record(folder: Path, cuda: bool, say: Callable[[str], None]) -> Iterator[None]:
    import torch  # here, since tools.timeline --help needs no torch

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
    path = folder / TRACE_FILE
    profile.export_chrome_trace(str(path))
    own_times = {row.key: row.self_cpu_time_total for row in profile.key_averages() if not row.is_user_annotation}
    summary = describe_trace(read_trace(path), own_times)
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    for line in summary.splitlines():
        say(line)
    say(f"Trace for ui.perfetto.dev: {path}    this summary: {folder / 'summary.txt'}")


class Event(NamedTuple):
    """One complete event; times in microseconds."""

    name: str
    category: str
    start: float
    duration: float
    thread: str
    launched: float | None  # of GPU work: when the host launched it

    @property
    def end(self) -> float:
        return self.start + self.duration


def read_trace(path: Path) -> list[Event]:
    """Return the complete events of a trace, gzipped if it ends in .gz, by start time; of two that start together, the
    longer one first."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = [{"cat": "", "args": {}} | row for row in json.load(file)["traceEvents"] if row["ph"] == "X"]
    launches = {row["args"].get("correlation"): row["ts"] for row in rows if row["cat"] in LAUNCHES}
    events = list[Event]()
    for row in rows:
        launched = launches.get(row["args"].get("correlation", "none")) if row["cat"] in GPU_WORK else None
        thread = f"{row['pid']}/{row['tid']}"
        events.append(Event(row["name"], row["cat"], row["ts"], row["dur"], thread, launched))
    return sorted(events, key=lambda event: (event.start, -event.duration))


def find_ranges(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the occurrences of each of RANGES by start time."""
    marked = [(re.sub(r" \d+$", "", event.name), event) for event in events if event.category == "user_annotation"]
    found = {name: [event for other, event in marked if other == name] for name in RANGES}
    return {name: occurrences for name, occurrences in found.items() if occurrences}


def describe_trace(events: Sequence[Event], own_times: Mapping[str, float]) -> str:
    """Describe time per range, top kernels or operators, GPU gaps, layout transposes, input.

    `own_times`: {operator: microseconds on the host, without the operators that it calls}."""
    ranges = find_ranges(events)
    iterations = ranges.get("iteration")
    if not iterations:
        return "The trace holds no iteration."
    start, host_end, count = iterations[0].start, iterations[-1].end, len(iterations)
    work = [event for event in events if event.launched is not None and start <= event.launched < host_end]
    # with CUDA graphs, one launch per step, the host finishes many steps before the GPU
    total = max([host_end, *(event.end for event in work)]) - start
    times = defaultdict[str, float](float, {} if work else own_times)
    for event in work:
        times[event.name] += event.duration
    lines = [f"Profile of {count} iterations, {total / 1e3 / count:.2f} ms each"]
    lines += [*_describe_ranges(ranges, work, total), f"top {'kernels' if work else 'operators'}:"]
    largest = sorted(times.items(), key=lambda item: -item[1])[:TOP]
    lines += [f"  {100 * time / total:5.1f} %  {name[:90]}" for name, time in largest]
    if work:
        reached = [*accumulate((event.end for event in work), max)]  # `work` is sorted by start
        gaps = [event.start - end for event, end in zip(work[1:], reached, strict=False) if event.start > end]
        idle, longest = 100 - 100 * (reached[-1] - work[0].start - sum(gaps)) / total, max(gaps, default=0) / 1e3
        found = f"the GPU is idle {idle:.1f} % of the time, {len(gaps)} gaps, the longest {longest:.2f} ms"
        lines.append(f"launch gaps: {found}")
    inside = work or [event for event in events if start <= event.start < host_end]
    transposes = (event for event in inside if TRANSPOSES.search(event.name))
    lines.append(f"layout transposes: {_share(transposes, total)}")
    lines.append(f"waiting for input: {_share(ranges.get('data', []), total)}")
    return "\n".join(lines)


def _describe_ranges(ranges: dict[str, list[Event]], work: Sequence[Event], total: float) -> list[str]:
    """Describe each range: its host time and, with a GPU, the time of the GPU work launched in it. Backward launches
    from another thread, so a launch is assigned to a range by its time only."""
    lines = [f"  {'range':24} {'host ms':>10} {'share':>7}" + (f" {'GPU ms':>10}" if work else "")]
    for name, occurrences in ranges.items():
        host = statistics.median(event.duration for event in occurrences) / 1e3
        bounds = [bound for event in occurrences for bound in (event.start, event.end)]  # in order: ranges do not nest
        inside = sum(event.duration for event in work if bisect_right(bounds, event.launched or 0.0) % 2)
        on_gpu = f" {inside / 1e3 / len(occurrences):10.3f}" if work else ""
        lines.append(f"  {name:24} {host:10.3f} {_share(occurrences, total):>7}{on_gpu}")
    return lines


def _share(events: Iterable[Event], total: float) -> str:
    return f"{100 * sum(event.duration for event in events) / total:.1f} %"
