"""Findings of the checks: printed, saved as JSON, compared over nodes or with an earlier baseline.

A document is the output of `python -m tools.doctor --json`. This module imports no torch.
"""

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from utils.errors import ConfigError

LEVELS = ("ok", "warn", "fail")
NOT_RUN = ("not run", "not readable")  # begin the messages of checks that could not look; they are `ok`
GIGABYTE = 1e9
SLOW = 1.15  # a rate fails if the median of the others, or the baseline, is more than this many times higher


@dataclass(frozen=True)
class Finding:
    """One line of the output: what was checked, what was found, and the remedy."""

    check: str
    level: str
    message: str
    remedy: str = ""
    where: str = ""  # host, and rank where it matters
    figures: dict[str, float] = field(default_factory=dict)  # {name with unit: rate}; more is better


def judge(
    check: str,
    message: str,
    remedy: str,
    *,
    warn: bool = False,
    fail: bool = False,
    figures: dict[str, float] | None = None,
) -> Finding:
    """Return a finding; the remedy is kept only if it warns or fails."""
    level = "fail" if fail else "warn" if warn else "ok"
    return Finding(check, level, message, remedy if warn or fail else "", figures=figures or {})


def read_text(file: Path) -> str | None:
    """Return the text of a file in /proc or /sys; None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


Placed = tuple[str, float]  # where, and the value there
Counted = Mapping[tuple[str, bool], int]  # see `count_values`


class Document(BaseModel):
    """All findings of one run of the doctor, with the device and software that its figures depend on."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    worst: str
    device: str
    software: dict[str, str]  # {name: version}
    time: datetime | None = None  # when the checks began; older records have none
    findings: list[Finding]

    def figures(self) -> dict[str, list[Placed]]:
        """Return {"CHECK, FIGURE": [(where, value)]}, with a value for each node, rank or device."""
        found: dict[str, list[Placed]] = {}
        for finding in self.findings:
            for name, value in finding.figures.items():
                values = found.setdefault(f"{finding.check}, {name}", [])
                again = sum(where.partition(" #")[0] == finding.where for where, _ in values)
                values.append((f"{finding.where} #{again + 1}" if again else finding.where, value))
        return found


class Compared(NamedTuple):
    """A measured value and the value expected of it."""

    where: str
    value: float
    expected: float

    @property
    def slow(self) -> bool:
        return not self.value * SLOW >= self.expected  # NaN is slow too


def read_document(path: Path) -> Document:
    """Read a document; raise `ConfigError` if the file cannot be read or is not one."""
    try:
        return Document.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        found = getattr(error, "strerror", "it holds something else")
        raise ConfigError(f"{path}: expected the output of python -m tools.doctor --json: {found}") from None


def compare_documents(read: Mapping[Path, Document]) -> list[Finding]:
    """Compare each figure over all nodes; raise `ConfigError` if devices or software differ."""
    (first, reference), *others = read.items()
    for path, document in others:
        check_comparable(f"{path} and {first}", document, reference)
    failed = [finding for document in read.values() for finding in document.findings if finding.level == "fail"]
    figures = [document.figures() for document in read.values()]
    return [
        *failed,
        *(
            _compare_nodes(name, compared, [count_values(found[name]) for found in figures if name in found])
            for name, compared in compare_figures(read.values()).items()
        ),
    ]


def compare_figures(documents: Iterable[Document]) -> dict[str, list[Compared]]:
    """Return {"CHECK, FIGURE": each value of all documents, with the median of the others}."""
    values: dict[str, list[tuple[str, float]]] = {}
    for document in documents:
        for name, found in document.figures().items():
            values.setdefault(name, []).extend(found)
    return {name: with_others(found) for name, found in values.items()}


