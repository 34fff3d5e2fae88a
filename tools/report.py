"""One self-contained HTML page about any number of runs, with its figures as PNG files beside it.

    python -m tools.report expts/bs256-amp expts/bs256-amp-nhwc --out report
    python -m tools.report expts results/reference/sc20_curves.json BENCH.json

Takes run folders, folders of runs, TensorBoard event files, published curves and reports of tools.bench. The page
names what is damaged, empty or still going, and shows the rest.
"""

import argparse
import base64
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.reports import Rate, Report, rates
from tools.command_line import new_parser
from tools.figures import as_png, colour, draw_bars, legend_below, new_figure, whole_numbers
from tools.history import Found, Run, ago, differences, read, same_but_seed
from tools.output import make_folder, write_file
from utils.errors import exit_in_a_line

TARGETS = (0.6, 0.7, 0.75, 0.76, 0.77, 0.78, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96)
LOSS_OUTLIER = 1.5  # times the 95th percentile of what is drawn: losses above it are cut off
PUBLISHED_CURVES = (
    "The published curves show a cut of the learning rate one epoch before ours, and the last training batch of an "
    "epoch where ours show the mean over its batches."
)
PAGE = Path(__file__).with_name("report_page.html")  # a template of Jinja2, which PyTorch needs too


@dataclass(frozen=True)
class Section:
    """A heading with a table, a figure or both; it is left out where neither has anything to show."""

    title: str
    figure: str = ""
    table: str = ""  # its id on the page
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    options = parser().parse_args(argv)
    found = gather(options.runs)
    figures = draw(found)
    make_folder(options.out)
    for name, png in figures.items():
        write_file(options.out / f"{name}.png", png)
    page = options.out / "report.html"
    write_file(page, render(found, figures).encode())
    for problem in found.problems:
        print(problem, file=sys.stderr)
    print(f"{page}: {len(found.runs)} run(s), {len(found.reports)} measurement(s), {len(figures)} figure(s)")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("report", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="run folders, folders of runs, event files, files of curves, reports of tools.bench",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="default: report")
    return parser


