"""Draw a training step of profiled runs, one run above the other on a common time axis.

    python -m tools.timeline expts/bs256-prof --out step.png
    python -m tools.timeline expts/bs256-prof expts/bs256-amp-nhwc-prof --out before_and_after.svg

Draws the step of median length from the trace of rank 0. Lanes: the trainer's ranges with their time, the backward
pass, the host's operators by thread (white: Python or waiting), the all-reduces, and the GPU's work by stream. An
all-reduce begins when a bucket's gradients are ready on this rank, so it includes the wait for slower ranks.

On a CPU a step is an iteration of the loop. The host runs ahead of a GPU: there a step lasts from its first GPU work
after the input to the next step's, and the host's lanes show what the host does meanwhile, mostly for later steps.
"""

import os
import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.common import COLOURS, check_writable, new_figure, new_parser, path_argument, save
from utils.errors import ConfigError, exit_in_a_line
from utils.run import profile as trace
from utils.run.profile import GPU_WORK, Event

ALL_REDUCES = re.compile("(?i)^(gloo:|ncclDev).*all_?reduce")  # `nccl:all_reduce` is only the host's launch
# In the order of drawing: operators call operators, and the inner one covers the outer one, but `other` covers nothing.
COLOUR = {
    "other": "#bbbbbb", "range": "#666666", "convolution": COLOURS[0], "batch norm": COLOURS[5],
    "matrix product": COLOURS[2], "optimizer": COLOURS[3], "communication": COLOURS[4], "copy": COLOURS[6],
    "layout transpose": COLOURS[1],
}  # fmt: skip
# What an operator or kernel computes: the first that its name matches. cuDNN computes some convolutions as `gemm`.
KINDS: dict[str, str | re.Pattern[str]] = {
    "layout transpose": trace.TRANSPOSES,
    "communication": "^(gloo|nccl|c10d)",
    "batch norm": r"(?i)batch_?norm|norm_?relu|\bbn_[fb]w|^_(sum_x|sum_gradient|statistics|apply|apply_gradient)$",
    "optimizer": "(?i)fused_?(sgd|adam)",  # in a CUDA graph; otherwise it is what its range contains
    "convolution": "(?i)conv|fprop|dgrad|wgrad|cudnn",
    "matrix product": r"(?i)gemm|nvjet|cutlass|addmm|matmul|aten::(linear|b?mm)$|\bMmBackward",
    "copy": "(?i)memcpy|copy",
}

# {lane, from top to bottom: {kind: [(start, duration)]}} in milliseconds from the beginning of the picture
Lanes = dict[str, dict[str, list[tuple[float, float]]]]


class Timeline(NamedTuple):
    """The drawn part of a trace; its length is in milliseconds."""

    title: str
    length: float
    lanes: Lanes


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture; returns the exit status."""
    parser, what = new_parser("timeline", __doc__), "a profiled run's folder, or its trace"
    parser.add_argument("traces", nargs="+", type=path_argument, metavar="TRACE", help=what)
    picture = "the picture: .svg, else PNG"
    parser.add_argument("--out", type=path_argument, required=True, metavar="FILE", help=picture)
    options = parser.parse_args(argv)
    check_writable("--out", options.out)
    timelines = [read_timeline(path) for path in options.traces]
    draw(timelines, options.out)
    print("\n".join([*(timeline.title for timeline in timelines), f"picture: {options.out}"]))
    return 0


def read_timeline(path: Path) -> Timeline:
    """Return the step of median length of a trace. Raises `ConfigError` if it is no trace or has no steps."""
    path = (path / "profile" / trace.TRACE_FILE if path.is_dir() else path).resolve()
    try:
        events = trace.read_trace(path)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "not a trace of torch.profiler"
        raise ConfigError(f"{path}: {reason}; give a run trained with enable_profiling, or its trace") from None
    ranges = trace.find_ranges(events)
    iterations = ranges.pop("iteration", [])
    bounds = find_bounds(events, iterations, ranges) if iterations else []
    steps = sorted(zip(bounds, bounds[1:], iterations, strict=False), key=lambda step: step[1] - step[0])
    if not steps:
        raise ConfigError(f"{path}: holds no training steps; profile a longer run")
    start, end, iteration = steps[(len(steps) - 1) // 2]
    run = os.fsencode(path.parents[1].name if path.parent.name == "profile" else path.name).decode(errors="replace")
    title = f"{run}: {iteration.name}, {(end - start) / 1e3:.2f} ms: the median length among {len(steps)}"
    return Timeline(title, (end - start) / 1e3, find_lanes(events, ranges, start, end))


def find_bounds(events: Sequence[Event], iterations: Sequence[Event], ranges: dict[str, list[Event]]) -> list[float]:
    """Return the start of each step and the end of the last one, in microseconds; none if a GPU's work is missing."""
    end = iterations[-1].end
    launched = [event for event in events if event.launched is not None and event.launched < end]
    work = sorted((event.launched or 0.0, event.start, event.end) for event in launched)
    if not work:
        return [*(event.start for event in iterations), end]
    places = [bisect_left(work, (data.end,)) for data in ranges.get("data", [])]
    first = [work[place] for place in places if place < len(work)]
    return [*(begun for _, begun, _ in first), max(ended for _, _, ended in work)] if first else []


