"""The command resnet50-at-scale, which `pip install` creates: train.py and the tools under one name, from any folder.

    resnet50-at-scale train --config=quickstart
    torchrun --nproc_per_node=2 -m resnet50_at_scale train --config=quickstart

Installed, all files are in one package, resnet50_at_scale (pyproject.toml). The modules import each other as in a
checkout (`utils...`), so this command puts their folder first in sys.path of its process and of its child processes.
"""

import os
import runpy
import sys
from pathlib import Path

CODE = Path(__file__).resolve().parent

# name: (module, what it does)
COMMANDS = {
    "train": ("train", "train a network from a named configuration block"),
    "evaluate": ("tools.evaluate", "evaluate a trained network on its own or other images"),
    "predict": ("tools.predict", "classify images, and show the worst mistakes"),
    "export": ("tools.export", "write the best weights for use elsewhere"),
    "report": ("tools.report", "draw runs as one page"),
    "runs": ("tools.runs", "list runs, show where the time went"),
    "timeline": ("tools.timeline", "draw a training step of profiled runs"),
    "bench": ("tools.bench", "measure one part of the trainer"),
    "doctor": ("tools.doctor", "check a machine before a job"),
    "prepare_data": ("tools.prepare_data", "download CIFAR, or pack and index shards"),
    "torchrun": ("tools.torchrun", "start ranks with torchrun, whose own messages go to a file"),
    "predict_scaling": ("tools.predict_scaling", "estimate the speed on more GPUs"),
    "verify_resume": ("tools.verify_resume", "kill runs and check that nothing is lost"),
}


def main() -> int:
    """Run the module of the command named by the first argument; returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    # As with `python train.py`, no file of the working directory shadows a library or a module of this program.
    sys.path[:] = [str(CODE), *(path for path in sys.path if path not in ("", os.getcwd()))]
    if name in ("-h", "--help"):
        from utils.errors import exit_in_a_line

        lines = [f"  {command:15}  {what}" for command, (_, what) in COMMANDS.items()]
        usage = "usage: resnet50-at-scale COMMAND [OPTION ...]   (COMMAND --help: its options)\n"
        return exit_in_a_line(lambda: print(usage, *lines, sep="\n") or 0)()
    if name == "--version":
        name = "train"
        sys.argv.insert(1, name)
    if name not in COMMANDS:
        print(f"error: no such command: {name}; expected one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    del sys.argv[1]
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
