"""One self-contained HTML page about any number of runs: tables and interactive curves.

    python -m tools.report expts/bs256-amp expts/bs256-amp-nhwc --out report
    python -m tools.report expts results/reference/sc20_curves.json BENCH.json

Takes run folders, folders of runs, published curves and reports of tools.bench. The page lists damaged, empty and
unfinished runs, and shows the rest. It needs no network; plotly draws the curves.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.bench.reports import Report, rates
from tools.shared.command_line import new_parser, path_argument
from tools.shared.output import make_folder, printable, say, write_file
from tools.shared.pages.plots import (
    Plot,
    Style,
    efficiencies,
    plot_bars,
    plot_runs,
    plot_scaling,
    scaling_rates,
    speed_text,
    style,
    title_of,
)
from tools.shared.read_runs import Found, Run, differences, read
from utils.base_config import as_yaml
from utils.errors import ConfigError, DataError, exit_in_a_line

TUTORIAL_GOAL = 0.75  # the accuracy on CIFAR-100 at which the tutorial compares times
ROUND_GOALS = [percent / 100 for percent in (*range(5, 90, 5), *range(90, 100))]
CURVES_NOTE = (
    "Strong lines: validation; thin, pale lines: training. Point at a line for its values. Drag to zoom, double-click "
    "to reset. Click on a run to hide or show it in all plots."
)
PUBLISHED_CURVES = (
    "The published curves show a cut of the learning rate one epoch before ours. Their training curves show the last "
    "batch of an epoch, ours the mean over its batches."
)
PAGE = Path(__file__).parent / "shared/pages/report.html"  # a Jinja2 template; PyTorch needs Jinja2 too


@dataclass(frozen=True)
class Section:
    """A heading with a table, plots or both; not shown if both are empty."""

    title: str
    table: str = ""  # its id on the page
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""
    plots: Sequence[Plot] = ()
    legend: Mapping[str, Style] = field(default_factory=dict)  # shows and hides the traces of the plots by their number


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    options = parser().parse_args(argv)
    found = gather(options.runs)
    names = _unique_names([(path.stem, path.with_suffix("")) for path, _ in found.reports])
    found = found._replace(
        reports=[(Path(name), report) for name, (_, report) in zip(names, found.reports, strict=True)]
    )
    styles, sections = sections_of(found)
    content = render_page(_count(found), found.problems, sections, styles)
    make_folder(options.out)
    page = options.out / "report.html"
    write_file(page, content.encode("utf-8", "backslashreplace"))
    for problem in found.problems:
        print(problem, file=sys.stderr)
    say(f"{page}: {_count(found)}, {len(content) / 1e6:.1f} MB")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = new_parser("report", __doc__, "0 written, 2 bad usage, 3 nothing to show")
    parser.add_argument(
        "runs", nargs="+", type=path_argument, metavar="RUN",
        help="run folders, folders of runs, files of curves, reports of tools.bench",
    )  # fmt: skip
    parser.add_argument("--out", type=path_argument, default=Path("report"), metavar="DIR", help="default: report")
    return parser


def gather(paths: Sequence[Path]) -> Found:
    """Read everything that the arguments name, each once; runs of the same name get their paths as names.

    Raises `DataError` if there is neither a run nor a measurement.
    """
    parts = [read(path) for path in paths]
    runs = list({(run.path.resolve(), run.name): run for part in parts for run in part.runs}.values())
    reports = list({path.resolve(): (path, report) for part in parts for path, report in part.reports}.values())
    problems = [problem for part in parts for problem in part.problems]
    for run, name in zip(runs, _unique_names([(run.name, run.path) for run in runs]), strict=True):
        run.name = printable(name)
    problems += [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    problems += [
        f"{path}: a report of tools.bench {report.bench}, which this page cannot draw"
        for path, report in reports
        if not rates(report)
    ]
    reports = [(path, report) for path, report in reports if rates(report)]
    if not runs and not reports:
        raise DataError(printable("; ".join(problems)))
    return Found(runs, reports, [printable(problem) for problem in problems])


def _unique_names(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the names; equal ones become the paths below the folder that they share."""
    counts = Counter(name for name, _ in named)
    alike = [path.absolute() for name, path in named if counts[name] > 1]
    shared = os.path.commonpath([path.parent for path in alike]) if alike else ""
    names = []
    for name, path in named:
        below = os.path.relpath(path.absolute(), shared or None)
        names.append(name if counts[name] == 1 else below if path.name == name else f"{below}: {name}")
    return names


