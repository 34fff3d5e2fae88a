"""torchrun with its own words in a file, so that a failed job shows what its ranks said, and then one line.

    python -m tools.torchrun FILE OPTIONS-OF-TORCHRUN... PROGRAM ...

tools/shared/slurm_node.sh starts it on each node. FILE stays only after a failure.
"""

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tools.shared.command_line import new_parser


def main(argv: Sequence[str] | None = None) -> int:
    """torchrun's exit status."""
    parser = new_parser("torchrun", __doc__, "0 all ranks ended in order; 1 otherwise, whatever theirs was")
    parser.add_argument("file", type=Path, metavar="FILE", help="for torchrun's own words")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="torchrun's")
    options = parser.parse_args(argv)
    return start(options.file, options.arguments)


def start(file: Path, arguments: list[str]) -> int:
    """torchrun with these arguments, in this process."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read at the import; else each failed connection shows a C++ stack
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks have their own
    said, problem = sys.stderr, ""
    with file.open("w", encoding="utf-8") as words:
        sys.stderr = words  # of this process alone: the ranks inherit the real one
        try:
            torchrun(arguments)
        except SignalException as error:  # not a failure: who sent it knows
            problem = f"ended by {error.sigval.name}"
            file.unlink()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            problem = f"{explain(error)}; {file} has what torchrun says"
        finally:
            sys.stderr = said
    if problem:
        print(f"torchrun on {socket.gethostname()}: {problem}", file=sys.stderr)
        return 1
    file.unlink()
    return 0


def explain(error: BaseException) -> str:
    """Why torchrun has ended, in a line."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        return f"rank {rank} " + (
            f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        )
    while error.__cause__ is not None:  # such as that of the socket, below that of the rendezvous
        error = error.__cause__
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


if __name__ == "__main__":
    sys.exit(main())
