"""Run real processes as the ranks of a run."""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable  # a fresh interpreter; during tests sys.executable is forked_python.py
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "MASTER_", "TRAIN_", "PET_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


class Ended(NamedTuple):
    status: int
    output: str
    errors: str


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without launchers' variables, so that tests also run inside a Slurm job."""
    kept = [name for name in environment if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES]
    return {name: environment[name] for name in kept}


def torchrun_variables(rank: int, world_size: int, port: int, **others: str) -> dict[str, str]:
    """Return the variables that torchrun sets, but with the store on rank 0."""
    here = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    variables = here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()} | others


class Job:
    """Processes that run `function(*arguments)`, each with its own launcher's variables."""

    def __init__(self, folder, function, arguments: Iterable[Any], ranks: Iterable[Mapping[str, str]]) -> None:
        self.started = time.monotonic()
        self.folders, self.processes = [], list[subprocess.Popen[bytes]]()
        for number, variables in enumerate(ranks):
            own = folder / f"process-{number}"
            own.mkdir(parents=True)
            (own / "call").write_bytes(pickle.dumps((function, tuple(arguments))))
            environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(variables)
            with open(own / "stdout", "wb") as out, open(own / "stderr", "wb") as errors:
                command = [sys.executable, __file__, str(own / "call")]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=errors))
            self.folders.append(own)

    def wait(self, timeout: float = 150) -> list[Ended]:
        """Wait for all; after `timeout` seconds kill the rest, which then have status -9."""
        for process in self.processes:
            try:
                process.wait(max(0.0, self.started + timeout - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        texts = [[(own / name).read_text(errors="replace") for name in ("stdout", "stderr")] for own in self.folders]
        return [Ended(process.returncode, *both) for process, both in zip(self.processes, texts, strict=True)]


def run_job(folder, world_size: int, function, *arguments, timeout: float = 150, **variables: str) -> list[Ended]:
    """Run `function(*arguments)` as every rank of one run, with more environment variables."""
    port = free_port()
    ranks = [torchrun_variables(rank, world_size, port, **variables) for rank in range(world_size)]
    return Job(folder, function, arguments, ranks).wait(timeout)


def make_command(folder: Path, name: str, action: str) -> None:
    """Write a bash script of this name."""
    (folder / name).unlink(missing_ok=True)  # a link to the real command
    (folder / name).write_text(f"#!/bin/bash\n{action}\n")
    (folder / name).chmod(0o755)


def wait_until(what: str | Callable[[], str], seconds: float, test: Callable[[], Any], step: float = 0.1) -> Any:
    """Return the first true value of test(); raise AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := test()):
        assert time.monotonic() < deadline, f"no {what() if callable(what) else what} within {seconds} s"
        time.sleep(step)
    return value


def complaints(ended: list[Ended]) -> list[str]:
    """Return all lines on the processes' stderr, except PyTorch's own warnings."""
    lines = [line for process in ended for line in process.errors.splitlines()]
    native = re.compile(r"(\[rank\d+\]:)?\[[WE]\d+|Exception raised from|frame #|<omitting|$")
    return [line for line in lines if not native.match(line)]


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    sys.exit(function(*arguments))
