"""List runs with their state, best accuracy and use of time; show where the time of one run went.

    python -m tools.runs
    python -m tools.runs expts/bs256
    diff expts/bs256/config.yaml expts/bs256-amp/config.yaml     # the settings that differ

A run's time is added up over all of its starts. `useful` is ETTR, the effective training time ratio of
arXiv:2410.21680: training, waiting for input, validation and test, divided by the wall clock from the first start to
the last record. The rest is start-up, compilation, checkpoints, steps trained again after a kill, and time without a
process (stopped), also after a killed start's last record.
"""

import fcntl
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tools.common import new_parser, path_argument, print_table
from utils.errors import DataError, Stopped, exit_in_a_line
from utils.files import read_json_lines
from utils.run.clock import ACTIVITIES

USEFUL = ("train", "input", "validation", "test")
MARKS = ("metrics.jsonl", "config.yaml", "tb_logs")  # a folder with one of them is a run
CLOCKS = ("wall_s_since_first_event", "wall_s_since_first_epoch_end")  # the times of published curves


@dataclass
class Run:
    """One training run. `epochs` holds a mapping for each epoch: epoch, seconds, loss/..., acc1/... (in [0, 1])."""

    name: str
    path: Path
    state: str = "unknown"  # running, finished, stopped, failed or published
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    epochs: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changed: float = 0.0  # seconds since 1970 of the last write; 0 of published curves

    @property
    def end(self) -> dict[str, Any]:
        """The record of the run's end; empty if the run has not ended or training has followed."""
        ends = [record for record in self.records if record["kind"] == "end"]
        return ends[-1] if ends and self.epochs and ends[-1].get("epoch") == self.epochs[-1]["epoch"] else {}

    def best(self) -> tuple[str, str]:
        """Return the best validation accuracy and its epoch, the earliest of equal ones, as text; "-" without any. The
        epoch may be one of another run, from whose checkpoint this run began."""
        scored = [(row["acc1/valid"], -int(row["epoch"])) for row in self.epochs if "acc1/valid" in row]
        if "best_acc1" in self.end:
            scored.append((self.end["best_acc1"], -int(self.end["best_epoch"])))
        return (f"{max(scored)[0]:.2%}", str(-max(scored)[1])) if scored else ("-", "-")

    def reached(self, target: float) -> tuple[int, float] | None:
        """Return (epoch, seconds) of the first validation accuracy of at least `target`."""
        enough = (row for row in self.epochs if row.get("acc1/valid", -1.0) >= target)
        return next(((int(row["epoch"]), row["seconds"]) for row in enough), None)

    def epochs_trained(self) -> str:
        """Return "12 of 90". Counts the epochs of another run, from whose checkpoint this run began."""
        trained = int(self.last("epoch") or 0)
        return f"{trained} of {self.config['max_epochs']}" if "max_epochs" in self.config else f"{trained}"

    def last(self, name: str) -> float | None:
        return next((row[name] for row in reversed(self.epochs) if name in row), None)


