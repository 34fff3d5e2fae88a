"""Atomic writes of files and folders, locks, and readers of regular files and of JSON lines."""

import errno
import fcntl
import json
import multiprocessing.util
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from filelock import FileLock, Timeout

from utils.errors import ConfigError, ExpectedError

POLL_SECONDS = 1.0  # between two attempts to lock a folder that another run holds
PAUSES = (0.5, 1, 2)  # seconds before another attempt to read, after an error that may pass


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError` if it is not a regular file: opening a FIFO, for one, would hang."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def strict_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON that every reader accepts: NaN and infinity become null. `default` converts unknown types."""
    finite = json.loads(json.dumps(value, default=default), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)


def read_json_lines(path: Path, key: str) -> tuple[list[dict[str, Any]], int]:
    """Return the objects that have `key` in a file of JSON lines, and the number of its other lines, such as one that a
    kill has cut; ([], 0) without the file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    objects = list[dict[str, Any]]()
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict) and key in value:
                objects.append(value)
    return objects, len(lines) - len(objects)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that at any moment either the whole old or the whole new one exists, also after a power cut;
    raise `ExpectedError` with the file's name if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_new(temporary, content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = f"{error.strerror}; an earlier version of the file, if any, is unchanged"
        raise ExpectedError(f"{path}: cannot be written: {reason}") from None
    with suppress(OSError):  # not every file system can flush a folder; the file itself is complete
        sync_folder(path.parent)


@contextmanager
def name_file_in_error(
    folder: str | Path, problem: str = "cannot be used", remedy: str = "", kind: type[ExpectedError] = ExpectedError
) -> Iterator[None]:
    """Turn an `OSError` of the block into a `kind` that says `problem` of its file, or of `folder`, and the remedy."""
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or folder}: {problem}: {error.strerror or error}{remedy}") from None


@contextmanager
def partial_folder(target: Path, lock_file: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`, for the caller to fill and rename to it, while holding `lock_file`. Remove
    the folder if the caller did not rename it, and what a killed process left in it.

    On a file system without locks, two processes at once do the work twice; each ends with one rename.
    """
    lock, partial = FileLock(lock_file), target.with_name(f".{target.name}.partial")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process, which holds {lock_file}", file=sys.stderr, flush=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # filelock's exceptions on a file system without locks
        partial = target.with_name(f"{partial.name}.{secrets.token_hex(4)}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def lock_folder(folder: Path, patience: float = 0.0) -> IO[str]:
    """Create `folder` and lock it. Raises `ConfigError` if another run holds it for longer than `patience` seconds.

    The lock file names the last job and its process: see `sign_lock`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            job, _, process = lock.read().partition("\n")
        if patience > 0:
            time.sleep(POLL_SECONDS)
            return lock_folder(folder, patience - POLL_SECONDS)
        owner = f"{process}, of the job {job}" if job else process
        remedy = "wait for it or choose another --run-dir"
        raise ConfigError(f"{folder}: another run is writing here: {owner}; {remedy}") from None
    except OSError as error:
        problem = f"its file system cannot lock a file ({error.strerror}), so two runs could share the folder"
        remedy = "choose another --run-dir, or have the file system mounted with locks (Lustre: -o flock)"
        raise ConfigError(f"{folder}: {problem}; {remedy}") from None
    if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
        lock.close()  # another run has moved the folder aside meanwhile
        return lock_folder(folder, patience)
    # loader workers, which outlive a killed run for some seconds, must not keep its folder locked
    multiprocessing.util.register_after_fork(lock, lambda file: file.close())
    return lock


def sign_lock(lock: IO[str], job: str) -> None:
    """Write the name of the job and of this process into the lock file."""
    lock.truncate(0)
    print(f"{job}\nprocess {os.getpid()} on {socket.gethostname()}", end="", file=lock, flush=True)
