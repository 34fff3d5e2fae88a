"""Fork ranks with faults from this process, which has imported torch, so that a start takes tenths of a second.

This process must not have used several threads of torch.
"""

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults.kinds import KINDS, Fault
from tests.processes import free_port
from tools.verify_resume import RunCommand
from utils.program import TRAIN


@dataclass(frozen=True)
class ForkedRun(RunCommand):
    """A run of `nproc` forked ranks, which meet at rank 0, as under `srun` and `mpirun`."""

    faults: Sequence[Fault] = ()

    def start(self, folder: Path, environment: Mapping[str, str], output: Path) -> Any:
        import utils.data.build
        import utils.distributed.ranks
        import utils.run.logging.environment
        import utils.training.learner  # noqa: F401 - imported before the fork, with torch

        output.write_bytes(b"")
        fork, processes = multiprocessing.get_context("fork"), []
        shared = {"WORLD_SIZE": str(self.nproc), "LOCAL_WORLD_SIZE": str(self.nproc), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port())}
        for rank in range(self.nproc):
            own = {**environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = [str(TRAIN), *self.train_arguments, f"--run-dir={folder}"]
            mine = [fault for fault in self.faults if fault.rank == rank]
            processes.append(fork.Process(target=_train, args=(arguments, own, output, mine)))
            processes[-1].start()
        return ForkedRanks(processes)


@dataclass
class ForkedRanks:
    """The processes of one start, with the interface of `subprocess.Popen`."""

    processes: Sequence[BaseProcess]
    returncode: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return None until all have ended, then the status of a killed rank, otherwise the first nonzero status."""
        statuses = [process.exitcode for process in self.processes]
        if None not in statuses:
            ended = [status for status in statuses if status is not None]
            self.returncode = min(ended) if min(ended) < 0 else next(filter(None, ended), 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for all ranks, at most `timeout` seconds for each, and return `poll`."""
        for process in self.processes:
            process.join(timeout)
        return self.poll()


def _train(arguments: list[str], environment: Mapping[str, str], output: Path, faults: Sequence[Fault]) -> None:
    """Run train.py in this forked process, as the rank given by its environment."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    from utils.data.datasets import dataset as datasets

    datasets.NUM_SHAPES_TRAIN, datasets.NUM_SHAPES_VALID = 200, 100  # all shapes would take a second
    _arm(faults)
    sys.argv = arguments
    runpy.run_path(str(TRAIN), run_name="__main__")


def _arm(faults: Sequence[Fault]) -> None:
    """Let the faults of this rank strike, now or after their steps."""
    from utils.training.learner import Learner

    train: Callable[..., None] = Learner.train_step

    def train_and_strike(self: Learner, *batch: object) -> None:
        train(self, *batch)
        for fault in faults:
            if fault.step == self.steps and not KINDS[fault.kind].before:
                if fault.delay:
                    timer = threading.Timer(fault.delay, _strike, [fault])
                    timer.daemon = True
                    timer.start()
                else:
                    _strike(fault)

    Learner.train_step = train_and_strike  # type: ignore[method-assign, assignment]
    for fault in faults:
        if KINDS[fault.kind].before:
            _strike(fault)


def _strike(fault: Fault) -> None:
    os.write(1, f"{fault.mark}\n".encode())  # one write, so that no other thread's output divides the line
    KINDS[fault.kind].strike()
