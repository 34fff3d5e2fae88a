"""PROF: reads a Chrome trace of torch.profiler and says in words what it shows of the training step."""

import bisect
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# The tutorial's ranges; `iteration 7` and `epoch 2` count under their first word.
RANGES = ("iteration", "data", "zero_grad", "forward/loss/backward", "optimizer.step", "graph replay")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# cuDNN's and PyTorch's kernels, and PyTorch's CPU operators, that only change a memory layout. oneDNN's reorders on a
# CPU are inside its convolutions and cannot be seen here.
TRANSPOSES = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|aten::contiguous$", re.IGNORECASE)
HOST_WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy$|aten::_local_scalar_dense$")
# What a step is for; all else is the loop's own: input, metrics, logging, Python.
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
    """The complete events of a gzipped trace, by start; the outer of two that start together comes first."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
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
    """The occurrences of each of RANGES, by start."""
    found: dict[str, list[Event]] = {name: [] for name in RANGES}
    for event in events:
        name = re.sub(r" \d+$", "", event.name)
        if event.category == "user_annotation" and name in found:
            found[name].append(event)
    return {name: occurrences for name, occurrences in found.items() if occurrences}


def describe_trace(events: Sequence[Event]) -> str:
    """Time per range, top kernels or operators, layout transposes, gaps, waiting for input, host synchronisations."""
    ranges = find_ranges(events)
    iterations = ranges.get("iteration")
    if not iterations:
        return "The trace holds no iteration."
    start, host_end = iterations[0].start, iterations[-1].end
    inside = [event for event in events if start <= event.start < host_end]
    launched = {event.correlation for event in inside if event.category in LAUNCHES}
    on_gpu = [event for event in events if event.category in GPU_WORK]
    # a graph is one launch a step, so that the host is done many steps before the GPU
    end = max([host_end, *(event.end for event in on_gpu if event.correlation in launched)])
    work = [event for event in on_gpu if start <= event.start < end]
    operators = [event for event in inside if event.category == "cpu_op"]
    total = end - start
    lines = [f"Profile of {len(iterations)} iterations, {total / 1e3 / len(iterations):.2f} ms each"]
    lines += _describe_ranges(ranges, inside, work, total)
    if work:
        lines += _top("kernels", _sum_by_name(work), total)
        busy, gaps = _union(work)
        lines.append(
            f"launch gaps: the GPU is idle {_percent(total - busy, total)} of the time, {len(gaps)} gaps, "
            f"the longest {max(gaps, default=0) / 1e3:.2f} ms"
        )
    else:
        own = _own_times(operators)
        lines += _top("operators", own, total)
        lines.append(f"outside operators (Python, waiting): {_percent(total - sum(own.values()), total)}")
    transposes = _outermost(event for event in work or operators if TRANSPOSES.search(event.name))
    lines.append(f"layout transposes: {_percent(sum(event.duration for event in transposes), total)}")
    waiting = sum(event.duration for event in ranges.get("data", []))
    lines.append(f"waiting for input: {_percent(waiting, total)}")
    step = sum(event.duration for name in STEP_RANGES for event in ranges.get(name, []))
    on_host = host_end - start
    lines.append(f"the loop itself, waiting included: {_percent(on_host - step, on_host)} of the host's time")
    waits = [event for event in inside if HOST_WAITS.search(event.name)]
    lines.append(
        f"host synchronisations: {len(waits) / len(iterations):.1f} an iteration, "
        f"{_percent(sum(event.duration for event in waits), total)}"
    )
    return "\n".join(lines)


def _describe_ranges(
    ranges: dict[str, list[Event]], inside: Sequence[Event], work: Sequence[Event], total: float
) -> list[str]:
    """Per range: its time on the host and, with a GPU, that of the work which was launched in it."""
    launched = _launch_times(inside, work)
    lines = [f"  {'range':24} {'host ms':>10} {'share':>7}" + (f" {'GPU ms':>10}" if work else "")]
    for name, occurrences in ranges.items():
        host = statistics.median(event.duration for event in occurrences) / 1e3
        line = f"  {name:24} {host:10.3f} {_percent(sum(event.duration for event in occurrences), total):>7}"
        if work:
            on_gpu = sum(
                duration
                for occurrence in occurrences
                for _, duration in launched[
                    bisect.bisect_left(launched, (occurrence.start, 0.0)) : bisect.bisect_left(
                        launched, (occurrence.end, 0.0)
                    )
                ]
            )
            line += f" {on_gpu / 1e3 / len(occurrences):10.3f}"
        lines.append(line)
    return lines


def _launch_times(inside: Sequence[Event], work: Sequence[Event]) -> list[tuple[float, float]]:
    """(when the host launched it, duration) of each piece of GPU work, by launch; backward launches from a thread of
    its own while the range's thread waits for it, so only the time tells the range."""
    launches = {event.correlation: event.start for event in inside if event.category in LAUNCHES}
    return sorted((launches[event.correlation], event.duration) for event in work if event.correlation in launches)


def _sum_by_name(events: Iterable[Event]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for event in events:
        sums[event.name] += event.duration
    return sums


def _own_times(operators: Iterable[Event]) -> dict[str, float]:
    """Time of each operator without that of the operators it calls. `operators` by start, outer first."""
    own: dict[str, float] = defaultdict(float)
    stacks: dict[str, list[Event]] = defaultdict(list)
    for event in operators:
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            own[stack[-1].name] -= event.duration
        own[event.name] += event.duration
        stack.append(event)
    return own


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Those that do not lie within an earlier one of the same thread."""
    kept: list[Event] = []
    ends: dict[str, float] = {}
    for event in events:
        if event.start >= ends.get(event.thread, float("-inf")):
            kept.append(event)
            ends[event.thread] = event.end
    return kept


def _union(work: Sequence[Event]) -> tuple[float, list[float]]:
    """(time in which at least one piece runs, the gaps between), of events by start."""
    busy, gaps, reached = 0.0, [], work[0].start
    for event in work:
        if event.start > reached:
            gaps.append(event.start - reached)
        busy += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return busy, gaps


def _top(kind: str, times: dict[str, float], total: float) -> list[str]:
    lines = [f"top {kind}:"]
    for name, time in sorted(times.items(), key=lambda item: -item[1])[:TOP]:
        lines.append(f"  {_percent(time, total):>7}  {name[:90]}")
    return lines


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
