"""The faults of a campaign: what each does to a rank, and how the start that it meets has to end.

Each strikes right after a given optimizer step, so that the same number draws the same campaign again.
"""

import errno
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

VARIABLE = "CHAOS_FAULTS"  # the faults of one start, as JSON, for tools/chaos/victim.py
STOPPED_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """One kind of fault, and what has to follow."""

    strike: Callable[[], None]
    statuses: tuple[int, ...] = ()  # how the start may end; none: it goes on
    named: str = ""  # what its output must say, as a regular expression; `{rank}` is the rank that it met
    only_main: bool = False  # of what only the main process does
    only_several: bool = False  # of what only torchrun has
    before: bool = False  # at the start, which has to have two checkpoints by then; not after a step


@dataclass(frozen=True)
class Fault:
    """One fault, as drawn."""

    kind: str
    step: int
    rank: int

    @property
    def mark(self) -> str:
        """What the rank prints when it strikes."""
        return f"chaos: {self.kind}, rank {self.rank}, step {self.step}."


def _send(*numbers: signal.Signals) -> Callable[[], None]:
    def strike() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return strike


def _kill_torchrun() -> None:
    """The parent, if it is torchrun: of a rank whose torchrun has gone it is another process."""
    parent = os.getppid()
    if b"torch.distributed.run" in Path(f"/proc/{parent}/cmdline").read_bytes():
        os.kill(parent, signal.SIGKILL)


def _stop_for_a_while() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _set_clock_back() -> None:
    really = time.time
    time.time = lambda: really() - 86400.0


def _fail_writes(number: int) -> Callable[[], None]:
    """Every file that is written whole, such as a checkpoint, fails with this error from now on."""

    def strike() -> None:
        from utils import files

        def fail(path: Path, content: bytes) -> NoReturn:
            raise OSError(number, os.strerror(number), str(path))

        files.write_new = fail

    return strike


def _fail_read() -> None:
    """The newest checkpoint cannot be read by the next who tries."""
    from utils.run import checkpoint

    really, failed = checkpoint.open_regular, set[str]()

    def fail_newest(path: str | Path) -> BinaryIO:
        if not failed or str(path) in failed:
            failed.add(str(path))
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path)

    checkpoint.open_regular = fail_newest


def _damage_newest() -> None:
    """Before the start: tools/chaos/__main__.py does it to the file."""


STATUS_KILLED = (-signal.SIGKILL, 1)  # of the process, of torchrun above it
BOTH = (signal.SIGUSR1, signal.SIGTERM)
KINDS: Mapping[str, Kind] = {
    "kill of a rank": Kind(_send(signal.SIGKILL), STATUS_KILLED, r"rank {rank}\b|SIGKILL"),
    "kill of torchrun": Kind(_kill_torchrun, STATUS_KILLED, "", only_several=True),
    "USR1": Kind(_send(signal.SIGUSR1), (75,), "stopped on SIGUSR1"),
    "TERM": Kind(_send(signal.SIGTERM), (75,), "stopped on SIGTERM"),
    "USR1 and TERM": Kind(_send(*BOTH), (75,), "stopped on SIG(USR1|TERM)"),
    "a storm of signals": Kind(_send(*BOTH * 15), (75,), "stopped on SIG(USR1|TERM)"),
    "stopped for a while": Kind(_stop_for_a_while),
    "clock set back": Kind(_set_clock_back),
    "disk full": Kind(_fail_writes(errno.ENOSPC), (1,), "cannot be written: No space left on device", only_main=True),
    "disk read-only": Kind(_fail_writes(errno.EROFS), (1,), "cannot be written: Read-only file system", only_main=True),
    "write error": Kind(_fail_writes(errno.EIO), (1,), "cannot be written: Input/output error", only_main=True),
    "read error": Kind(_fail_read, named="Passed over: .*Input/output error", only_main=True, before=True),
    "damaged checkpoint": Kind(_damage_newest, named="Passed over: .*is damaged", only_main=True, before=True),
}


def draw(seed: int, number: int, steps: int, nproc: int, most: int) -> list[list[Fault]]:
    """The faults of run `number`, at most `most`: a list for each start that one of them ends, and one for the last.

    `steps` are those of a whole run. No step has two, and none comes before the second checkpoint can be there."""
    source = random.Random(f"{seed}/{number}")
    names = [name for name, kind in KINDS.items() if nproc > 1 or not kind.only_several]
    starts: list[list[Fault]] = [[]]
    for step in sorted(source.sample(range(5, steps), source.randint(1, most))):
        allowed = [name for name in names if not KINDS[name].before or (len(starts) > 1 and not starts[-1])]
        name = source.choice(allowed)
        starts[-1].append(Fault(name, step, 0 if KINDS[name].only_main else source.randrange(nproc)))
        if KINDS[name].statuses:
            starts.append([])
    return starts


def encode(faults: list[Fault]) -> dict[str, str]:
    """For the environment of a start."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def decode(environment: Mapping[str, str]) -> list[Fault]:
    """What `encode` wrote."""
    return [Fault(**fault) for fault in json.loads(environment[VARIABLE])]
