"""Send a run's metrics to Weights & Biases and MLflow too (`log_to`), from threads: a slow network delays no step."""

import importlib
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.errors import ExpectedError
from utils.run.tensorboard import Record, numbers


class Tracker(threading.Thread):
    """Feeds wandb or mlflow until it is closed; says in the log that it has failed."""

    closing_seconds = 10.0  # the longest that an ending run waits for a tracker

    def __init__(self, name: str, folder: Path, config: dict[str, Any], say: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)  # the process may end before it
        self.folder, self.config, self.say, self.failed = folder, config, say, False
        self.identity = folder / f"{name}.id"  # of the external run, which a resumed run continues
        self.project = re.sub(r"[/\\#?%:']", "-", folder.resolve().parent.name)[:128]  # they refuse these characters
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None ends it
        self.start()

    def run(self) -> None:
        try:
            {"wandb": follow_wandb, "mlflow": follow_mlflow}[self.name](self, importlib.import_module(self.name))
        except Exception as error:
            remedy = f'; pip install ".[{self.name}]"' if isinstance(error, ImportError) else ""
            with suppress(ExpectedError):  # the log cannot be written: the run ends at its next line
                self.say(f"log_to {self.name}: {error!r}{remedy}; the run continues without it")

    def record(self, record: Record) -> None:
        """Send a record later, if it has numbers and the tracker has not failed."""
        if self.is_alive() and numbers(record):
            self.records.put(record)

    def close(self, *, failed: bool) -> None:
        """Wait until all records are sent, but not longer than `closing_seconds`."""
        self.failed = failed
        self.records.put(None)
        self.join(self.closing_seconds)
        if self.is_alive():
            with suppress(ExpectedError):
                self.say(f"log_to {self.name}: it did not answer within {self.closing_seconds:.0f} s; given up")


def follow_wandb(tracker: Tracker, wandb: Any) -> None:
    """Online if this machine is logged in, otherwise, without a question at the terminal, in the run's folder."""
    if not tracker.identity.exists():
        tracker.identity.write_text(secrets.token_hex(8))
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", tracker.project), name=tracker.folder.name, config=tracker.config,
        id=tracker.identity.read_text(), resume="allow", dir=str(tracker.folder),
        mode=os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline"),
        settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    for record in iter(tracker.records.get, None):
        run.log(numbers(record) | {"step": record["step"]})
    run.finish(exit_code=int(tracker.failed))


def follow_mlflow(tracker: Tracker, mlflow: Any) -> None:
    """The server of MLFLOW_TRACKING_URI, otherwise a folder `mlruns` next to the run's folder."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # new versions require a database without it
    store = tracker.folder.resolve().parent / "mlruns"
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", store.as_uri()))
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", tracker.project))
    earlier = tracker.identity.read_text() if tracker.identity.exists() else None
    tracker.identity.write_text(mlflow.start_run(earlier, run_name=tracker.folder.name).info.run_id)
    if earlier is None:
        mlflow.log_params(tracker.config)
    for record in iter(tracker.records.get, None):
        mlflow.log_metrics(numbers(record), step=record["step" if record["kind"] == "step" else "epoch"])
    mlflow.end_run("KILLED" if tracker.failed else "FINISHED")
