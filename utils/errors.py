"""Errors that a user can cause or fix, each with an exit status that scripts may rely on.

Every command's `main()` prints such an error as one or two lines, without a traceback. Any other exception is a bug,
except a `PermissionError` that names a path.
"""

import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TextIO

Parameters = ParamSpec("Parameters")

# torch's messages (gloo, NCCL, the rendezvous store) when another process of the run is gone.
LOST_RANK = re.compile(
    "connection (was )?(closed|reset) by (remote )?peer|connection was likely closed|broken pipe|remote process exited|"
    "socket closed|gloo/transport",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile("out of memory|can(?:'|no)t allocate memory", re.IGNORECASE)


class ExpectedError(Exception):
    """An error with a message for the user: the thing, its value, the allowed values and the remedy."""

    exit_status = 1
    rank: int | None = None  # the rank that failed, if all ranks raise its error


class ConfigError(ExpectedError):
    exit_status = 2  # bad usage or configuration


class DataError(ExpectedError):
    exit_status = 3  # data that is missing, truncated or altered


class CheckpointError(ExpectedError):
    exit_status = 4  # no usable checkpoint where one is required, or one that does not fit


class CorruptionError(ExpectedError):
    exit_status = 5  # the machine computed wrong; the wrong result was not saved


class Stopped(ExpectedError):
    exit_status = 75  # on request, with everything saved; the same command resumes (EX_TEMPFAIL of sysexits.h)


def exit_in_a_line(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Decorate a command's `main` to print an `ExpectedError` without a traceback and return its status. The status is
    1 for a path without permission, 130 after Ctrl-C, and 141 if the reader of the output has closed the pipe."""

    @functools.wraps(main)
    def guarded(*arguments: Parameters.args, **options: Parameters.kwargs) -> int:
        occupy_streams()
        try:
            with complete_output():
                return main(*arguments, **options)
        except ExpectedError as error:
            print_error(f"error: {error}")
            return error.exit_status
        except PermissionError as error:
            if error.filename is None:
                raise
            print_error(f"error: {error.filename}: {error.strerror}; give a path that you may use")
            return 1
        except KeyboardInterrupt:
            print_error("interrupted")
            return 130

    return guarded


def occupy_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no other file gets the number 0, 1 or 2,
    and have characters escaped that the encoding of the output lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opened with the lowest free number, this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        if number and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")


@contextmanager
def complete_output() -> Iterator[None]:
    """Flush the standard output after the block, which prints a command's result. Raises `ExpectedError` if it cannot
    be written, and `SystemExit` with 141 if nobody reads it any more, as after `| head`."""
    more = ""
    try:
        yield
    except OSError:
        more = "\n"  # fails too if the output was the cause
        raise
    finally:
        try:
            with suppress(AttributeError):  # an object that has only `write`
                print(end=more, flush=True)
        except OSError as error:
            drop(sys.stdout)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise ExpectedError(f"standard output: {error.strerror}") from None


def drop(stream: TextIO) -> None:
    """Drop all output of a stream from here on, also what it still holds in its buffer."""
    with suppress(OSError, ValueError, AttributeError):  # no file, or a closed one
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_text(text: str, stream: TextIO) -> None:
    """Print to the screen; drop this text and all later ones if nobody reads them any more or the disk is full."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, AttributeError):  # the last two: a closed stream, an object that has only `write`
        drop(stream)


def print_error(message: str) -> None:
    """Print a line to stderr, as `print_text` does."""
    print_text(f"{message}\n", sys.stderr)


SYSTEM = (RuntimeError, OSError, MemoryError)
# Failures that are no bugs: types, pattern of "TYPE: TEXT", kind and text of the user's error, in which {line} is the
# text's first line, {0}, {1} are the pattern's groups, and {remedy} is of `_remedy`. The first that fits counts.
FAILURES: tuple[tuple[tuple[type[Exception], ...], str, type[ExpectedError], str], ...] = (
    (  # of the system, or of PyTorch when it passes a tensor between processes; or a loader worker's exit code (EMFILE)
        SYSTEM, r"too many open files|items of ancdata|exit codes? .*\b24\b", ExpectedError,
        "too many open files: raise the limit before the start (ulimit -n 65536), or use fewer num_data_workers or "
        "data_loader=device",
    ),
    (
        (Exception,), r"Caught \w+ in DataLoader worker[\s\S]*((?-i:File) .*)[\s\S]*\n\s*(\S.*)\s*$", ExpectedError,
        "a loader worker failed: {1} ({0})",
    ),
    (  # PyTorch reports the signal or not, depending on what it waited for
        (Exception,), "DataLoader worker", ExpectedError,
        "a loader worker was killed, as the kernel does when host memory or /dev/shm runs out ({line})\n"
        "use fewer num_data_workers, data_loader=device, a job with more memory, or docker run --shm-size=8g; the last "
        "checkpoint is good (bus error: or a memory-mapped file of images was cut)",
    ),
    (
        SYSTEM, f"MemoryError|{OUT_OF_MEMORY.pattern}", ExpectedError,
        "out of memory: {line}\nuse {remedy}; --dry-run estimates the memory of training",
    ),
    (
        (RuntimeError,), r"(\S+) does not have a deterministic implementation", ConfigError,
        "deterministic is true, but PyTorch has no deterministic kernel for {0} on this device\n"
        "use deterministic: false, another network, or device: cpu",
    ),
    (  # DDP's message at the second step
        (RuntimeError,), "parameters that were not used in producing loss", ConfigError,
        "the network has parameters that its outputs do not depend on in every step; several ranks cannot train it\n"
        "remove these parameters, or exclude them from training with requires_grad_(False)",
    ),
    (
        (RuntimeError,), LOST_RANK.pattern, ExpectedError,
        "another process of this run has ended, so this one ends too; see its message",
    ),
)  # fmt: skip


def explain(error: Exception) -> ExpectedError | None:
    """Return the user's message for a failure of the machine or of another process; None if it may be a bug."""
    if isinstance(error, ExpectedError):
        return error
    text = f"{type(error).__name__}: {error}"
    for types, pattern, kind, message in FAILURES:
        if isinstance(error, types) and (found := re.search(pattern, text, re.IGNORECASE)):
            return kind(message.format(*found.groups(), line=str(error).partition("\n")[0], remedy=_remedy(error)))
    return None


def _remedy(error: Exception) -> str:
    """Return what needs less memory in the part of the run where the error was raised."""
    files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    if "step.py" in files:  # of utils/training, as validation.py
        return "a smaller micro_batch_size, which keeps batch_size, a smaller batch_size, or enable_amp=true"
    return "a smaller valid_batch_size_per_gpu" if "validation.py" in files else "less data, or more memory"
