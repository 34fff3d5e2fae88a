"""Run real processes as the ranks of a run."""

import contextlib
import os
import pickle
import re
import signal
import socket
import sys
import time
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import NamedTuple

from utils.program import end_with_parent

ROOT = Path(__file__).resolve().parent.parent
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded"])
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "MASTER_", "TRAIN_", "PET_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


class Ended(NamedTuple):
    status: int
    output: str
    errors: str


def free_port():
    """Return a port that is free at this moment, below those that the system gives to other sockets meanwhile."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port := 10_000 + int.from_bytes(os.urandom(4)) % 20_000))
            return port


def without_launcher(environment):
    """Return the environment without launchers' variables, so that tests also run inside a Slurm job."""
    kept = [name for name in environment if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES]
    return {name: environment[name] for name in kept}


def torchrun_variables(rank, world_size, port, **others):
    """Return the variables that torchrun sets, but with the store on rank 0."""
    here = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    variables = here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()} | others


def fork(function, *arguments):
    """Start function(*arguments) in a process forked from a server that has imported torch, in 0.1 s instead of 5 s."""
    with contextlib.chdir(ROOT):  # where the server looks for the module
        forkserver.ensure_running()
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    return process


class Job:
    """Processes that run `function(*arguments)`, each with its own launcher's variables."""

    def __init__(self, folder, function, arguments, ranks):
        self.started, call = time.monotonic(), pickle.dumps((function, tuple(arguments)))
        self.folders, self.processes = [], []
        for number, variables in enumerate(ranks):
            own = folder / f"process-{number}"
            own.mkdir(parents=True)
            environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(variables)
            self.processes.append(fork(_run, call, environment, own))
            self.folders.append(own)

    def wait(self, timeout=150):
        """Wait for all; after `timeout` seconds kill the rest, which then have status -9."""
        for process in self.processes:
            process.join(max(0.0, self.started + timeout - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        texts = [[(own / name).read_text(errors="replace") for name in ("stdout", "stderr")] for own in self.folders]
        return [Ended(process.exitcode, *both) for process, both in zip(self.processes, texts, strict=True)]


def _run(call, environment, own):
    end_with_parent(signal.SIGKILL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(own / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    function, arguments = pickle.loads(call)
    sys.exit(function(*arguments))


def run_job(folder, world_size, function, *arguments, timeout=150, **variables):
    """Run `function(*arguments)` as every rank of one run, with more environment variables."""
    port = free_port()
    ranks = [torchrun_variables(rank, world_size, port, **variables) for rank in range(world_size)]
    return Job(folder, function, arguments, ranks).wait(timeout)


def make_command(folder, name, action):
    """Write a bash script of this name."""
    (folder / name).unlink(missing_ok=True)  # a link to the real command
    (folder / name).write_text(f"#!/bin/bash\n{action}\n")
    (folder / name).chmod(0o755)


def wait_until(what, seconds, test, step=0.1):
    """Return the first true value of test(); raise AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := test()):
        assert time.monotonic() < deadline, f"no {what() if callable(what) else what} within {seconds} s"
        time.sleep(step)
    return value


def complaints(ended):
    """Return all lines on the processes' stderr, except PyTorch's own warnings."""
    lines = [line for process in ended for line in process.errors.splitlines()]
    native = re.compile(r"(\[rank\d+\]:)?\[[WE]\d+|Exception raised from|frame #|<omitting|$")
    return [line for line in lines if not native.match(line)]
