"""A bring-up as one offline page, one JSON file and an archive of its raw logs in pieces: DIR/packed/."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.bring_up.baseline import Baseline, Change
from tools.bring_up.figures import Figure, read_figures
from tools.bring_up.parts import PARTS
from tools.bring_up.progress import BringUpProgress
from tools.bring_up.published import stand_beside
from tools.report import Section, duration, gather, render_page, sections_of
from tools.shared.output import printable, write_file, write_json
from tools.shared.pages.plots import Style
from utils.errors import DataError
from utils.files import write_atomically
from utils.program import CODE

CURVES = CODE / "results/reference/sc20_curves.json"
DRAWN = ("compile", "ladder", "loaders")  # reports that tools.report draws bars of
REHEARSAL = "A REHEARSAL with small sizes: the figures measure nothing. "
REGRESSION = (
    "A regression is worse by more than 5 % (25 % for the seconds of a single run, 1 point for an accuracy), and "
    "where there are several trials each of them is worse than each earlier one."
)
PIECE = 16 * 2**20  # bytes; some machines give back only so much in a file
PIECES = 6  # at most: 8 files with the page and the figures
LEFT_OUT = (".pt", ".tmp", ".lock")


def write_all(out: Path, progress: BringUpProgress, baseline: Baseline | None = None) -> list[str]:
    """Write everything in packed/; returns a line for each regression against the baseline."""
    figures = read_figures(out, progress.parts)
    changes = baseline.changes(figures) if baseline else []
    regressions = [str(change) for change in changes if change.regressed]
    if baseline:
        gone = baseline.missing(figures, progress.parts)
        regressions += [f"{key}: in the baseline, not here" for key in gone]
    packed = out / "packed"
    packed.mkdir(exist_ok=True)
    left_out = pack_logs(out)
    content = {
        "rehearsal": progress.small,
        "machine": progress.machine,
        "settings": progress.settings,
        "parts": {part.name: progress.of(part.name).model_dump() for part in PARTS},
        "figures": [asdict(figure) for figure in figures],
        "regressions": regressions,
        "left_out_of_the_packed_logs": left_out,
    }
    write_json(packed / "bring_up.json", content)
    styles, drawn, problems = _drawn(out)
    sections = [*_tables(progress, figures, changes), *drawn]
    untold = [f"{name}: {entry.state}: {entry.note}" for name, entry in progress.parts.items()
              if entry.state not in ("done", "running")]  # fmt: skip
    title = f"{REHEARSAL if progress.small else ''}Bring-up of {progress.machine.get('device')}"
    lines = [*(f"REGRESSION {line}" for line in regressions), *untold, *problems]
    page = render_page(printable(title), [printable(line) for line in lines], sections, styles)
    write_file(packed / "bring_up.html", page.encode("utf-8", "backslashreplace"))
    return regressions


def pack_logs(out: Path, piece: int = PIECE, pieces: int = PIECES) -> list[str]:
    """Write packed/logs.tar.gz.1 and so on; returns what has no room, the smallest files being packed first.

    Unpacked they make a folder that another call can go on with. Checkpoints are not in them, so that a training that
    was cut off begins again there."""
    files = [path for path in (out / "state.json", *(out / "parts").rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix not in LEFT_OUT and "checkpoints" not in path.parts]
    files.sort(key=lambda path: (path.name != "state.json", path.stat().st_size, path))
    buffer, room, left_out = io.BytesIO(), piece * pieces, []
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in files:
            room -= path.stat().st_size + 2 * tarfile.BLOCKSIZE  # packed it is smaller
            if room < 0:
                left_out.append(str(path.relative_to(out)))
            else:
                archive.add(path, str(path.relative_to(out)))
    for old in (out / "packed").glob("logs.tar.gz.*"):
        old.unlink()
    content = buffer.getvalue()
    for number, start in enumerate(range(0, len(content), piece), start=1):
        write_atomically(out / f"packed/logs.tar.gz.{number}", content[start : start + piece])
    return left_out


def _drawn(out: Path) -> tuple[Mapping[str, Style], list[Section], list[str]]:
    """Runs beside the published curves, and bars, as tools.report shows them."""
    runs = [path.parent for path in sorted((out / "parts").glob("*/run/metrics.jsonl"))]
    reports = [path for name in DRAWN if (path := out / "parts" / name / "report.json").exists()]
    published = [CURVES] if runs and CURVES.exists() else []
    try:
        found = gather([*runs, *published, *reports])
    except DataError:
        return {}, [], []
    named = [(path.parent.with_suffix(path.suffix), report) for path, report in found.reports]  # ladder/report.json
    return *sections_of(found._replace(reports=named)), found.problems


def _tables(progress: BringUpProgress, figures: Sequence[Figure], changes: Sequence[Change]) -> list[Section]:
    compared = [
        (change.now.key, change.before.text(), change.now.text(), f"{change.percent:+.1f} %",
         "REGRESSION" if change.regressed else "")
        for change in changes
    ]  # fmt: skip
    met = {None: "not measured", True: "yes", False: "NO"}
    published = [
        (one.what, one.where, f"{one.there:,g}", one.here.text() if one.here else "-", one.better_by, met[one.met],
         _share(one.here))
        for one in stand_beside({figure.key: figure for figure in figures})
    ]  # fmt: skip
    parts = []
    for part in PARTS:
        entry = progress.of(part.name)
        seconds = duration(entry.seconds) if entry.calls else "-"
        parts.append((f"{part.name}: {part.what}", entry.state, seconds, entry.calls, entry.note))
    rows = [(figure.part, figure.name, figure.text(), figure.unit, _share(figure)) for figure in figures]
    machine = [(name, value) for name, value in progress.machine.items() if value not in (None, {})]
    beside = ("what", "on", "there", "here", "better by", "at least as good", "share of this device's ceiling")
    return [
        Section("Against the baseline", "baseline", ("figure", "before", "now", "change", ""), compared, REGRESSION),
        Section("Beside published figures and goals", "published", beside, published,
                "Images/s where no other unit is named. results/reference/README.md has the sources."),
        Section("Parts", "parts", ("part", "state", "time", "calls", "note"), parts),
        Section("Figures", "figures", ("part", "figure", "value", "unit", "share of the ceiling"), rows,
                "Median (lowest-highest) of the trials. The ceilings are those that the part limits measured here."),
        Section("Machine", "machine", ("", "value"), machine),
    ]  # fmt: skip


def _share(figure: Figure | None) -> str:
    return "-" if figure is None or figure.share is None else f"{figure.share:.0%} of {figure.of}"
