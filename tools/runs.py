"""List runs with their state, best accuracy and age; compare two runs, or show where the time of one went.

python -m tools.runs
python -m tools.runs --diff expts/bs256 expts/bs256-amp
python -m tools.runs --ledger expts/bs256
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.shared.command_line import new_parser, path_argument
from tools.shared.ledger import show_ledger
from tools.shared.output import say
from tools.shared.read_runs import Run, differences, read
from utils.errors import DataError, exit_in_a_line


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, the differences or the ledger; returns the exit status."""
    options = parser().parse_args(argv)
    if options.ledger:
        lines = show_ledger(options.ledger)
    else:
        lines = show_differences(*options.diff) if options.diff else show_runs(options.folder)
    say("\n".join(lines))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = new_parser("runs", __doc__)
    parser.add_argument(
        "folder", nargs="?", type=path_argument, default=Path("expts"), help="where the runs are (default: expts)"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--diff", nargs=2, type=path_argument, metavar=("A", "B"), help="show how two runs differ")
    choice.add_argument(
        "--ledger", type=path_argument, metavar="RUN", help="show where the time of a run went, over all starts"
    )
    return parser


def ago(moment: float) -> str:
    """Return the time since `moment` in the largest fitting unit."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def show_runs(folder: Path) -> list[str]:
    """Return a line for each run, the newest first, followed by its problems."""
    runs, _, problems = read(folder)
    if problems:
        raise DataError(problems[0])
    lines = [f"{'run':28} {'state':9} {'epochs':>9} {'best acc1':>10} {'in epoch':>8} {'changed':>14}"]
    for run in sorted(runs, key=lambda run: -run.changed):
        best = run.best()
        accuracy, epoch = (f"{best[0]:.2%}", best[1]) if best else ("-", "-")
        epochs, age = f"{run.epochs_trained()}/{run.config.get('max_epochs', '?')}", f"{ago(run.changed)} ago"
        lines.append(f"{run.name:28} {run.state:9} {epochs:>9} {accuracy:>10} {epoch:>8} {age:>14}")
        lines += [f"    {problem}" for problem in run.problems]
    return lines


def show_differences(*folders: Path) -> list[str]:
    """Return the differences of two runs in configuration and environment, and their results."""
    runs = list[Run]()
    for folder in folders:
        found, _, problems = read(folder)
        if len(found) != 1:
            raise DataError(problems[0] if problems else f"{folder}: holds {len(found)} runs; name one of them")
        runs += found
    rows: dict[str, list[object]] = {"": [run.name for run in runs], **differences(runs)}
    for key in ("commit", "torch", "device", "world_size", "host"):
        values = [run.environment.get(key) for run in runs]
        if values[0] != values[1]:
            rows[key] = values
    bests = [run.best() for run in runs]
    rows["best acc1"] = [f"{best[0]:.2%} in epoch {best[1]}" if best else "none yet" for best in bests]
    lines = [f"{name:24} {one!s:32} {other!s}" for name, (one, other) in rows.items()]
    return lines + [f"{run.name}: {problem}" for run in runs for problem in run.problems]


if __name__ == "__main__":
    sys.exit(main())
