"""One self-contained HTML page about any number of runs: tables and interactive curves.

    python -m tools.report expts/bs256-amp expts/bs256-amp-nhwc --out report
    python -m tools.report expts results/reference/sc20_curves.json

Takes run folders, folders of runs and published curves. The page lists damaged, empty and
unfinished runs, and shows the rest. It needs no network; plotly draws the curves.
"""

import html
import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.common import COLOURS, make_folder, new_parser, path_argument, write_file
from tools.runs import Run, read
from utils.base_config import as_yaml
from utils.errors import ConfigError, DataError, exit_in_a_line

TUTORIAL_GOAL = 0.75  # the accuracy on CIFAR-100 at which the tutorial compares times
ROUND_GOALS = [percent / 100 for percent in (*range(5, 90, 5), *range(90, 100))]
PAGE = Path(__file__).parent / "report.html"  # a Jinja2 template; PyTorch needs Jinja2 too
DASHES = ("solid", "dash", "dot", "dashdot")
LOSS_OUTLIER = 1.5  # times the 95th percentile: the first view cuts off losses above it
PANELS = (  # title, key in an epoch's record, alone or with /valid and /train, horizontal axis
    ("Accuracy, %", "acc1", "epoch"), ("Accuracy, %", "acc1", "seconds"), ("Loss", "loss", "epoch"),
    ("Loss", "loss", "seconds"), ("Training images/s", "images_per_sec", "epoch"),
    ("Learning rate", "learning_rate", "epoch"),
)  # fmt: skip
Rows = list[tuple[Any, ...]]  # a table; the first row is its header


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("report", __doc__, "0 written, 2 bad usage, 3 nothing to show")
    what = "run folders, folders of runs, files of curves"
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help=what)
    parser.add_argument("--out", type=path_argument, default=Path("report"), metavar="DIR", help="default: report")
    options = parser.parse_args(argv)
    runs, problems = read(options.runs)
    if not runs:
        raise DataError("; ".join(problems))
    try:
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing; install it with: pip install ".[report]"') from None
    shown, title = [run for run in runs if run.epochs], f"{len(runs)} runs"
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    page = template.render(
        title=title, written=clock_time(time.time()), problems=problems, results=results_table(runs),
        targets=goals_table(shown), differences=differences_table(runs), library=get_plotlyjs() if shown else "",
        curves=draw_curves(shown) if shown else "",
    ).encode("utf-8", "backslashreplace")  # fmt: skip
    make_folder(options.out)
    write_file(options.out / "report.html", page)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    print(f"{options.out / 'report.html'}: {title}, {len(page) / 1e6:.1f} MB")
    return 0


def results_table(runs: Sequence[Run]) -> Rows:
    columns = "run, state, epochs, best acc1, in epoch, last acc1, time, images/s, device, written"
    rows: Rows = [tuple(columns.split(", "))]
    for run in runs:
        last, seconds = run.last("acc1/valid"), run.last("seconds")
        rate = run.end.get("images_per_sec") or run.last("images_per_sec")  # of the whole run, or its newest epoch
        rows.append((
            run.name, run.state, run.epochs_trained(), *run.best(), "-" if last is None else f"{last:.2%}",
            "-" if seconds is None else duration(seconds), f"{rate:,.0f}" if rate else "-", device(run),
            clock_time(run.changed) if run.changed else "-",
        ))  # fmt: skip
    return rows


def device(run: Run) -> str:
    name, count = run.environment.get("device", "-"), run.environment.get("world_size", 1)
    return f"{count} x {name}" if count > 1 else name


