"""Reads run folders, published curves and reports of tools.bench.

Damaged or missing files become problems of the run; the rest is read. No torch, so that the commands start fast.
"""

import fcntl
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Required

from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from tools.bench.reports import Report
from utils.errors import Stopped

MARKS = ("metrics.jsonl", "config.yaml", "tb_logs")  # a folder with one of them is a run
State = Literal["running", "finished", "stopped", "failed", "published", "unknown"]
# start of the times of published curves
CLOCKS = {
    "wall_s_since_first_event": "since the first event",
    "wall_s_since_first_epoch_end": "since the first epoch's end",
}
LISTS_OF_NUMBERS = TypeAdapter(dict[str, list[float]])
_WorstClass = TypedDict("_WorstClass", {"class": str, "accuracy": float, "taken_for": str, "share": float})


class _Settings(TypedDict, total=False):
    """The settings of a run that are used here."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    max_epochs: int
    stop_at_accuracy: float | None
    seed: int
    dataset: str


class _Environment(TypedDict, total=False):
    """The values of environment.json that are used here."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    device: str
    world_size: int


class _Record(TypedDict, total=False):
    """The values of a line of metrics.jsonl that are used here and in the ledger, without the measured ones."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    kind: Required[str]
    time: FiniteFloat  # seconds since 1970
    step: int
    epoch: int
    world_size: int  # of a start
    clock_seconds: dict[str, FiniteFloat]
    status: int
    reason: str
    worst_classes: list[_WorstClass]
    images_per_sec: FiniteFloat
    best_acc1: FiniteFloat
    best_epoch: int


SETTINGS, ENVIRONMENT, RECORD = TypeAdapter(_Settings), TypeAdapter(_Environment), TypeAdapter(_Record)


@dataclass
class Run:
    """One training run. `epochs` holds a mapping for each epoch: epoch, seconds, loss/..., acc1/... (in [0, 1])."""

    name: str
    path: Path
    state: State = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)
    worst_classes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changed: float = 0.0  # seconds since 1970 of the last write
    clock: str = "of training"  # what `seconds` is
    images_per_sec: float | None = None  # of the whole run, once it has ended
    best_at_end: tuple[float, int] | None = None  # perhaps of the run from whose checkpoint this one began

    def best(self) -> tuple[float, int] | None:
        """Return the best validation accuracy and its epoch, the earliest of equal ones."""
        scored = [(row["acc1/valid"], -int(row["epoch"])) for row in self.epochs if "acc1/valid" in row]
        if self.best_at_end is not None:
            scored.append((self.best_at_end[0], -self.best_at_end[1]))
        if not scored:
            return None
        accuracy, epoch = max(scored)
        return accuracy, -epoch

    def reached(self, target: float) -> tuple[int, float] | None:
        """Return (epoch, seconds) of the first validation accuracy of at least `target`."""
        enough = (row for row in self.epochs if row.get("acc1/valid", -1.0) >= target)
        return next(((int(row["epoch"]), row["seconds"]) for row in enough), None)

    def rate(self) -> float | None:
        """Return images/s: of the whole run, or before its end of its newest epoch."""
        return self.images_per_sec or self.last("images_per_sec")

    def epochs_trained(self) -> int:
        """Return the number of the last epoch: it counts the epochs of another run whose checkpoint was resumed."""
        return int(self.last("epoch") or 0)

    def last(self, name: str) -> float | None:
        """Return the newest value of this name."""
        return next((row[name] for row in reversed(self.epochs) if name in row), None)


class Found(NamedTuple):
    """The content of a path."""

    runs: list[Run]
    reports: list[tuple[Path, Report]]
    problems: list[str]


def read(path: Path) -> Found:
    """Read a file of curves, a report, a run folder, or all runs in a folder."""
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        return Found([], [], [f"{path}: no such file or folder"])
    if any((path / name).exists() for name in MARKS):
        return Found([read_run_folder(path)], [], [])
    inner = sorted({file.parent for name in MARKS for file in path.glob(f"*/{name}")})
    runs = [read_run_folder(folder) for folder in inner]
    return Found(runs, [], [] if runs else [f"{path}: holds no run"])


def _read_file(path: Path) -> Found:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get("runs"), dict):
            return _read_curves(path, content["runs"])
        if isinstance(content, dict) and {"bench", "results"} <= content.keys():
            return Found([], [(path, Report.model_validate(content))], [])
        problem = "is neither a file of curves nor a report of tools.bench"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{first['loc'][0]}: {first['msg']}; skipped"
    except ValueError:
        problem = "is not JSON; give run folders, curves or reports of tools.bench"
    return Found([], [], [f"{path}: {problem}"])


# ---- the project's own folders


def read_run_folder(folder: Path) -> Run:
    """Read a run folder of train.py, also of an unfinished run."""
    run = Run(folder.name, folder, config=_read_config(folder / "config.yaml"))
    if not run.config:
        run.problems.append("config.yaml is missing or damaged: unknown configuration")
    try:
        run.environment = dict(ENVIRONMENT.validate_json((folder / "environment.json").read_bytes()))
    except (OSError, ValidationError):
        run.problems.append("environment.json is missing or damaged: unknown device and versions")
    records, damaged = read_lines(folder / "metrics.jsonl")
    if damaged:
        run.problems.append(f"metrics.jsonl: {damaged} line(s) cannot be read; skipped")
    by_epoch: dict[int, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "epoch" and "epoch" in record:
            numbers = {
                key: float(value)
                for key, value in record.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            by_epoch[record["epoch"]] = {"seconds": 0.0} | numbers
    run.epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if not run.epochs:
        run.problems.append(f"metrics.jsonl {'has no finished epoch yet' if records else 'is missing or empty'}")
    end = _last_of(records, "end") or {}
    run.worst_classes = end.get("worst_classes", [])
    if run.epochs and end.get("epoch") == run.epochs[-1]["epoch"]:  # no training has followed
        run.images_per_sec = end.get("images_per_sec")
        if "best_acc1" in end and "best_epoch" in end:
            run.best_at_end = end["best_acc1"], end["best_epoch"]
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]  # no temporary file
    run.changed = max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    run.state, reason = _judge_state(run, records)
    run.problems += [reason] if reason else []
    return run


def _last_of(records: list[dict[str, Any]], *kinds: str) -> dict[str, Any] | None:
    return next((record for record in reversed(records) if record["kind"] in kinds), None)


def _find_hang(folder: Path) -> str:
    """Return the collective that its ranks timed out on, if the run wrote that last."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        report = folder / "collectives.json"
        if report.stat().st_mtime >= (folder / "metrics.jsonl").stat().st_mtime:
            return str(json.loads(report.read_text(encoding="utf-8"))["message"]).splitlines()[-1]
    return ""


