"""The time of a run by activity, over all of its starts: for `tools.runs --ledger`. No torch.

Each record of metrics.jsonl has the seconds of its start by activity. The time from the last record of a start to the
next start counts as stopped. So the parts add up to the wall clock from the first start to the last record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tools.shared.read_runs import read_lines, read_run_folder
from utils.errors import CorruptionError, DataError, ExpectedError
from utils.timing.clock import ACTIVITIES

LABELS = {
    "train": "training", "input": "waiting for input", "validation": "validation", "test": "test",
    "checkpoint": "checkpoints", "start": "start-up", "compile": "compilation", "replay": "replayed steps",
    "stopped": "stopped",
}  # fmt: skip
USEFUL = ("train", "input", "validation", "test")
# ETTR of arXiv:2410.21680: productive time over wall clock. Not productive: start-up, replayed steps, and the time
# between two starts, in a queue or not; here also compilation and checkpoints. Of replayed steps, only their training
# counts as replayed: waiting for input, and a repeated validation, count as productive.
USEFUL_SHARE = "useful (ETTR)"


@dataclass
class StartTimes:
    """One start of a run. Steps are optimizer steps since the beginning of the run."""

    began: float  # seconds since 1970
    first: int  # the step that it resumed from
    reached: int  # the last step of all earlier starts: up to there it repeats steps
    step: int  # the last recorded step
    ended: bool = False  # orderly or by an error; otherwise it was killed, or is running
    seconds: dict[str, float] = field(default_factory=dict)  # by activity, up to its last record
    ranks: int = 1
    status: int | None = None  # if it ended before the training was done

    @property
    def interrupted(self) -> bool:
        """Whether it was killed, or ended by an error that is not of its configuration or data."""
        return not self.ended or self.status in (ExpectedError.exit_status, CorruptionError.exit_status)

    @property
    def alive(self) -> float:
        """Seconds up to its last record."""
        return sum(self.seconds.values())

    @property
    def replayed(self) -> int:
        """Steps that an earlier start had trained already."""
        return max(0, min(self.step, self.reached) - self.first)


@dataclass(frozen=True)
class TimeLedger:
    """The starts of a run in order, and the number of damaged lines."""

    starts: Sequence[StartTimes]
    damaged: int = 0

    @property
    def gaps(self) -> list[float]:
        """Seconds from the last record of each start to the next start; negative if their clocks disagree."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [later.began - (earlier.began + earlier.alive) for earlier, later in pairs]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part, in the order of LABELS."""
        spent = {name: sum(start.seconds.get(name, 0.0) for start in self.starts) for name in ACTIVITIES}
        spent["stopped"] = sum(max(0.0, gap) for gap in self.gaps)
        return {name: spent[name] for name in LABELS}

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last record: the sum of all parts."""
        return sum(self.seconds.values())

    @property
    def useful(self) -> float:
        """Useful time as a fraction of the wall clock."""
        return sum(self.seconds[name] for name in USEFUL) / self.wall

    @property
    def trained(self) -> int:
        """Steps, replayed ones included."""
        return sum(start.step - start.first for start in self.starts)

    @property
    def replayed(self) -> int:
        """Steps that were repeated, because the run was killed between them and the next checkpoint."""
        return sum(start.replayed for start in self.starts)


def find_ledger(folder: Path) -> TimeLedger | None:
    """Return the ledger of the run in `folder`; None if no record has times."""
    records, damaged = read_lines(folder / "metrics.jsonl")
    starts: list[StartTimes] = []
    reached = 0
    for record in (record for record in records if "clock_seconds" in record):
        seconds = {name: spent for name, spent in record["clock_seconds"].items() if name in ACTIVITIES}
        step = record.get("step", 0)
        if record["kind"] in ("start", "resume") and "time" in record:
            began = record["time"] - sum(seconds.values())
            starts.append(StartTimes(began, step, reached, step, ranks=record.get("world_size", 1)))
        if not starts or sum(seconds.values()) < starts[-1].alive:
            continue  # a start that failed before its first record
        start = starts[-1]
        start.step, start.seconds = max(start.step, step), seconds
        start.ended, start.status = record["kind"] in ("end", "stop"), record.get("status")
        reached = max(reached, start.step)
    return TimeLedger(starts, damaged) if any(start.alive for start in starts) else None


def show_ledger(folder: Path) -> list[str]:
    """Return the ledger as lines. Raises `DataError` if there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the folder of a run of train.py")
    ledger = find_ledger(folder)
    if ledger is None:
        raise DataError(f"{folder}: holds no metrics.jsonl with clock_seconds; expected a run of train.py")
    seconds, first, last = ledger.seconds, ledger.starts[0], ledger.starts[-1]
    running = read_run_folder(folder).state == "running"
    end = _moment(last.began + last.alive)
    lines = [
        f"{folder}: {_count(len(ledger.starts), 'start')}, {_moment(first.began)} to {end}",
        *(f"  {LABELS[name]:18} {spent:12.1f} s {spent / ledger.wall:7.1%}" for name, spent in seconds.items()),
        f"  {'wall clock':18} {ledger.wall:12.1f} s",
        f"{USEFUL_SHARE}: {ledger.useful:.1%}: {', '.join(LABELS[name] for name in USEFUL)}, of the wall clock",
        f"steps: {last.step} done, {ledger.trained} trained, {ledger.replayed} of them repeated after a loss",
        "",
        f"{'start':>5}  {'began':19} {'from step':>9} {'to':>9} {'replayed':>8} {'seconds':>10}  end",
    ]
    for number, start in enumerate(ledger.starts, start=1):
        finished = "finished" if start.status is None else f"exit status {start.status}"
        end = finished if start.ended else "killed: no record of its last seconds"
        end = "still running" if running and start is last else end
        lines.append(
            f"{number:>5}  {_moment(start.began):19} {start.first:>9} {start.step:>9} {start.replayed:>8} "
            f"{start.alive:>10.1f}  {end}"
        )
    return lines + _remarks(ledger)


def _remarks(ledger: TimeLedger) -> list[str]:
    remarks = []
    if ledger.damaged:
        remarks.append(f"{_count(ledger.damaged, 'line')} of metrics.jsonl cannot be read: that time is missing")
    if (overlap := -sum(min(0.0, gap) for gap in ledger.gaps)) > 1.0:
        remarks.append(f"starts overlap by {overlap:.1f} s: the clocks of their hosts disagree, or one was set")
    return remarks


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
