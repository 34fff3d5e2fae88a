"""Weights & Biases and MLflow get the records of metrics.jsonl and never disturb a run."""

import sys
import threading

import pytest

from tests.conftest import read_records, run
from tests.processes import wait_until
from utils.run import trackers
from utils.run.trackers import Tracker


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def start_twice(tiny, one_rank, folder, name):
    for epochs in (1, 2):
        config = tiny(log_to=[name], max_epochs=epochs, lr=0.05)
        run(config, one_rank, folder, resume=str(folder) if folder.exists() else "auto")
    assert "log_to" not in (folder / "train.log").read_text()
    return (folder / f"{name}.id").read_text()


def test_mlflow_has_one_run_over_all_starts(tiny, one_rank, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason='mlflow is missing: pip install ".[mlflow]"')
    folder = tmp_path / "100 % of 'ü' #1/run"
    identity = start_twice(tiny, one_rank, folder, "mlflow")
    client = mlflow.MlflowClient((folder.parent / "mlruns").as_uri())
    (experiment,) = [found for found in client.search_experiments() if found.name == "100 - of -ü- -1"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == identity
    assert found.info.status == "FINISHED" and found.info.run_name == "run" and found.data.params["lr"] == "0.05"
    for kind, name, tag in (("epoch", "acc1/valid", "acc1/valid"), ("step", "loss", "step/loss")):
        history = client.get_metric_history(identity, tag)
        expected = [(row[kind], row[name]) for row in read_records(folder, kind)]
        assert [(point.step, point.value) for point in history] == expected


def test_wandb_has_one_run_over_all_starts(tiny, one_rank, tmp_path):
    pytest.importorskip("wandb", reason='wandb is missing: pip install ".[wandb]"')
    folder = tmp_path / "100 % of #1: ü?/run 1"
    identity = start_twice(tiny, one_rank, folder, "wandb")
    files = list((folder / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert files
    # the service of wandb may write its file after the run has ended
    wait_until("accuracy in wandb's file", 120, lambda: all(b"acc1/valid" in file.read_bytes() for file in files))


@pytest.mark.parametrize(("what", "message"), {
    "hangs": "did not answer within",
    "fails": "No space left on device'); the run continues without it",
    "is missing": 'pip install ".[wandb]"; the run continues without it',
}.items())  # fmt: skip
def test_an_error_is_a_line_in_the_log_and_the_run_continues(tiny, one_rank, tmp_path, monkeypatch, what, message):
    def follow(tracker, package):
        tracker.records.get()
        if what == "hangs":
            threading.Event().wait()
        raise OSError("No space left on device")

    monkeypatch.setitem(sys.modules, "wandb", None if what == "is missing" else trackers)  # any module
    monkeypatch.setattr(trackers, "follow_wandb", follow)
    monkeypatch.setattr(Tracker, "closing_seconds", 0.2 if what == "hangs" else 60)
    run(tiny(max_epochs=1, log_to=["wandb"]), one_rank, tmp_path)
    (line,) = [line for line in (tmp_path / "train.log").read_text().splitlines() if "log_to wandb: " in line]
    assert message in line
