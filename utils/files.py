"""Files that are written whole or not at all, folders that appear at once, locks, and files that are only files."""

import errno
import fcntl
import glob
import multiprocessing.util
import os
import secrets
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from filelock import FileLock, Timeout

from utils.errors import ConfigError, ExpectedError


class FolderHeldError(ConfigError):
    """Another process holds a run's folder: `holder`, in words, for the job of that name; "" where it is not known."""

    def __init__(self, message: str, job: str = "", holder: str = "") -> None:  # unpickled with the message alone
        super().__init__(f"{message}\nit is {holder}" if holder else message)
        self.job, self.holder = job, holder


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. `OSError` where it is no regular file: a FIFO, for one, would be waited for forever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries through to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new one is there, also after a power cut.

    `ExpectedError` naming the file where the disk is full or it may not be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_new(temporary, content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ExpectedError(
            f"{path}: cannot be written: {error.strerror}; what was there before is untouched"
        ) from None
    with suppress(OSError):  # not every file system can flush a folder; the file is whole and in its place
        sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; only for the process that holds the run's lock."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


@contextmanager
def partial_folder(target: Path, lock_file: Path) -> Iterator[Path]:
    """A new folder beside `target`, to be filled and renamed to it, while `lock_file` is held (it stays); whatever is
    left of the folder at the end is removed, and so are those of processes that were killed.

    Without a lock, where the file system has none, two at once do the work twice: each ends in one rename.
    """
    lock = FileLock(lock_file)
    with suppress(OSError, NotImplementedError):  # what filelock raises where there are no locks
        try:
            lock.acquire(blocking=False)
        except Timeout:
            print(f"waiting for another process, which holds {lock_file}", file=sys.stderr, flush=True)
            lock.acquire()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if lock.is_locked:
            for leftover in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}"):
                shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def lock_folder(folder: Path) -> IO[str]:
    """Create `folder` and hold it for this process; `FolderHeldError` where another run holds it.

    The lock's file names the job that was here last, and the process that holds it: see `sign_lock`."""
    path = folder / ".lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot hold a run: {error.strerror}; choose another with --run-dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                job, _, process = lock.read().partition("\n")
            holder = f"{process}, of the job {job}" if job and process else process
            message = f"{folder}: another run is writing here; wait for it or choose another --run-dir"
            raise FolderHeldError(message, job, holder) from None
        except OSError as error:
            raise ConfigError(
                f"{folder}: its file system cannot lock a file ({error.strerror}), so two runs could share the folder; "
                "choose another --run-dir, or have the file system mounted with locks (Lustre: -o flock)"
            ) from None
        # another run may have moved the folder aside since the lock was opened, which then is that of the old folder
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                # else loader workers that outlive a killed run for some seconds would hold its folder
                multiprocessing.util.register_after_fork(lock, lambda file: file.close())
                return lock
        lock.close()


def sign_lock(lock: IO[str], job: str) -> None:
    """Write the name of the job into the lock's file, and this process, which holds it."""
    lock.truncate(0)
    print(f"{job}\nprocess {os.getpid()} on {socket.gethostname()}", end="", file=lock, flush=True)
