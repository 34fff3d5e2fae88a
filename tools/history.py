"""Read what runs left behind: run folders, TensorBoard event files, published curves, reports of tools.bench.

Nothing here fails because one thing cannot be read: what is damaged or missing is told as a problem, and the rest is
shown. No torch: these commands answer at once.
"""

import fcntl
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from utils.errors import Stopped

State = Literal["running", "finished", "stopped", "failed", "published", "unknown"]
CURVES = ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate")


@dataclass
class Run:
    """One training run. `epochs` holds one mapping an epoch: epoch, seconds, loss/..., acc1/... (shares in [0, 1])."""

    name: str
    path: Path
    state: State = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
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
        for row in self.epochs:
            if row.get("acc1/valid", -1.0) >= target:
                return int(row["epoch"]), row["seconds"]
        return None

    def last(self, name: str) -> float | None:
        """The last epoch's value of this name."""
        values = [row[name] for row in self.epochs if name in row]
        return values[-1] if values else None


@dataclass
class Bench:
    """A report of tools.bench."""

    command: str
    path: Path
    content: dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """What one case of a report says."""

    images_per_sec: float
    config: dict[str, Any]
    ranks: int = 1
    training: bool = True  # False: of a loader alone
    mode: str = ""  # weak or strong, of a scaling report
    epoch_images_per_sec: float | None = None


def rates(content: dict[str, Any]) -> dict[str, Rate]:
    """{case: what it says} of a report of tools.bench ladder, scaling or loaders; empty for others."""
    results, config = content.get("results", {}), content.get("config", {})
    found = {}
    if isinstance(results.get("rungs"), dict):
        for name, values in results["rungs"].items():
            if (rate := _median(values, "full")) is not None:
                found[name] = Rate(rate, results.get("configs", {}).get(name, config))
        return found
    world_size = content.get("environment", {}).get("world_size", 1)
    for name, values in results.items():
        mode, _, number = name.rpartition(" ")
        if content.get("bench") == "scaling" and number.isdigit():
            if (rate := _median(values, "train_images_per_sec")) is not None:
                epoch_rate = _median(values, "epoch_images_per_sec")
                found[name] = Rate(rate, config, int(number), mode=mode, epoch_images_per_sec=epoch_rate)
            continue
        trained = _median(values, "training_images_per_sec")
        if rate := trained or _median(values, "images_per_sec"):
            found[name] = Rate(rate, config, world_size, training=bool(trained) or content.get("bench") != "loaders")
    return found


def _median(values: Any, key: str) -> float | None:
    value = values.get(key) if isinstance(values, dict) else None
    value = value.get("median") if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else None


def read(path: Path) -> tuple[list[Run], list[Bench], list[str]]:
    """(runs, measurements, problems) of a file or folder; a folder of runs gives all of them."""
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        return [], [], [f"{path}: there is no such file or folder"]
    if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
        return [read_run_folder(path)], [], []
    inner = sorted({file.parent for name in ("metrics.jsonl", "config.yaml") for file in path.glob(f"*/{name}")})
    runs = [read_run_folder(folder) for folder in inner]
    claimed = {folder.resolve() for folder in inner}
    for folder in sorted({file.parent for file in path.rglob("events.out.tfevents.*")}):
        if not any(parent in claimed for parent in folder.resolve().parents):
            runs.append(_read_event_folder(folder, path))
    runs = [run for run in runs if run.epochs or run.problems or run.state != "unknown"]
    return runs, [], [] if runs else [f"{path}: holds neither a run nor TensorBoard event files"]


