"""`python -m tools.bench COMMAND`: measure one part of the trainer with trials, median and spread.

A command is a module of this package with `add_arguments(parser)` and `run(options) -> int`, and a line in COMMANDS.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from utils.errors import exit_in_a_line
from utils.program import command

COMMANDS = {
    "ddp_overhead": "what a process group and DDP cost a single process",
    "scaling": "weak and strong scaling over processes, and the share of communication",
    "record": "time to an accuracy, or the accuracy at the end, over several seeds",
    "paired": "gains in accuracy by settings, over the same seeds without them",
    "loaders": "images/s of each data loader, alone and feeding a training step",
    "ladder": "images/s of every rung of speed, as shares of what the machine can do",
    "limits": "what the machine can do: products, convolutions, memory, copies, disk, all-reduce",
    "layers": "where a step's time goes: time, share and rate by kind of operation",
    "peers": "this project's training step against timm's and Lightning's",
}


@exit_in_a_line
def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog=" ".join(command("bench")), description="Measure one part of the trainer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in argv:  # the others are not imported: torch takes its seconds
            importlib.import_module(f"tools.bench.{name}").add_arguments(subparser)
    options = parser.parse_args(argv)
    return importlib.import_module(f"tools.bench.{options.command}").run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