def _judge_state(run: Run, records: list[dict[str, Any]]) -> tuple[State, str]:
    """Return the state of a run folder and, if it failed, the reason."""
    if _is_locked(run.path / ".lock"):
        return "running", ""
    outcome = _last_of(records, "start", "resume", "end", "stop")
    if outcome is not None and outcome["kind"] == "end":
        return "finished", ""
    if outcome is None or outcome["kind"] != "stop":
        return "failed", _find_hang(run.path) or "no record of its end: it was killed, or its machine failed"
    if outcome.get("status") == Stopped.exit_status:
        return "stopped", ""
    return "failed", "ended by " + str(outcome.get("reason", "something unknown")).partition("\n")[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a JSON lines file and its number of damaged lines; a missing file is empty."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            records.append(dict(RECORD.validate_python(json.loads(line))))  # pydantic's parser refuses surrogates
    return records, len(lines) - len(records)


def read_records(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the records of these kinds in a metrics.jsonl, without an incomplete last line."""
    return [record for record in read_lines(path)[0] if record["kind"] in kinds]


def _read_config(path: Path) -> dict[str, Any]:
    """Return the values of the file's only block; empty if it is missing or damaged."""
    try:
        blocks = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        block = next(iter(blocks.values()), None) if isinstance(blocks, dict) else None
        return dict(SETTINGS.validate_python(block))
    except (OSError, YAMLError, UnicodeDecodeError, ValidationError):
        return {}


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


# ---- published curves


def _read_curves(path: Path, curves_by_run: dict[str, Any]) -> Found:
    runs, problems = [], []
    for name, curves in curves_by_run.items():
        try:
            runs.append(_published(path, name, LISTS_OF_NUMBERS.validate_python(curves, strict=True)))
        except ValidationError:
            problems.append(f"{path}: {name} does not hold lists of numbers; skipped")
    return Found(runs, [], problems)


def _published(path: Path, name: str, curves: dict[str, list[float]]) -> Run:
    run = Run(f"{name} (published)", path, "published", changed=path.stat().st_mtime)
    clock = next((key for key in CLOCKS if key in curves), None)
    run.clock = CLOCKS[clock] if clock else "not recorded"
    columns = {"seconds": curves[clock] if clock else [], **curves}
    for number in range(len(curves.get("epoch", []))):
        row = {key: float(values[number]) for key, values in columns.items() if number < len(values)}
        run.epochs.append({"seconds": 0.0} | row)
    if not run.epochs:
        run.problems.append("holds no epochs")
    return run


# ---- comparing


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return {setting: its value in each run} for the settings that differ."""
    known = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in known for key in config)
    table = {key: [config.get(key) for config in known] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}