def gather(paths: Sequence[Path]) -> Found:
    """Everything that the arguments name; runs of the same name are named by their folder."""
    parts = [read(path) for path in paths]
    runs = [run for part in parts for run in part.runs]
    problems = [problem for part in parts for problem in part.problems]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    problems += [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    return Found(runs, [report for part in parts for report in part.reports], problems)


# ---- figures


def draw(found: Found) -> dict[str, bytes]:
    """{name: PNG} of every figure that has something to show."""
    shown = [run for run in found.runs if run.epochs]
    figures = {}
    if shown:
        figures["accuracy"] = _draw_curves(shown, "acc1", "accuracy, %", 100.0)
        figures["loss"] = _draw_curves(shown, "loss", "loss", 1.0)
        figures["speed"] = _draw_speed(shown)
    bars = [report for _, report in found.reports if rates(report) and not scaling_rates(report)]
    if bars:
        figures["ladder"] = _draw_bars(bars)
    scalings = [(path, report) for path, report in found.reports if scaling_rates(report)]
    if scalings:
        figures["scaling"] = _draw_scaling(scalings)
    return figures


def _draw_curves(runs: Sequence[Run], kind: str, label: str, scale: float) -> bytes:
    figure, axes = new_figure(1, 2, size=(6.2, 4.2))
    title = label.split(",", maxsplit=1)[0]
    for panel, across, factor, xlabel in zip(
        axes, ("epoch", "seconds"), (1, 1 / 60), ("epoch", "minutes"), strict=True
    ):
        for number, run in enumerate(runs):
            for tag, style in ((f"{kind}/valid", "-"), (f"{kind}/train", ":")):
                rows = [row for row in run.epochs if tag in row]
                panel.plot(
                    [row[across] * factor for row in rows], [row[tag] * scale for row in rows], style, linewidth=1.4,
                    color=colour(number), label=run.name if style == "-" else None, marker=_marker(rows),
                )  # fmt: skip
        panel.set(xlabel=xlabel, ylabel=label, title=f"{title}: validation solid, training dotted")
    drawn = sorted(value for run in runs for row in run.epochs for tag, value in row.items() if tag.startswith("loss/"))
    if kind == "loss" and drawn:
        top = min(LOSS_OUTLIER * drawn[int(0.95 * (len(drawn) - 1))], 1.05 * drawn[-1])
        for panel in axes:
            panel.set_ylim(0, top)
    whole_numbers(axes[0])
    legend_below(figure, axes[0])
    return as_png(figure)


def _marker(rows: Sequence[Any]) -> str | None:
    """A line through one point cannot be seen."""
    return "o" if len(rows) == 1 else None


def _draw_speed(runs: Sequence[Run]) -> bytes:
    figure, panels = new_figure(1, 2, size=(6.2, 3.6))
    drawn = (("images_per_sec", "images/s", "training throughput"), ("learning_rate", "learning rate", "learning rate"))
    for panel, (key, label, title) in zip(panels, drawn, strict=True):
        for number, run in enumerate(runs):
            rows = [row for row in run.epochs if key in row]
            epochs, values = [row["epoch"] for row in rows], [row[key] for row in rows]
            panel.plot(epochs, values, color=colour(number), label=run.name, marker=_marker(rows))
        panel.set(xlabel="epoch", ylabel=label, title=title, ylim=(0, None))
        if not any(key in row for run in runs for row in run.epochs):
            panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", color="gray")
        whole_numbers(panel)
    legend_below(figure, panels[1])
    return as_png(figure)


def _draw_bars(reports: Sequence[Report]) -> bytes:
    most = max(len(rates(report)) for report in reports)
    figure, axes = new_figure(len(reports), 1, size=(8.5, 1.4 + 0.42 * most))
    for panel, report in zip([axes] if len(reports) == 1 else axes, reports, strict=True):
        cases = {name: rate.images_per_sec for name, rate in rates(report).items()}
        draw_bars(panel, cases, f"{report.bench} on {report.environment.get('device', 'unknown device')}")
    return as_png(figure)


def scaling_rates(report: Report) -> list[Rate]:
    """The cases of a report of `tools.bench scaling` by mode and ranks; none of another's."""
    return sorted((rate for rate in rates(report).values() if rate.mode), key=lambda rate: (rate.mode, rate.ranks))


def efficiencies(report: Report) -> dict[str, list[tuple[int, float, float]]]:
    """{"weak, training only", ...: [(ranks, images/s, efficiency against the fewest ranks)]} of a scaling report."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for what, name in (("training only", "images_per_sec"), ("whole epoch", "epoch_images_per_sec")):
        for rate in scaling_rates(report):
            if speed := getattr(rate, name):
                curves.setdefault(f"{rate.mode}, {what}", []).append((rate.ranks, speed))
    return {
        name: [(ranks, speed, speed / ranks * points[0][0] / points[0][1]) for ranks, speed in points]
        for name, points in sorted(curves.items())
    }


def _draw_scaling(reports: Sequence[tuple[Path, Report]]) -> bytes:
    figure, (left, right) = new_figure(1, 2, size=(6.2, 3.8))
    curves = [
        (f"{path.stem}: {name}", points) for path, report in reports for name, points in efficiencies(report).items()
    ]
    for number, (label, points) in enumerate(curves):
        ranks, speeds, shares = zip(*points, strict=True)
        left.plot(ranks, speeds, "o-", color=colour(number), label=label)
        right.plot(ranks, [100 * share for share in shares], "o-", color=colour(number))
    left.set(xlabel="ranks", ylabel="images/s", title="throughput", ylim=(0, None))
    right.set(xlabel="ranks", ylabel="efficiency, %", title="efficiency", ylim=(0, 110))
    for panel in (left, right):
        whole_numbers(panel)
    legend_below(figure, left)
    return as_png(figure)


# ---- the page


def render(found: Found, figures: dict[str, bytes]) -> str:
    """The page: no script, no outside file."""
    from jinja2 import Environment, StrictUndefined

    shown = [run for run in found.runs if run.epochs]
    sections = [
        _results(found.runs),
        Section("Accuracy", "accuracy"),
        _targets(shown),
        Section("Loss", "loss"),
        Section("Throughput and learning rate", "speed"),
        _scaling(found.reports),
        Section("What each switch gives", "ladder"),
        _seeds(shown),
        _differences(found.runs),
        _hardest_classes(shown),
    ]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(
        count=len(found.runs), nothing=not shown and not found.reports, problems=found.problems, sections=sections,
        figures={name: base64.b64encode(png).decode() for name, png in figures.items()},
    )  # fmt: skip


def _results(runs: Sequence[Run]) -> Section:
    header = ("run", "state", "epochs", "best acc1", "in epoch", "last acc1", "time", "images/s", "device", "changed")
    rows = []
    for run in runs:
        best, last, seconds, rate = run.best(), run.last("acc1/valid"), run.last("seconds"), run.last("images_per_sec")
        goal = run.config.get("max_epochs")
        device, count = run.environment.get("device", "-"), run.environment.get("world_size", 1)
        rows.append((
            run.name,
            run.state,
            f"{len(run.epochs)} of {goal}" if goal else len(run.epochs),
            f"{best[0]:.2%}" if best else "-",
            best[1] if best else "-",
            "-" if last is None else f"{last:.2%}",
            "-" if seconds is None else duration(seconds),
            f"{rate:,.0f}" if rate else "-",
            f"{count} x {device}" if count > 1 else device,
            "-" if run.state == "published" else f"{ago(run.changed)} ago",
        ))  # fmt: skip
    clocks = " or ".join(sorted({run.clock for run in runs}))
    published = PUBLISHED_CURVES if any(run.state == "published" for run in runs) else ""
    return Section("Results", "", "results", header, rows, f"Times are {clocks}. {published}".strip())


def _targets(runs: Sequence[Run]) -> Section:
    reached = [target for target in TARGETS if any(run.reached(target) for run in runs)]
    rows = []
    for run in runs:
        moments = [run.reached(target) for target in reached]
        rows.append((run.name, *(f"epoch {found[0]}, {duration(found[1])}" if found else "-" for found in moments)))
    header = ("run", *(f"{target:.0%}" for target in reached))
    return Section("Time to accuracy", "", "targets", header, rows if reached else ())


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, to be read by a person."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def _scaling(reports: Sequence[tuple[Path, Report]]) -> Section:
    rows = [
        (f"{path.name}: {name}", ranks, f"{speed:,.0f}", f"{share:.1%}")
        for path, report in reports
        for name, points in efficiencies(report).items()
        for ranks, speed, share in points
    ]
    return Section("Scaling", "scaling", "scaling", ("measurement", "ranks", "images/s", "efficiency"), rows)


def _seeds(runs: Sequence[Run]) -> Section:
    rows = []
    for group in same_but_seed([run for run in runs if run.config and run.state == "finished"]):
        best = [100 * found[0] for run in group if (found := run.best())]
        last = [100 * value for run in group if (value := run.last("acc1/valid")) is not None]
        seconds = [value for run in group if (value := run.last("seconds")) is not None]
        if best:
            seeds = ", ".join(str(run.config.get("seed")) for run in group)
            rows.append((group[0].name, seeds, len(group), _spread(best, 2), _spread(last, 2), _spread(seconds, 1)))
    header = ("finished runs like", "seeds", "n", "best acc1, %", "last acc1, %", "seconds")
    return Section("Mean and spread over seeds", "", "seeds", header, rows)


def _spread(values: Sequence[float], digits: int) -> str:
    mean, *rest = (f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f} ({'-'.join(rest)})"


def _differences(runs: Sequence[Run]) -> Section:
    header = ("key", *(run.name for run in runs if run.config))
    rows = [(key, *values) for key, values in differences(list(runs)).items()]
    return Section("Where the configurations differ", "", "differences", header, rows)


def _hardest_classes(runs: Sequence[Run]) -> Section:
    rows = [
        (run.name, row["class"], f"{row['accuracy']:.1%}", row["taken_for"], f"{row['share']:.1%}")
        for run in runs
        for row in run.worst_classes[:5]
        if {"class", "accuracy", "taken_for", "share"} <= set(row)
    ]
    return Section("Hardest classes", "", "worst", ("run", "class", "accuracy", "most often taken for", "share"), rows)


if __name__ == "__main__":
    sys.exit(main())
