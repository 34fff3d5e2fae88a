"""A run that is stopped or killed anywhere and resumed is bitwise equal to an uninterrupted run."""

import os
import signal
import subprocess
import sys
from functools import cache
from unittest.mock import Mock

import pytest

from tests.conftest import BATCHES, POLLS, ROOT, TINY, as_options, interrupt, read_records, run, stop, tiny_config
from tests.processes import run_job, wait_until, without_launcher
from tools.verify_resume import compare
from train import Trainer
from utils.distributed.ranks import run_ranks
from utils.errors import Stopped
from utils.run import preemption
from utils.run.checkpoint import encode, list_checkpoints, read_checkpoint
from utils.run.preemption import SIGNALS

# Three epochs of 4 batches of training and 2 of validation; a log point after batches 1 and 3, so none after batch 2.
SETTINGS = {
    # with a learning rate too high, so that validation gets worse and the plateau schedule lowers it
    "plateau and O2": {"data_loader": "torchvision", "lr_schedule": "plateau/0", "lr_warmup_epochs": 0.5, "lr": 0.3,
                       "opt_level": "O2"},
    "onecycle and average": {"lr_schedule": "onecycle", "lr_warmup_epochs": 1.5, "ema_decay": 0.8, "cutmix_alpha": 1.0,
                             "loss_scale": "dynamic", "optimizer": "muon", "lr": 0.02, "rnd_rotation_angle": 10.0},
    "adamw and O3": {"optimizer": "adamw", "lr": 0.01, "opt_level": "O3", "weight_decay_bn_bias": False}}  # fmt: skip
PLATEAU, ONECYCLE, ADAMW = SETTINGS


@pytest.fixture(scope="module")
def whole(one_rank, tmp_path_factory):
    """whole(name): the configuration and the folder of an uninterrupted run, which is trained once."""

    @cache
    def train(name):
        config = tiny_config(max_epochs=3, **SETTINGS[name])
        return config, run(config, one_rank, tmp_path_factory.mktemp("whole")).run.folder

    return train


def assert_same_run(folder, whole):
    """Compare everything that training resumes from and everything recorded, except times."""
    # when it is saved may change
    assert not [line for line in compare(whole, folder) if not line.startswith("config.")]


@pytest.mark.parametrize(("where", "case"), {
    "in mid-epoch, between log points": (PLATEAU, POLLS + 2, "in epoch 2 after 2 batches", {"epoch": 1, "batch": 2}, 3),
    "before validation": (ONECYCLE, POLLS + BATCHES, "in epoch 2 after its last batch", {"epoch": 1, "batch": 4}, 3),
    "in validation": (PLATEAU, POLLS + BATCHES + 1, "in epoch 2 after its last batch", {"epoch": 1, "batch": 4}, 4),
    "between epochs": (ADAMW, 2 * POLLS + 1, "in epoch 3 after 1 batches", {"epoch": 2, "batch": 1}, 5),
}.items())  # fmt: skip
def test_stopped_and_continued_equals_uninterrupted(one_rank, tmp_path, whole, where, case):
    name, poll, position, saved, loops = case
    config, expected = whole(name)
    trainer = Trainer(config, one_rank, tmp_path, "tiny", "auto")
    stop(trainer, poll)
    trainer._report_unreadable = reported = Mock()
    trainer.requests.start_loop = started = Mock()
    with pytest.raises(Stopped, match=f"stopped on SIGTERM {position} with everything saved") as stopped:
        trainer.train()
    assert stopped.value.exit_status == 75 == read_records(tmp_path, "stop")[-1]["status"]
    state = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    assert reported.call_count == 1 + saved["epoch"] + 1  # at the start, after each epoch, and before it is saved
    assert started.call_count == loops
    assert read_records(tmp_path, "epoch")[-1]["seconds"] <= state["timing"][0] < state["seconds"]
    run(config, one_rank, tmp_path)
    assert all(saved.items() <= found.items() for found in (state, read_records(tmp_path, "resume")[0]))
    assert_same_run(tmp_path, expected)
    assert not read_records(tmp_path, "end")[0]["clock_seconds"]["replay"]


