"""Test and measure a new GPU in one command: checks, tests, limits, the ladder, records, the most valuable part first.

    python -m tools.bring_up --out DIR --minutes 9                  # repeat until the exit status is not 75
    python -m tools.bring_up --out DIR --list                       # which part fits into which call; runs nothing
    python -m tools.bring_up --out DIR --minutes 9 --baseline OLD   # compare with an earlier bring-up
    python -m tools.bring_up --out DIR --minutes 5 --small          # a rehearsal: every part at its smallest size

Each part runs in its own process. After each part DIR/packed/ is written: the page, the figures and the raw logs.
The next call with the same DIR resumes, also on another machine of the same kind. Parts whose data are missing wait for
them. Ctrl-C and SIGTERM end the current part and the command, with everything written.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from textwrap import shorten

from filelock import FileLock, Timeout

from tools.bench.reports import VERSIONS, differences
from tools.bring_up.figures import read_baseline
from tools.bring_up.page import write_all
from tools.bring_up.parts import PARTS, CallSettings, Part, build_command
from tools.bring_up.progress import PartProgress, check_same, read_progress
from tools.bring_up.run import eager_is_faster, estimate, plan, run_parts
from tools.report import duration
from tools.shared.command_line import minutes, new_parser, path_argument
from tools.shared.output import make_folder
from tools.shared.processes import Deadline, describe_machine
from utils.errors import ConfigError, DataError, exit_in_a_line
from utils.program import INSTALLED

UNFINISHED = 75
STATUSES = """0 all done but parts that are left out; 1 a part failed, or a regression against --baseline; 2 bad usage;
3 the remaining parts need data; 75 run the same command again"""


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that fit into the time; returns the exit status."""
    started = time.monotonic()
    options = parser().parse_args(argv)
    if INSTALLED:
        raise ConfigError("bring_up runs the project's tests, which are not installed; run it in a checkout")
    if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:  # for the page, written last
        raise ConfigError(f"missing: {', '.join(missing)}: pip install them; tools.pack brings them without network")
    parts = [part for part in PARTS if options.part is None or part.name in options.part]
    if options.list:
        print_list(options, parts)
        return 0
    make_folder(options.out)
    try:
        with FileLock(options.out / ".bring_up.lock", timeout=0):
            return run_call(options, parts, Deadline(started + 60 * options.minutes))
    except Timeout:
        raise ConfigError(f"--out {options.out}: another call is using it; wait for it, or give another") from None


def parser() -> argparse.ArgumentParser:
    parser = new_parser("bring_up", __doc__, STATUSES)
    parser.add_argument(
        "--out", type=path_argument, required=True, metavar="DIR", help="folder of state, logs and results"
    )
    parser.add_argument("--minutes", type=minutes, default=9.0, metavar="M", help="time of this call (default: 9)")
    parser.add_argument("--list", action="store_true", help="print parts, states, calls, seconds; run nothing")
    names, text = [part.name for part in PARTS], "run only this part, again if it has failed; repeatable"
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help=text)
    parser.add_argument("--baseline", type=path_argument, metavar="DIR", help="an earlier --out, of any version")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for every part")
    parser.add_argument("--small", action="store_true", help="every part at its smallest size: a rehearsal")
    return parser


def run_call(options: argparse.Namespace, parts: Sequence[Part], deadline: Deadline) -> int:
    """Run the parts, write page and figures, compare with the baseline; returns the exit status."""
    progress, machine = read_progress(options.out), describe_machine()
    check_same(progress, machine, options.small, options.set)
    progress.machine, progress.small, progress.settings = machine, options.small, list(options.set)
    baseline = None if options.baseline is None else read_baseline(options.baseline, machine, small=options.small)
    call = CallSettings(options.out, tuple(options.set), options.small, earlier=baseline.seconds() if baseline else {})
    for part in parts if options.part else ():
        if progress.of(part.name).state == "failed":
            if (folder := call.folder(part)).exists():  # keep the earlier attempt under another name
                number = len(list(folder.parent.glob(f"{part.name}.*"))) + 1
                folder.rename(folder.with_name(f"{part.name}.{number}"))
            progress.parts[part.name] = PartProgress()
    progress.write()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, deadline.stop)
    save = partial(write_all, options.out, progress, baseline)
    print(f"{machine['device']}, torch {machine['torch']}: {duration(deadline.left())} left", flush=True)
    run_parts(parts, call, progress, deadline, save, lambda line: print(line, flush=True))
    progress.write()
    regressions = save()
    if baseline is not None:
        changed = differences(baseline.machine, machine, (*VERSIONS, "dali", "commit", "host"))
        print("".join(f"baseline: {line}\n" for line in changed), end="")
        print("\n".join(f"REGRESSION {line}" for line in regressions) or "no regression")
    entries = {part.name: progress.of(part.name) for part in parts}
    unfinished = [name for name, entry in entries.items() if entry.state in ("waiting", "cut off", "no data")]
    failed = [name for name, entry in entries.items() if entry.state == "failed"]
    left_out = [f"{name} ({entry.note})" for name, entry in entries.items() if entry.state == "left out"]
    settled = sum(entry.settled for entry in entries.values())
    print(f"{options.out / 'packed' / 'bring_up.html'}: {settled} of {len(entries)} parts settled")
    if left_out:
        print(f"left out: {', '.join(left_out)}; install that and run the same command again")
    if failed:
        print(f"failed: {', '.join(failed)}; logs: {options.out}/parts/NAME; to repeat: --part NAME")
    if unfinished:
        no_data = {entries[name].state for name in unfinished} == {"no data"}
        first = "bring the data (tools.pack or tools.prepare_data), then " if no_data else ""
        print(f"{first}run the same command again for: {', '.join(unfinished)}")
        return DataError.exit_status if no_data else UNFINISHED
    return int(bool(failed or regressions))


def print_list(options: argparse.Namespace, parts: Sequence[Part]) -> None:
    """Print for each part in which calls it runs, its seconds and its command. Runs and writes nothing."""
    progress = read_progress(options.out)
    small = options.small or progress.small
    baseline = options.baseline and read_baseline(options.baseline, progress.machine, small=small)
    earlier = baseline.seconds() if baseline else {}
    call = CallSettings(options.out, tuple(options.set), small, eager_is_faster(options.out), earlier=earlier)
    calls, total = plan(parts, call, progress, 60 * options.minutes), 0.0
    for part in parts:
        entry, when = progress.of(part.name), ""
        if not entry.settled:
            seconds, source = estimate(part, call, entry)
            numbers = ", ".join(map(str, calls[part.name])) or "-"
            numbers += " (too short)" if len(calls[part.name]) > 1 and not part.resumable else ""
            when, total = f"call {numbers}: about {duration(seconds)}, {source}", total + seconds
        print(f"{part.name:22} {entry.state:9} {when:44} {part.what}{f' ({entry.note})' if entry.note else ''}")
        print(f"    python {shorten(' '.join(build_command(part, call)[1:]), 240, placeholder=' ...')}")
    number = max((found[-1] for found in calls.values() if found), default=0)
    print(f"about {duration(total)} in total, in {number} call(s) of {options.minutes:g} minutes")


if __name__ == "__main__":
    sys.exit(main())
