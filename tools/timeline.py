"""Draw a training step of profiled runs, one run above the other on a common time axis.

    python -m tools.timeline expts/bs256-prof --out step.png
    python -m tools.timeline expts/bs256-prof expts/bs256-amp-nhwc-prof --out before_and_after.svg

Draws the step of median length from the trace of rank 0. Lanes: the trainer's ranges with their time, the backward
pass, the host's operators by thread (white: Python or waiting), the all-reduces, and the GPU's work by stream. An
all-reduce begins when a bucket's gradients are ready on this rank, so it includes the wait for slower ranks.

On a CPU a step is an iteration of the loop. The host runs ahead of a GPU: there a step lasts from its first GPU work
after the input to the next step's, and the host's lanes show what the host does meanwhile, mostly for later steps.
"""

import gzip
import json
import os
import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.common import COLOURS, check_writable, new_figure, new_parser, path_argument, save
from utils.errors import ConfigError, exit_in_a_line
from utils.run.profile import RANGES, TRACE_FILE, TRANSPOSES

GROUPS = (*RANGES, "backward pass", "operators", "all-reduces")  # of lanes, above the lanes of GPU streams
ALL_REDUCES = re.compile("(?i)^(gloo:|ncclDev).*all_?reduce")  # `nccl:all_reduce` is only the host's launch
# In the order of drawing: operators call operators, and the inner one covers the outer one, but `other` covers nothing.
COLOUR = {
    "other": "#bbbbbb", "range": "#666666", "convolution": COLOURS[0], "batch norm": COLOURS[5],
    "matrix product": COLOURS[2], "optimizer": COLOURS[3], "communication": COLOURS[4], "copy": COLOURS[6],
    "layout transpose": COLOURS[1],
}  # fmt: skip
# What an operator or kernel computes: the first that its name matches. cuDNN computes some convolutions as `gemm`.
KINDS: dict[str, str | re.Pattern[str]] = {
    "layout transpose": TRANSPOSES,
    "communication": "^(gloo|nccl|c10d)",
    "batch norm": r"(?i)batch_?norm|norm_?relu|\bbn_[fb]w|^_(sum_x|sum_gradient|statistics|apply|apply_gradient)$",
    "optimizer": "(?i)fused_?(sgd|adam)",  # in a CUDA graph; otherwise it is what its range contains
    "convolution": "(?i)conv|fprop|dgrad|wgrad|cudnn",
    "matrix product": r"(?i)gemm|nvjet|cutlass|addmm|matmul|aten::(linear|b?mm)$|\bMmBackward",
    "copy": "(?i)memcpy|copy",
}
# {lane, from top to bottom: {kind: [(start, duration)]}} in milliseconds from the beginning of the picture
Lanes = dict[str, dict[str, list[tuple[float, float]]]]
Timeline = tuple[str, float, Lanes]  # title, length in milliseconds, lanes


class Event(NamedTuple):
    """A range or operator of the host, or work of a GPU; times in microseconds."""

    name: str
    group: str  # of the lane; all operators are in "operators"
    on_gpu: bool
    start: float
    end: float
    thread: str
    launched: float  # GPU work: when the host launched it; else `start`


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser, what = new_parser("timeline", __doc__), "a profiled run's folder, or its trace"
    parser.add_argument("traces", nargs="+", type=path_argument, metavar="TRACE", help=what)
    parser.add_argument("--out", type=path_argument, required=True, metavar="FILE", help="picture: .svg, else PNG")
    options = parser.parse_args(argv)
    check_writable("--out", options.out)
    timelines = [read_timeline(path) for path in options.traces]
    draw(timelines, options.out)
    print("\n".join([*(title for title, _, _ in timelines), f"picture: {options.out}"]))
    return 0


