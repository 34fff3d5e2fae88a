"""Worker processes of a loader: how many, what they obey, how they die, and the shared memory that they need."""

import os
import signal
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path

from utils.errors import ConfigError

PREFETCHED = 2  # batches that each worker prepares ahead
DYING_SECONDS = 1.0  # between a worker's last word and its end
SHARED_MEMORY = Path("/dev/shm")


def obey_only_the_trainer(worker: int) -> None:
    """What a worker process begins with.

    Slurm, torchrun and a terminal send a signal to every process of a run. The trainer answers it by saving, for which
    it may need more batches, so its workers go on until it ends them itself, which it does with SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_the_trainer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_the_trainer, daemon=True).start()


def find_lost_worker(batches: object, error: str) -> str:
    """How a worker process of a DataLoader's iterator died, in PyTorch's words; empty where none did.

    PyTorch tells how from its handler of SIGCHLD only; where this process was just receiving from the worker, it finds
    a connection that has ended, or a worker that is gone, instead.
    """
    workers = getattr(batches, "_workers", ()) if "in DataLoader worker process" not in error else ()
    until = time.monotonic() + DYING_SECONDS
    while workers and time.monotonic() < until:
        for worker in workers:
            if worker.exitcode:
                status = f"exited with status {worker.exitcode}"
                if worker.exitcode < 0:
                    status = f"is killed by signal: {signal.strsignal(-worker.exitcode)}"
                return f"DataLoader worker (pid {worker.pid}) {status}"
        time.sleep(0.01)
    return ""


SHARED_MEMORY_REMEDY = (
    "In a container: docker run --ipc=host, or --shm-size=8g; else fewer workers, "
    "--set num_data_workers=0 (no shared memory), or --set data_loader=device"
)


def check_shared_memory(batch_bytes: int, num_workers: int) -> None:
    """`ConfigError` where `num_workers` on this machine cannot keep their batches ahead in shared memory."""
    if not num_workers or not SHARED_MEMORY.is_dir():
        return
    needed = batch_bytes * num_workers * PREFETCHED
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free; {num_workers} data workers on this machine, each "
            f"{PREFETCHED} batches of {batch_bytes / 1e6:.1f} MB ahead, need {needed / 1e6:.0f} MB.\n"
            f"{SHARED_MEMORY_REMEDY}"
        )


def check_sockets(num_workers: int) -> None:
    """`ConfigError` where workers cannot make the sockets that hand over their batches' memory.

    PyTorch makes them where Python's multiprocessing does, below TMPDIR. A path of more than 107 bytes is no address of
    a socket, and of a worker that cannot make its own no batch ever comes.
    """
    if not num_workers:
        return
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: worker processes cannot make a socket below {os.environ.get('TMPDIR', '/tmp')} ({error}).\n"
            "Set TMPDIR to a short path on a local disk with free space, such as /tmp; else --set num_data_workers=0 "
            "or --set data_loader=device"
        ) from None


def workers_of_a_rank(wanted: int, sharing: int) -> int:
    """`wanted` loader workers, but no more than a rank's part of the cores that `sharing` ranks may run on."""
    return min(wanted, max(1, usable_cores() // sharing))


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