def find_lanes(events: Sequence[Event], ranges: dict[str, list[Event]], start: float, end: float) -> Lanes:
    """Return the lanes from `start` to `end`, in microseconds."""
    updates = ranges.get("optimizer.step", [])
    names = [*ranges, "backward pass", "operators", "all-reduces"]
    lanes: Lanes = {}
    members: dict[str, list[Event]] = {name: [*ranges.get(name, [])] for name in names}
    for event in events:
        if event.name.startswith("autograd::engine::evaluate_function"):
            members["backward pass"].append(event)
        if ALL_REDUCES.search(event.name):
            members["all-reduces"].append(event)
        elif event.category == "cpu_op":
            members["operators"].append(event)
        elif event.category in GPU_WORK:
            members.setdefault(f"GPU stream {event.thread.partition('/')[2]}", []).append(event)
    for group, inside in members.items():
        threads: dict[str, str] = {}  # {thread: its lane}
        for event in inside:
            begun, ended = max(event.start, start), min(event.end, end)
            if begun >= ended:
                continue
            lane = threads.setdefault(event.thread, f"{group}, thread {len(threads) + 1}" if threads else group)
            launched = event.start if event.launched is None else event.launched
            if group in ranges or group == "backward pass":
                kind = "range"
            elif any(update.start <= launched < update.end for update in updates):
                kind = "optimizer"
            else:
                kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), "other")
            lanes.setdefault(lane, {}).setdefault(kind, []).append(((begun - start) / 1e3, (ended - begun) / 1e3))
    return lanes


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw the timelines, each below its title."""
    height = sum(len(timeline.lanes) + 1.5 for timeline in timelines)
    figure, axes = new_figure(size=(14.55, 0.25 * height + 0.9))  # 1,600 pixels
    row, names, legend = 0.0, dict[float, str](), dict[str, Any]()
    for timeline in timelines:
        axes.text(0, row, timeline.title, weight="bold", fontsize=10, va="center")
        axes.vlines(timeline.length, row + 0.5, row + len(timeline.lanes) + 0.5, color="black", linewidth=0.8)
        for lane, kinds in timeline.lanes.items():
            row += 1
            total = f"  {sum(duration for _, duration in kinds['range']):.2f} ms" if "range" in kinds else ""
            names[row] = lane + total
            edge = 0.8 if lane.startswith("all-reduces") else 0  # separates an all-reduce from the next
            for kind in sorted(kinds, key=list(COLOUR).index):
                style = {"facecolor": COLOUR[kind], "edgecolor": "#7a5200", "linewidth": edge, "snap": False}
                legend[kind] = axes.broken_barh(kinds[kind], (row - 0.4, 0.8), **style)
        row += 1.5
    axes.set_yticks(list(names), list(names.values()), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set(axisbelow=True, xlabel="ms from the beginning of the step", ylim=(row - 0.7, -0.7))
    axes.set_xlim(0, 1.002 * max(timeline.length for timeline in timelines))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend), fontsize=9, frameon=False)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
