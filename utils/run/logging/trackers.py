"""Metrics elsewhere: the records of metrics.jsonl, also for CSV files, Weights & Biases and MLflow (`log_to`).

A tracker works in a thread of its own, so that a slow disk or network never holds up a step, and what goes wrong in it
is told in the log and ends the tracker, never the run. A resumed run goes on in the same external run.
"""

import csv
import importlib
import io
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from utils.files import write_atomically

Record = Mapping[str, Any]
CLOSING_SECONDS = 10.0  # that a run waits at its end, or before it stops on a signal, for all that is on the way
TABLES = {"step": "steps.csv", "epoch": "epochs.csv"}  # kinds of records with a CSV file
METRICS = "metrics.jsonl"  # the records of the run so far
POSITIONS = ("step", "epoch")  # where in the training a record stands
# values of records that no two runs have in common
MEASURED = frozenset({
    "seconds", "epoch_seconds", "clock_seconds", "images_per_sec", "data_wait", "memory_gb", "model_tflops", "mfu",
    "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz", "gpu_memory_gb", "joules", "joules_per_image",
})  # fmt: skip
REFUSED = re.compile(r"[/\\#?%:']")  # in a project's name by wandb, and the last in an experiment's by MLflow
MLFLOW_BATCH = 100  # parameters that it takes at once
IDS = "trackers.json"  # in the run's folder: the names that external runs have got


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run starts or resumes."""

    folder: Path
    name: str  # of the run
    config: Mapping[str, Any]

    def project(self) -> str:
        """The name that stands for all runs beside this one, where the user gives none."""
        return REFUSED.sub("-", self.folder.resolve().parent.name)[:128]


class Tracker(Protocol):
    """Built in the main thread, where it imports its package; the rest happens in a thread of its own."""

    def open(self) -> None: ...

    def record(self, record: Record) -> None: ...

    def close(self, finished: bool) -> None: ...


class CsvTracker:
    """steps.csv and epochs.csv in the run's folder, for a spreadsheet: made of metrics.jsonl, anew after each epoch."""

    def __init__(self, start: TrackedRun) -> None:
        self.folder = start.folder

    def open(self) -> None:
        self._write()  # without what is trained again

    def record(self, record: Record) -> None:
        if record["kind"] == "epoch":
            self._write()

    def close(self, finished: bool) -> None:
        self._write()

    def _write(self) -> None:
        rows: dict[str, list[Record]] = {kind: [] for kind in TABLES}
        for line in (self.folder / METRICS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a line that is being written
                record = json.loads(line)
                if record["kind"] in rows:
                    rows[record["kind"]].append(record)
        for kind, name in TABLES.items():
            text = io.StringIO()
            columns = dict.fromkeys(key for row in rows[kind] for key in row if key not in ("kind", "clock_seconds"))
            table = csv.DictWriter(text, list(columns), lineterminator="\n", extrasaction="ignore")
            if columns:
                table.writeheader()
            table.writerows(rows[kind])
            write_atomically(self.folder / name, text.getvalue().encode())


class WandbTracker:
    """Weights & Biases: online where this machine is logged in, else kept in the run's folder for `wandb sync`."""

    def __init__(self, start: TrackedRun) -> None:
        self.start, self.wandb = start, import_package("wandb")

    def open(self) -> None:
        wandb, start = self.wandb, self.start
        known = read_id(start.folder, "wandb")
        identity = known or secrets.token_hex(8)
        keep_id(start.folder, "wandb", identity)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", start.project()),
            name=start.name,
            id=identity,
            resume="allow",
            dir=str(start.folder),
            config=dict(start.config),
            # without it, wandb would ask for a login at the terminal that shows the progress
            mode=os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline"),
            settings=wandb.Settings(console="off", silent=True),
        )
        for axis, tags in (("epoch", ("loss/*", "acc1/*")), ("step", ("step/*",))):
            for tag in tags:
                self.run.define_metric(tag, step_metric=axis)

    def record(self, record: Record) -> None:
        if record["kind"] == "end":
            self.run.summary.update(numbers(record))
        elif record["kind"] in TABLES:
            self.run.log(numbers(record))

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MlflowTracker:
    """MLflow: the server of MLFLOW_TRACKING_URI, else a folder `mlruns` beside the run's."""

    def __init__(self, start: TrackedRun) -> None:
        self.start, self.mlflow = start, import_package("mlflow")

    def open(self) -> None:
        folder, known = self.start.folder, read_id(self.start.folder, "mlflow")
        store = folder.resolve().parent / "mlruns"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else its newest versions want a database
        self.client = self.mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", store.as_uri()))
        if known:
            self.run = known
            self.client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.start.project())
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.run = self.client.create_run(number, run_name=self.start.name).info.run_id
        keep_id(folder, "mlflow", self.run)
        parameters = [self.mlflow.entities.Param(key, str(value)) for key, value in self.start.config.items()]
        for first in range(0, len(parameters), MLFLOW_BATCH):
            self.client.log_batch(self.run, params=parameters[first : first + MLFLOW_BATCH])

    def record(self, record: Record) -> None:
        if record["kind"] not in (*TABLES, "end"):
            return
        step = record["step" if record["kind"] == "step" else "epoch"]
        now, entity = int(1000 * time.time()), self.mlflow.entities.Metric
        # the position is each value's own; as metrics, a file "step" would stand where the folder of step/... has to be
        values = {key: value for key, value in numbers(record).items() if key not in POSITIONS}
        self.client.log_batch(self.run, [entity(key, value, now, step) for key, value in values.items()])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "csv": CsvTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def import_package(name: str) -> ModuleType:
    """An optional package; `ImportError` with the remedy where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f'it is not installed: pip install ".[{name}]"') from None


def numbers(record: Record) -> dict[str, float]:
    """A record's numbers by tag: those of a log point as step/..., of the end as result/..., as in TensorBoard."""
    prefix = {"step": "step/", "end": "result/"}.get(record["kind"], "")
    return {
        key if key in POSITIONS else prefix + key: value
        for key, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def read_id(folder: Path, name: str) -> str | None:
    """The external run that an earlier start of this run has opened."""
    with suppress(OSError, ValueError, AttributeError):
        identity = json.loads((folder / IDS).read_text(encoding="utf-8")).get(name)
        return str(identity) if identity else None
    return None


_ids = threading.Lock()  # two trackers open at the same time


def keep_id(folder: Path, name: str, identity: str) -> None:
    """Remember an external run for the next start."""
    with _ids:
        known = {other: read_id(folder, other) for other in TRACKERS if read_id(folder, other)}
        write_atomically(folder / IDS, (json.dumps(known | {name: identity}) + "\n").encode())


class Trackers:
    """All trackers of a run. Nothing here waits, but `close` for at most CLOSING_SECONDS."""

    def __init__(self, names: Sequence[str], start: TrackedRun) -> None:
        self._threads = [_TrackerThread(name, start) for name in names]

    def record(self, record: Record) -> None:
        """Hand a record to each."""
        for thread in self._threads:
            if thread.is_alive():  # else nobody would take it out
                thread.waiting.put(record)

    def faults(self) -> list[str]:
        """What went wrong since the last call, a line each."""
        return [thread.faults.get() for thread in self._threads for _ in range(thread.faults.qsize())]

    def close(self, finished: bool) -> None:
        """Let each take what waits, for a while."""
        until = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.waiting.put(finished)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                thread.faults.put(f"log_to {thread.name}: it did not answer within {CLOSING_SECONDS:.0f} s; left alone")


class _TrackerThread(threading.Thread):
    """Feeds one tracker until it is closed or something goes wrong."""

    def __init__(self, name: str, start: TrackedRun) -> None:
        super().__init__(name=name, daemon=True)  # the run's end never waits for it
        self.waiting: queue.SimpleQueue[Record | bool] = queue.SimpleQueue()  # a truth value is the end
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._tracker: Tracker | None = None
        try:
            self._tracker = TRACKERS[name](start)
        except Exception as error:
            self._complain(error)
        self.start()

    def run(self) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.open()
            while not isinstance(record := self.waiting.get(), bool):
                self._tracker.record(record)
            self._tracker.close(record)
        except Exception as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        self.faults.put(f"log_to {self.name}: {text or type(error).__name__}; the run goes on without it")
