"""Send the records of metrics.jsonl to CSV files, Weights & Biases and MLflow as well (`log_to`).

Each tracker works in its own thread, so that a slow disk or network never delays a step. An error in it is logged and
ends the tracker, never the run. A resumed run continues the same external run.
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
CLOSING_SECONDS = 10.0  # the longest that an ending run waits for its trackers
TABLES = {"step": "steps.csv", "epoch": "epochs.csv"}  # kinds of records with a CSV file
POSITIONS = ("step", "epoch")  # the position of a record in the training
# values that differ in each run
MEASURED = frozenset({
    "seconds", "epoch_seconds", "clock_seconds", "images_per_sec", "data_wait", "memory_gb", "model_tflops", "mfu",
    "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz", "gpu_memory_gb", "joules", "joules_per_image",
})  # fmt: skip
REFUSED = re.compile(r"[/\\#?%:']")  # by wandb in a project's name; ' by MLflow in an experiment's name
MLFLOW_BATCH = 100  # parameters in one request, at most
IDS = "trackers.json"  # in the run's folder: the ids of the external runs


@dataclass(frozen=True)
class TrackedRun:
    """The run, as its trackers see it."""

    folder: Path
    config: Mapping[str, Any]

    def project(self) -> str:
        """Return the default name for the project of this run and of those next to it: the parent folder's."""
        return REFUSED.sub("-", self.folder.resolve().parent.name)[:128]


class Tracker(Protocol):
    """Constructed in the main thread, where it imports its package; all methods run in the tracker's own thread."""

    def open(self) -> None: ...

    def record(self, record: Record) -> None: ...

    def close(self, finished: bool) -> None: ...


class CsvTracker:
    """steps.csv and epochs.csv in the run's folder, rewritten from metrics.jsonl after each epoch."""

    def __init__(self, start: TrackedRun) -> None:
        self.folder = start.folder

    def open(self) -> None:
        self._write()  # without records that the resumed run dropped

    def record(self, record: Record) -> None:
        if record["kind"] == "epoch":
            self._write()

    def close(self, finished: bool) -> None:
        self._write()

    def _write(self) -> None:
        rows: dict[str, list[Record]] = {kind: [] for kind in TABLES}
        for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a line that is just being written
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
    """Weights & Biases: online if this machine is logged in, otherwise in the run's folder, for `wandb sync`."""

    def __init__(self, start: TrackedRun) -> None:
        self.start, self.wandb = start, import_package("wandb")

    def open(self) -> None:
        wandb, start = self.wandb, self.start
        identity = read_ids(start.folder).get("wandb") or secrets.token_hex(8)
        keep_id(start.folder, "wandb", identity)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", start.project()),
            name=start.folder.name,
            id=identity,
            resume="allow",
            dir=str(start.folder),
            config=dict(start.config),
            # otherwise wandb would ask for a login at the terminal that shows the progress
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
    """MLflow: the server of MLFLOW_TRACKING_URI, otherwise a folder `mlruns` next to the run's folder."""

    def __init__(self, start: TrackedRun) -> None:
        self.start, self.mlflow = start, import_package("mlflow")

    def open(self) -> None:
        folder, known = self.start.folder, read_ids(self.start.folder).get("mlflow")
        store = folder.resolve().parent / "mlruns"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # new versions require a database without it
        self.client = self.mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", store.as_uri()))
        if known:
            self.run = known
            self.client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.start.project())
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.run = self.client.create_run(number, run_name=self.start.folder.name).info.run_id
        keep_id(folder, "mlflow", self.run)
        parameters = [self.mlflow.entities.Param(key, str(value)) for key, value in self.start.config.items()]
        for first in range(0, len(parameters), MLFLOW_BATCH):
            self.client.log_batch(self.run, params=parameters[first : first + MLFLOW_BATCH])

    def record(self, record: Record) -> None:
        if record["kind"] not in (*TABLES, "end"):
            return
        step = record["step" if record["kind"] == "step" else "epoch"]
        now, entity = int(1000 * time.time()), self.mlflow.entities.Metric
        # each value has its position; a metric "step" would be a file where the file store needs the folder of step/...
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
    """Import an optional package; raise `ImportError` with the remedy if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f'it is not installed: pip install ".[{name}]"') from None


def numbers(record: Record) -> dict[str, float]:
    """Return a record's numbers by their tags in TensorBoard: step/... for a log point, result/... for the end."""
    prefix = {"step": "step/", "end": "result/"}.get(record["kind"], "")
    return {
        key if key in POSITIONS else prefix + key: value
        for key, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def read_ids(folder: Path) -> dict[str, str]:
    """Return {tracker: id of the external run} that earlier starts of this run opened."""
    with suppress(OSError, ValueError, TypeError):
        return {**json.loads((folder / IDS).read_text(encoding="utf-8"))}
    return {}


_ids_lock = threading.Lock()  # trackers open at the same time


def keep_id(folder: Path, name: str, identity: str) -> None:
    """Store an external run's id for the next start."""
    with _ids_lock:
        write_atomically(folder / IDS, (json.dumps(read_ids(folder) | {name: identity}) + "\n").encode())


class Trackers:
    """All trackers of a run. Only `close` waits, at most CLOSING_SECONDS."""

    def __init__(self, names: Sequence[str], start: TrackedRun) -> None:
        self._threads = [_TrackerThread(name, start) for name in names]

    def record(self, record: Record) -> None:
        for thread in self._threads:
            if thread.is_alive():  # a queue that nobody reads would grow
                thread.waiting.put(record)

    def errors(self) -> list[str]:
        """Return the errors since the last call, a line each."""
        return [thread.errors.get() for thread in self._threads for _ in range(thread.errors.qsize())]

    def close(self, finished: bool) -> None:
        """Wait until every tracker has its records, but not longer than CLOSING_SECONDS."""
        until = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.waiting.put(finished)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                thread.errors.put(f"log_to {thread.name}: it did not answer within {CLOSING_SECONDS:.0f} s; given up")


class _TrackerThread(threading.Thread):
    """Feeds one tracker until it is closed or fails."""

    def __init__(self, name: str, start: TrackedRun) -> None:
        super().__init__(name=name, daemon=True)  # the process may end before it
        self.waiting: queue.SimpleQueue[Record | bool] = queue.SimpleQueue()  # a bool, `finished`, ends it
        self.errors: queue.SimpleQueue[str] = queue.SimpleQueue()
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
        self.errors.put(f"log_to {self.name}: {text or type(error).__name__}; the run continues without it")