def _read_file(path: Path) -> tuple[list[Run], list[Bench], list[str]]:
    if path.name.startswith("events.out.tfevents."):
        return [_read_event_folder(path.parent, path.parent)], [], []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return [], [], [f"{path}: cannot be read: {error.strerror}"]
    except ValueError:
        return [], [], [f"{path}: is no JSON; give run folders, event files, curves or reports of tools.bench"]
    if isinstance(content, dict) and isinstance(content.get("runs"), dict):
        good = {name: curves for name, curves in content["runs"].items() if _are_curves(curves)}
        wrong = sorted(content["runs"].keys() - good)
        problems = [f"{path}: {name} does not hold lists of numbers; passed over" for name in wrong]
        return [_published(path, name, curves) for name, curves in good.items()], [], problems
    parts = ("config", "environment", "results")
    if not isinstance(content, dict) or not {"bench", "results"} <= content.keys():
        problem = "is neither a file of curves nor a report of tools.bench"
    elif wrong := [key for key in parts if not isinstance(content.get(key, {}), dict)]:
        problem = f"its {wrong[0]} is no mapping; passed over"
    else:
        return [], [Bench(str(content["bench"]), path, content)], []
    return [], [], [f"{path}: {problem}"]


# ---- the project's own folders


def read_run_folder(folder: Path) -> Run:
    """A run folder of train.py, also of one that goes on or that was cut short."""
    run = Run(folder.name, folder)
    run.config = _read_config(folder / "config.yaml", run.problems)
    try:
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        environment = None
    if isinstance(environment, dict):
        run.environment = environment
    else:
        run.problems.append("environment.json is missing or damaged: device and versions are not known")
    rows, damaged = read_lines(folder / "metrics.jsonl")
    if damaged:
        run.problems.append(f"metrics.jsonl: {damaged} line(s) cannot be read and are left out")
    by_epoch: dict[int, dict[str, float]] = {}
    ended_after, stop = None, None
    for row in rows:
        if row.get("kind") == "epoch" and isinstance(row.get("epoch"), int):
            by_epoch[row["epoch"]] = {"seconds": 0.0} | _numbers(row)
        elif row.get("kind") == "step":
            run.steps.append(_numbers(row))
        elif row.get("kind") in ("start", "resume", "stop"):
            stop = row if row["kind"] == "stop" else None
        elif row.get("kind") == "end":
            run.worst_classes, ended_after = row.get("worst_classes", []), row.get("epoch")
    run.epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if not run.epochs:
        run.problems.append("no finished epoch in metrics.jsonl yet" if rows else "metrics.jsonl is missing or empty")
    files = [file for file in folder.iterdir() if file.is_file()]
    run.changed = max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    run.state = _state(folder, run, ended_after, stop)
    return run


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of lines that are none) of a file of JSON lines; a missing file is empty."""
    records, damaged = [], 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], 0
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        blocks = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, YAMLError, UnicodeDecodeError):
        blocks = None
    if not isinstance(blocks, dict) or not blocks or not isinstance(next(iter(blocks.values())), dict):
        problems.append("config.yaml is missing or damaged: the configuration is not known")
        return {}
    return next(iter(blocks.values()))


def _state(folder: Path, run: Run, ended_after: int | None, stop: dict[str, Any] | None) -> State:
    """`ended_after`: the epoch of the last record of an end, after which training may have gone on; `stop`: the record
    with which the last start ended, if it wrote one."""
    if _is_locked(folder / ".lock"):
        return "running"
    last = run.last("epoch")
    enough = run.config.get("stop_at_accuracy")
    if last is not None and last >= run.config.get("max_epochs", float("inf")):
        return "finished"
    if last is not None and last == ended_after and enough is not None and run.reached(enough):
        return "finished"
    if stop is None:
        run.problems.append("it did not record how it ended: killed, or its machine failed")
        return "failed"
    if stop.get("status") == Stopped.exit_status:
        return "stopped"
    run.problems.append("ended by " + str(stop.get("reason", "something unknown")).partition("\n")[0])
    return "failed"


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


def _are_curves(curves: Any) -> bool:
    """Whether these are lists of numbers by name."""
    return isinstance(curves, dict) and all(
        isinstance(values, list) and all(isinstance(value, int | float) for value in values)
        for values in curves.values()
    )


def _published(path: Path, name: str, curves: dict[str, list[float]]) -> Run:
    run = Run(
        f"{name} (published)", path, "published", changed=path.stat().st_mtime, clock="since the first epoch's end"
    )
    scale = 0.01 if max(curves.get("acc1/valid", []), default=0.0) > 1.5 else 1.0  # percent
    for number, epoch in enumerate(curves.get("epoch", [])):
        row = {"epoch": float(epoch), "seconds": _item(curves.get("wall_s_since_first_epoch_end", []), number) or 0.0}
        for tag in CURVES:
            value = _item(curves.get(tag, []), number)
            if value is not None:
                row[tag] = value * scale if tag.startswith("acc1") else value
        run.epochs.append(row)
    if not run.epochs:
        run.problems.append("holds no epochs")
    return run


def _item(values: list[float], number: int) -> float | None:
    return float(values[number]) if number < len(values) else None


# ---- TensorBoard's event files


def _read_event_folder(folder: Path, root: Path) -> Run:
    """The five curves by epoch from the event files of one folder."""
    shown = folder.parent if folder.name == "tb_logs" else folder
    name = shown.name if shown == root or root not in shown.parents else str(shown.relative_to(root))
    run = Run(name, folder, clock="since the first event")
    points: dict[str, dict[int, tuple[float, float]]] = {tag: {} for tag in CURVES}
    files = sorted(folder.glob("events.out.tfevents.*"))
    for file in files:
        run.changed = max(run.changed, file.stat().st_mtime)
        try:
            for event in read_events(file):
                if event.session_log.status == event.session_log.START:  # what came later is trained again
                    for series in points.values():
                        for step in [step for step in series if step >= event.step > 0]:
                            del series[step]
                for value in event.summary.value:
                    if value.tag in points:
                        points[value.tag][event.step] = (_scalar(value), event.wall_time)
        except ValueError as error:
            run.problems.append(f"{file.name}: {error}; what came before it is shown")
    times = [when for series in points.values() for _, when in series.values()]
    for epoch in sorted({step for series in points.values() for step in series}):
        seen = {tag: series[epoch] for tag, series in points.items() if epoch in series}
        seconds = max(when for _, when in seen.values()) - min(times)
        run.epochs.append(
            {"epoch": float(epoch), "seconds": seconds} | {tag: value for tag, (value, _) in seen.items()}
        )
    top = max((row.get("acc1/valid", 0.0) for row in run.epochs), default=0.0)
    if top > 1.5:  # percent
        for row in run.epochs:
            row |= {tag: row[tag] / 100 for tag in ("acc1/train", "acc1/valid") if tag in row}
    if not run.epochs and files and any(run.problems):
        run.problems.append("nothing could be read")
    return run


def _scalar(value: Any) -> float:
    """A summary's number, in the old and the new way of writing it."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    from tensorboard.util.tensor_util import make_ndarray

    return float(make_ndarray(value.tensor))


