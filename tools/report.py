"""One self-contained HTML page about any number of runs, with its figures as PNG files beside it.

    python -m tools.report expts/bs256-amp expts/bs256-amp-nhwc --out report
    python -m tools.report expts results/reference/sc20_curves.json BENCH.json

Takes run folders, folders of runs, TensorBoard event files, published curves and reports of tools.bench. What is
damaged, empty or still going is told on the page, and the rest is shown.
"""

import argparse
import base64
import html
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.figures import as_png, colour, legend_below, new_figure, whole_numbers
from tools.history import Bench, Run, ago, differences, rates, read, same_but_seed
from utils.errors import ConfigError, exit_in_a_line

TARGETS = (0.6, 0.7, 0.75, 0.76, 0.77, 0.78, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96)
LOSS_OUTLIER = 1.5  # times the 95th percentile of what is drawn: losses above it are cut off

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; background: #f6f6f6; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; display: block; margin: .5rem 0; }
.problems li { color: #8a3b00; }
.note { color: #555; font-size: .9rem; }
"""


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    options = parser().parse_args(argv)
    runs, benches, problems = gather(options.runs)
    figures = draw(runs, benches)
    page = options.out / "report.html"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, png in figures.items():
            (options.out / f"{name}.png").write_bytes(png)
        page.write_text(render(runs, benches, problems, figures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.out}: cannot be written: {error.strerror}; choose another --out") from None
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{page}: {len(runs)} run(s), {len(benches)} measurement(s), {len(figures)} figure(s)")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="run folders, folders of runs, event files, files of curves, reports of tools.bench",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="default: report")
    return parser


def gather(paths: Sequence[Path]) -> tuple[list[Run], list[Bench], list[str]]:
    """Everything that the arguments name; runs of the same name are told apart by their folder."""
    runs: list[Run] = []
    benches: list[Bench] = []
    problems: list[str] = []
    for path in paths:
        found = read(path)
        runs, benches, problems = runs + found[0], benches + found[1], problems + found[2]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    problems += [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    return runs, benches, problems


# ---- figures


def draw(runs: Sequence[Run], benches: Sequence[Bench]) -> dict[str, bytes]:
    """{name: PNG} of every figure that there is something to show in."""
    shown = [run for run in runs if run.epochs]
    figures = {}
    if shown:
        figures["accuracy"] = _curves(shown, "acc1", "accuracy, %", 100.0)
        figures["loss"] = _curves(shown, "loss", "loss", 1.0)
        figures["speed"] = _speed(shown)
    rungs = [bench for bench in benches if not scaling_rows(bench) and rates(bench.content)]
    if rungs:
        figures["ladder"] = _ladder(rungs)
    scalings = [(bench, rows) for bench in benches if (rows := scaling_rows(bench))]
    if scalings:
        figures["scaling"] = _scaling(scalings)
    return figures


def _curves(runs: Sequence[Run], kind: str, label: str, scale: float) -> bytes:
    figure, axes = new_figure(1, 2, size=(6.2, 4.2))
    title = label.split(",", maxsplit=1)[0]
    for number, run in enumerate(runs):
        for tag, style in ((f"{kind}/valid", "-"), (f"{kind}/train", ":")):
            rows = [row for row in run.epochs if tag in row]
            name = run.name if style == "-" else None
            for panel, key in zip(axes, ("epoch", "seconds"), strict=True):
                factor = 1 if key == "epoch" else 1 / 60
                across, up = [row[key] * factor for row in rows], [scale * row[tag] for row in rows]
                marker = "o" if len(rows) == 1 else None
                panel.plot(across, up, style, color=colour(number), label=name, linewidth=1.4, marker=marker)
    for panel, xlabel in zip(axes, ("epoch", "minutes"), strict=True):
        panel.set(xlabel=xlabel, ylabel=label, title=f"{title}: validation solid, training dotted")
    if kind == "loss":
        drawn = sorted(
            row[tag] for run in runs for row in run.epochs for tag in ("loss/train", "loss/valid") if tag in row
        )
        top = LOSS_OUTLIER * drawn[int(0.95 * (len(drawn) - 1))] if drawn else 1.0
        for panel in axes:
            panel.set_ylim(0, min(top, 1.05 * drawn[-1]) if drawn else None)
    whole_numbers(axes[0])
    legend_below(figure, axes[0])
    return as_png(figure)


def _speed(runs: Sequence[Run]) -> bytes:
    figure, (left, right) = new_figure(1, 2, size=(6.2, 3.6))
    any_rate = False
    for number, run in enumerate(runs):
        rows = [row for row in run.epochs if "images_per_sec" in row]
        any_rate = any_rate or bool(rows)
        marker = "o" if len(run.epochs) == 1 else None
        left.plot(
            [row["epoch"] for row in rows], [row["images_per_sec"] for row in rows],
            color=colour(number), label=run.name, marker=marker,
        )  # fmt: skip
        rows = [row for row in run.epochs if "learning_rate" in row]
        right.plot(
            [row["epoch"] for row in rows], [row["learning_rate"] for row in rows],
            color=colour(number), label=run.name, marker=marker,
        )  # fmt: skip
    left.set(xlabel="epoch", ylabel="images/s", title="training throughput", ylim=(0, None))
    right.set(xlabel="epoch", ylabel="learning rate", title="learning rate", ylim=(0, None))
    if not any_rate:
        left.text(0.5, 0.5, "not recorded", transform=left.transAxes, ha="center", color="gray")
    for panel in (left, right):
        whole_numbers(panel)
    legend_below(figure, right)
    return as_png(figure)


def _ladder(benches: Sequence[Bench]) -> bytes:
    rows = max(len(rates(bench.content)) for bench in benches)
    figure, axes = new_figure(len(benches), 1, size=(8.5, 1.4 + 0.42 * rows))
    for panel, bench in zip([axes] if len(benches) == 1 else axes, benches, strict=True):
        rungs = {name: rate.images_per_sec for name, rate in rates(bench.content).items()}
        first = next(iter(rungs.values()))
        bars = panel.barh(list(rungs), list(rungs.values()), color=colour(0), height=0.65)
        labels = [f"{rate:,.0f}  ({rate / first:.2f}x)" for rate in rungs.values()]
        panel.bar_label(bars, labels, padding=4, fontsize=9)
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        device = bench.content.get("environment", {}).get("device", "unknown device")
        panel.set(xlabel="images/s", title=f"{bench.command} on {device}", xlim=(0, 1.25 * max(rungs.values())))
    return as_png(figure)


def scaling_rows(bench: Bench) -> list[dict[str, Any]]:
    """[{kind, ranks, images_per_sec, whole_epoch}] of a report of `tools.bench scaling`, else nothing."""
    rows = [
        {
            "kind": rate.mode,
            "ranks": rate.ranks,
            "images_per_sec": rate.images_per_sec,
            "whole_epoch": rate.epoch_images_per_sec,
        }
        for rate in rates(bench.content).values()
        if rate.mode
    ]
    return sorted(rows, key=lambda row: (row["kind"], row["ranks"]))


def efficiencies(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, int, float, float]]:
    """(kind, what, ranks, images/s, efficiency against the fewest ranks) of each row, training only and whole epoch."""
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for key, what in (("images_per_sec", "training only"), ("whole_epoch", "whole epoch")):
            of_kind = [row for row in rows if row["kind"] == kind and row[key]]
            for row in of_kind:
                alone = of_kind[0][key] / of_kind[0]["ranks"]
                table.append((kind, what, row["ranks"], row[key], row[key] / row["ranks"] / alone))
    return table


def _scaling(scalings: Sequence[tuple[Bench, list[dict[str, Any]]]]) -> bytes:
    figure, (left, right) = new_figure(1, 2, size=(6.2, 3.8))
    number = 0
    for bench, rows in scalings:
        table = efficiencies(rows)
        for kind, what in dict.fromkeys(row[:2] for row in table):
            mine = [row for row in table if row[:2] == (kind, what)]
            label = f"{bench.path.stem}: {kind}, {what}"
            left.plot([row[2] for row in mine], [row[3] for row in mine], "o-", color=colour(number), label=label)
            right.plot([row[2] for row in mine], [100 * row[4] for row in mine], "o-", color=colour(number))
            number += 1
    left.set(xlabel="ranks", ylabel="images/s", title="throughput", ylim=(0, None))
    right.set(xlabel="ranks", ylabel="efficiency, %", title="efficiency", ylim=(0, 110))
    for panel in (left, right):
        whole_numbers(panel)
    legend_below(figure, left)
    return as_png(figure)


# ---- the page


def render(runs: Sequence[Run], benches: Sequence[Bench], problems: Sequence[str], figures: dict[str, bytes]) -> str:
    """The page: no script, no outside file."""
    shown = [run for run in runs if run.epochs]
    parts = [f"<h1>{len(runs)} run(s)</h1>"]
    if not shown and not benches:
        parts.append("<p id='nothing'>Nothing to show: no run with a finished epoch was found.</p>")
    if problems:
        items = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
        parts.append(
            f"<h2>What could not be read, or is not finished</h2><ul class='problems' id='problems'>{items}</ul>"
        )
    sections: list[tuple[str, str, Callable[[], str]]] = [
        ("Results", "", lambda: _results(runs)),
        ("Accuracy", "accuracy", lambda: ""),
        ("Time to accuracy", "", lambda: _targets(shown)),
        ("Loss", "loss", lambda: ""),
        ("Throughput and learning rate", "speed", lambda: ""),
        ("Scaling", "scaling", lambda: _scaling_table(benches)),
        ("What each switch gives", "ladder", lambda: ""),
        ("Mean and spread over seeds", "", lambda: _seeds(shown)),
        ("Where the configurations differ", "", lambda: _differences(runs)),
        ("Hardest classes", "", lambda: _worst(shown)),
    ]
    for title, figure, body in sections:
        image = _image(figure, title, figures[figure]) if figure in figures else ""
        text = body()
        if image or text:
            parts.append(f"<h2>{title}</h2>{text}{image}")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Training report</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body>"
        + "".join(parts)
        + "</body></html>\n"
    )


def _image(name: str, title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f"<img id='figure-{name}' alt='{html.escape(title)}' src='data:image/png;base64,{data}'>"


def _table(name: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table id='{name}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _results(runs: Sequence[Run]) -> str:
    header = ("run", "state", "epochs", "best acc1", "in epoch", "last acc1", "time", "images/s", "device", "changed")
    rows = []
    for run in runs:
        best, last, seconds = run.best(), run.last("acc1/valid"), run.last("seconds")
        rate = run.last("images_per_sec")
        goal = run.config.get("max_epochs")
        rows.append(
            (
                run.name,
                run.state,
                f"{len(run.epochs)} of {goal}" if goal else len(run.epochs),
                f"{best[0]:.2%}" if best else "-",
                best[1] if best else "-",
                f"{last:.2%}" if last is not None else "-",
                duration(seconds) if seconds is not None else "-",
                f"{rate:,.0f}" if rate else "-",
                _device(run),
                f"{ago(run.changed)} ago" if run.state != "published" else "-",
            )
        )
    clocks = sorted({f"{run.clock}" for run in runs})
    note = f"<p class='note'>Times are {' or '.join(clocks)}.</p>" if clocks else ""
    return _table("results", header, rows) + note


def _device(run: Run) -> str:
    device = run.environment.get("device", "-")
    count = run.environment.get("world_size", 1)
    return f"{count} x {device}" if count > 1 else str(device)


def _targets(runs: Sequence[Run]) -> str:
    reached = [target for target in TARGETS if any(run.reached(target) for run in runs)]
    rows = []
    for run in runs:
        cells = []
        for target in reached:
            when = run.reached(target)
            cells.append(f"epoch {when[0]}, {duration(when[1])}" if when else "-")
        rows.append((run.name, *cells))
    return _table("targets", ("run", *(f"{target:.0%}" for target in reached)), rows) if reached else ""


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def _seeds(runs: Sequence[Run]) -> str:
    rows = []
    for group in same_but_seed([run for run in runs if run.config and run.state == "finished"]):
        best = [100 * found[0] for run in group if (found := run.best())]
        last = [100 * value for run in group if (value := run.last("acc1/valid")) is not None]
        seconds = [value for run in group if (value := run.last("seconds")) is not None]
        if not best:
            continue
        seeds = ", ".join(str(run.config.get("seed")) for run in group)
        rows.append((group[0].name, seeds, len(group), _spread(best, 2), _spread(last, 2), _spread(seconds, 1)))
    header = ("finished runs like", "seeds", "n", "best acc1, %", "last acc1, %", "seconds")
    return _table("seeds", header, rows)


def _spread(values: Sequence[float], digits: int) -> str:
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return (
        f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
    )


def _differences(runs: Sequence[Run]) -> str:
    known = [run for run in runs if run.config]
    rows = [(key, *values) for key, values in differences(list(runs)).items()]
    return _table("differences", ("key", *(run.name for run in known)), rows)


def _scaling_table(benches: Sequence[Bench]) -> str:
    rows = []
    for bench in benches:
        for kind, what, ranks, rate, efficiency in efficiencies(scaling_rows(bench)):
            rows.append((f"{bench.path.name}: {kind}, {what}", ranks, f"{rate:,.0f}", f"{efficiency:.1%}"))
    return _table("scaling", ("measurement", "ranks", "images/s", "efficiency"), rows)


def _worst(runs: Sequence[Run]) -> str:
    rows = [
        (run.name, row["class"], f"{row['accuracy']:.1%}", row["taken_for"], f"{row['share']:.1%}")
        for run in runs
        for row in run.worst_classes[:5]
        if {"class", "accuracy", "taken_for", "share"} <= set(row)
    ]
    return _table("worst", ("run", "class", "accuracy", "most often taken for", "share"), rows)


if __name__ == "__main__":
    sys.exit(main())
