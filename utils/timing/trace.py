"""PROF: read a Chrome trace of torch.profiler, and summarise it as text."""

import bisect
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_FILE = "rank0.pt.trace.json.gz"  # in the folder profile/ of a run
# The tutorial's ranges; `iteration 7` counts as `iteration`.
RANGES = ("iteration", "data", "zero_grad", "forward/loss/backward", "optimizer.step", "graph replay")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Kernels of cuDNN and PyTorch, and PyTorch's CPU operators, that only change a memory layout. On a CPU, oneDNN reorders
# inside its convolutions, which a trace does not show.
TRANSPOSES = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|aten::contiguous$", re.IGNORECASE)
HOST_WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy$|aten::_local_scalar_dense$")
# The training step itself; the rest of an iteration is input, metrics, logging and Python.
STEP_RANGES = ("zero_grad", "forward/loss/backward", "optimizer.step", "graph replay")
TOP = 8


@dataclass(frozen=True)
class Event:
    """One complete event; times in microseconds."""

    name: str
    category: str
    start: float
    duration: float
    thread: str
    correlation: int | None

    @property
    def end(self) -> float:
        return self.start + self.duration


def read_trace(path: Path) -> list[Event]:
    """Return the complete events of a trace, gzipped if it ends in .gz, by start time; of two that start together, the
    longer one first."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = json.load(file)["traceEvents"]
    events = [
        Event(
            row["name"], row.get("cat", ""), row["ts"], row["dur"], f"{row['pid']}/{row['tid']}",
            row.get("args", {}).get("correlation"),
        )
        for row in rows
        if row["ph"] == "X"
    ]  # fmt: skip
    return sorted(events, key=lambda event: (event.start, -event.duration))


def find_ranges(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the occurrences of each of RANGES by start time."""
    found: dict[str, list[Event]] = {name: [] for name in RANGES}
    for event in events:
        name = re.sub(r" \d+$", "", event.name)
        if event.category == "user_annotation" and name in found:
            found[name].append(event)
    return {name: occurrences for name, occurrences in found.items() if occurrences}


def find_launches(events: Iterable[Event]) -> dict[int | None, float]:
    """Return {correlation: time} of the host's launches of GPU work."""
    launches = (event for event in events if event.category in LAUNCHES and event.correlation is not None)
    return {event.correlation: event.start for event in launches}


def describe_trace(events: Sequence[Event]) -> str:
    """Describe time per range, top kernels or operators, layout transposes, GPU gaps, input, host synchronisations."""
    ranges = find_ranges(events)
    iterations = ranges.get("iteration")
    if not iterations:
        return "The trace holds no iteration."
    start, host_end = iterations[0].start, iterations[-1].end
    inside = [event for event in events if start <= event.start < host_end]
    launches = find_launches(inside)
    on_gpu = [event for event in events if event.category in GPU_WORK]
    # with CUDA graphs, one launch per step, the host finishes many steps before the GPU
    end = max([host_end, *(event.end for event in on_gpu if event.correlation in launches)])
    work = [event for event in on_gpu if start <= event.start < end]
    operators = [event for event in inside if event.category == "cpu_op"]
    total, on_host = end - start, host_end - start
    lines = [f"Profile of {len(iterations)} iterations, {total / 1e3 / len(iterations):.2f} ms each"]
    lines += _describe_ranges(ranges, launches, work, total)
    if work:
        lines += _top("kernels", ((event.name, event.duration) for event in work), total)
        busy, gaps = _union(work)
        lines.append(
            f"launch gaps: the GPU is idle {_percent(total - busy, total)} of the time, {len(gaps)} gaps, "
            f"the longest {max(gaps, default=0) / 1e3:.2f} ms"
        )
    else:
        own = _own_times(operators)
        lines += _top("operators", own, total)
        outside = total - sum(duration for _, duration in own)
        lines.append(f"outside operators (Python, waiting): {_percent(outside, total)}")
    transposes = _outermost(event for event in work or operators if TRANSPOSES.search(event.name))
    step = [event for name in STEP_RANGES for event in ranges.get(name, [])]
    # an .item() on a GPU is an operator with a synchronisation inside: one wait
    waits = _outermost(event for event in inside if HOST_WAITS.search(event.name))
    return "\n".join([
        *lines,
        f"layout transposes: {_percent(_sum(transposes), total)}",
        f"waiting for input: {_percent(_sum(ranges.get('data', [])), total)}",
        f"the loop itself, waiting included: {_percent(on_host - _sum(step), on_host)} of the host's time",
        f"host synchronisations: {len(waits) / len(iterations):.1f} an iteration, {_percent(_sum(waits), total)}",
    ])  # fmt: skip


def _describe_ranges(
    ranges: dict[str, list[Event]], launches: dict[int | None, float], work: Sequence[Event], total: float
) -> list[str]:
    """Describe each range: its host time and, with a GPU, the time of the GPU work launched in it. Backward launches
    from another thread, so a launch is assigned to a range by its time only."""
    launched = sorted((launches[event.correlation], event.duration) for event in work if event.correlation in launches)
    lines = [f"  {'range':24} {'host ms':>10} {'share':>7}" + (f" {'GPU ms':>10}" if work else "")]
    for name, occurrences in ranges.items():
        host = statistics.median(event.duration for event in occurrences) / 1e3
        line = f"  {name:24} {host:10.3f} {_percent(_sum(occurrences), total):>7}"
        if work:
            on_gpu = 0.0
            for event in occurrences:
                first, last = (bisect.bisect_left(launched, (time, 0.0)) for time in (event.start, event.end))
                on_gpu += sum(duration for _, duration in launched[first:last])
            line += f" {on_gpu / 1e3 / len(occurrences):10.3f}"
        lines.append(line)
    return lines


def _own_times(operators: Iterable[Event]) -> list[tuple[str, float]]:
    """Return (name, time without the operators it calls) of each operator. `operators` by start, outer first."""
    own: list[tuple[str, float]] = []
    stacks: dict[str, list[Event]] = defaultdict(list)
    for event in operators:
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            own.append((stack[-1].name, -event.duration))
        own.append((event.name, event.duration))
        stack.append(event)
    return own


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Return the events that are not within an earlier event of the same thread."""
    kept: list[Event] = []
    ends: dict[str, float] = defaultdict(float)
    for event in events:
        if event.start >= ends[event.thread]:
            kept.append(event)
            ends[event.thread] = event.end
    return kept


def _union(work: Sequence[Event]) -> tuple[float, list[float]]:
    """Return (time in which at least one event runs, the gaps between), for events by start."""
    gaps, reached = [], work[0].start
    for event in work:
        if event.start > reached:
            gaps.append(event.start - reached)
        reached = max(reached, event.end)
    return reached - work[0].start - sum(gaps), gaps


def _top(kind: str, times: Iterable[tuple[str, float]], total: float) -> list[str]:
    sums: dict[str, float] = defaultdict(float)
    for name, time in times:
        sums[name] += time
    largest = sorted(sums.items(), key=lambda item: -item[1])[:TOP]
    return [f"top {kind}:", *(f"  {_percent(time, total):>7}  {name[:90]}" for name, time in largest)]


def _sum(events: Iterable[Event]) -> float:
    return sum(event.duration for event in events)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