def with_others(values: Sequence[tuple[str, float]]) -> list[Compared]:
    """Return each value with the median of the others. `values`: (where, rate); a single one expects itself."""
    order = sorted(value for _, value in values)
    compared = []
    for where, value in values:
        rank = bisect_left(order, value)
        low, high = (place + (place >= rank) for place in ((len(order) - 2) // 2, (len(order) - 1) // 2))
        expected = (order[low] + order[high]) / 2 if len(order) > 1 else value
        compared.append(Compared(where, value, expected))
    return compared


def check_comparable(what: str, one: Document, other: Document) -> None:
    """Raise `ConfigError` if device or software differ, naming the first difference."""
    mine, others = ({"device": document.device, **document.software} for document in (one, other))
    for name in mine | others:
        if mine.get(name) != others.get(name):
            raise ConfigError(f"{what}: cannot be compared: {name} {mine.get(name)} and {others.get(name)}")


def _compare_nodes(name: str, values: Sequence[Compared], counts: Sequence[Counted]) -> Finding:
    rates = [one.value for one in values]
    median = statistics.median(rates)
    spread = f"{min(rates):,.4g} to {max(rates):,.4g}"
    if len(rates) > 3 and median:
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        spread += f", the middle half within {(high - low) / median:.1%}"
    message = f"{name}: median {median:,.4g} ({spread}) over {len(rates)}"
    return _judge_rates(message, values, "the median of the others", missing_values(counts, counts))


def compare_with_baseline(now: Document, baseline: Document) -> list[Finding]:
    """Compare each figure with the median of that figure in the baseline, and the numbers of values."""
    findings, earlier = [], baseline.figures()
    for name, values in now.figures().items():
        if name in earlier:
            median = statistics.median(value for _, value in earlier[name])
            missing = missing_values([count_values(values)], [count_values(earlier[name])])
            compared = [Compared(where, value, median) for where, value in values]
            findings.append(_judge_rates(f"{name}: baseline {median:,.4g}", compared, "the baseline", missing))
    return findings


def count_values(values: Sequence[Placed]) -> Counted:
    """Return {(node, whether of its ranks): number of its values}, of one document."""
    places = (where.partition(" #")[0].partition(", rank") for where, _ in values if where)
    return Counter((node, bool(rank)) for node, rank, _ in places)


def missing_values(counts: Iterable[Counted], reference: Iterable[Counted]) -> list[str]:
    """Say which nodes have fewer values, one for each GPU or rank, than the node with most in `reference`."""
    most: dict[bool, int] = {}
    for (_, of_ranks), number in (pair for counted in reference for pair in counted.items()):
        most[of_ranks] = max(number, most.get(of_ranks, 0))
    return [
        f"{node} has {number} of {most[of_ranks]} values"
        for counted in counts
        for (node, of_ranks), number in counted.items()
        if number < most.get(of_ranks, 0)
    ]


def _judge_rates(message: str, values: Sequence[Compared], reference: str, missing: Sequence[str]) -> Finding:
    """`missing`: see `missing_values`."""
    slow = [
        f"{one.where or 'all ranks'} {one.value:,.4g}, {one.expected / one.value:.2f} times slower than {reference}"
        for one in values
        if one.slow
    ]
    remedy = "exclude the node; look there for other processes, heat, a power limit, a link that is down"
    remedy += ", a lost GPU" if missing else ""
    return judge("comparison", "; ".join([message, *slow, *missing]), remedy, fail=bool(slow or missing))


def render(findings: Sequence[Finding], *, name_nodes: bool = False) -> list[str]:
    """Return a line for each finding, with the remedy below; equal findings of several nodes share one line.

    `name_nodes`: name all nodes of a line, also if there is only one; otherwise several are only counted.
    """
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        merged.setdefault((finding.check, finding.level, finding.message, finding.remedy), []).append(finding.where)
    several = len({finding.where for finding in findings if finding.where}) > 1
    lines = []
    for (check, level, message, remedy), origins in merged.items():
        named = [where for where in origins if where] if several or name_nodes else []
        names = ", ".join(named) if name_nodes or len(named) == 1 else f"{len(named)} alike"
        suffix = f"  [{names}]" if named else ""
        lines.append(f"{level:4}  {check:14} {message}{suffix}")
        if remedy and level != "ok":
            lines.append(f"      {'':14} -> {remedy}")
    return [*lines, f"{worst_level(findings)}: {count_levels((level, message) for _, level, message, _ in merged)}"]


def count_levels(findings: Iterable[tuple[str, str]]) -> str:
    """Return "N ok, N warn, N fail" for (level, message) of each finding, and "N not run" if there are such checks."""
    names = ["not run" if level == "ok" and message.startswith(NOT_RUN) else level for level, message in findings]
    return ", ".join(f"{names.count(name)} {name}" for name in (*LEVELS, "not run") if name in (*LEVELS, *names))


def worst_level(findings: Sequence[Finding]) -> str:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
