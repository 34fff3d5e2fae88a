"""Where the time of a run went, over all of its starts: for `tools.runs --ledger` and the report. No torch.

What each start did comes from its record in clock.bin (utils/clock.py), what lies between two of them was stopped. So
the parts add up to the wall clock from the first start to the last sign of life.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tools.shared.read_runs import read_records, read_run_folder
from utils.clock import ACTIVITIES, FILE, Start, read_starts
from utils.errors import DataError

LABELS = {
    "train": "training", "input": "waiting for input", "validation": "validation", "test": "test",
    "checkpoint": "checkpoints", "start": "start-up", "compile": "compilation", "replay": "replayed steps",
    "stopped": "stopped",
}  # fmt: skip
USEFUL = ("train", "input", "validation", "test")
# ETTR of arXiv:2410.21680: productive time over wall clock; not productive are starting, catching up after a loss, and
# the time between two starts, in a queue or not. Checkpoints are counted as not productive here.
USEFUL_SHARE = "useful (ETTR)"


@dataclass(frozen=True)
class Ledger:
    """The starts of a run in their order, and records that cannot be read."""

    starts: Sequence[Start]
    damaged: int = 0

    @property
    def gaps(self) -> list[float]:
        """Seconds from the end of each start to the begin of the next; below 0 where their clocks disagree."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [later.began - (earlier.began + earlier.alive) for earlier, later in pairs]

    @property
    def seconds(self) -> dict[str, float]:
        """Of each part in the order of LABELS."""
        parts = [start.seconds() for start in self.starts]
        spent = {activity: sum(part[activity] for part in parts) for activity in ACTIVITIES}
        spent["stopped"] = sum(max(0.0, gap) for gap in self.gaps)
        return {name: spent[name] for name in LABELS}

    @property
    def wall(self) -> float:
        """Seconds from the begin of the first start to the end of the last one: the sum of all parts."""
        return sum(self.seconds.values())

    @property
    def useful(self) -> float:
        """The share of the wall clock in which the run got on."""
        return sum(self.seconds[name] for name in USEFUL) / self.wall

    @property
    def trained(self) -> int:
        """Steps, replayed ones included."""
        return sum(start.step - start.first for start in self.starts)

    @property
    def replayed(self) -> int:
        """Steps that were trained again, because a kill came between them and the next checkpoint."""
        return sum(start.replayed for start in self.starts)


def find_ledger(folder: Path) -> Ledger | None:
    """The ledger of the run in `folder`; None where it has no record that can be read."""
    try:
        starts, damaged = read_starts(folder / FILE)
    except OSError:
        return None
    return Ledger(starts, damaged) if starts else None


def show_ledger(folder: Path) -> list[str]:
    """The ledger as lines; `DataError` where there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    ledger = find_ledger(folder)
    if ledger is None:
        raise DataError(f"{folder}: holds no readable {FILE}, in which a run of this version records its times")
    seconds, first, last = ledger.seconds, ledger.starts[0], ledger.starts[-1]
    running = read_run_folder(folder).state == "running"
    end = _moment(last.began + last.alive)
    lines = [
        f"{folder}: {_count(len(ledger.starts), 'start')}, {_moment(first.began)} to {end}",
        *(f"  {LABELS[name]:18} {spent:12.1f} s {spent / ledger.wall:7.1%}" for name, spent in seconds.items()),
        f"  {'wall clock':18} {ledger.wall:12.1f} s",
        f"{USEFUL_SHARE}: {ledger.useful:.1%}: {', '.join(LABELS[name] for name in USEFUL)}, of the wall clock",
        f"steps: {last.step} done, {ledger.trained} trained, {ledger.replayed} of them again after a loss",
        "",
        f"{'start':>5}  {'began':19} {'from step':>9} {'to':>9} {'replayed':>8} {'seconds':>10}  end",
    ]
    for number, start in enumerate(ledger.starts, start=1):
        end = "by itself" if start.ended else f"killed, its last activity: {LABELS[ACTIVITIES[start.activity]]}"
        end = "still running" if running and start is last else end
        lines.append(
            f"{number:>5}  {_moment(start.began):19} {start.first:>9} {start.step:>9} {start.replayed:>8} "
            f"{start.alive:>10.1f}  {end}"
        )
    return lines + _remarks(folder, ledger)


def _remarks(folder: Path, ledger: Ledger) -> list[str]:
    remarks = []
    told = len(read_records(folder / "metrics.jsonl", "start", "resume"))
    if told > len(ledger.starts):
        remarks.append(f"metrics.jsonl tells of {_count(told, 'start')}: the time of those without a record is missing")
    if ledger.damaged:
        remarks.append(f"{_count(ledger.damaged, 'record')} cannot be read: that time is missing")
    if (overlap := -sum(min(0.0, gap) for gap in ledger.gaps)) > 1.0:
        remarks.append(f"starts overlap by {overlap:.1f} s: the clocks of their hosts disagree, or one was set")
    return remarks


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
