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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from tools.bring_up.baseline import Change, read_baseline, regressions, versions
from tools.bring_up.estimates import Known, baseline_parts, seconds_of
from tools.bring_up.ledger import Entry, Ledger, check_same, read_ledger
from tools.bring_up.machine import look
from tools.bring_up.page import write_all
from tools.bring_up.parts import Part, Setting, select, words
from tools.bring_up.run import Clock, run_parts
from tools.report import duration
from tools.shared.command_line import minutes, new_parser
from tools.shared.output import make_folder
from utils.errors import ConfigError, exit_in_a_line

UNFINISHED = 75
STATUSES = "0 all is done; 1 a part failed, or regressed against --baseline; 2 bad usage; 75 the same command goes on"


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Run what there is time for; returns the exit status."""
    started = time.monotonic()
    options = parser().parse_args(argv)
    try:
        parts = select(options.part)
        again = select(options.again or ())
    except KeyError as error:
        names = ", ".join(part.name for part in select(None))
        raise ConfigError(f"there is no part {error.args[0]}; expected one of: {names}") from None
    if options.list:
        show(options.out, parts, options)
        return 0
    make_folder(options.out)
    try:
        with FileLock(options.out / ".bring_up.lock", timeout=0):
            return work(options, parts, again, Clock(started + 60 * options.minutes))
    except Timeout:
        raise ConfigError(f"--out {options.out}: another call is at work there; wait for it, or give another") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("bring_up", __doc__, STATUSES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="what was done, and what comes of it")
    parser.add_argument("--minutes", type=minutes, default=9.0, metavar="M", help="of this call (default: 9)")
    parser.add_argument("--list", action="store_true", help="show parts, states and estimates; run nothing")
    parser.add_argument("--part", action="append", metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--again", action="append", metavar="NAME", help="run this one again; repeatable")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="an earlier --out, of any version")
    parser.add_argument("--other-device", action="store_true", help="compare with a --baseline of another device too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key for every part")
    parser.add_argument("--small", action="store_true", help="every part at its smallest size: a rehearsal")
    return parser


def work(options: argparse.Namespace, parts: Sequence[Part], again: Sequence[Part], clock: Clock) -> int:
    """Run the parts, write page and figures, compare with the baseline."""
    ledger = read_ledger(options.out)
    machine = look()
    check_same(ledger, machine, options.small, options.set)
    ledger.machine, ledger.small, ledger.settings = machine, options.small, list(options.set)
    old = None
    if options.baseline is not None:
        old = read_baseline(options.baseline, machine, small=options.small, other_device=options.other_device)
    setting = Setting(options.out, tuple(options.set), options.small)
    for part in again:
        move_aside(setting.folder(part))
        ledger.parts[part.name] = Entry()
    ledger.write()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, clock.stop)
    worse: list[str] = []

    def save() -> None:
        worse[:], changes = _compare(options, ledger, old)
        write_all(options.out, ledger, changes, worse)

    known = Known(options.out, baseline_parts(old, machine))
    print(f"{machine['device']}, torch {machine['torch']}: {duration(clock.left())} left", flush=True)
    run_parts(parts, setting, ledger, known, clock, save, lambda line: print(line, flush=True))
    ledger.write()
    save()
    return conclude(options, parts, ledger, old, worse)


def _compare(options: argparse.Namespace, ledger: Ledger, old: Ledger | None) -> tuple[list[str], list[Change]]:
    if old is None:
        return [], []
    changes, lines = regressions(options.baseline, ledger, options.out, old)
    return lines, changes


def conclude(
    options: argparse.Namespace, parts: Sequence[Part], ledger: Ledger, old: Ledger | None, worse: Sequence[str]
) -> int:
    """Say what came of it; returns the exit status."""
    if old is not None:
        print(*(f"baseline: {line}" for line in versions(old.machine, ledger.machine)), sep="\n")
        print(*(f"REGRESSION {line}" for line in worse or ["none"]), sep="\n")
    states = {part.name: ledger.entry(part.name).state for part in parts}
    waiting = [name for name, state in states.items() if state in ("waiting", "cut off")]
    failed = [name for name, state in states.items() if state == "failed"]
    print(f"{options.out / 'packed' / 'bring_up.html'}: {len(states) - len(waiting)} of {len(states)} parts settled")
    if failed:
        print(f"failed: {', '.join(failed)}; logs: {options.out}/parts/NAME; once more: --again NAME", file=sys.stderr)
    if waiting:
        print(f"the same command goes on with: {', '.join(waiting)}")
        return UNFINISHED
    return int(bool(failed or worse))


def move_aside(folder: Path) -> None:
    """An earlier attempt stays, under another name, but does not count."""
    if folder.exists():
        number = next(number for number in range(1, 1000) if not folder.with_name(f"{folder.name}.{number}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))


def show(out: Path, parts: Sequence[Part], options: argparse.Namespace) -> None:
    """A line for each part, its command below. Runs nothing and writes nothing."""
    ledger = read_ledger(out)
    known = Known(out)
    setting = Setting(out, tuple(options.set), options.small or ledger.small, eager_wins=known.eager_wins())
    rest = 0.0
    for part in parts:
        entry = ledger.parts.get(part.name, Entry())
        seconds = 0.0 if entry.settled else seconds_of(part, setting, entry, known)
        rest += seconds
        left = "" if entry.settled else f"about {duration(seconds)}"
        print(f"{part.name:22} {entry.state:9} {left:15} {part.what}{f' ({entry.note})' if entry.note else ''}")
        print(f"    python {' '.join(words(part, setting)[1:])}"[:240])
    print(f"about {duration(rest)} in all")
