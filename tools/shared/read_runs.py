"""Read what runs left behind: run folders, published curves, reports of tools.bench.

What is damaged or missing is named as a problem, and the rest is shown. No torch, so that these commands answer at
once.
"""

import fcntl
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from typing_extensions import Required, TypedDict  # of pydantic; Python's own lack a part before 3.12

from tools.bench.reports import Report
from utils.errors import Stopped

State = Literal["running", "finished", "stopped", "failed", "published", "unknown"]
# what the times of published curves count from
CLOCKS = {
    "wall_s_since_first_event": "since the first event",
    "wall_s_since_first_epoch_end": "since the first epoch's end",
}
LISTS_OF_NUMBERS = TypeAdapter(dict[str, list[float]])
_WorstClass = TypedDict("_WorstClass", {"class": str, "accuracy": float, "taken_for": str, "share": float})


class _Settings(TypedDict, total=False):
    """What is used of a run's configuration."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    max_epochs: int
    stop_at_accuracy: float | None
    seed: int
    dataset: str


class _Environment(TypedDict, total=False):
    """What is used of environment.json."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    device: str
    world_size: int


class _Record(TypedDict, total=False):
    """What is used of a line of metrics.jsonl that is no measured value."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    kind: Required[str]
    epoch: int
    status: int
    reason: str
    worst_classes: list[_WorstClass]


SETTINGS, ENVIRONMENT, RECORD = TypeAdapter(_Settings), TypeAdapter(_Environment), TypeAdapter(_Record)


@dataclass
class Run:
    """One training run. `epochs` holds one mapping an epoch: epoch, seconds, loss/..., acc1/... (shares in [0, 1])."""

    name: str
    path: Path
    state: State = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)
    worst_classes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changed: float = 0.0  # seconds since 1970, when something was last written
    clock: str = "of training"  # what `seconds` counts

    def best(self) -> tuple[float, int] | None:
        """(validation accuracy, its epoch), the earliest of equal ones."""
        scored = [(row["acc1/valid"], -int(row["epoch"])) for row in self.epochs if "acc1/valid" in row]
        if not scored:
            return None
        accuracy, epoch = max(scored)
        return accuracy, -epoch

    def reached(self, target: float) -> tuple[int, float] | None:
        """(epoch, seconds) after which the validation accuracy first was at least `target`."""
        enough = (row for row in self.epochs if row.get("acc1/valid", -1.0) >= target)
        return next(((int(row["epoch"]), row["seconds"]) for row in enough), None)

    def last(self, name: str) -> float | None:
        """The newest value of this name."""
        return next((row[name] for row in reversed(self.epochs) if name in row), None)


class Found(NamedTuple):
    """What a path gave."""

    runs: list[Run]
    reports: list[tuple[Path, Report]]
    problems: list[str]


def read(path: Path) -> Found:
    """Everything in a file or folder; a folder of runs gives all of them."""
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        return Found([], [], [f"{path}: there is no such file or folder"])
    if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
        return Found([read_run_folder(path)], [], [])
    inner = sorted({file.parent for name in ("metrics.jsonl", "config.yaml") for file in path.glob(f"*/{name}")})
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
        problem = f"its {error.errors()[0]['loc'][0]} is no mapping; skipped"
    except ValueError:
        problem = "is no JSON; give run folders, curves or reports of tools.bench"
    return Found([], [], [f"{path}: {problem}"])


# ---- the project's own folders


def read_run_folder(folder: Path) -> Run:
    """A run folder of train.py, also of a run that is still going or was cut short."""
    run = Run(folder.name, folder, config=_read_config(folder / "config.yaml"))
    if not run.config:
        run.problems.append("config.yaml is missing or damaged: the configuration is not known")
    try:
        run.environment = dict(ENVIRONMENT.validate_json((folder / "environment.json").read_bytes()))
    except (OSError, ValidationError):
        run.problems.append("environment.json is missing or damaged: device and versions are not known")
    records, damaged = read_lines(folder / "metrics.jsonl")
    if damaged:
        run.problems.append(f"metrics.jsonl: {damaged} line(s) cannot be read and are left out")
    by_epoch: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("kind") == "epoch" and isinstance(record.get("epoch"), int):
            numbers = {
                key: float(value)
                for key, value in record.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            by_epoch[record["epoch"]] = {"seconds": 0.0} | numbers
    run.epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if not run.epochs:
        there = bool(records)
        run.problems.append("no finished epoch in metrics.jsonl yet" if there else "metrics.jsonl is missing or empty")
    run.worst_classes = (_last_of(records, "end") or {}).get("worst_classes", [])
    files = [file for file in folder.iterdir() if file.is_file()]
    run.changed = max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    run.state, reason = _judge_state(run, records)
    run.problems += [reason] if reason else []
    return run


def _last_of(records: list[dict[str, Any]], *kinds: str) -> dict[str, Any] | None:
    return next((record for record in reversed(records) if record.get("kind") in kinds), None)


def _find_hang(folder: Path) -> str:
    """What its ranks waited for in vain, if that was the last that it wrote."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = folder / "collectives.json"
        if told.stat().st_mtime >= (folder / "metrics.jsonl").stat().st_mtime:
            return str(json.loads(told.read_text(encoding="utf-8"))["message"]).splitlines()[-1]
    return ""


def _judge_state(run: Run, records: list[dict[str, Any]]) -> tuple[State, str]:
    """The state of a run folder and, of a failed run, the reason."""
    if _is_locked(run.path / ".lock"):
        return "running", ""
    end, last, enough = _last_of(records, "end") or {}, run.last("epoch"), run.config.get("stop_at_accuracy")
    if last is not None:
        reached = enough is not None and run.reached(enough) is not None
        # training may have continued after the record of an end
        if last >= run.config.get("max_epochs", float("inf")) or (last == end.get("epoch") and reached):
            return "finished", ""
    outcome = _last_of(records, "start", "resume", "stop")
    if outcome is None or outcome["kind"] != "stop":
        return "failed", _find_hang(run.path) or "it did not record how it ended: killed, or its machine failed"
    if outcome.get("status") == Stopped.exit_status:
        return "stopped", ""
    return "failed", "ended by " + str(outcome.get("reason", "something unknown")).partition("\n")[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of lines that are none) of a file of JSON lines; a missing file is empty."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    records = []
    for line in lines:
        with suppress(ValidationError):
            records.append(dict(RECORD.validate_json(line)))
    return records, len(lines) - len(records)


def read_records(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of these kinds in a metrics.jsonl, without a last line that is still being written."""
    return [record for record in read_lines(path)[0] if record.get("kind") in kinds]


def _read_config(path: Path) -> dict[str, Any]:
    """The values of the file's one block; empty where it is missing or damaged."""
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
    except BlockingIOError:
        return True
    except OSError:
        return False
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
    """{key: its value in each run} for the keys in which their configurations differ."""
    known = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in known for key in config)
    table = {key: [config.get(key) for config in known] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}
