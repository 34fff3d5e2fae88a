"""Run torchrun with its log in a file, so that a failed job shows its ranks' messages and then one line per node.

    python -m tools.torchrun FILE OPTIONS-OF-TORCHRUN... PROGRAM ...

deploy/slurm_node.sh starts it on each node. FILE is kept only after a failure.
"""

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr

from tools.common import new_parser, path_argument

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def main(argv: Sequence[str] | None = None) -> int:
    statuses = "0 all ranks succeeded; 128 + N ended by signal N; 1 any other failure; 2 FILE exists or cannot be made"
    parser = new_parser("torchrun", __doc__, statuses)
    parser.add_argument("file", type=path_argument, metavar="FILE", help="a new file, for torchrun's log")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="torchrun's arguments")
    options = parser.parse_args(argv)
    wanted = os.environ.get(CPP_LOG_LEVEL)
    os.environ.setdefault(CPP_LOG_LEVEL, "ERROR")  # read at import; else each failed connection prints a C++ stack
    file, problem, status = options.file, "", 0
    try:
        log = file.open("x", encoding="utf-8")
    except OSError as error:
        parser.error(f"{file}: {error.strerror}; expected the name of a new file, for torchrun's log")
    with log, redirect_stderr(log):  # only in this process: the ranks inherit the file descriptor
        from torch.distributed.elastic.multiprocessing.api import SignalException  # here: torch 2.11 keeps this stderr
        from torch.distributed.run import main as torchrun

        if wanted is None:
            del os.environ[CPP_LOG_LEVEL]  # not for the ranks
        try:
            torchrun(options.arguments)
        except SignalException as error:  # a requested stop, not a failure
            problem, status = f"ended by {error.sigval.name}", 128 + error.sigval
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            problem, status = f"{explain(error)}; torchrun's log: {file}", 1
    if status != 1:
        file.unlink()
    if status:
        print(f"torchrun on {socket.gethostname()}: {problem}", file=sys.stderr)
    return status


def explain(error: BaseException) -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        ended = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        return f"rank {rank} {ended}"
    while error.__cause__ is not None:  # such as the socket's error below the rendezvous' error
        error = error.__cause__
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


if __name__ == "__main__":
    sys.exit(main())
