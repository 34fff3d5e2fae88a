"""The errors a user can cause or mend, each with the exit status that scripts may rely on.

`main()` of every command prints such an error as one or two lines, without a traceback. Anything else is a bug.
"""

import functools
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

Parameters = ParamSpec("Parameters")

# What torch says when another process of the run is gone: gloo, NCCL, and the store that they meet at.
LOST_RANK = re.compile(
    "connection (was )?(closed|reset) by (remote )?peer|broken pipe|remote process exited|socket closed|gloo/transport",
    re.IGNORECASE,
)
# What PyTorch says when the memory of a device or of the host does not suffice, and how much it wanted.
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory", re.IGNORECASE)
WANTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ \w+)", re.IGNORECASE)

# What DDP says at the second step of a network with parameters that got no gradient in the first.
UNUSED_PARAMETERS = "parameters that were not used in producing loss"


class ExpectedError(Exception):
    """Something foreseeable went wrong; the message names the thing, the value, what is allowed and the remedy."""

    exit_status = 1
    rank: int | None = None  # where it happened, if several ranks raise what happened to one


class ConfigError(ExpectedError):
    exit_status = 2  # bad usage or configuration


class DataError(ExpectedError):
    exit_status = 3  # data that is missing, truncated or altered


class CheckpointError(ExpectedError):
    exit_status = 4  # no usable checkpoint where one was demanded, or one that does not fit


class CorruptionError(ExpectedError):
    exit_status = 5  # the machine computed wrong, and what it computed was not saved


class Stopped(ExpectedError):
    exit_status = 75  # on request, with everything saved: the same command goes on from there (sysexits.h EX_TEMPFAIL)


def exit_in_a_line(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """A command's `main` that prints an `ExpectedError` without traceback and returns its status; for Ctrl-C 130,
    and 141 where the reader of its output has left."""

    @functools.wraps(main)
    def guarded(*arguments: Parameters.args, **options: Parameters.kwargs) -> int:
        try:
            status = main(*arguments, **options)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            return 128 + signal.SIGPIPE
        except ExpectedError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return guarded


def _reader_is_gone() -> bool:
    """Whether nobody reads the standard output any more, as after `| head`; then the rest of the output is dropped."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not any(events & select.POLLERR for _, events in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def explain(error: Exception) -> ExpectedError | None:
    """What a failure of the machine or of another process means, in one or two lines; None for what may be a bug."""
    text = str(error)
    if isinstance(error, ExpectedError):
        return error
    if "DataLoader worker" in text:
        return ExpectedError(_explain_loader_worker(text))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(text)):
        return ExpectedError(_explain_memory(text))
    if isinstance(error, RuntimeError) and UNUSED_PARAMETERS in text:
        return ConfigError(
            "the network has parameters that its outputs do not depend on, which several ranks cannot train\n"
            "remove them, or leave them out of the training with requires_grad_(False)"
        )
    if isinstance(error, RuntimeError) and LOST_RANK.search(text):
        return ExpectedError("another process of this run has ended, so this one ends too; see its message")
    return None


def _explain_memory(text: str) -> str:
    wanted = WANTED.search(text)
    where = "GPU" if "CUDA" in text else "host"
    return (
        f"out of {where} memory{f', at an allocation of {wanted[1]}' if wanted else ''}\n"
        "use a smaller micro_batch_size, which leaves batch_size as it is, a smaller batch_size, or enable_amp=true; "
        "--dry-run estimates the need"
    )


def _explain_loader_worker(text: str) -> str:
    if re.search(r"Caught \w+ in DataLoader worker", text):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        files = [line for line in lines if line.startswith("File ")]
        return f"a loader worker failed: {lines[-1]} ({files[-1] if files else 'file unknown'})"
    process = re.search(r"pid(?:\(s\))?:? ([\d, ]+)", text)
    name = f"loader worker {process[1].strip()}" if process else "a loader worker"
    if "Killed" in text:
        return (
            f"{name} was killed by SIGKILL, which is what the kernel does when memory runs out\n"
            "use fewer num_data_workers, data_loader=device, or a job with more memory; the last checkpoint is good"
        )
    return f"{name} exited unexpectedly: {text.splitlines()[0]}; the last checkpoint is good"
