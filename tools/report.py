"""One self-contained HTML page about any number of runs: tables and interactive curves.

    python -m tools.report expts/bs256-amp expts/bs256-amp-nhwc --out report
    python -m tools.report expts results/reference/sc20_curves.json

Takes run folders, folders of runs and published curves. The page lists damaged, empty and
unfinished runs, and shows the rest. It needs no network; plotly draws the curves.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.shared.command_line import new_parser, path_argument
from tools.shared.output import make_folder, printable, say, write_file
from tools.shared.read_runs import Found, Run, differences, read
from utils.base_config import as_yaml
from utils.errors import ConfigError, DataError, exit_in_a_line

TUTORIAL_GOAL = 0.75  # the accuracy on CIFAR-100 at which the tutorial compares times
ROUND_GOALS = [percent / 100 for percent in (*range(5, 90, 5), *range(90, 100))]
CURVES_NOTE = (
    "Strong lines: validation; thin, pale lines: training. Point at a line for its values, drag to zoom, double-click "
    "to reset, click a run in the legend to hide it in all plots. Published curves show a cut of the learning rate one "
    "epoch before ours, and the last batch of an epoch instead of the mean over its training batches."
)
PAGE = Path(__file__).parent / "shared/pages/report.html"  # a Jinja2 template; PyTorch needs Jinja2 too


@dataclass(frozen=True)
class Section:
    """A heading with a table, a figure or both; not shown if both are empty."""

    title: str
    name: str  # of the table on the page
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""
    figure: str = ""  # HTML


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    options = parser().parse_args(argv)
    found = read(options.runs)
    if not found.runs:
        raise DataError(printable("; ".join(found.problems)))
    title = f"{len(found.runs)} runs"
    page = printable(render_page(title, found))
    make_folder(options.out)
    write_file(options.out / "report.html", page.encode())
    for problem in found.problems:
        print(printable(problem), file=sys.stderr)
    say(f"{options.out / 'report.html'}: {title}, {len(page) / 1e6:.1f} MB")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = new_parser("report", __doc__, "0 written, 2 bad usage, 3 nothing to show")
    parser.add_argument(
        "runs", nargs="+", type=path_argument, metavar="RUN", help="run folders, folders of runs, files of curves"
    )  # fmt: skip
    parser.add_argument("--out", type=path_argument, default=Path("report"), metavar="DIR", help="default: report")
    return parser


def render_page(title: str, found: Found) -> str:
    """Return the page, which needs no other file. Raises `ConfigError` if a package for drawing is missing."""
    try:
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs

        from tools.shared.pages.plots import draw_curves
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing; install it with: pip install ".[report]"') from None
    shown = [run for run in found.runs if run.epochs]
    curves = draw_curves(shown) if shown else ""
    sections = [
        _results(found.runs),
        Section("Curves", "", note=CURVES_NOTE, figure=curves),
        _time_to_accuracy(shown),
        _differences(found.runs),
    ]
    library = get_plotlyjs() if shown else ""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    written = clock_time(time.time())
    return template.render(title=title, written=written, problems=found.problems, sections=sections, library=library)


def _results(runs: Sequence[Run]) -> Section:
    header = ("run", "state", "epochs", "best acc1", "in epoch", "last acc1", "time", "images/s", "device", "written")
    rows = []
    for run in runs:
        best, last, seconds, rate = run.best(), run.last("acc1/valid"), run.last("seconds"), run.rate()
        rows.append((
            run.name,
            run.state,
            run.epochs_trained(),
            f"{best[0]:.2%}" if best else "-",
            best[1] if best else "-",
            "-" if last is None else f"{last:.2%}",
            "-" if seconds is None else duration(seconds),
            f"{rate:,.0f}" if rate else "-",
            _device(run),
            clock_time(run.changed) if run.changed else "-",
        ))  # fmt: skip
    note = (
        "acc1: fraction of validation images whose most probable class is correct. Times are of training; of published "
        "curves, since their first record."
    )
    return Section("Results", "results", header, rows, note)


def _device(run: Run) -> str:
    device, count = run.environment.get("device", "-"), run.environment.get("world_size", 1)
    return f"{count} x {device}" if count > 1 else device


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
    wanted = {goal for run in runs if (goal := run.config.get("stop_at_accuracy")) is not None}
    wanted |= {TUTORIAL_GOAL for run in runs if run.config.get("dataset", "cifar100") == "cifar100"}
    bests = [best[0] for run in runs if (best := run.best())]
    highest = {max((goal for goal in ROUND_GOALS if goal <= best), default=1.0) for best in bests}
    return sorted(goal for goal in wanted | highest if any(run.reached(goal) for run in runs))


def _time_to_accuracy(runs: Sequence[Run]) -> Section:
    columns = goals(runs)
    rows = []
    for run in runs:
        moments = [run.reached(goal) for goal in columns]
        times = (f"epoch {found[0]}, {duration(found[1])}" if found else "-" for found in moments)
        rows.append((run.name, _device(run), *times))
    note = (
        "The first epoch with at least this validation accuracy. Columns: the highest of 5, 10, ... 90, 91, ... 99 % "
        "that each run reached; the tutorial's 75 % of CIFAR-100; each run's own stop_at_accuracy."
    )
    header = ("run", "device", *(f"{100 * goal:.4g} %" for goal in columns))
    return Section("Time to accuracy", "targets", header, rows if columns else (), note)


def _differences(runs: Sequence[Run]) -> Section:
    header = ("setting", *(run.name for run in runs if run.config))
    rows = [(key, *map(as_yaml, values)) for key, values in differences(runs).items()]
    return Section("Where the configurations differ", "differences", header, rows)


if __name__ == "__main__":
    sys.exit(main())
