"""Worker processes of a loader: signals and sockets."""

import os
import signal
import threading
from multiprocessing.connection import Listener
from multiprocessing.queues import Queue

from utils.errors import ConfigError, print_error

PREFETCHED = 2  # batches that each worker prepares ahead


def init_worker(worker: int) -> None:
    """Make a worker process ignore signals, except SIGTERM from its trainer.

    Slurm, torchrun and a terminal signal every process of a run. The trainer then saves, for which it may need more
    batches, so its workers continue until the trainer ends them with SIGTERM.
    """
    # a batch that cannot be sent, as when /dev/shm is full, would be dropped, and the trainer would wait for ever
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_the_trainer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_the_trainer, daemon=True).start()


def _end_worker(error: Exception, batch: object) -> None:
    print_error(f"a loader worker cannot send a batch: {error}")
    os._exit(1)


def check_sockets(num_workers: int) -> None:
    """`ConfigError` if workers cannot make the sockets below TMPDIR through which they share their batches' memory. A
    socket's path has at most 107 bytes, and a worker without a socket never sends a batch."""
    try:
        if num_workers:
            Listener(family="AF_UNIX").close()
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: worker processes cannot make a socket below {os.environ.get('TMPDIR', '/tmp')} ({error}).\n"
            "Set TMPDIR to a short path on a local disk, such as /tmp; else --set num_data_workers=0"
        ) from None


def usable_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))
