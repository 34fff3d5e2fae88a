"""Starts train.py, interrupts it, and compares interrupted with uninterrupted runs.

For tools.verify_resume and tests.faults. Needs Linux's /proc.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.shared.command_line import path_argument, seconds
from tools.shared.read_runs import read_records
from utils.distributed.launch import torchrun_here
from utils.errors import ExpectedError
from utils.program import TRAIN
from utils.run.config import MEASURED

METRICS = "metrics.jsonl"
KINDS = ("step", "epoch", "end")  # records of metrics.jsonl that must be equal; others record starts and stops
KILL_SECONDS = 30.0  # seconds that a process may take to end after SIGKILL


@dataclass(frozen=True)
class RunCommand:
    """How to start the run under test."""

    train_arguments: list[str]
    nproc: int
    timeout: float  # seconds after which a start counts as hanging
    end: float  # of all starts (time.monotonic)

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command line, the same at every start, and its environment variables."""
        if self.nproc > 1:
            rendezvous = folder.with_name(f"{folder.name}.rendezvous")
            rendezvous.unlink(missing_ok=True)  # from the previous start, whose ranks are dead
            start, environment = torchrun_here(self.nproc, rendezvous)
        else:
            start, environment = [sys.executable], {}
        return [*start, str(TRAIN), *self.train_arguments, f"--run-dir={folder}"], environment

    def start(self, folder: Path, environment: Mapping[str, str], output: Path) -> Any:
        """Start the run; return its `subprocess.Popen`, or an object with the same `poll`, `wait` and `returncode`.

        Its processes, orphans too, are identified by their standard output."""
        command, more = self.command(folder)
        with output.open("wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**environment, **more}, start_new_session=True
            )


