"""Writes DIR/packed/: a bring-up as one offline page, one JSON file, and an archive of its raw logs in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.bring_up.figures import Baseline, Change, Figure, read_figures, read_published
from tools.bring_up.parts import PARTS
from tools.bring_up.progress import BringUpProgress
from tools.pack import pack_files
from tools.report import Section, duration, gather, render_page, sections_of
from tools.shared.output import printable, write_file, write_json
from tools.shared.pages.plots import Style
from utils.errors import DataError
from utils.program import CODE

CURVES = CODE / "results/reference/sc20_curves.json"
BAR_CHARTS = ("compile", "half-precision", "ladder", "loaders")  # parts whose reports tools.report draws as bars
TRAININGS = {part.name for part in PARTS if part.epochs}
REGRESSION = """A regression is worse by more than 5 % (25 % for the seconds of a single run, 1 point for an accuracy).
With several trials, each must also be worse than each earlier one."""
PIECE, MAX_PIECES = 16 * 2**20, 3  # some machines return files of 16 MiB, and 64 MiB with the page and the figures


def write_all(out: Path, progress: BringUpProgress, baseline: Baseline | None = None) -> list[str]:
    """Write everything in packed/. Returns a line for each regression against the baseline."""
    figures = read_figures(out, progress.parts)
    changes = baseline.changes(figures) if baseline else []
    missing = baseline.missing(figures, progress.parts) if baseline else []
    regressions = [str(one) for one in changes if one.regressed] + [f"{key}: only in the baseline" for key in missing]
    (packed := out / "packed").mkdir(exist_ok=True)
    content = {
        "rehearsal": progress.small,
        **progress.model_dump(include={"machine", "settings"}),
        "parts": {part.name: progress.of(part.name).model_dump() for part in PARTS},
        "figures": [asdict(figure) for figure in figures],
        "regressions": regressions,
        "left_out_of_the_packed_logs": pack_logs(out),
    }
    write_json(packed / "bring_up.json", content)
    styles, charts, problems = _charts(out)
    unfinished = [f"{name}: {entry.state}: {entry.note}".removesuffix(": ") for name, entry in progress.parts.items()
                  if entry.note or entry.state not in ("done", "running")]  # fmt: skip
    rehearsal = "A REHEARSAL with small sizes: the figures measure nothing. " if progress.small else ""
    title = f"{rehearsal}Bring-up of {progress.machine.get('device')}"
    lines = [*(f"REGRESSION {line}" for line in regressions), *unfinished, *problems]
    sections = [*_tables(progress, figures, changes), *charts]
    page = render_page(printable(title), [printable(line) for line in lines], sections, styles)
    write_file(packed / "bring_up.html", page.encode("utf-8", "backslashreplace"))
    return regressions


def pack_logs(out: Path) -> list[str]:
    """Write packed/logs.tar.gz.1 and so on, smallest files first, without checkpoints; return those without room."""
    files = [path for path in (out / "state.json", *(out / "parts").rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix not in (".pt", ".tmp", ".lock") and "checkpoints" not in path.parts]
    files.sort(key=lambda path: (path.name != "state.json", path.stat().st_size, path))
    return pack_files(files, out, out / "packed", "logs.tar.gz", PIECE, MAX_PIECES)


def _charts(out: Path) -> tuple[Mapping[str, Style], list[Section], list[str]]:
    """Return the runs next to the published curves, and bars, as tools.report shows them."""
    runs = [path.parent for path in sorted((out / "parts").glob("*/run/metrics.jsonl"))]
    reports = [path for name in BAR_CHARTS if (path := out / "parts" / name / "report.json").exists()]
    published = [CURVES] if runs and CURVES.exists() else []
    try:
        found = gather([*runs, *published, *reports])
    except DataError:
        return {}, [], []
    named = [(Path(path.parent.name), report) for path, report in found.reports]  # of ladder/report.json: ladder
    return *sections_of(found._replace(reports=named)), found.problems


def _tables(progress: BringUpProgress, figures: Sequence[Figure], changes: Sequence[Change]) -> list[Section]:
    device = f"on {progress.machine.get('device')}"
    compared = [
        (change.now.key, change.before.text(), change.now.text(), f"{change.percent:+.1f} %",
         "REGRESSION" if change.regressed else "")
        for change in changes
    ]  # fmt: skip
    by_key = {figure.key: figure for figure in figures}
    published = []
    for entry in read_published():
        row = ("-", "-", "not measured", "-")
        if here := by_key.get(entry.key):
            row = (_value(here), entry.relative(here), "yes" if entry.is_met(here) else "NO", _share(here))
        published.append((entry.what, entry.where, f"{entry.value:,g}", *row))
    parts = [(f"{part.name}: {part.what}", entry.state, duration(entry.seconds) if entry.calls else "-", entry.calls)
             for part in PARTS for entry in [progress.of(part.name)]]  # fmt: skip
    rows = [(figure.part, figure.name, _value(figure), figure.unit, _share(figure)) for figure in figures]
    machine = [(name, value) for name, value in progress.machine.items() if value not in (None, {})]
    return [
        Section("Compared with the baseline", "baseline", ("figure", "before", "now", "change", ""), compared,
                f"Both {device}. {REGRESSION}"),
        Section("Compared with published figures and goals", "published",
                ("what", "device or goal", "published or goal", device, "relative", "at least as good", "of a limit"),
                published, "Images/s unless another unit is named. results/reference/README.md has the sources."),
        Section("Parts", "parts", ("part", "state", "time", "calls"), parts),
        Section("Figures", "figures", ("part", "figure", device, "unit", "of a limit"), rows,
                "Median (lowest-highest) of the trials. The limits are measured here, in the same number format."),
        Section("Machine", "machine", ("", "value"), machine),
    ]  # fmt: skip


def _value(figure: Figure) -> str:
    return figure.text() + (" (one seed)" if figure.part in TRAININGS and figure.unit in ("%", "s") else "")


def _share(figure: Figure) -> str:
    return "-" if figure.share is None else f"{figure.share:.0%} of {figure.of}"
