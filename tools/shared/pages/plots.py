"""The interactive plots of tools.report, as descriptions for plotly in the browser. Does not need plotly itself."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.reports import Rate, Report, rates
from tools.shared.pages.png_plots import COLOURS
from tools.shared.read_runs import Run

LOSS_OUTLIER = 1.5  # times the 95th percentile: the first view cuts off losses above it
EVERY_EPOCH = 12  # up to this many epochs, each has its tick on the axis
HEIGHT = 330  # pixels


@dataclass(frozen=True)
class Style:
    """The look of a run's line in every plot and in the legend."""

    colour: str
    dash: str  # lengths of lines and gaps, as SVG and plotly take them; empty: a solid line


@dataclass(frozen=True)
class Plot:
    """The arguments of plotly's `newPlot`. A trace's `legendgroup` is the number of its line in the legend."""

    name: str  # its id on the page
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def style(number: int) -> Style:
    """Return the style of line 0, 1, ...: each colour solid, then each dashed, then dashed and dotted, ..."""
    turn, place = divmod(number, len(COLOURS))
    return Style(COLOURS[place], "8px,4px" + ",2px,4px" * (turn - 1) if turn else "")


# ---- curves of runs


def plot_runs(runs: Sequence[Run]) -> list[Plot]:
    """Plot accuracy and loss against epochs and time, throughput and learning rate, if a run recorded them."""
    axes = (("epoch", "epoch", 1.0), ("seconds", *_time_unit(runs)))
    plots = []
    for kind, label, scale in (("acc1", "accuracy, %", 100.0), ("loss", "loss", 1.0)):
        for column, unit, length in axes:
            sides = (("train", "training"), ("valid", "validation"))
            traces = [
                trace
                for side, words in sides
                for trace in _trace_runs(runs, column, length, f"{kind}/{side}", scale, f"{words} {label}", unit)
            ]
            title = f"{label.partition(',')[0].capitalize()} against {'epochs' if column == 'epoch' else 'time'}"
            layout = _layout(unit, label, traces)
            if kind == "loss":
                layout["yaxis"]["range"] = [0, _highest_loss(traces)]
            plots.append(Plot(f"{kind}-{column}", title, traces, layout))
    for key, label in (("images_per_sec", "images/s"), ("learning_rate", "learning rate")):
        traces = _trace_runs(runs, "epoch", 1.0, key, 1.0, label, "epoch")
        layout = _layout("epoch", label, traces)
        layout["yaxis"]["rangemode"] = "tozero"
        plots.append(Plot(key, "Training throughput" if key == "images_per_sec" else "Learning rate", traces, layout))
    return [plot for plot in plots if plot.traces]


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """Return the unit that suits the longest run, and its seconds."""
    longest = max((row["seconds"] for run in runs for row in run.epochs), default=0.0)
    return ("seconds", 1.0) if longest < 120 else ("minutes", 60.0) if longest < 7200 else ("hours", 3600.0)


def _trace_runs(
    runs: Sequence[Run], column: str, length: float, key: str, scale: float, label: str, unit: str
) -> list[dict[str, Any]]:
    """Return a line for each run that recorded `key`; lines of training are thin and pale."""
    traces = []
    for number, run in enumerate(runs):
        rows = [row for row in run.epochs if key in row]
        if not rows:
            continue
        value = label.removesuffix(", %") + (" %{y:.2f} %" if label.endswith("%") else " %{y:.5g}")
        time = "" if column == "epoch" else f", %{{x:.4g}} {unit}"
        traces.append(
            _trace(number, run.name, [row[column] / length for row in rows], [scale * row[key] for row in rows])
            | {
                "customdata": [int(row["epoch"]) for row in rows],
                "hovertemplate": f"<b>%{{fullData.name}}</b><br>{value}<br>epoch %{{customdata}}{time}<extra></extra>",
                "opacity": 0.45 if key.endswith("/train") else 1.0,
            }
        )
        traces[-1]["line"]["width"] = 1.2 if key.endswith("/train") else 2
    return traces


def _highest_loss(traces: Sequence[dict[str, Any]]) -> float:
    """Return the end of the loss axis, chosen so that one spike does not flatten all curves."""
    drawn = sorted(value for trace in traces for value in trace["y"] if value is not None)
    return min(LOSS_OUTLIER * drawn[int(0.95 * (len(drawn) - 1))], 1.05 * drawn[-1]) if drawn else 1.0


# ---- reports of tools.bench


