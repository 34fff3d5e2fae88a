"""The lock of a run's folder: a restarted job waits for its earlier start, and errors name the holder."""

import os
import socket
import time

import pytest

from utils.files import FolderHeldError, lock_folder
from utils.run import folder as run_folder
from utils.run.folder import open_run

HOLDER = f"process {os.getpid()} on {socket.gethostname()}, of the job 7"


@pytest.fixture
def start(tiny, tmp_path, monkeypatch):
    """start(restarts, patience): open the folder `run` as this start of the Slurm job 7."""
    monkeypatch.setattr(run_folder, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def open_as(restarts, patience):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return open_run(tmp_path / "run", "auto", tiny(), {}, {}, patience=patience)

    return open_as


def test_a_restarted_job_waits_for_its_earlier_start(start, capsys, monkeypatch):
    earlier = start(0, 60)
    monkeypatch.setattr(time, "sleep", lambda seconds: earlier.lock.close())
    start(1, 60).lock.close()
    assert capsys.readouterr().err == f"waiting up to 60 s for an earlier start to leave {earlier.lock.name[:-6]}\n"


@pytest.mark.parametrize(("restarts", "patience"), [(1, 0.3), (0, 60)], ids=["too long", "first"])
def test_the_error_for_other_starts_names_the_holder(start, restarts, patience):
    """A restarted job whose patience has run out, and a first start."""
    earlier, began = start(0, 60), time.monotonic()
    with pytest.raises(FolderHeldError, match=f"another run is writing here: {HOLDER}; wait for it or choose"):
        start(restarts, patience)
    assert time.monotonic() - began < 30
    earlier.lock.close()


def test_a_start_that_still_reads_its_checkpoint_is_named(tiny, tmp_path):
    def look():
        with pytest.raises(FolderHeldError, match=rf"is writing here: process {os.getpid()} on \S+; wait"):
            lock_folder(tmp_path / "run")

    open_run(tmp_path / "run", "auto", tiny(), {}, {}, read_pretrained=look).lock.close()
