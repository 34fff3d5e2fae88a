"""The lock of a run's folder: who holds it, for how long others wait, and what does not hold it."""

import errno
import fcntl
import multiprocessing
import os
import socket
import time

import pytest

from tests.test_checkpoint import contents
from tests.test_train import run
from train import Trainer
from utils import files
from utils.errors import ConfigError, ExpectedError
from utils.files import FolderHeldError, lock_folder
from utils.run import folder as run_folder
from utils.run.folder import open_run

HOLDER = rf"is writing here: process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def start(tiny, one_rank, tmp_path, monkeypatch):
    """start(restarts, patience, **others): open the folder `run` as this start of the Slurm job 7."""
    monkeypatch.setattr(run_folder, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    state = Trainer(tiny(), one_rank).state

    def open_as(restarts, patience, **others):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return open_run(tmp_path / "run", "auto", state, patience=patience, **others)

    return open_as


def test_a_restarted_job_waits_for_its_earlier_start(start, monkeypatch):
    earlier = start(0, 60)
    monkeypatch.setattr(time, "sleep", lambda seconds: earlier.lock.close())
    start(1, 60).lock.close()


@pytest.mark.parametrize(("restarts", "patience"), [(1, 0.3), (0, 60)], ids=["too long", "first"])
def test_the_error_for_other_starts_names_the_holder(start, restarts, patience):
    """A restarted job whose patience has run out, and a first start."""
    earlier, began = start(0, 60), time.monotonic()
    with pytest.raises(FolderHeldError, match=f"{HOLDER}, of the job 7; wait for it or choose"):
        start(restarts, patience)
    assert time.monotonic() - began < 30
    earlier.lock.close()


def test_a_start_that_still_reads_its_checkpoint_is_named(start, tmp_path):
    def look():
        with pytest.raises(FolderHeldError, match=f"{HOLDER}; wait"):
            lock_folder(tmp_path / "run")

    start(0, 0, read_pretrained=look).lock.close()


def test_a_folder_that_is_moved_aside_between_opening_and_locking_is_not_locked(tmp_path, monkeypatch):
    """Otherwise this run would hold the lock of the earlier run's folder, and a third one could write here too."""
    really, moves = fcntl.flock, iter([lambda: (tmp_path / "run").rename(tmp_path / "run.1")])

    def flock(file, operation):
        really(file, operation)
        next(moves, bool)()

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_folder(tmp_path / "run"), pytest.raises(FolderHeldError):
        lock_folder(tmp_path / "run")
    lock_folder(tmp_path / "run.1").close()


def test_a_second_run_in_one_folder_is_refused(tiny, one_rank, tmp_path, monkeypatch):
    trainer, refused = Trainer(tiny(max_epochs=1), one_rank, tmp_path), []
    validate = trainer.validate_one_epoch

    def start_another():
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=r"another run is writing here.*; wait for it or choose another"):
            run(tiny(max_epochs=1), one_rank, tmp_path, resume="never")
        refused.append(contents(tmp_path) == before)
        return validate()

    monkeypatch.setattr(trainer, "validate_one_epoch", start_another)
    trainer.train()
    assert refused == [True]


def wait_for(ready, enough):
    ready.set()
    enough.wait(60)


def test_loader_workers_of_a_killed_run_do_not_hold_its_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, enough = context.Event(), context.Event()
    lock = lock_folder(tmp_path / "run")
    worker = context.Process(target=wait_for, args=(ready, enough), daemon=True)
    worker.start()
    assert ready.wait(60)
    with pytest.raises(ConfigError, match="another run is writing here"):
        lock_folder(tmp_path / "run")  # and the worker's copy does not release it
    lock.close()
    lock_folder(tmp_path / "run").close()
    enough.set()
    worker.join()


def refuse(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"run: .*cannot lock a file \(No locks available\).*--run-dir.*-o flock"):
        lock_folder(tmp_path / "run")


def test_a_start_that_fails_after_moving_the_earlier_run_aside_leaves_no_lock(start, tmp_path, monkeypatch):
    """Also while the error is kept, as in a notebook. The message names the folder."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    monkeypatch.setattr(run_folder, "_records", refuse)
    with pytest.raises(ExpectedError, match=f"{tmp_path}/run: cannot be used: No locks") as kept:
        start(0, 0)
    assert (tmp_path / "run.1").exists() and kept.value.__traceback__
    files.lock_folder(tmp_path / "run").close()
