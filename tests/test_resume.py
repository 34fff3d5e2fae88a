"""A run that is stopped or killed anywhere and resumed is bitwise equal to an uninterrupted run."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, TINY, as_options, read_records, without_times
from tests.processes import wait_until, without_launcher
from tests.test_train import run
from tools.verify_resume import compare
from train import Trainer
from utils.errors import Stopped
from utils.run.checkpoint.io import encode, list_checkpoints, read_checkpoint
from utils.run.preemption import SIGNALS

# Three epochs of 4 batches of training and 2 of validation; a log point after batches 1 and 3, so none after batch 2.
PLATEAU, ONECYCLE = "torchvision and plateau", "device and onecycle"
LOADERS = {
    # with a learning rate too high, so that validation gets worse and the plateau schedule lowers it
    PLATEAU: {
        "data_loader": "torchvision", "lr_schedule": "plateau/0", "lr_warmup_epochs": 0.5,
        "lr": 0.3,
    },
    ONECYCLE: {
        "data_loader": "device", "lr_schedule": "onecycle", "lr_warmup_epochs": 1.5, "ema_decay": 0.8,
        "rnd_rotation_angle": 10.0, "cutmix_alpha": 1.0, "loss_scale": "dynamic",
    },
}  # fmt: skip
BATCHES, POLLS = 4, 4 + 2  # polls for requests: one after each batch, of training and of validation
STOPS = {
    "in mid-epoch, between log points": (PLATEAU, POLLS + 2, "in epoch 2 after 2 batches", {"epoch": 1, "batch": 2}),
    "before validation": (ONECYCLE, POLLS + BATCHES, "in epoch 2 after its last batch", {"epoch": 1, "batch": 4}),
    "in validation": (PLATEAU, POLLS + BATCHES + 1, "in epoch 2 after its last batch", {"epoch": 1, "batch": 4}),
    "between epochs": (ONECYCLE, 2 * POLLS + 1, "in epoch 3 after 1 batches", {"epoch": 2, "batch": 1}),
}


@pytest.fixture(scope="module")
def whole_runs():
    """Folders of uninterrupted runs by loader: each is trained once."""
    return {}


@pytest.fixture
def whole(tiny, one_rank, tmp_path_factory, whole_runs):
    """whole(loader): return (configuration, folder) of an uninterrupted run."""

    def train(loader):
        config = tiny(max_epochs=3, **LOADERS[loader])
        if loader not in whole_runs:
            whole_runs[loader] = tmp_path_factory.mktemp("whole")
            run(config, one_rank, whole_runs[loader])
        return config, whole_runs[loader]

    return train


def interrupt(trainer, poll, action):
    """Do `action` right before the poll with this number."""
    really, numbers = trainer.requests.poll, iter(range(1, 1000))

    def poll_and_act():
        if next(numbers) == poll:
            action()
        return really()

    trainer.requests.poll = poll_and_act


def stop(trainer, poll):
    """Ask for a stop there, as the signal handler does."""
    interrupt(trainer, poll, lambda: setattr(trainer.requests, "signal", signal.SIGTERM))


def assert_same_run(folder, whole):
    """Compare everything that training resumes from and everything recorded, except times."""
    assert not [
        line for line in compare(whole, folder) if not line.startswith("config.")
    ]  # when it is saved may change


@pytest.mark.parametrize("where", STOPS)
def test_stopped_and_continued_equals_uninterrupted(one_rank, tmp_path, whole, where):
    loader, poll, position, saved = STOPS[where]
    config, expected = whole(loader)
    trainer = Trainer(config, one_rank, tmp_path, "tiny", "auto")
    stop(trainer, poll)
    with pytest.raises(Stopped, match=f"stopped on SIGTERM {position} with everything saved") as stopped:
        trainer.train()
    assert stopped.value.exit_status == 75 == read_records(tmp_path, "stop")[-1]["status"]
    state = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    assert {key: state[key] for key in saved} == saved
    run(config, one_rank, tmp_path)
    assert_same_run(tmp_path, expected)


def test_two_epochs_equal_one_and_a_resumed_one(tiny, one_rank, tmp_path):
    whole = run(tiny(max_epochs=2), one_rank, tmp_path / "whole")
    run(tiny(max_epochs=1), one_rank, tmp_path / "parts")
    resumed = run(tiny(max_epochs=2), one_rank, tmp_path / "parts", resume=str(tmp_path / "parts"))
    for kind in ("step", "epoch"):
        parts, undivided = (without_times(read_records(tmp_path / name, kind)) for name in ("parts", "whole"))
        assert parts == undivided
    assert all(map(torch.equal, *(trainer.learner.model.state_dict().values() for trainer in (whole, resumed))))
    assert whole.learner.steps == resumed.learner.steps == 8


def test_an_epoch_that_an_earlier_start_trained_keeps_its_time_and_speed(tiny, one_rank, tmp_path):
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto")
    stop(trainer, BATCHES + 1)  # in validation
    with pytest.raises(Stopped):
        trainer.train()
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    times = {"seconds": 1000.0, "timing": [400.0, 5000, 500.0]}
    path.write_bytes(encode(read_checkpoint(path) | times))
    resumed = run(tiny(max_epochs=1), one_rank, tmp_path)
    (epoch,), (end,) = read_records(tmp_path, "epoch"), read_records(tmp_path, "end")
    assert 600 < epoch["epoch_seconds"] < 700 and 1000 < epoch["seconds"] < 1100
    assert epoch["images_per_sec"] == end["images_per_sec"] == resumed.run.clock.run().images_per_sec == 10


def test_a_killed_run_resumes_from_the_last_interval(one_rank, tmp_path, whole):
    """Everything after the checkpoint of step 6 is done again, its records included."""
    config, expected = whole(ONECYCLE)
    config = config.model_copy(update={"checkpoint_every_steps": 3})
    trainer = Trainer(config, one_rank, tmp_path, "tiny", "auto")

    def die():
        raise KeyboardInterrupt

    interrupt(trainer, 2 * POLLS - 2, die)  # after step 8, before its epoch's validation
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-000000006.pt"
    assert read_records(tmp_path, "step")[-1]["step"] == 7
    run(config, one_rank, tmp_path)
    assert_same_run(tmp_path, expected)


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(number, marks=pytest.mark.slow) for number in SIGNALS[:-1])],
    ids=lambda number: number.name,
)
def test_a_real_signal_stops_with_75_and_the_same_command_finishes(tmp_path, number):
    """Sent to every process of the run, loader workers included, as torchrun, Slurm and a terminal do."""
    keys = TINY | {"limit_train_batches": 40, "log_freq": 1, "data_loader": "torchvision", "num_data_workers": 1}
    folder = tmp_path / "run"
    command = [sys.executable, "train.py", "--config=bs128-opt", f"--run-dir={folder}", *as_options(keys)]
    environment = without_launcher(os.environ)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)
    metrics = folder / "metrics.jsonl"
    wait_until("step", 120, lambda: metrics.exists() and '"kind": "step"' in metrics.read_text(), step=0.01)
    os.killpg(process.pid, number)
    errors = ""
    while "with everything saved" not in errors and (line := process.stderr.readline()):
        errors += line
    process.send_signal(number)  # again, as some schedulers do, while Python ends, which takes a second
    errors += process.communicate(timeout=120)[1]
    assert process.returncode == 75, errors
    assert errors.count("asked to stop") == 1
    assert f"stopped on {number.name} in epoch" in errors
    assert "with everything saved; run the same command again to resume" in errors
    assert "Traceback" not in errors
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in read_records(folder, "step")] == list(range(1, 81))