class Attempt:
    """One start of the run. Leaving the `with` block kills all of its processes."""

    def __init__(self, job: RunCommand, folder: Path) -> None:
        self.folder, self.deadline = folder, min(time.monotonic() + job.timeout, job.end)
        self.log = output_of(folder)
        self.status_file = folder.with_name(f"{folder.name}.status")
        self.status_file.unlink(missing_ok=True)
        self.starts_before = read_records(folder / METRICS, "start", "resume")
        environment = os.environ | {"TRAIN_EXIT_STATUS_FILE": str(self.status_file)}
        self.process = job.start(folder, environment, self.log)

    def wait_until(self, reached: Callable[[], bool], pause: float = 0.001) -> bool:
        """Wait until `reached`; False if the run ended before. Raises `ExpectedError` if it hangs."""
        while not reached():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > self.deadline:
                raise ExpectedError(
                    "longer than --timeout or --total-timeout, so it may hang; the end of its output:\n"
                    + self.end_of_output()
                )
            time.sleep(pause)
        return True

    def wait(self) -> int:
        """Return the run's exit status, as written by rank 0: torchrun turns every failure into 1."""
        self.wait_until(lambda: self.process.poll() is not None, pause=0.01)
        written = self.status_file.read_text().strip() if self.status_file.exists() else ""
        return int(written) if written and self.process.returncode >= 0 else self.process.returncode

    def has_begun(self) -> bool:
        """Return whether training has begun; from then on it handles signals."""
        starts = read_records(self.folder / METRICS, "start", "resume")
        return bool(starts) and starts != self.starts_before  # fewer if the folder was moved aside

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written, or was when its writer was killed."""
        return any((self.folder / "checkpoints").glob("*.tmp"))

    def check_resumed(self, earlier: set[Path]) -> None:
        """Raise `ExpectedError` if it started from the beginning although there was a good checkpoint.

        Such a run can still be equal, as every start is deterministic. `earlier`: folders moved aside before.
        """
        starts = read_records(self.folder / METRICS, "start", "resume")
        if self.has_begun() and starts[-1]["kind"] == "start":
            raise ExpectedError(f"a start did not resume from its good checkpoint:\n{self.end_of_output()}")
        if new := moved_aside(self.folder) - earlier:
            raise ExpectedError(f"a start moved its good checkpoint aside, to {min(new)}:\n{self.end_of_output()}")

    def end_of_output(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.folder)
        self.process.wait(KILL_SECONDS)


def moved_aside(folder: Path) -> set[Path]:
    """Return the folders to which starts from the beginning have moved `folder`."""
    return {path for path in folder.parent.glob(f"{folder.name}.*") if path.suffix[1:].isdigit()}


def compare(uninterrupted: Path, killed: Path) -> list[str]:
    """Return the differences between two finished runs."""
    from utils.run.checkpoint.io import newest_good, read_checkpoint

    states = [newest_good(folder / "checkpoints")[1] or {} for folder in (uninterrupted, killed)]
    best = [read_checkpoint(folder / "checkpoints" / "best.pt") for folder in (uninterrupted, killed)]
    records = [_records(folder) for folder in (uninterrupted, killed)]
    sides: dict[str, Sequence[Any]] = {METRICS: records}
    keys = sorted(states[0].keys() - {"seconds", "timing", "versions"})
    sides |= {key: [state.get(key) for state in states] for key in keys}
    sides |= {f"{key} of best.pt": [state[key] for state in best] for key in ("model", "epoch")}
    return [difference for name, (left, right) in sides.items() for difference in _differences(name, left, right)][:20]


def _differences(where: str, left: Any, right: Any) -> Iterator[str]:
    """Yield a line for each differing value in two nested structures."""
    import torch

    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys():
        for key in left:
            yield from _differences(f"{where}.{key}", left[key], right[key])
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{where}[{number}]", one, other)
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            yield f"{where}: {left.dtype} {tuple(left.shape)} uninterrupted, {right.dtype} {tuple(right.shape)} killed"
        elif not torch.equal(left, right):
            yield f"{where}: differs by {(left.double() - right.double()).abs().max().item():.3g}"
    elif left != right:
        yield f"{where}: {str(left)[:80]} uninterrupted, {str(right)[:80]} killed"


def _records(folder: Path) -> list[dict[str, Any]]:
    records = read_records(folder / METRICS, *KINDS)
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def output_of(folder: Path) -> Path:
    """Return the file with the output of the run in `folder`."""
    return folder.with_name(f"{folder.name}.output")


def find_processes(folder: Path) -> dict[int, bytes]:
    """Return every process of the run in `folder`, with its environment, from /proc."""
    output = os.path.realpath(output_of(folder))
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(entry / "fd/1") == output:
                found[int(entry.name)] = (entry / "environ").read_bytes()
    return found


def find_ranks(folder: Path) -> dict[int, int]:
    """Return {rank: process}. A rank's children, such as loader workers, share its environment.

    A run without torchrun has only rank 0, and so has a torchrun that has not started its ranks yet."""
    processes = find_processes(folder)
    parents = {process: int(_status(process)[1]) for process in processes}
    found = ((process, re.search(rb"(?:^|\0)RANK=(\d+)", environment)) for process, environment in processes.items())
    numbers = {process: int(number[1]) for process, number in found if number}
    ranks = {number: process for process, number in numbers.items() if parents[process] not in numbers}
    roots = [process for process, parent in parents.items() if parent not in processes]
    return ranks or dict(enumerate(roots[:1]))


def _status(process: int) -> list[str]:
    """Return state, parent and so on of a process, or those of a dead process if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def kill_all(folder: Path) -> None:
    """Send SIGKILL to every process of the run until none is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while processes := [process for process in find_processes(folder) if _status(process)[0] not in ("Z", "X")]:
        if time.monotonic() > deadline:
            raise ExpectedError(f"processes {processes} do not end after SIGKILL; see the kernel's log (dmesg)")
        for process in processes:
            send(process, signal.SIGKILL)
        time.sleep(0.01)


def add_limits(parser: argparse.ArgumentParser, timeout: float) -> None:
    """Add the options of commands that interrupt runs; `timeout`: seconds of one start."""
    seed, text = random.randrange(10**6), "of the random choices (default: random, and printed)"
    parser.add_argument("--seed", type=int, default=seed, metavar="S", help=text)
    for option, default, what in (("--timeout", timeout, "one start"), ("--total-timeout", 86400.0, "everything")):
        help_text = f"limit of {what} (default: {default:g})"
        parser.add_argument(option, type=seconds, default=default, metavar="SECONDS", help=help_text)
    parser.add_argument(
        "--work-dir", type=path_argument, metavar="DIR", help="folder for the runs (default: temporary)"
    )
