"""Files that are written whole or not at all, locks, and folders that appear at once."""

import contextlib
import errno
import fcntl
import multiprocessing.util
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from utils.errors import ConfigError, ExpectedError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new one is there, also after a power cut.

    `ExpectedError` naming the file where the disk is full or it may not be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ExpectedError(
            f"{path}: cannot be written: {error.strerror}; what was there before is untouched"
        ) from None
    with suppress(OSError):  # not every file system can flush a folder; the file is whole and in its place
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; only for the process that holds the run's lock."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` (created, never removed), waiting for another process that holds it; yield whether.

    False where the file system has no locks: two downloads at once then both work, since each ends in one rename.
    """
    with path.open("a") as file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which holds {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            locked = False
        yield locked


@contextlib.contextmanager
def partial_folder(target: Path, *, alone: bool) -> Iterator[Path]:
    """A new folder beside `target`, to be filled and renamed to it; whatever is left of it at the end is removed.

    `alone` says that a lock is held, so that any other such folder was left by a process that was killed: it goes too.
    """
    if alone:
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock_folder(folder: Path) -> IO[str]:
    """Create `folder` and hold it for this process; `ConfigError` where another run holds it."""
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
            raise ConfigError(
                f"{folder}: another run is writing here; wait for it or choose another --run-dir"
            ) from None
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
