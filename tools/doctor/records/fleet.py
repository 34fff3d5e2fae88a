"""The stored records of many nodes and days: outliers, nodes that are outliers on several days, and interruptions.

A record is of one moment, so it cannot tell how often a job is interrupted. The ledgers of training runs can.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tools.doctor.findings import Document, Finding, compare_documents, compare_figures, judge, read_document
from tools.report import duration
from tools.shared.ledger import find_ledger
from tools.shared.read_runs import read
from utils.errors import ConfigError, DataError

UNDATED = "undated"  # records from before records had a time
JOBS = (1, 8, 64, 512)  # nodes
# If there was no interruption in some time, there are fewer than 3 in such a time with 95 % confidence: exp(-3) = 0.05.
NONE_SEEN = 3


def read_fleet(folder: Path) -> dict[Path, Document]:
    """Read every *.json in a folder. `where` of each finding becomes "DAY HOST", in UTC."""
    documents = {}
    for path in sorted(folder.glob("*.json")):
        document = read_document(path)
        day = UNDATED if document.time is None else f"{document.time:%Y-%m-%d}"
        findings = [replace(one, where=f"{day} {one.where}") if one.where else one for one in document.findings]
        documents[path] = document.model_copy(update={"findings": findings})
    if not documents:
        raise ConfigError(
            f"--baseline {folder}: holds no *.json; store the output of python -m tools.doctor --json there"
        )
    return documents


def judge_fleet(records: Mapping[Path, Document], runs: Path | None, checkpoint_seconds: float | None) -> list[Finding]:
    """Compare each figure over all nodes and days; name nodes that fail on several days; expect interruptions."""
    documents = list(records.values())
    slow = [(one.where, name) for name, row in compare_figures(documents).items() for one in row if one.slow]
    findings = [finding for document in documents for finding in document.findings]
    failed = [(finding.where, finding.check) for finding in findings if finding.level == "fail"]
    devices = max(map(_devices_of_a_node, documents))
    again = find_offenders([*slow, *failed], {_place(finding.where) for finding in findings if finding.where})
    return [
        *compare_documents(records),
        again,
        *expect_interruptions(runs, devices, checkpoint_seconds),
    ]


def _devices_of_a_node(document: Document) -> int:
    hosts = Counter(finding.where.partition(",")[0] for finding in document.findings if finding.check == "limits")
    return max(hosts.values(), default=1)


def _place(where: str) -> tuple[str, str]:
    """Split "DAY HOST, rank N #2" into (day, host)."""
    day, _, host = where.partition(" ")
    return day, host.partition(",")[0].partition(" #")[0]


def find_offenders(faults: Iterable[tuple[str, str]], places: set[tuple[str, str]]) -> Finding:
    """Name the nodes with faults on several days. `faults`: (where, what); `places`: (day, host) of all records."""
    days: dict[str, dict[str, set[str]]] = {}  # {host: {day: what}}
    for where, what in faults:
        day, host = _place(where)
        if host and day != UNDATED:
            days.setdefault(host, {}).setdefault(day, set()).add(what)
    several = sorted((host for host in days if len(days[host]) > 1), key=lambda host: (-len(days[host]), host))
    named = [
        f"{host} on {len(days[host])} days ({', '.join(sorted(set.union(*days[host].values())))})" for host in several
    ]
    seen = f"{len({host for _, host in places})} nodes on {len({day for day, _ in places})} days"
    message = f"{seen}; slow or failed on several: {', '.join(named) or 'none'}"
    remedy = "drain these nodes and have them repaired: what comes back is no accident of one day"
    return judge("repeat offenders", message, remedy, fail=bool(named))


def expect_interruptions(runs: Path | None, devices: int, checkpoint_seconds: float | None) -> list[Finding]:
    """Say how often a job of N nodes of `devices` ranks is interrupted, from the ledgers in the folder `runs`.

    With `checkpoint_seconds` also how often to write a checkpoint: sqrt(2 * seconds of a checkpoint * seconds between
    interruptions), for checkpoints that are much shorter than that (J. W. Young, 1974, doi:10.1145/361147.361115;
    J. T. Daly, 2006, doi:10.1016/j.future.2004.11.016). Raises `DataError` if no run has times.
    """
    if runs is None:
        message = "unknown, as a record is of one moment; --runs DIR counts them in the ledgers of training runs"
        return [Finding("interruptions", "ok", message)]
    found, problems = read([runs])
    ledgers = [(run, ledger) for run in found if (ledger := find_ledger(run.path)) is not None]
    if not ledgers:
        raise DataError(f"--runs {runs}: {problems[0] if problems else 'no run has times'}; expected runs of train.py")
    hours, count = 0.0, 0
    seen = set[tuple[float, float]]()  # the next run's ledger repeats a start that was lost before its first checkpoint
    for run, ledger in ledgers:
        for start in ledger.starts:
            if (key := (start.began, start.alive)) not in seen:
                seen.add(key)
                hours += start.alive * start.ranks / 3600
                count += start.interrupted and not (run.state == "running" and start is ledger.starts[-1])
    apart = hours / (count or NONE_SEEN)  # rank-hours
    least, sure = ("", f"standard error {1 / math.sqrt(count):.0%}") if count else ("at least ", "95 % confidence")
    lines = [
        f"{count} in {hours:,.1f} rank-hours of {len(ledgers)} runs, killed or ended by an error: one in {least}"
        f"{apart:,.1f} rank-hours, {sure}"
    ]
    for nodes in JOBS:
        between = 3600 * apart / (nodes * devices)
        lines.append(f"{nodes} node(s) of {devices} rank(s): one in {least}{duration(between)}")
        if checkpoint_seconds is not None:
            interval = math.sqrt(2 * checkpoint_seconds * between)
            lines[-1] += f"; a checkpoint of {checkpoint_seconds:g} s every {duration(interval)}"
    return [Finding("interruptions", "ok", line) for line in lines]