def plot_bars(number: int, path: Path, report: Report) -> Plot:
    """Plot a bar for each case of a report, the first on top, with its images/s and relative speed."""
    speeds = {name: rate.images_per_sec for name, rate in rates(report).items()}
    first = next(iter(speeds.values()))
    trace = {
        "type": "bar", "orientation": "h", "x": list(speeds.values()), "y": [html.escape(name) for name in speeds],
        "text": [f"{speed_text(speed)} ({speed / first:.2f} x)" for speed in speeds.values()],
        "textposition": "outside", "cliponaxis": False, "marker": {"color": COLOURS[0]},
        "hovertemplate": "%{y}<br>%{x:,.5g} images/s<extra></extra>",
    }  # fmt: skip
    layout = _layout("images/s", "", [])
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "showgrid": False}
    layout["xaxis"]["range"] = [0, 1.3 * max(speeds.values())]
    layout["height"] = 90 + 34 * len(speeds)
    return Plot(f"bars-{number}", title_of(path, report), [trace], layout)


def title_of(path: Path, report: Report) -> str:
    """Return the name, the bench and the device of a report."""
    return f"{path}: {report.bench} on {report.environment.get('device', 'unknown device')}"


def speed_text(images_per_sec: float) -> str:
    """Return images/s rounded to significant digits."""
    return f"{images_per_sec:,.0f}" if images_per_sec >= 100 else f"{images_per_sec:.1f}"


def scaling_rates(report: Report) -> list[Rate]:
    """Return the cases of a report of `tools.bench scaling` by mode and ranks; none for another report."""
    return sorted((rate for rate in rates(report).values() if rate.mode), key=lambda rate: (rate.mode, rate.ranks))


def efficiencies(reports: Sequence[tuple[Path, Report]]) -> dict[str, list[tuple[int, float, float]]]:
    """{"scaling: weak, training only", ...: [(ranks, images/s, efficiency against the fewest ranks)]}."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for path, report in reports:
        for what, name in (("training only", "images_per_sec"), ("whole epoch", "epoch_images_per_sec")):
            for rate in scaling_rates(report):
                if speed := getattr(rate, name):
                    curves.setdefault(f"{path}: {rate.mode}, {what}", []).append((rate.ranks, speed))
    return {
        name: [(ranks, speed, speed / ranks * points[0][0] / points[0][1]) for ranks, speed in points]
        for name, points in sorted(curves.items())
    }


def plot_scaling(curves: dict[str, list[tuple[int, float, float]]]) -> list[Plot]:
    """Plot throughput and efficiency against ranks, from `efficiencies`."""
    plots = []
    for column, name, label in ((1, "throughput", "images/s"), (2, "efficiency", "efficiency, %")):
        traces = []
        for number, (curve, points) in enumerate(curves.items()):
            scale = 100.0 if column == 2 else 1.0
            ranks, values = [point[0] for point in points], [scale * point[column] for point in points]
            hover = f"<b>%{{fullData.name}}</b><br>%{{x}} ranks: %{{y:,.4g}} {label.rpartition(' ')[2]}<extra></extra>"
            traces.append(_trace(number, curve, ranks, values) | {"mode": "lines+markers", "hovertemplate": hover})
        layout = _layout("ranks", label, [])
        layout["yaxis"]["rangemode"] = "tozero"
        plots.append(Plot(f"scaling-{name}", name.capitalize(), traces, layout))
    return plots if curves else []


# ---- shared


def _trace(number: int, name: str, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    look = style(number)
    return {
        "type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "x": _numbers(x), "y": _numbers(y),
        "name": html.escape(name),  # plotly interprets <b> and the like as markup
        "legendgroup": str(number), "line": {"color": look.colour, "dash": look.dash or "solid"},
        "marker": {"color": look.colour},
    }  # fmt: skip


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Round to six digits, finer than a pixel; None, a gap in the line, for a number that is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _layout(across: str, up: str, traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    axis = {"gridcolor": "#e6e6e6", "linecolor": "#888", "zeroline": False, "showline": True, "ticks": "outside"}
    last = max((number for trace in traces for number in trace["customdata"]), default=EVERY_EPOCH + 1)
    steps = {"dtick": 1} if across == "epoch" and last <= EVERY_EPOCH else {}
    return {
        "height": HEIGHT, "margin": {"l": 58, "r": 14, "t": 30, "b": 46}, "showlegend": False, "hovermode": "closest",
        "hoverlabel": {"namelength": -1}, "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1a1a1a"},
        "xaxis": axis | steps | {"title": {"text": across}}, "yaxis": axis | {"title": {"text": up}},
        "plot_bgcolor": "#fff", "paper_bgcolor": "#fff",
    }  # fmt: skip