# ---- the page


def sections_of(found: Found) -> tuple[dict[str, Style], list[Section]]:
    """Return the style of each run, and all sections, also empty ones."""
    shown = [run for run in found.runs if run.epochs]
    styles = {run.name: style(number) for number, run in enumerate(shown)}
    return styles, [
        _results(found.runs),
        _curves(shown, styles),
        _time_to_accuracy(shown),
        _scaling(found.reports),
        _measurements([(path, report) for path, report in found.reports if not scaling_rates(report)]),
        _seeds(shown),
        _differences(found.runs),
        _hardest_classes(shown),
    ]


def render_page(
    title: str, problems: Sequence[str], sections: Sequence[Section], styles: Mapping[str, Style]
) -> str:  # fmt: skip
    """Return the page, which needs no other file. Raises `ConfigError` if a package for drawing is missing."""
    plots = [vars(plot) for section in sections for plot in section.plots]
    try:
        from jinja2 import Environment, StrictUndefined

        library = ""
        if plots:
            from plotly.offline import get_plotlyjs

            library = get_plotlyjs()
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing; install it with: pip install ".[report]"') from None
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        title=title, written=clock_time(time.time()), problems=problems, sections=sections, styles=styles,
        descriptions=plots, library=library,
    )  # fmt: skip


def _count(found: Found) -> str:
    """Count what was found: "2 runs, 1 measurement"."""
    counts = ((len(found.runs), "run"), (len(found.reports), "measurement"))
    return ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)


def _results(runs: Sequence[Run]) -> Section:
    header = ("run", "state", "epochs", "best acc1", "in epoch", "last acc1", "time", "images/s", "device", "written")
    rows = []
    for run in runs:
        best, last, seconds, rate = run.best(), run.last("acc1/valid"), run.last("seconds"), run.rate()
        goal = run.config.get("max_epochs")
        rows.append((
            run.name,
            run.state,
            f"{run.epochs_trained()} of {goal}" if goal else run.epochs_trained(),
            f"{best[0]:.2%}" if best else "-",
            best[1] if best else "-",
            "-" if last is None else f"{last:.2%}",
            "-" if seconds is None else duration(seconds),
            speed_text(rate) if rate else "-",
            _device(run),
            "-" if run.state == "published" else clock_time(run.changed),
        ))  # fmt: skip
    clocks = " or ".join(sorted({run.clock for run in runs}))
    note = f"acc1: fraction of validation images whose most probable class is correct. Times are {clocks}."
    return Section("Results", "results", header, rows, note)


def _device(run: Run) -> str:
    device, count = run.environment.get("device", "-"), run.environment.get("world_size", 1)
    return f"{count} x {device}" if count > 1 else device


def _curves(runs: Sequence[Run], styles: Mapping[str, Style]) -> Section:
    published = PUBLISHED_CURVES if any(run.state == "published" for run in runs) else ""
    return Section("Curves", plots=plot_runs(runs), legend=styles, note=f"{CURVES_NOTE} {published}".strip())