def train_on_two_ranks(folder, poll):
    preemption.POLL_SECONDS = 0  # the ranks compare their flags after every batch

    def action(world):
        trainer = Trainer(tiny_config(ema_decay=0.8), world, folder, "tiny", "auto")
        if world.rank == 1:
            stop(trainer, poll)
        trainer.train()

    return run_ranks(action, "cpu", 60)


def test_two_ranks_stopped_exactly_after_an_epochs_last_batch_equal_an_uninterrupted_run(tmp_path):
    for name, poll, status in (("whole", 0, 0), ("parts", BATCHES, 75), ("parts", 0, 0)):
        ended = run_job(tmp_path / f"{name}-{poll}", 2, train_on_two_ranks, tmp_path / name, poll)
        assert [process.status for process in ended] == [status] * 2, ended[0].errors
        if poll:
            state = read_checkpoint(list_checkpoints(tmp_path / "parts/checkpoints")[0])
            assert (state["epoch"], state["batch"]) == (0, BATCHES)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_an_epoch_that_an_earlier_start_trained_keeps_its_time_and_speed(tiny, one_rank, tmp_path):
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto")
    stop(trainer, BATCHES + 1)  # in validation
    with pytest.raises(Stopped):
        trainer.train()
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    path.write_bytes(encode(read_checkpoint(path) | {"seconds": 1000.0, "timing": [400.0, 5000, 500.0]}))
    resumed = run(tiny(max_epochs=1), one_rank, tmp_path)
    (epoch,), (end,) = read_records(tmp_path, "epoch"), read_records(tmp_path, "end")
    assert 600 < epoch["epoch_seconds"] < 700 and 1000 < epoch["seconds"] <= end["seconds"] < 1100
    assert epoch["images_per_sec"] == end["images_per_sec"] == resumed.run.clock.whole.images_per_sec == 10
    assert resumed.run.summarise(False).split(", ")[1].startswith("10"), "seconds"


def test_a_killed_run_resumes_from_the_last_interval(one_rank, tmp_path, whole):
    """Everything after the checkpoint of step 6 is done again, its records included."""
    config, expected = whole(ONECYCLE)
    config = config.model_copy(update={"checkpoint_every_steps": 3})
    trainer = Trainer(config, one_rank, tmp_path, "tiny", "auto")
    interrupt(trainer, 2 * POLLS - 2, Mock(side_effect=KeyboardInterrupt))  # after step 8, before the validation
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-000000006.pt"
    assert read_records(tmp_path, "step")[-1]["step"] == 7
    run(config, one_rank, tmp_path)
    assert_same_run(tmp_path, expected)
    assert not read_records(tmp_path, "lost")  # the record of the stop has its time


@pytest.mark.parametrize("number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in SIGNALS[:-1])],
    ids=lambda number: number.name)  # fmt: skip
def test_a_real_signal_stops_with_75_and_the_same_command_finishes(tmp_path, number):
    """Sent to every process of the run, loader workers included, as torchrun, Slurm and a terminal do."""
    keys = TINY | {"limit_train_batches": 60, "log_freq": 1, "data_loader": "torchvision", "num_data_workers": 1}
    folder = tmp_path / "run"
    command = [sys.executable, "train.py", "--config=bs128-opt", f"--run-dir={folder}", *as_options(keys)]
    environment = without_launcher(os.environ)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "pipesize": 4096}  # soon full: no run ends unread
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipe)
    metrics = folder / "metrics.jsonl"
    wait_until("step", 120, lambda: metrics.exists() and '"kind": "step"' in metrics.read_text(), step=0.01)
    os.killpg(process.pid, number)
    output = ""
    while "with everything saved" not in output and (line := process.stdout.readline()):
        output += line
    process.send_signal(number)  # again, as some schedulers do, while Python ends, which takes a second
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 75 and output.count("asked to stop") == 1 and "Traceback" not in output, output
    assert f"stopped on {number.name} in epoch" in output and "; run the same command again to resume" in output
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in read_records(folder, "step")] == list(range(1, 121))