def read_timeline(path: Path) -> Timeline:
    """Return the step of median length of a trace. Raises `ConfigError` if it is no trace or has no steps."""
    path = (path / "profile" / TRACE_FILE if path.is_dir() else path).resolve()
    try:
        events = read_trace(path)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "not a trace of torch.profiler"
        raise ConfigError(f"{path}: {reason}; give a run trained with enable_profiling, or its trace") from None
    steps = sorted(find_steps(events))
    if not steps:
        raise ConfigError(f"{path}: holds no training steps; profile a longer run")
    length, start, name = steps[(len(steps) - 1) // 2]
    run = os.fsencode(path.parents[1].name if path.parent.name == "profile" else path.name).decode(errors="replace")
    title = f"{run}: {name}, {length / 1e3:.2f} ms: the median length among {len(steps)}"
    return title, length / 1e3, find_lanes(events, start, start + length)


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace, gzipped if it ends in .gz, by start."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = [{"cat": "", "args": {}} | row for row in json.load(file)["traceEvents"] if row["ph"] == "X"]
    launches = {row["args"].get("correlation"): row["ts"] for row in rows if row["cat"].startswith("cuda_")}
    events = list[Event]()
    for row in rows:
        name, start, on_gpu = row["name"], row["ts"], row["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        groups = {"cpu_op": "operators", "user_annotation": re.sub(r" \d+$", "", name)}
        group = "all-reduces" if ALL_REDUCES.search(name) else groups.get(row["cat"], f"GPU stream {row['tid']}")
        launched = launches.get(row["args"].get("correlation"), start) if on_gpu else start
        if group in GROUPS or on_gpu:
            end, thread = start + row["dur"], f"{row['pid']}/{row['tid']}"
            events.append(Event(name, group, on_gpu, start, end, thread, launched))
    return sorted(events, key=lambda event: event.start)


def find_steps(events: Sequence[Event]) -> list[tuple[float, float, str]]:
    """Return (length, start, name) of each step."""
    iterations = [event for event in events if event.group == "iteration"]
    bounds, end = [event.start for event in iterations], max((event.end for event in iterations), default=0.0)
    work = sorted((event.launched, event.start, event.end) for event in events if event.on_gpu and event.launched < end)
    if work:
        places = [bisect_left(work, (event.end,)) for event in events if event.group == "data"]
        bounds, end = [work[place][1] for place in places if place < len(work)], max(ended for _, _, ended in work)
    steps = zip(pairwise([*bounds, end]), iterations, strict=False)
    return [(following - start, start, iteration.name) for (start, following), iteration in steps]


def find_lanes(events: Sequence[Event], start: float, end: float) -> Lanes:
    """Return the lanes from `start` to `end`, in microseconds."""
    updates = [event for event in events if event.group == "optimizer.step"]
    groups: dict[str, Lanes] = {name: {} for name in GROUPS if name != "iteration"}
    for event in events:
        begun, ended = max(event.start, start), min(event.end, end)
        if begun >= ended or event.group == "iteration":
            continue
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), "other")
        if any(update.start <= event.launched < update.end for update in updates):
            kind = "optimizer"
        places = {event.group: "range" if event.group in RANGES else kind}
        if event.name.startswith("autograd::engine::evaluate_function"):
            places["backward pass"] = "range"
        for group, kind in places.items():
            lane = groups.setdefault(group, {}).setdefault(event.thread, {})
            lane.setdefault(kind, []).append(((begun - start) / 1e3, (ended - begun) / 1e3))
    return {
        group if number == 1 else f"{group}, thread {number}": lane
        for group, threads in groups.items()
        for number, lane in enumerate(threads.values(), start=1)
    }


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw the timelines, each below its title."""
    height = sum(len(lanes) + 1.5 for _, _, lanes in timelines)
    figure, axes = new_figure(size=(14.55, 0.25 * height + 0.9))  # 1,600 pixels
    row, names, legend = 0.0, dict[float, str](), dict[str, object]()
    for title, length, lanes in timelines:
        axes.text(0, row, title, weight="bold", fontsize=10, va="center")
        axes.vlines(length, row + 0.5, row + len(lanes) + 0.5, color="black", linewidth=0.8)
        for lane, kinds in lanes.items():
            row += 1
            total = f"  {sum(duration for _, duration in kinds['range']):.2f} ms" if "range" in kinds else ""
            names[row] = lane + total
            style = {"edgecolor": "#7a5200", "linewidth": 0.8 if lane.startswith("all-reduces") else 0, "snap": False}
            for kind in filter(kinds.get, COLOUR):
                legend[kind] = axes.broken_barh(kinds[kind], (row - 0.4, 0.8), facecolor=COLOUR[kind], **style)
        row += 1.5
    axes.set_yticks(list(names), list(names.values()), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    right = 1.002 * max(length for _, length, _ in timelines)
    axes.set(axisbelow=True, xlabel="ms from the beginning of the step", ylim=(row - 0.7, -0.7), xlim=(0, right))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend), fontsize=9, frameon=False)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