def clock_time(seconds: float) -> str:
    """Return a moment (seconds since 1970) as date, time and difference from UTC."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours as text."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def goals(runs: Sequence[Run]) -> list[float]:
    """Return the accuracies whose times the page lists; the note of the table explains the choice."""
    reached_by = {goal: tuple(run.reached(goal) is not None for run in runs) for goal in ROUND_GOALS}
    highest = {reached: goal for goal, reached in reached_by.items() if any(reached)}  # the highest of each group
    own: set[float] = {goal for run in runs if (goal := run.config.get("stop_at_accuracy")) is not None}
    if any(run.config.get("dataset", "cifar100") == "cifar100" for run in runs):
        own.add(TUTORIAL_GOAL)
    return sorted({*highest.values(), *(goal for goal in own if any(run.reached(goal) for run in runs))})


def _time_to_accuracy(runs: Sequence[Run]) -> Section:
    columns = goals(runs)
    rows = []
    for run in runs:
        moments = [run.reached(goal) for goal in columns]
        times = (f"epoch {found[0]}, {duration(found[1])}" if found else "-" for found in moments)
        rows.append((run.name, _device(run), *times))
    note = (
        "The first epoch with at least this validation accuracy. Columns: for each set of runs, the highest of 5, 10, "
        "... 90, 91, ... 99 % that exactly these runs reached; the tutorial's 75 % of CIFAR-100; each run's own "
        "stop_at_accuracy."
    )
    header = ("run", "device", *(f"{100 * goal:.4g} %" for goal in columns))
    return Section("Time to accuracy", "targets", header, rows if columns else (), note if columns else "")


def _scaling(reports: Sequence[tuple[Path, Report]]) -> Section:
    curves = efficiencies(reports)
    devices = {str(path): report.environment.get("device", "-") for path, report in reports}
    rows = [
        (name, devices[name.rpartition(": ")[0]], ranks, speed_text(speed), f"{efficiency:.1%}")
        for name, points in curves.items()
        for ranks, speed, efficiency in points
    ]
    legend = {name: style(number) for number, name in enumerate(curves)}
    header = ("measurement", "device", "ranks", "images/s", "efficiency")
    return Section("Scaling", "scaling", header, rows, plots=plot_scaling(curves), legend=legend)


def _measurements(reports: Sequence[tuple[Path, Report]]) -> Section:
    rows = []
    for path, report in reports:
        speeds = {name: rate.images_per_sec for name, rate in rates(report).items()}
        first = next(iter(speeds.values()))
        rows += [
            (title_of(path, report), name, speed_text(speed), f"{speed / first:.2f}") for name, speed in speeds.items()
        ]
    header = ("measurement and device", "case", "images/s", "relative speed")
    plots = [plot_bars(number, path, report) for number, (path, report) in enumerate(reports)]
    return Section("Measured speed", "speeds", header, rows, plots=plots)


def same_but_seed(runs: list[Run]) -> list[list[Run]]:
    """Group runs by device and configuration without its seed, in order; without one each run is a group."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        same = json.dumps([_device(run), rest], sort_keys=True) if rest else f"alone {number}"
        groups.setdefault(same, []).append(run)
    return list(groups.values())


def _seeds(runs: Sequence[Run]) -> Section:
    rows = []
    for same in same_but_seed([run for run in runs if run.config and run.state == "finished"]):
        by_seed = {run.config.get("seed", 0): run for run in sorted(same, key=lambda run: run.changed)}
        seeds, group = sorted(by_seed), [*by_seed.values()]  # of equal seeds the newest run
        best = [100 * found[0] for run in group if (found := run.best())]
        last = [100 * value for run in group if (value := run.last("acc1/valid")) is not None]
        seconds = [value for run in group if (value := run.last("seconds")) is not None]
        if len(seeds) > 1 and len(best) > 1:
            spreads = _spread(best, 2), _spread(last, 2), _spread(seconds, 1)
            rows.append((group[0].name, _device(group[0]), ", ".join(map(str, seeds)), len(group), *spreads))
    header = ("finished runs like", "device", "seeds", "runs", "best acc1, %", "last acc1, %", "seconds")
    note = "Mean ± standard deviation (lowest to highest) of runs that differ only in the seed; the newest run of each."
    return Section("Mean and spread over seeds", "seeds", header, rows, note)


def _spread(values: Sequence[float], digits: int) -> str:
    mean, lowest, highest = (f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ± {statistics.stdev(values):.{digits}f} ({lowest} to {highest})"


def _differences(runs: Sequence[Run]) -> Section:
    names = [run.name for run in runs if run.config]
    table = {key: [as_yaml(value) for value in values] for key, values in differences(list(runs)).items()}
    if len(names) > len(table):  # the longer side becomes the rows
        header, rows = ("run", *table), list(zip(names, *table.values(), strict=True))
    else:
        header, rows = ("key", *names), [(key, *values) for key, values in table.items()]
    return Section("Where the configurations differ", "differences", header, rows if table else ())


def _hardest_classes(runs: Sequence[Run]) -> Section:
    rows = []
    for run in runs:
        worst = run.worst_classes[:5]
        cells = [f"{row['class']} {row['accuracy']:.0%} ({row['taken_for']} {row['share']:.0%})" for row in worst]
        if cells:
            rows.append((run.name, *cells, *["-"] * (5 - len(cells))))
    note = "Fraction of a class's validation images that are recognised; in brackets the class it is most mistaken for."
    header = ("run", "hardest", "second", "third", "fourth", "fifth")
    return Section("Hardest classes", "worst", header, rows, note)


if __name__ == "__main__":
    sys.exit(main())
