"""Ranks that are forked from this process, which has imported torch already: a start takes tenths of a second.

They differ from those that a launcher starts in one thing: what an interpreter does after the program's last line is
left out. This process must not have run anything of torch on several threads.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.attempts import Job, Started


@dataclass(frozen=True)
class ForkedJob(Job):
    """A run of `nproc` forked ranks, which meet at rank 0, as under `srun` and `mpirun`."""

    def start(self, folder: Path, environment: Mapping[str, str], output: Path) -> Started:
        """One process a rank."""
        arguments = [*self.train_arguments, f"--run-dir={folder}"]
        port = str(_free_port())
        output.write_bytes(b"")
        processes = []
        for rank in range(self.nproc):
            others = {"WORLD_SIZE": str(self.nproc), "LOCAL_WORLD_SIZE": str(self.nproc), "MASTER_ADDR": "127.0.0.1"}
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            processes.append(_fork({**environment, **others, **own}, arguments, output))
        return ForkedRanks(processes)


@dataclass
class ForkedRanks:
    """The processes of one start, as `subprocess.Popen` has one."""

    processes: list[int]
    statuses: dict[int, int] = field(default_factory=dict)
    returncode: int | None = None

    def poll(self) -> int | None:
        """None until all have ended; then that of a rank that a signal killed, else the first that is not 0."""
        for process in self.processes:
            if process not in self.statuses:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.statuses[process] = os.waitstatus_to_exitcode(status)
        if len(self.statuses) == len(self.processes):
            statuses = [self.statuses[process] for process in self.processes]
            self.returncode = min(statuses) if min(statuses) < 0 else next(filter(None, statuses), 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once all have ended; `TimeoutError` after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the ranks {self.processes} do not end")
            time.sleep(0.01)
        return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(environment: Mapping[str, str], arguments: Sequence[str], output: Path) -> int:
    """A process that trains; returns its number."""
    import utils.data.build
    import utils.distributed.ranks
    import utils.run.environment
    import utils.training.learner  # noqa: F401 - with torch: so that the child has them already

    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        _leave_the_parent(environment, output)
        sys.argv = ["train.py", *arguments]
        status = _train()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever a full disk says: no second campaign
            os._exit(status)


def _leave_the_parent(environment: Mapping[str, str], output: Path) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND)
    for here, there in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(here, there)
    os.closerange(3, 1 << 10)
    os.environ.clear()
    os.environ.update(environment)


def _train() -> int:
    from tools.chaos import victim

    try:
        victim.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
