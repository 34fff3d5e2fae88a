"""Runs the parts of a bring-up one after the other, each in a process of its own, until the time is up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tools.bring_up.parts import EAGER, SMALL_SECONDS, CallSettings, Part, build_command, passed_tests
from tools.bring_up.progress import BringUpProgress, PartProgress, read_results
from tools.shared.processes import GRACE, Deadline, last_line, run_limited
from tools.shared.read_runs import read_run_folder

MIN_SECONDS = 40.0  # a resumable part does not start with less: its start-up takes some of it
MAX_OVERRUN = 4.0  # times the estimate, but at least MIN_LIMIT: then a part may hang, and is ended
MIN_LIMIT = 300.0
MARGIN = 1.3  # a training that fits with this margin writes no checkpoints, which cost time
MAX_CUT_OFFS = 2  # a part that is not resumable fails after this many
NO_TESTS = 5  # pytest's status if all tests passed in earlier calls
STOPPED = 75  # train.py's, with everything saved
START_SECONDS = 25.0  # of train.py: Python, imports, data, graphs
EPOCH_IMAGES = 50_000 + 10_000 / 3  # an image of validation costs a third of one of training


def _rate(out: Path, part: str, rung: str) -> float | None:
    """Return the measured images/s of a rung of `compile` or `ladder`."""
    return read_results(out, part).get("rungs", {}).get(rung, {}).get("full", {}).get("median")


def eager_is_faster(out: Path) -> bool:
    """Return whether compilation makes the step slower here; under CUDA graphs if they run."""
    for pair in (("eager-graphs", "compiled-graphs"), ("eager", "compiled")):
        eager, compiled = (_rate(out, "compile", rung) for rung in pair)
        if eager and compiled:
            return eager > compiled
    return False


def estimate_seconds(part: Part, call: CallSettings, entry: PartProgress) -> float:
    """Return the seconds until the part is done, from measurements in this folder, else from the table."""
    if call.small:
        return SMALL_SECONDS
    run, rate = call.folder(part) / "run", _rate(call.out, "ladder", part.rung)
    if part.epochs and (run / "metrics.jsonl").exists() and (epochs := read_run_folder(run).epochs):
        return START_SECONDS + (part.epochs - len(epochs)) * epochs[-1]["seconds"] / len(epochs)
    if part.epochs and rate:
        return START_SECONDS + part.epochs * EPOCH_IMAGES / rate
    if part.resumable:
        return max(part.seconds - entry.seconds, part.seconds / 10)
    return max(part.seconds, 1.5 * entry.seconds / max(1, entry.calls)) if entry.cut_offs else part.seconds


def run_parts(
    parts: Sequence[Part], call: CallSettings, progress: BringUpProgress, deadline: Deadline,
    save: Callable[[], object], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Run the unsettled parts in order; a part that does not fit the time left waits. `save` is called after each."""
    has_whole_call = True  # no part has run in this call yet
    for part in parts:
        entry = progress.of(part.name)
        if entry.settled or deadline.stopped:
            continue
        available = {"cuda": progress.machine.get("cuda")}
        if missing := [name for name in part.needs if not available.get(name, find_spec(name))]:
            entry.state, entry.note = "left out", f"needs {', '.join(missing)}"
            say(f"{part.name}: left out: {entry.note}")
            continue
        # a resumed part stays compiled or eager, whatever the part `compile` has shown since
        resumed = part.resumable and entry.command
        now = replace(call, eager_is_faster=EAGER in entry.command if resumed else eager_is_faster(call.out))
        estimate, left = estimate_seconds(part, now, entry), deadline.left() - GRACE
        if left < (MIN_SECONDS if part.resumable else estimate) and not (has_whole_call and left > 0):
            if entry.state != "cut off":
                entry.state = "waiting"
            entry.note = f"needs about {estimate:.0f} s, {max(0.0, left):.0f} s were left"
            say(f"{part.name}: waits: {entry.note}")
            continue
        now = replace(now, checkpoints=MARGIN * estimate > left or entry.cut_offs > 0)
        say(f"{part.name}: about {estimate:.0f} s ({part.what})")
        limit = min(left, max(MIN_LIMIT, MAX_OVERRUN * estimate))
        _run(part, now, progress, limit, deadline, had_time=has_whole_call or limit < left)
        say(f"{part.name}: {entry.state} after {entry.seconds:.0f} s{f': {entry.note}' if entry.note else ''}")
        has_whole_call = False
        progress.write()
        save()


def _run(
    part: Part, call: CallSettings, progress: BringUpProgress, limit: float, deadline: Deadline, *, had_time: bool
) -> None:
    """Run a part until it is done, failed or cut off. `had_time`: a call cannot give it more time."""
    entry, folder = progress.of(part.name), call.folder(part)
    folder.mkdir(parents=True, exist_ok=True)
    entry.command, entry.calls = build_command(part, call), entry.calls + 1
    entry.state, entry.note = "running", ""
    progress.write()
    started, log = time.monotonic(), folder / f"log-{entry.calls}.txt"
    status = run_limited(entry.command, log, limit, deadline)
    entry.seconds += time.monotonic() - started
    if status == 0 or (status == NO_TESTS and passed_tests(folder)):
        entry.state = "done"
    elif status == 1 and part.warned and part.warned in log.read_text("utf-8", "replace"):
        entry.state, entry.note = "done", "with warnings"
    elif status is not None and status != STOPPED:
        entry.state, entry.note = "failed", f"status {status}: {last_line(log)}"
    elif deadline.stopped:
        entry.state, entry.note = "cut off", "on request"
    else:
        entry.state, entry.note = "cut off", "at its time limit; the next call continues"
        entry.cut_offs += 1
        if not part.resumable and had_time and entry.cut_offs >= MAX_CUT_OFFS:
            entry.state, entry.note = "failed", f"cut off {entry.cut_offs} times; give more --minutes, and --part"
