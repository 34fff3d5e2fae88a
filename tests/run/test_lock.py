"""The lock of a run's folder: who holds it, for how long others wait, and what does not hold it."""

import errno
import fcntl
import multiprocessing
import os
import socket
import time
from unittest.mock import Mock

import pytest
from filelock import FileLock

from train import Trainer
from utils.errors import ConfigError, ExpectedError
from utils.files import lock_folder, partial_folder
from utils.run import folder as run_folder
from utils.run.folder import open_folder
from utils.run.run import Run

HOLDER = rf"is writing here: process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def start(tiny, one_rank, tmp_path, monkeypatch):
    """start(restarts, resume): open the folder `run` as this start of the Slurm job 7."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    opening = Trainer(tiny(rank_timeout_seconds=3), one_rank, tmp_path / "run").run

    def open_as(restarts, resume="auto"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return open_folder(opening, resume)[0]

    return open_as


def test_a_restarted_job_waits_for_its_earlier_start(start, monkeypatch):
    earlier = start(0)
    assert run_folder.PATIENCE < 1, "longer than the other ranks wait for this one"
    monkeypatch.setattr(time, "sleep", lambda seconds: earlier.close())
    start(1).close()


@pytest.mark.parametrize("restarts", [1, 0], ids=["too long", "first"])
def test_the_error_for_other_starts_names_the_holder_and_the_folder_stays(start, tmp_path, monkeypatch, restarts):
    earlier, slept, before = start(0), [], sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(ConfigError, match=f"{HOLDER}, of the job 7; wait for it or choose"):
        start(restarts, resume="never")
    assert slept == [1.0] * 3 * (restarts > 0) and sorted(tmp_path.rglob("*")) == before
    earlier.close()


def test_a_start_that_still_reads_its_checkpoint_is_named(start, tmp_path, monkeypatch):
    def look(run):
        with pytest.raises(ConfigError, match=f"{HOLDER}; wait"):
            lock_folder(tmp_path / "run")

    monkeypatch.setattr(Run, "read_pretrained", look)
    start(0).close()


def test_a_folder_that_is_moved_aside_between_opening_and_locking_is_not_locked(tmp_path, monkeypatch):
    """Otherwise this run would hold the lock of the earlier run's folder, and a third one could write here too."""
    really, moves = fcntl.flock, iter([lambda: (tmp_path / "run").rename(tmp_path / "run.1")])

    def flock(file, operation):
        really(file, operation)
        next(moves, bool)()

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_folder(tmp_path / "run"), pytest.raises(ConfigError):
        lock_folder(tmp_path / "run")
    lock_folder(tmp_path / "run.1").close()


def test_loader_workers_of_a_killed_run_do_not_hold_its_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, enough = context.Event(), context.Event()
    lock = lock_folder(tmp_path / "run")
    worker = context.Process(target=lambda: (ready.set(), enough.wait(60)), daemon=True)
    worker.start()
    assert ready.wait(60)
    with pytest.raises(ConfigError, match="another run is writing here"):
        lock_folder(tmp_path / "run")  # and the worker's copy does not release it
    lock.close()
    lock_folder(tmp_path / "run").close()
    enough.set()
    worker.join()


def test_a_start_that_fails_after_moving_the_earlier_run_aside_leaves_no_lock(start, tmp_path, monkeypatch):
    """Also while the error is kept, as in a notebook. The message names the file."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    monkeypatch.setattr(run_folder, "read_records", lambda folder: (folder / "absent").read_bytes())
    with pytest.raises(ExpectedError, match=f"{tmp_path}/run/absent: cannot be used: No such") as kept:
        start(0)
    assert (tmp_path / "run.1").exists() and kept.value.__traceback__
    lock_folder(tmp_path / "run").close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(ConfigError, match=r"run: .*cannot lock a file \(No locks available\).*--run-dir.*-o flock"):
        lock_folder(tmp_path / "run")


def test_without_locks_two_that_fill_a_folder_have_each_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=OSError))
    places = tmp_path / "data", tmp_path / "lock"
    with partial_folder(*places) as one, partial_folder(*places) as other:
        assert one != other
