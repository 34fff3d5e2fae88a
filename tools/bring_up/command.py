"""Everything that waits for a GPU, in order of worth: checks, tests, limits, the ladder, records, in one command.

    python -m tools.bring_up --out DIR --minutes 9                  # again, until its exit status is not 75
    python -m tools.bring_up --out DIR --list                       # parts, their state, and how long they may take
    python -m tools.bring_up --out DIR --minutes 9 --baseline OLD   # is it as fast as it was?
    python -m tools.bring_up --out DIR --minutes 5 --small          # a rehearsal: every part at its smallest size

Each part is a process of its own. After every part what there is is written: DIR/packed/ holds the page, the figures
and the raw logs. The next call with the same DIR goes on where this one ended, on another machine of the same kind too.
Ctrl-C and SIGTERM end the part at hand and the command, with everything written.
"""

import argparse
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tools.bring_up.baseline import read_baseline
from tools.bring_up.page import write_all
from tools.bring_up.parts import CallSettings, Part, select, words
from tools.bring_up.progress import PartProgress, check_same, read_progress
from tools.bring_up.run import Deadline, eager_wins, run_parts, seconds_of
from tools.report import duration
from tools.shared.command_line import minutes, new_parser
from tools.shared.output import make_folder
from utils.errors import ConfigError, ExpectedError, exit_in_a_line
from utils.program import CODE

UNFINISHED = 75
STATUSES = "0 all is done; 1 a part failed, or regressed against --baseline; 2 bad usage; 75 the same command goes on"


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Run what there is time for; returns the exit status."""
    started = time.monotonic()
    options = parser().parse_args(argv)
    parts = select(options.part)
    if options.list:
        show(options, parts)
        return 0
    make_folder(options.out)
    try:
        with FileLock(options.out / ".bring_up.lock", timeout=0):
            return work(options, parts, Deadline(started + 60 * options.minutes))
    except Timeout:
        raise ConfigError(f"--out {options.out}: another call is at work there; wait for it, or give another") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("bring_up", __doc__, STATUSES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="what was done, and what comes of it")
    parser.add_argument("--minutes", type=minutes, default=9.0, metavar="M", help="of this call (default: 9)")
    parser.add_argument("--list", action="store_true", help="show parts, states and estimates; run nothing")
    help_text = "only this one, once more where it has failed; repeatable"
    parser.add_argument("--part", action="append", metavar="NAME", help=help_text)
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="an earlier --out, of any version")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key for every part")
    parser.add_argument("--small", action="store_true", help="every part at its smallest size: a rehearsal")
    return parser


def work(options: argparse.Namespace, parts: Sequence[Part], deadline: Deadline) -> int:
    """Run the parts, write page and figures, compare with the baseline; returns the exit status."""
    progress, machine = read_progress(options.out), look()
    check_same(progress, machine, options.small, options.set)
    progress.machine, progress.small, progress.settings = machine, options.small, list(options.set)
    old = None if options.baseline is None else read_baseline(options.baseline, machine, small=options.small)
    call = CallSettings(options.out, tuple(options.set), options.small)
    for part in parts if options.part else ():
        if progress.of(part.name).state == "failed":
            move_aside(call.folder(part))
            progress.parts[part.name] = PartProgress()
    progress.write()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, deadline.stop)

    def save() -> None:
        write_all(options.out, progress, old)

    print(f"{machine['device']}, torch {machine['torch']}: {duration(deadline.left())} left", flush=True)
    run_parts(parts, call, progress, deadline, save, lambda line: print(line, flush=True))
    progress.write()
    regressions = write_all(options.out, progress, old)
    if old is not None:
        print(*(f"baseline: {line}" for line in old.versions(machine)), sep="\n")
        print(*(f"REGRESSION {line}" for line in regressions or ["none"]), sep="\n")
    states = {part.name: progress.of(part.name).state for part in parts}
    waiting = [name for name, state in states.items() if state in ("waiting", "cut off")]
    failed = [name for name, state in states.items() if state == "failed"]
    print(f"{options.out / 'packed' / 'bring_up.html'}: {len(states) - len(waiting)} of {len(states)} parts settled")
    if failed:
        print(f"failed: {', '.join(failed)}; logs: {options.out}/parts/NAME; once more: --part NAME")
    if waiting:
        print(f"the same command goes on with: {', '.join(waiting)}")
        return UNFINISHED
    return int(bool(failed or regressions))


def look() -> dict[str, Any]:
    """`describe_machine` by another process, so that this one holds no memory of the GPU while it measures."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(describe_machine).result()
    except (ImportError, RuntimeError, OSError) as error:
        raise ExpectedError(f"PyTorch does not start here: {error}\npython -m tools.doctor may say more") from None


def describe_machine() -> dict[str, Any]:
    """Versions, device, commit, memory of the device."""
    import torch

    from utils.distributed.world import choose_device
    from utils.run.logging.environment import describe_environment

    device, packed_commit = choose_device("auto", 0), CODE / "commit.txt"  # of a tree without .git, by tools.pack
    seen = describe_environment(device, 1)
    seen.pop("command")
    if seen["commit"] is None and packed_commit.exists():
        seen["commit"] = packed_commit.read_text("utf-8").strip()
    gigabytes = torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else None
    return seen | {"type": device.type, "gigabytes": gigabytes}


def move_aside(folder: Path) -> None:
    """An earlier attempt stays, under another name, but does not count."""
    if folder.exists():
        number = next(number for number in range(1, 1000) if not folder.with_name(f"{folder.name}.{number}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))


def show(options: argparse.Namespace, parts: Sequence[Part]) -> None:
    """A line for each part, its command below. Runs nothing and writes nothing."""
    progress = read_progress(options.out)
    small, wins = options.small or progress.small, eager_wins(options.out)
    call = CallSettings(options.out, tuple(options.set), small, eager_wins=wins)
    rest = 0.0
    for part in parts:
        entry = progress.of(part.name)
        seconds = 0.0 if entry.settled else seconds_of(part, call, entry)
        rest += seconds
        left = "" if entry.settled else f"about {duration(seconds)}"
        print(f"{part.name:22} {entry.state:9} {left:15} {part.what}{f' ({entry.note})' if entry.note else ''}")
        print(f"    python {' '.join(words(part, call)[1:])}"[:240])
    print(f"about {duration(rest)} in all")