def read(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in files of curves, run folders and folders of runs, and problems."""
    runs, problems = dict[tuple[Path, str], Run](), list[str]()
    for path in paths:
        inner = sorted(folder for folder in path.glob("*/") if _is_run(folder))
        for part in [path] if _is_run(path) or not inner else inner:
            try:
                for run in _read_part(part):
                    runs.setdefault((part.resolve(), run.name), run)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # values of other types
                problems.append(f"{part}: cannot be read: {str(error).partition(chr(10))[0]}")
    names = Counter(run.name for run in runs.values())
    for run in runs.values():
        if names[run.name] > 1:
            run.name = f"{run.path}: {run.name}" if run.state == "published" else f"{run.path}"
        problems += [f"{run.name}: {problem}" for problem in run.problems]
    return list(runs.values()), problems


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)


def _read_part(path: Path) -> list[Run]:
    """Return the run in the folder `path`, or the published curves, lists by tag, in the file `path`."""
    if _is_run(path):
        return [read_run_folder(path)]
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "runs" not in content:
        raise ValueError("it is no run folder, folder of runs or file of curves")
    runs = []
    for name, curves in content["runs"].items():
        columns = {"seconds": next((curves[clock] for clock in CLOCKS if clock in curves), []), **curves}
        epochs = [
            {"seconds": 0.0} | {key: float(values[number]) for key, values in columns.items() if number < len(values)}
            for number in range(len(curves["epoch"]))
        ]
        runs.append(Run(f"{name} (published)", path, "published", epochs=epochs))
    return runs


def read_run_folder(folder: Path) -> Run:
    """Read a run folder of train.py, also of an unfinished run."""
    run = Run(folder.name, folder)
    try:
        (block,) = YAML(typ="safe", pure=True).load((folder / "config.yaml").read_text("utf-8")).values()
        run.config = dict(block)
        run.environment = dict(json.loads((folder / "environment.json").read_text("utf-8")))
    except (OSError, YAMLError, ValueError, TypeError, AttributeError):
        run.problems.append("config.yaml or environment.json is missing or damaged")
    run.records, damaged = read_json_lines(folder / "metrics.jsonl", "kind")
    if damaged:
        run.problems.append(f"metrics.jsonl: {damaged} line(s) cannot be read; skipped")
    by_epoch = {record["epoch"]: record for record in run.records if record["kind"] == "epoch"}
    for _, record in sorted(by_epoch.items()):
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        run.epochs.append({"seconds": 0.0} | numbers)
    if not run.epochs:
        run.problems.append(f"metrics.jsonl {'has no finished epoch yet' if run.records else 'is missing or empty'}")
    run.changed = max(file.stat().st_mtime for file in [folder, *folder.glob("[!.]*")] if file.exists())
    run.state, reason = _find_state(run)
    run.problems += [reason] if reason else []
    return run


def _find_state(run: Run) -> tuple[str, str]:
    """Return the state of a run folder and, if the run failed, the reason."""
    with suppress(OSError), (run.path / ".lock").open() as lock:  # no such file, or a file system without locks
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running", ""
    outcomes = [record for record in run.records if record["kind"] in ("start", "resume", "end", "stop")]
    outcome = outcomes[-1] if outcomes else {"kind": "start"}
    if outcome["kind"] == "end":
        return "finished", ""
    if outcome["kind"] != "stop":
        return "failed", "no record of its end: it was killed, or its machine failed"
    if outcome.get("status") == Stopped.exit_status:
        return "stopped", ""
    return "failed", f"ended by {outcome.get('reason', 'something unknown')}".partition("\n")[0]


def find_ledger(records: Sequence[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the number of starts in the records of a metrics.jsonl, and the run's seconds by activity (ACTIVITIES and
    "stopped"), from the first start to the last record; (0, {}) if no record has times."""
    starts: list[tuple[float, dict[str, float]]] = []  # when each start began, and its last seconds by activity
    for record in records:
        if (seconds := record.get("clock_seconds")) is None:
            continue
        if record["kind"] in ("start", "resume"):
            starts.append((record["time"] - sum(seconds.values()), seconds))
        elif starts and sum(seconds.values()) >= sum(starts[-1][1].values()):  # else of a start that recorded no begin
            starts[-1] = starts[-1][0], seconds
    if not starts:
        return 0, {}
    ends = [began + sum(seconds.values()) for began, seconds in starts]
    gaps = (later - end for (later, _), end in zip(starts[1:], ends, strict=False))
    total = {name: sum(seconds.get(name, 0.0) for _, seconds in starts) for name in ACTIVITIES}
    total["stopped"] = sum(max(0.0, gap) for gap in gaps)  # clocks may disagree
    return len(starts), total


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("runs", __doc__)
    what = "a run, or a folder of runs (default: expts)"
    parser.add_argument("folder", nargs="?", type=path_argument, default=Path("expts"), help=what)
    runs, problems = read([parser.parse_args(argv).folder])
    if not runs:
        raise DataError("; ".join(problems))
    rows, seconds = [], dict[str, float]()
    for run in sorted(runs, key=lambda run: -run.changed):
        starts, seconds = find_ledger(run.records)
        useful = f"{sum(seconds[name] for name in USEFUL) / sum(seconds.values()):.1%}" if starts else "-"
        changed = datetime.fromtimestamp(run.changed).isoformat(" ", "minutes")
        rows.append((run.name, run.state, run.epochs_trained(), *run.best(), str(starts or "-"), useful, changed))
    print_table("", ("run", "state", "epochs", "best acc1", "in epoch", "starts", "useful", "changed"), rows)
    if len(runs) == 1 and seconds:
        wall = sum(seconds.values())
        shares = [(name, f"{t:.1f}", f"{t / wall:.1%}") for name, t in {**seconds, "wall clock": wall}.items()]
        print_table("", ("activity", "seconds", "of the wall clock"), shares)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
