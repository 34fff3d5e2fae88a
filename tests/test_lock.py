"""The lock of a run's folder: a restarted job waits for its earlier start, and errors name the holder."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.config import Config
from utils.files import FolderHeldError, lock_folder, sign_lock
from utils.run import folder as run_folder
from utils.run.folder import OpenedRun, open_run

HOLDER = f"process {os.getpid()} on {socket.gethostname()}, of the job 7"


@pytest.fixture
def start(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpenedRun]:
    """start(job, restarts, patience): open the folder `run` as this start of a Slurm job."""
    monkeypatch.setattr(run_folder, "POLL_SECONDS", 0.05)

    def open_as(job: str, restarts: int, patience: float) -> OpenedRun:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return open_run(tmp_path / "run", "auto", tiny(), {}, {}, patience=patience)

    return open_as


def test_a_restarted_job_waits_for_its_earlier_start(
    start: Callable[..., OpenedRun],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = start("7", 0, 60)
    monkeypatch.setattr(time, "sleep", lambda seconds: earlier.lock.close())
    again = start("7", 1, 60)
    waited = again.notes[0]  # another note says where the earlier start's folder is now
    assert waited.startswith("Waited ") and waited.endswith(f" s for an earlier start of this job, {HOLDER}")
    message = f"{tmp_path}/run: held by an earlier start of this job, {HOLDER}; waiting up to 60 s for it\n"
    assert capsys.readouterr().err == message
    again.lock.close()


@pytest.mark.parametrize(
    ("job", "restarts", "patience"), [("7", 1, 0.3), ("7", 0, 60), ("8", 1, 60)], ids=["too long", "first", "another"]
)
def test_the_error_for_other_starts_names_the_holder(
    start: Callable[..., OpenedRun], job: str, restarts: int, patience: float
) -> None:
    """Another job, a first start of this job, and a restarted job whose patience has run out."""
    earlier, began = start("7", 0, 60), time.monotonic()
    with pytest.raises(FolderHeldError, match=f"another run is writing here; .*\nit is {HOLDER}"):
        start(job, restarts, patience)
    assert time.monotonic() - began < 30
    earlier.lock.close()


def test_a_start_that_still_reads_its_checkpoint_is_named(tiny: Callable[..., Config], tmp_path: Path) -> None:
    def look() -> None:
        with pytest.raises(FolderHeldError, match=r"--run-dir\nit is process \d+ on \S+$"):
            lock_folder(tmp_path / "run")

    open_run(tmp_path / "run", "auto", tiny(), {}, {}, read_pretrained=look).lock.close()


def test_an_unsigned_lock_names_no_holder(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run") as lock:
        with pytest.raises(FolderHeldError) as refused:
            lock_folder(tmp_path / "run")
        assert "\n" not in str(refused.value)
        sign_lock(lock, "")
        with pytest.raises(FolderHeldError, match=r"--run-dir\nit is process \d+ on \S+$"):
            lock_folder(tmp_path / "run")
