"""List runs with their state, best accuracy and use of time; show where the time of one run went; compare two.

    python -m tools.runs
    python -m tools.runs expts/bs256
    python -m tools.runs --diff expts/bs256 expts/bs256-amp

A run's time is added up over all of its starts. `useful` is ETTR, the effective training time ratio of
arXiv:2410.21680: training, waiting for input, validation and test, divided by the wall clock from the first start to
the last record. The rest is start-up, compilation, checkpoints, steps trained again after a kill, and time without a
process (stopped), in a queue or not. If a start was killed, the time after its last record counts as stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.shared.command_line import new_parser, path_argument
from tools.shared.output import print_table
from tools.shared.read_runs import Run, differences, read
from utils.errors import DataError, exit_in_a_line
from utils.timing.clock import ACTIVITIES

USEFUL = ("train", "input", "validation", "test")
ENVIRONMENT = ("commit", "torch", "device", "world_size", "host")  # what --diff compares


@dataclass(frozen=True)
class Ledger:
    """The time of a run over all of its starts."""

    starts: int
    seconds: dict[str, float]  # by activity of utils/timing/clock.py, and "stopped"

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last record."""
        return sum(self.seconds.values())

    @property
    def useful(self) -> float:
        """Useful time as a fraction of the wall clock."""
        return sum(self.seconds[name] for name in USEFUL) / self.wall


def find_ledger(records: Sequence[dict[str, Any]]) -> Ledger | None:
    """Add up the times in the records of a metrics.jsonl; None if they hold none.

    Each record has the seconds of its start by activity so far."""
    starts: list[tuple[float, dict[str, float]]] = []  # when each start began, and its last seconds by activity
    for record in records:
        if (seconds := record.get("clock_seconds")) is None:
            continue
        if record["kind"] in ("start", "resume"):
            starts.append((record["time"] - sum(seconds.values()), seconds))
        elif starts and sum(seconds.values()) >= sum(starts[-1][1].values()):  # else of a start that recorded no begin
            starts[-1] = starts[-1][0], seconds
    if not starts:
        return None
    ends = [began + sum(seconds.values()) for began, seconds in starts]
    gaps = (later - end for (later, _), end in zip(starts[1:], ends, strict=False))
    total = {name: sum(seconds.get(name, 0.0) for _, seconds in starts) for name in ACTIVITIES}
    return Ledger(len(starts), total | {"stopped": sum(max(0.0, gap) for gap in gaps)})  # clocks may disagree


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the list or the differences; returns the exit status."""
    parser = new_parser("runs", __doc__)
    what, default = "a run, or a folder of runs: default expts", Path("expts")
    parser.add_argument("folder", nargs="?", type=path_argument, default=default, help=what)
    parser.add_argument("--diff", nargs=2, type=path_argument, metavar=("A", "B"), help="show how two runs differ")
    options = parser.parse_args(argv)
    runs, problems = read(options.diff or [options.folder])
    if not runs:
        raise DataError("; ".join(problems))
    if options.diff and len(runs) != 2:
        raise DataError(f"--diff: {', '.join(map(str, options.diff))} hold {len(runs)} runs; name two")
    show_differences(runs) if options.diff else show_runs(runs)
    for problem in problems:
        print(problem)
    return 0


def show_runs(runs: Sequence[Run]) -> None:
    """Print a line for each run, the newest first; of a single run also its time by activity."""
    rows, ledgers = [], {id(run): find_ledger(run.records) for run in runs}
    for run in sorted(runs, key=lambda run: -run.changed):
        ledger = ledgers[id(run)]
        times = (str(ledger.starts), f"{ledger.useful:.1%}") if ledger else ("-", "-")
        changed = datetime.fromtimestamp(run.changed).isoformat(" ", "minutes")
        rows.append((run.name, run.state, run.epochs_trained(), *run.best(), *times, changed))
    print_table("", ("run", "state", "epochs", "best acc1", "in epoch", "starts", "useful", "changed"), rows)
    if len(runs) == 1 and (ledger := ledgers[id(runs[0])]):
        parts = [*ledger.seconds.items(), ("wall clock", ledger.wall)]
        shares = [(name, f"{seconds:.1f}", f"{seconds / ledger.wall:.1%}") for name, seconds in parts]
        print_table("", ("activity", "seconds", "of the wall clock"), shares)


def show_differences(runs: Sequence[Run]) -> None:
    """Print the differences of two runs in configuration and environment, and their results."""
    environments = {key: [run.environment.get(key) for run in runs] for key in ENVIRONMENT}
    rows = differences(runs) | {key: values for key, values in environments.items() if values[0] != values[1]}
    rows["best acc1, its epoch"] = [", ".join(run.best()) for run in runs]
    print_table("", ("", *(run.name for run in runs)), [(key, *map(str, values)) for key, values in rows.items()])


if __name__ == "__main__":
    sys.exit(main())
