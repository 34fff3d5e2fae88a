"""`python -m tools.bench COMMAND`: measure one part of the trainer with trials, median and spread.

A command is a module of this package with `add_arguments(parser)` and `run(options) -> int`, and a line in COMMANDS.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from utils.distributed.launch import find_launch
from utils.errors import ConfigError, exit_in_a_line
from utils.program import command

COMMANDS = {
    "scaling": "weak and strong scaling over processes, and the fraction of time spent in communication",
    "record": "time to an accuracy, or the accuracy at the end, over several seeds; gains on the same seeds",
    "loaders": "images/s of each data loader, by itself and feeding a training step",
    "ladder": "images/s of every rung, and as fractions of the hardware limits",
    "limits": "hardware limits: products, convolutions, memory, copies, all-reduce",
    "peers": "this project's training step compared with timm's, Lightning's and plain PyTorch's",
}
ON_ALL_RANKS = ("loaders", "limits")  # the others would measure one device several times at once


@exit_in_a_line
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=command("bench"), description="Measure one part of the trainer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in argv:  # importing all would import torch, which takes seconds
            importlib.import_module(f"tools.bench.{name}").add_arguments(subparser)
    options = parser.parse_args(argv)
    if options.command not in ON_ALL_RANKS and find_launch(os.environ).world_size > 1:
        raise ConfigError(f"bench {options.command} is one process; start it without torchrun, srun or mpirun")
    return importlib.import_module(f"tools.bench.{options.command}").run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
