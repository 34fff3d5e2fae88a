"""CSV, Weights & Biases and MLflow get the records of metrics.jsonl and never disturb a run."""

import csv
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_records
from tests.processes import wait_until
from tests.test_train import run
from utils.run.logging import trackers
from utils.run.logging.trackers import TrackedRun, Trackers


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def rows(path: Path) -> list[dict[str, float | str]]:
    return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(path.read_text().splitlines())]


def test_csv_equals_the_records_also_after_a_resume_from_an_earlier_step(tiny, one_rank, tmp_path):
    config = tiny(log_to=["csv"])
    run(config, one_rank, tmp_path)
    (tmp_path / "checkpoints/step-000000008.pt").unlink()  # the second epoch is lost
    run(tiny(log_to=["csv"], max_epochs=3), one_rank, tmp_path, resume=str(tmp_path))
    for kind, name in (("step", "steps.csv"), ("epoch", "epochs.csv")):
        not_numbers = ("kind", "clock_seconds")
        expected = [{key: row[key] for key in row if key not in not_numbers} for row in read_records(tmp_path, kind)]
        assert rows(tmp_path / name) == expected


def test_a_new_column_keeps_the_old_rows(tmp_path):
    """Records of other kinds and a half-written line are skipped."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "start", "step": 0}\n{"kind": "step", "step": 1, "loss": 2.0, "clock_seconds": {}}\n'
        '{"kind": "step", "step": 2, "loss": 1.0, "loss_scale": 8.0}\n{"kind": "epoch", "epoch": 1, "acc1/va'
    )
    trackers.CsvTracker(TrackedRun(tmp_path, {})).record({"kind": "epoch"})
    assert (tmp_path / "steps.csv").read_text() == "step,loss,loss_scale\n1,2.0,\n2,1.0,8.0\n"
    assert (tmp_path / "epochs.csv").read_text() == ""


def test_mlflow_has_one_run_over_all_starts(tiny, one_rank, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason='mlflow is missing: pip install ".[mlflow]"')
    folder = tmp_path / "100 % of 'ü' #1/run"
    for epochs in (1, 2):
        config = tiny(log_to=["mlflow"], max_epochs=epochs, lr=0.05)
        run(config, one_rank, folder, resume=str(folder) if folder.exists() else "auto")
    assert "log_to" not in (folder / "train.log").read_text()
    client = mlflow.MlflowClient((folder.parent / "mlruns").as_uri())
    (experiment,) = [found for found in client.search_experiments() if found.name == "100 - of -ü- -1"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run" and found.data.params["lr"] == "0.05"
    for tag in ("acc1/valid", "loss/train"):
        history = client.get_metric_history(found.info.run_id, tag)
        expected = [(row["epoch"], row[tag]) for row in read_records(folder, "epoch")]
        assert [(point.step, point.value) for point in history] == expected
    history = client.get_metric_history(found.info.run_id, "step/loss")
    assert [point.step for point in history] == [row["step"] for row in read_records(folder, "step")]


def test_wandb_has_one_run_over_all_starts(tiny, one_rank, tmp_path):
    pytest.importorskip("wandb", reason='wandb is missing: pip install ".[wandb]"')
    folder = tmp_path / "100 % of #1: ü?/run 1"
    for epochs in (1, 2):
        run(
            tiny(log_to=["wandb"], max_epochs=epochs),
            one_rank,
            folder,
            resume=str(folder) if folder.exists() else "auto",
        )
    assert "log_to" not in (folder / "train.log").read_text()
    identity = json.loads((folder / "trackers.json").read_text())["wandb"]
    files = list((folder / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert files
    # the service of wandb may write its file after the run has ended
    wait_until("accuracy in wandb's file", 20, lambda: all(b"acc1/valid" in file.read_bytes() for file in files))


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_never_answers_costs_a_line_and_a_bounded_time(tmp_path, silent_server, name):
    """In a separate process, as such a package may also hang at the process's exit."""
    pytest.importorskip(name, reason=f'{name} is missing: pip install ".[{name}]"')
    online = {"WANDB_MODE": "online", "WANDB_BASE_URL": silent_server, "WANDB_API_KEY": 40 * "0"}
    environment = os.environ | online | {"MLFLOW_TRACKING_URI": silent_server}
    program = (
        "import sys, pathlib\n"
        "from utils.run.logging import trackers\n"
        "trackers.CLOSING_SECONDS = 1.0\n"
        "start = trackers.TrackedRun(pathlib.Path(sys.argv[2]), {'lr': 0.1})\n"
        "all_trackers = trackers.Trackers([sys.argv[1]], start)\n"
        "for step in range(1000): all_trackers.record({'kind': 'step', 'step': step, 'loss': 1.0})\n"
        "all_trackers.close(True)\n"
        "print(*all_trackers.errors(), sep='\\n')\n"
    )
    command = [sys.executable, "-c", program, name, str(tmp_path)]
    ended = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"log_to {name}: it did not answer within 1 s; given up\n"


class Broken:
    """A tracker that fails, or never answers, at one place."""

    def __init__(self, start: TrackedRun, place: str, hang: bool) -> None:
        self.place, self.hang = place, hang
        self.reach("import")

    def reach(self, place: str) -> None:
        if place == self.place:
            if self.hang:
                threading.Event().wait()
            raise OSError("No space left on device")

    def open(self) -> None:
        self.reach("open")

    def record(self, record: trackers.Record) -> None:
        self.reach("record")

    def close(self, finished: bool) -> None:
        self.reach("close")


@pytest.mark.parametrize(("place", "hang"), [("import", False), ("open", True), ("record", False), ("close", False)])
def test_an_error_is_a_line_in_the_log_and_the_run_continues(tiny, one_rank, tmp_path, monkeypatch, place, hang):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda start: Broken(start, place, hang))
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 2 if hang else 60)
    run(tiny(max_epochs=1, log_to=["wandb", "csv"]), one_rank, tmp_path)
    (line,) = [line for line in (tmp_path / "train.log").read_text().splitlines() if "log_to wandb: " in line]
    assert ("did not answer within" if hang else "No space left on device; the run continues without it") in line
    assert len(rows(tmp_path / "epochs.csv")) == 1


def test_a_missing_package_is_logged_with_the_remedy(tiny, one_rank, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tiny(max_epochs=1, log_to=["wandb"]), one_rank, tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert 'log_to wandb: it is not installed: pip install ".[wandb]"; the run continues' in log


def test_records_do_not_pile_up_for_a_tracker_that_has_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "csv", lambda start: Broken(start, "open", False))
    all_trackers = Trackers(["csv"], TrackedRun(tmp_path, {}))
    (thread,) = all_trackers._threads
    thread.join()
    all_trackers.record({"kind": "step"})
    assert thread.waiting.empty() and len(all_trackers.errors()) == 1
