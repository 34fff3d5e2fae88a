"""A bring-up as one offline page and one JSON file: verdicts, parts, figures beside published ones and ceilings."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tools.bring_up.baseline import Change
from tools.bring_up.figures import Figure, read_figures
from tools.bring_up.ledger import Ledger
from tools.bring_up.logs import pack_logs
from tools.bring_up.parts import PARTS
from tools.bring_up.published import PUBLISHED, verdicts
from tools.report import Section, duration, gather, render_page, sections_of
from tools.shared.output import printable, write_file, write_json
from tools.shared.page_plots import Style
from utils.errors import DataError
from utils.program import CODE

CURVES = CODE / "results/reference/sc20_curves.json"
DRAWN = ("compile", "ladder", "loaders")  # reports that tools.report draws bars of
REHEARSAL = "A REHEARSAL with small sizes: the figures measure nothing. "


def write_all(out: Path, ledger: Ledger, changes: Sequence[Change] = (), regressions: Sequence[str] = ()) -> None:
    """packed/bring_up.html, packed/bring_up.json and packed/logs-N.tar.gz, each whole or not at all."""
    figures = read_figures(out, ledger.parts)
    packed = out / "packed"
    packed.mkdir(exist_ok=True)
    left_out = pack_logs(out)
    found = verdicts({figure.key: figure for figure in figures}, str(ledger.machine.get("device")))
    content = {
        "rehearsal": ledger.small,
        "machine": ledger.machine,
        "settings": ledger.settings,
        "parts": {part.name: asdict(ledger.entry(part.name)) for part in PARTS},
        "verdicts": [verdict._asdict() for verdict in found],
        "figures": [asdict(figure) for figure in figures],
        "regressions": list(regressions),
        "left_out_of_the_packed_logs": left_out,
    }
    write_json(packed / "bring_up.json", content)
    page = render(out, ledger, figures, changes, regressions)
    write_file(packed / "bring_up.html", page.encode("utf-8", "backslashreplace"))


def render(
    out: Path, ledger: Ledger, figures: Sequence[Figure], changes: Sequence[Change], regressions: Sequence[str]
) -> str:
    """The page. Its curves and bars need plotly; without it the tables stand alone, and it says so."""
    styles, drawn, problems = _drawn(out)
    by_key = {figure.key: figure for figure in figures}
    sections = [
        _verdicts(by_key, ledger),
        _baseline(changes),
        _published(by_key),
        _parts(ledger),
        _figures(figures),
        _machine(ledger),
        *drawn,
    ]
    left_out = [f"{name}: {entry.state}: {entry.note}" for name, entry in ledger.parts.items() if _to_name(entry.state)]
    title = f"{REHEARSAL if ledger.small else ''}Bring-up of {ledger.machine.get('device')}"
    worse = [f"REGRESSION {line}" for line in regressions]
    return render_page(printable(title), [printable(line) for line in (*worse, *left_out, *problems)], sections, styles)


def _to_name(state: str) -> bool:
    return state not in ("done", "running")


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
    styles, sections = sections_of(found._replace(reports=named))
    if importlib.util.find_spec("plotly") is None:
        sections = [replace(section, plots=(), legend={}) for section in sections]
        return {}, sections, ["plotly is missing: tables without curves"]
    return styles, sections, found.problems


def _verdicts(figures: Mapping[str, Figure], ledger: Ledger) -> Section:
    rows = [
        (verdict.goal, verdict.here or "-", verdict.word)
        for verdict in verdicts(figures, str(ledger.machine.get("device")))
    ]
    return Section("Verdicts", "verdicts", ("goal", "here", "met"), rows)


def _baseline(changes: Sequence[Change]) -> Section:
    rows = [
        (change.now.key, change.before.text(), change.now.text(), f"{change.percent:+.1f} %",
         "REGRESSION" if change.regressed else "")
        for change in changes
    ]  # fmt: skip
    note = (
        "A regression is worse by more than 5 % (25 % for the seconds of a single run, 1 point for an accuracy), and "
        "where there are several trials each of them is worse than each earlier one."
    )
    return Section("Against the baseline", "baseline", ("figure", "before", "now", "change", ""), rows, note)


def _published(figures: Mapping[str, Figure]) -> Section:
    rows = []
    for what, device, value, key in PUBLISHED:
        here = figures.get(key)
        faster = "-"
        if here is not None and here.unit != "%":
            ratio = here.median / value if here.better == "higher" else value / here.median
            faster = f"{ratio:.2f} x"
        elif here is not None:
            faster = f"{here.median - value:+.2f} points"
        rows.append((what, device, f"{value:,g}", here.text() if here else "not measured", faster, _share(here)))
    header = ("what", "published on", "there", "here", "better by", "share of this device's ceiling")
    note = "Images/s where no other unit is named. docs/sources.md has the sources."
    return Section("Beside the published figures", "published", header, rows, note)


def _share(figure: Figure | None) -> str:
    return "-" if figure is None or figure.share is None else f"{figure.share:.0%} of {figure.of}"


def _parts(ledger: Ledger) -> Section:
    rows = []
    for part in PARTS:
        entry = ledger.entry(part.name)
        seconds = duration(entry.seconds) if entry.calls else "-"
        rows.append((f"{part.name}: {part.what}", entry.state, seconds, entry.calls, entry.note))
    return Section("Parts", "parts", ("part", "state", "time", "calls", "note"), rows)


def _figures(figures: Sequence[Figure]) -> Section:
    rows = [(figure.part, figure.name, figure.text(), figure.unit, _share(figure)) for figure in figures]
    note = "Median (lowest-highest) of the trials. The ceilings are those that the part limits measured here."
    return Section("Figures", "figures", ("part", "figure", "value", "unit", "share of the ceiling"), rows, note)


def _machine(ledger: Ledger) -> Section:
    rows = [(name, value) for name, value in ledger.machine.items() if value not in (None, {})]
    return Section("Machine", "machine", ("", "value"), rows)
