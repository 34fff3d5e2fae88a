"""Weights & Biases and MLflow get the records of metrics.jsonl and never disturb a run."""

import sys
import threading
from unittest.mock import MagicMock, call

import pytest

from tests.conftest import POLLS, read_records, run, stop
from tests.processes import wait_until
from train import Trainer
from utils.errors import Stopped
from utils.run import trackers
from utils.run.tensorboard import numbers
from utils.run.trackers import Tracker


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_has_one_run_over_all_starts(tiny, one_rank, tmp_path, name):
    package = pytest.importorskip(name, reason=f'{name} is missing: pip install ".[{name}]"')
    folder = tmp_path / "100 % of 'ü' #1/run"
    for epochs in (1, 2):
        run(tiny(log_to=[name], max_epochs=epochs, lr=0.05), one_rank, folder, str(folder) if epochs > 1 else "auto")
    assert "log_to" not in (folder / "train.log").read_text()
    identity = (folder / f"{name}.id").read_text()
    if name == "mlflow":
        client = package.MlflowClient((folder.parent / "mlruns").as_uri())
        (experiment,) = [found for found in client.search_experiments() if found.name == "100 - of -ü- -1"]
        (found,) = client.search_runs([experiment.experiment_id])
        assert (found.info.run_id, found.info.run_name, found.info.status) == (identity, "run", "FINISHED")
        assert found.data.params["lr"] == "0.05"
        for kind, value, tag in (("epoch", "acc1/valid", "acc1/valid"), ("step", "loss", "step/loss")):
            history = [(point.step, point.value) for point in client.get_metric_history(identity, tag)]
            assert history == [(row[kind], row[value]) for row in read_records(folder, kind)]
    else:
        files = [*folder.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb")]
        # its service may write the files after the run has ended
        wait_until("accuracies", 120, lambda: files and all(b"acc1/valid" in file.read_bytes() for file in files))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_all_numbers_are_sent_and_how_the_run_ended(tiny, one_rank, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, package := MagicMock())
    package.start_run.return_value.info.run_id = "of an earlier start"
    (tmp_path / f"{name}.id").write_text("of an earlier start")
    trainer = Trainer(tiny(log_to=[name]), one_rank, tmp_path)
    stop(trainer, POLLS + 2)
    with pytest.raises(Stopped):
        trainer.train()
    rows = [row for row in read_records(tmp_path) if row["kind"] in ("step", "epoch")]
    if name == "wandb":
        assert package.init.call_args.kwargs["id"] == "of an earlier start"
        log, end, ended = package.init().log, package.init().finish, call(exit_code=1)
        expected = [call(numbers(row) | {"step": row["step"]}) for row in rows]
    else:
        assert package.start_run.call_args.args == ("of an earlier start",)
        log, end, ended = package.log_metrics, package.end_run, call("KILLED")
        expected = [call(numbers(row), step=row[row["kind"]]) for row in rows]
    assert log.call_args_list == expected and end.call_args_list == [ended]


@pytest.mark.parametrize(("what", "message"), {
    "hangs": "did not answer within", "fails": "No space left on device'); the run continues without it",
    "is missing": 'pip install ".[wandb]"; the run continues without it'}.items())  # fmt: skip
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