def clock_time(seconds: float) -> str:
    """Return a moment (seconds since 1970) as date, time and difference from UTC."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def goals(runs: Sequence[Run]) -> list[float]:
    """Return the accuracies to list: the highest round one that each run reached, the tutorial's, each run's own."""
    wanted = {goal for run in runs if (goal := run.config.get("stop_at_accuracy")) is not None}
    wanted |= {TUTORIAL_GOAL for run in runs if run.config.get("dataset", "cifar100") == "cifar100"}
    wanted |= {max((goal for goal in ROUND_GOALS if run.reached(goal)), default=1.0) for run in runs}
    return sorted(goal for goal in wanted if any(run.reached(goal) for run in runs))


def goals_table(runs: Sequence[Run]) -> Rows:
    columns = goals(runs)
    rows: Rows = [("run", "device", *(f"{100 * goal:.4g} %" for goal in columns))]
    for run in runs:
        moments = (run.reached(goal) for goal in columns)
        times = (f"epoch {found[0]}, {duration(found[1])}" if found else "-" for found in moments)
        rows.append((run.name, device(run), *times))
    return rows if columns else []


def differences_table(runs: Sequence[Run]) -> Rows:
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config)
    values = ((key, *(as_yaml(run.config.get(key)) for run in known)) for key in keys)
    rows: Rows = [row for row in values if len({*row[1:]}) > 1]
    return [("setting", *(run.name for run in known)), *rows] if rows else []


def draw_curves(runs: Sequence[Run]) -> str:
    """Return the element `curves`, without the library: what the runs recorded for each epoch."""
    from plotly.subplots import make_subplots

    recorded = {key for run in runs for row in run.epochs for key in row}
    panels = [panel for panel in PANELS if recorded & {panel[1], f"{panel[1]}/valid", f"{panel[1]}/train"}]
    longest = max(row["seconds"] for run in runs for row in run.epochs)
    unit, seconds = ("seconds", 1) if longest < 120 else ("minutes", 60) if longest < 7200 else ("hours", 3600)
    height, named = math.ceil(len(panels) / 2), set[int]()  # runs that are in the legend
    figure = make_subplots(height, 2, subplot_titles=[title for title, _, _ in panels], vertical_spacing=0.25 / height)
    for place, (_, kind, axis) in enumerate(panels):
        where = {"row": place // 2 + 1, "col": place % 2 + 1}
        scale, digits = (100, "%{y:.2f} %") if kind == "acc1" else (1, "%{y:.5g}")
        values = []
        for number, run in enumerate(runs):
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
            for key, word in ((f"{kind}/valid", "validation "), (f"{kind}/train", "training "), (kind, "")):
                rows = [row for row in run.epochs if row.get(key) is not None]
                if not rows:
                    continue
                values += [row[key] for row in rows if math.isfinite(row[key])]
                pale = word == "training "
                figure.add_scatter(
                    x=[row[axis] / (1 if axis == "epoch" else seconds) for row in rows],
                    y=[scale * row[key] for row in rows], customdata=[int(row["epoch"]) for row in rows],
                    name=html.escape(run.name),  # plotly interprets <b> and the like as markup
                    legendgroup=str(number), showlegend=number not in named, opacity=0.45 if pale else 1.0,
                    line={"color": colour, "dash": dash, "width": 1.2 if pale else 2},
                    mode="lines" if len(rows) > 1 else "markers", **where,
                    hovertemplate=f"%{{fullData.name}}<br>{word}{kind} {digits}, epoch %{{customdata}}<extra></extra>",
                )  # fmt: skip
                named.add(number)
        figure.update_xaxes(title_text="epoch" if axis == "epoch" else unit, **where)
        figure.update_yaxes(rangemode="normal" if kind == "acc1" else "tozero", **where)
        if kind == "loss" and values:  # one spike must not flatten all curves
            values.sort()
            highest = min(LOSS_OUTLIER * values[int(0.95 * (len(values) - 1))], 1.05 * values[-1])
            figure.update_yaxes(range=[0, highest], **where)
    figure.update_layout(
        height=330 * height, template="plotly_white", margin={"l": 50, "r": 40, "t": 40, "b": 40},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0 + 0.1 / height},
        modebar_orientation="v",  # in the right margin: else the buttons would cover the legend
    )  # fmt: skip
    options = {"responsive": True, "displaylogo": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id="curves", config=options))


if __name__ == "__main__":
    sys.exit(main())
