"""The faults of a campaign: what each does to a rank, and how the affected start must end.

Each strikes after a given optimizer step, so that a campaign can be repeated. Faults from outside (signals, stops)
strike a random moment later, perhaps in the next step, a validation or the write of a checkpoint."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from utils import files

STOPPED_SECONDS = 0.5
LONGEST_DELAY = 0.04  # seconds: some steps


class FaultKind(NamedTuple):
    """One kind of fault, and its expected consequences."""

    strike: Callable[[], object]
    statuses: tuple[int, ...] = ()  # possible exit statuses of the start; none: it continues
    # regular expression that its output must match; {rank} is the affected rank, {who} a rank's prefix, if several
    named: str = ""
    only_main: bool = False  # strikes only the main process
    before: bool = False  # strikes at a start with at least two checkpoints, not after a step
    outside: bool = False  # strikes at any moment


class Fault(NamedTuple):
    """One planned fault."""

    kind: str
    step: int
    rank: int
    delay: float = 0.0  # seconds after the step

    @property
    def mark(self):
        """The line that the rank prints when the fault strikes."""
        return f"chaos: {self.kind}, rank {self.rank}, step {self.step}."


def _send(*numbers):
    def strike():
        for number in numbers:
            os.kill(os.getpid(), number)

    return strike


def _kill_worker():
    """Kill a loader worker of this rank, as the kernel does when memory is full, and wait until it is dead."""
    (worker := multiprocessing.active_children()[0]).kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def _in_a_shell(script):
    """Strike from another process, as this one may be stopped."""
    return lambda: subprocess.Popen(["sh", "-c", script, "sh", str(os.getpid())])


def _set_clock_back():
    really = time.time
    time.time = lambda: really() - 86400.0


def _fail_writes(number):
    """From now on, every atomic write, such as of a checkpoint, fails with this error."""

    def fail(path, content):
        raise OSError(number, os.strerror(number), str(path))

    return lambda: setattr(files, "write_new", fail)


def _fill_disk_of_logs():
    """Let further writes to metrics.jsonl and train.log fail as on a full disk, with the kernel's /dev/full."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if Path(os.readlink(f"/proc/self/fd/{number}")).name in ("metrics.jsonl", "train.log"):
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))


def _fail_read():
    """Let every read of one checkpoint, the next one that is read, fail."""
    really, failed = Path.read_bytes, set()

    def fail_newest(path):
        if path.match("step-*.pt") and (not failed or path in failed):
            failed.add(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path)

    Path.read_bytes = fail_newest


KILLED = (-signal.SIGKILL, 1)  # statuses of the killed process, and of the other ranks
BOTH = (signal.SIGUSR1, signal.SIGTERM)
STOP = f"kill -STOP $1; sleep {STOPPED_SECONDS}; kill -CONT $1"
THROTTLE = "for _ in 1 2 3 4 5 6 7 8 9 10; do kill -STOP $1; sleep 0.05; kill -CONT $1; sleep 0.005; done"
NO_WRITE = "error: {who}.*cannot be written: "
KINDS = {
    "kill of a rank": FaultKind(_send(signal.SIGKILL), KILLED, r"rank {rank}\b", outside=True),
    "kill of a worker": FaultKind(_kill_worker, (1,), "error: {who}a loader worker was killed, as the kernel does"),
    "USR1": FaultKind(_send(signal.SIGUSR1), (75,), "stopped on SIGUSR1", outside=True),
    "TERM": FaultKind(_send(signal.SIGTERM), (75,), "stopped on SIGTERM", outside=True),
    "USR1 and TERM": FaultKind(_send(*BOTH), (75,), "stopped on SIG(USR1|TERM)", outside=True),
    "storm of signals": FaultKind(_send(*BOTH * 15), (75,), "stopped on SIG(USR1|TERM)", outside=True),
    "stopped for a while": FaultKind(_in_a_shell(STOP), outside=True),
    "throttled core": FaultKind(_in_a_shell(THROTTLE), outside=True),
    "clock set back": FaultKind(_set_clock_back),
    "disk full": FaultKind(_fail_writes(errno.ENOSPC), (1,), f"{NO_WRITE}No space left on device", only_main=True),
    "disk of logs full": FaultKind(_fill_disk_of_logs, (1,), f"{NO_WRITE}No space left on device", only_main=True),
    "write error": FaultKind(_fail_writes(errno.EIO), (1,), f"{NO_WRITE}Input/output error", only_main=True),
    "read error": FaultKind(_fail_read, named="Skipped: .*Input/output error", only_main=True, before=True),
    # chaos.py damages the file before the start
    "damaged checkpoint": FaultKind(_send(), named="Skipped: .*is damaged", only_main=True, before=True),
    "cut-off checkpoint": FaultKind(_send(), named="Skipped: .*is damaged", only_main=True, before=True),
}


def damage(path, cut):
    """Leave only the first half of a checkpoint, or change one byte."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] = (content[len(content) // 2] + 1) % 256  # never back to the first value
    path.write_bytes(content[: len(content) // 2] if cut else content)


def plan_faults(seed, number, steps, nproc, most):
    """Sample up to `most` faults of run `number`: a list for each start that one of them ends, and one for the last.

    A whole run has `steps` steps. No step has two faults, and none comes before the second checkpoint."""
    source = random.Random(f"{seed}/{number}")
    starts: list[list[Fault]] = [[]]
    for step in sorted(source.sample(range(5, steps), source.randint(1, most))):
        allowed = [name for name in KINDS if not KINDS[name].before or (len(starts) > 1 and not starts[-1])]
        kind = KINDS[name := source.choices(allowed, [3 if KINDS[name].before else 1 for name in allowed])[0]]
        rank, delay = source.randrange(nproc), source.uniform(0, LONGEST_DELAY)
        starts[-1].append(Fault(name, step, 0 if kind.only_main else rank, delay if kind.outside else 0.0))
        if kind.statuses:
            starts.append([])
    return starts