def read_events(path: Path) -> Iterator[Any]:
    """The events of a file of TFRecords: length, its checksum, the event, its checksum. `ValueError` where it breaks.

    TensorBoard's own reader stops at damage and says nothing.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    content = path.read_bytes()
    position = 0
    while position < len(content):
        header = content[position : position + 12]
        where = f"damaged at byte {position} of {len(content)}"
        if len(header) < 12:
            raise ValueError(f"{where}: cut short")
        length, length_check = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != length_check:
            raise ValueError(f"{where}: a checksum is wrong")
        body = content[position + 12 : position + 12 + length]
        footer = content[position + 12 + length : position + 16 + length]
        if len(body) < length or len(footer) < 4:
            raise ValueError(f"{where}: cut short")
        if masked_crc32c(body) != struct.unpack("<I", footer)[0]:
            raise ValueError(f"{where}: a checksum is wrong")
        yield Event.FromString(body)
        position += 16 + length


# ---- comparing


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """{key: its value in each run} for the keys in which their configurations differ."""
    known = [run for run in runs if run.config]
    keys = list(dict.fromkeys(key for run in known for key in run.config))
    table = {key: [run.config.get(key) for run in known] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def same_but_seed(runs: list[Run]) -> list[list[Run]]:
    """Runs grouped by configuration without its seed, in order; runs without a configuration stand alone."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        groups.setdefault(json.dumps(rest, sort_keys=True) if rest else f"alone {number}", []).append(run)
    return list(groups.values())


def ago(moment: float) -> str:
    """How long ago, in the largest fitting unit."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
