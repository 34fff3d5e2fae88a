"""List runs with their state, best accuracy and age; show what differed.

python -m tools.runs
python -m tools.runs --diff expts/bs256 expts/bs256-amp
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.history import Run, ago, differences, read, read_run_folder
from utils.errors import DataError, exit_in_a_line


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the list or the differences; returns the exit status."""
    options = parser().parse_args(argv)
    if options.diff:
        print("\n".join(show_differences(*[_one(folder) for folder in options.diff])))
    else:
        print("\n".join(show_runs(options.folder)))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.runs", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("expts"), help="where the runs are (default: expts)"
    )
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two run folders: what differed")
    return parser


def _one(folder: Path) -> Run:
    if not (folder / "config.yaml").exists():
        raise DataError(f"{folder}: holds no run (no config.yaml)")
    return read_run_folder(folder)


def show_runs(folder: Path) -> list[str]:
    """A line for each run, the newest first, and what is wrong with it."""
    runs, _, problems = read(folder)
    if problems:
        raise DataError(problems[0])
    lines = [f"{'run':28} {'state':9} {'epochs':>9} {'best acc1':>10} {'in epoch':>8} {'changed':>14}"]
    for run in sorted(runs, key=lambda run: -run.changed):
        best = run.best()
        epochs = f"{len(run.epochs)}/{run.config.get('max_epochs', '?')}"
        accuracy, epoch = (f"{best[0]:.2%}", str(best[1])) if best else ("-", "-")
        lines.append(
            f"{run.name:28} {run.state:9} {epochs:>9} {accuracy:>10} {epoch:>8} {ago(run.changed) + ' ago':>14}"
        )
        lines += [f"    {problem}" for problem in run.problems]
    return lines


def show_differences(first: Run, second: Run) -> list[str]:
    """Configuration, environment and result, where they differ."""
    lines = [f"{'':24} {first.name:32} {second.name}"]
    for key, (one, other) in differences([first, second]).items():
        lines.append(f"{key:24} {one!s:32} {other!s}")
    for key in ("commit", "torch", "device", "world_size", "host"):
        one, other = first.environment.get(key), second.environment.get(key)
        if one != other:
            lines.append(f"{key:24} {one!s:32} {other!s}")
    results = []
    for run in (first, second):
        best = run.best()
        results.append(f"{best[0]:.2%} in epoch {best[1]}" if best else "none yet")
    lines.append(f"{'best acc1':24} {results[0]:32} {results[1]}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
