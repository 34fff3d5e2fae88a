"""Findings of the checks: printed, saved as JSON, and compared over nodes or with an earlier record. No torch."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from utils.errors import ConfigError
from utils.program import command

LEVELS = ("ok", "warn", "fail")
NOT_RUN = ("not run", "not readable")  # begin the messages of checks that could not look; they are `ok`
SLOW = 1.15  # a rate fails if the median, or the baseline, is more than this many times higher
FINGERPRINT_REMEDY = f"exclude the device, and run {command('doctor')} again to see whether it recurs"
Placed = tuple[str, float]  # where, and the value there
SLOW_REMEDY = "exclude the node; look there for other processes, heat, a power limit, a link that is down"


@dataclass(frozen=True)
class Finding:
    """One line of the output: what was checked, what was found, and the remedy."""

    check: str
    level: str
    message: str
    remedy: str = ""
    where: str = ""  # "NODE", "NODE, rank N" or "NODE, cuda:N"; empty: all nodes together
    figures: dict[str, float] = field(default_factory=dict)  # {name with unit: rate}; more is better

    @property
    def node(self) -> str:
        return self.where.partition(",")[0]


def judge(check: str, message: str, remedy: str, *, warn: bool = False, fail: bool = False) -> Finding:
    """Return a finding; the remedy is kept only if it warns or fails."""
    level = "fail" if fail else "warn" if warn else "ok"
    return Finding(check, level, message, remedy if warn or fail else "")


def read_text(file: Path) -> str | None:
    """Return the text of a file in /proc or /sys; None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


class Record(BaseModel):
    """All findings of one run of the doctor (--json), with the device and software that its figures depend on."""

    worst: str = "ok"
    device: str
    software: dict[str, str]  # {name: version}
    time: datetime | None = None  # when the checks began; older records have none
    findings: list[Finding] = []


def read_record(path: Path) -> Record:
    """Read a record; raise `ConfigError` if the file cannot be read or is not one."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        found = getattr(error, "strerror", "it holds something else")
        raise ConfigError(f"{path}: expected the output of {command('doctor')} --json: {found}") from None


def read_figures(findings: Iterable[Finding]) -> dict[str, list[Placed]]:
    """Return {"CHECK, FIGURE": [(where, value)]}, with a value for each node, rank or device."""
    found: dict[str, list[Placed]] = {}
    for finding in findings:
        for name, value in finding.figures.items():
            found.setdefault(f"{finding.check}, {name}", []).append((finding.where, value))
    return found


def compare_values(name: str, values: Sequence[Placed], others: Sequence[Placed], reference: str) -> list[Finding]:
    """Return a finding for each value that is too far below the median of `others`, or one `ok` for all."""
    # the upper one, so that the better of two nodes decides, also if each has several devices
    expected = statistics.median_high([value for _, value in others])
    text = f"{reference} {expected:,.4g}"
    slow = [
        Finding("comparison", "fail", f"{name} {value:,.4g}, {value / expected:.0%} of {text}", SLOW_REMEDY, where)
        for where, value in values
        if value * SLOW < expected
    ]
    rates = [value for _, value in values]
    message = f"{name} {min(rates):,.4g} to {max(rates):,.4g}, {text}, over {len(rates)}"
    return slow or [Finding("comparison", "ok", message)]


def compare_fingerprints(findings: Iterable[Finding]) -> list[Finding]:
    """Fail each device with another fingerprint than most devices of its kind."""
    kinds: dict[str, list[tuple[str, str]]] = {}  # {kind: [(where, fingerprint)]}
    for finding in findings:
        if finding.check == "fingerprint" and finding.level == "ok":
            kind, _, found = finding.message.rpartition(": ")
            kinds.setdefault(kind, []).append((finding.where, found))
    differing = []
    for alike in kinds.values():
        usual, count = Counter(found for _, found in alike).most_common(1)[0]
        # without a majority each device may be wrong
        wrong = [where for where, found in alike if found != usual or 2 * count <= len(alike) > 1]
        message = f"differs from other devices of its kind: most have {usual}"
        differing += [Finding("fingerprint", "fail", message, FINGERPRINT_REMEDY, where) for where in wrong]
    return differing


def compare_records(records: Sequence[Record], others: Sequence[Record], reference: str) -> list[Finding]:
    """Compare fingerprints, each figure of `records` with its median in `others`, and each node's number of devices
    with the most there. Raise `ConfigError` if device or software differ."""
    expected = {"device": others[0].device, **others[0].software}
    for record in (*records, *others):
        for name, found in {"device": record.device, **record.software}.items():
            if found != (other := expected.get(name)):
                nodes = " and ".join(next((one.node for one in each.findings), "?") for each in (record, others[0]))
                raise ConfigError(f"the records of {nodes} cannot be compared: {name} {found} and {other}")
    mine, theirs = ([one for record in some for one in record.findings] for some in (records, others))
    findings = compare_fingerprints(mine if records is others else [*mine, *theirs])
    findings = [one for one in findings if one.where in {each.where for each in mine}]  # the reference is not judged
    known = read_figures(theirs)
    for name, values in read_figures(mine).items():
        findings += compare_values(name, values, known[name], reference) if name in known else []
    most = max((number for record in others for number in _count_devices(record).values()), default=0)
    return findings + [
        Finding("comparison", "fail", f"{number} of {most} devices", "look for a lost GPU there", node)
        for record in records
        for node, number in _count_devices(record).items()
        if number < most
    ]


def _count_devices(record: Record) -> Counter[str]:
    """Return {node: number of its devices that were measured}."""
    return Counter(finding.node for finding in record.findings if finding.check == "limits")


def render(findings: Sequence[Finding], name_nodes: bool = False) -> list[str]:
    """Return a line for each finding, with the remedy below; equal findings of several places share one line."""
    name_nodes = name_nodes or len({finding.node for finding in findings if finding.where}) > 1
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        place = finding.where.replace(",", "") if name_nodes else finding.where.partition(", ")[2]
        merged.setdefault((finding.check, finding.level, finding.message, finding.remedy), []).append(place)
    lines = []
    for (check, level, message, remedy), places in merged.items():
        named = list(dict.fromkeys(filter(None, places)))
        names = f"{len(named)} alike" if level == "ok" and len(named) > 1 else "; ".join(named)
        lines.append(f"{level:4}  {check:14} {message}" + (f"  [{names}]" if names else ""))
        lines += [f"      {'':14} -> {remedy}"] if remedy and level != "ok" else []
    levels = ["not run" if text.startswith(NOT_RUN) else level for _, level, text, _ in merged]
    counts = ", ".join(f"{levels.count(name)} {name}" for name in (*LEVELS, "not run") if name in (*LEVELS, *levels))
    return [*lines, f"{worst_level(findings)}: {counts}"]


def worst_level(findings: Sequence[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
