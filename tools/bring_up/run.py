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
from utils.errors import DataError, Stopped

MIN_SECONDS = 40.0  # a resumable part does not start with less: its start-up takes some of it
MAX_OVERRUN = 4.0  # times the estimate, but at least MIN_LIMIT: then a part may hang, and is ended
MIN_LIMIT = 300.0
MARGIN = 1.3  # a training that fits with this margin writes no checkpoints, which cost time
MAX_CUT_OFFS = 2  # a part that is not resumable fails after this many
NO_TESTS = 5  # pytest's status if all tests passed in earlier calls
CALL_SECONDS = 10.0  # of a call, outside of its parts
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


def estimate(part: Part, call: CallSettings, entry: PartProgress) -> tuple[float, str]:
    """Return the seconds until the part is done, and what they are from."""
    if call.small:
        return SMALL_SECONDS, "a rehearsal's"
    run, rate = call.folder(part) / "run", _rate(call.out, "ladder", part.rung)
    if part.epochs and (run / "metrics.jsonl").exists() and (epochs := read_run_folder(run).epochs):
        return START_SECONDS + (part.epochs - len(epochs)) * epochs[-1]["seconds"] / len(epochs), "by its epochs"
    if part.epochs and rate:
        return START_SECONDS + part.epochs * EPOCH_IMAGES / rate, "by the ladder"
    seconds = call.earlier.get(part.name, part.seconds)
    source = "by the baseline" if part.name in call.earlier else "not measured"
    if part.resumable:
        seconds = max(seconds - entry.seconds, seconds / 10)
    elif entry.cut_offs:
        seconds = max(seconds, 1.5 * entry.seconds / max(1, entry.calls))
    return seconds, source


def fits(part: Part, seconds: float, left: float, *, whole_call: bool) -> bool:
    """Return whether a part starts that needs `seconds`. `whole_call`: no part has run in this call yet."""
    return left >= (min(MIN_SECONDS, seconds) if part.resumable else seconds) or (whole_call and left > 0)


def plan(parts: Sequence[Part], call: CallSettings, progress: BringUpProgress, seconds: float) -> dict[str, list[int]]:
    """Return {part: the numbers of the calls, each of `seconds`, in which it runs} if estimates are right."""
    entries = [(part, progress.of(part.name)) for part in parts]
    needed = {part.name: 0.0 if entry.settled else estimate(part, call, entry)[0] for part, entry in entries}
    calls: dict[str, list[int]] = {part.name: [] for part in parts}
    number = 0
    while any(needed.values()) and seconds > GRACE + CALL_SECONDS:
        number, left, whole_call = number + 1, seconds - GRACE - CALL_SECONDS, True
        for part in parts:
            need = needed[part.name]
            if need and fits(part, need, left, whole_call=whole_call):
                took = min(need, left)
                calls[part.name].append(number)
                fails = not part.resumable and len(calls[part.name]) == MAX_CUT_OFFS
                needed[part.name] = 0.0 if took == need or fails else need - took * part.resumable
                left, whole_call = left - took, False
    return calls


def run_parts(
    parts: Sequence[Part], call: CallSettings, progress: BringUpProgress, deadline: Deadline,
    save: Callable[[], object], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Run the unsettled parts in order; a part that does not fit the time left waits. `save` is called after each."""
    whole_call = True
    available = {"cuda": bool(progress.machine.get("cuda")), "data": True}
    for part in parts:
        entry = progress.of(part.name)
        if entry.settled or deadline.stopped:
            continue
        if missing := [name for name in part.needs if not available.get(name, find_spec(name))]:
            entry.state, entry.note = "no data" if missing == ["data"] else "left out", f"needs {', '.join(missing)}"
            say(f"{part.name}: {entry.state}: {entry.note}")
            continue
        # a resumed part stays compiled or eager, whatever the part `compile` has shown since
        resumed = part.resumable and entry.command
        now = replace(call, eager_is_faster=EAGER in entry.command if resumed else eager_is_faster(call.out))
        (seconds, _source), left = estimate(part, now, entry), deadline.left() - GRACE
        if not fits(part, seconds, left, whole_call=whole_call):
            entry.state = "cut off" if entry.state == "cut off" else "waiting"
            entry.note = f"needs about {seconds:.0f} s, {max(0.0, left):.0f} s were left"
            say(f"{part.name}: waits: {entry.note}")
            continue
        now = replace(now, checkpoints=MARGIN * seconds > left or entry.cut_offs > 0)
        say(f"{part.name}: about {seconds:.0f} s ({part.what})")
        limit = min(left, max(MIN_LIMIT, MAX_OVERRUN * seconds))
        _run(part, now, progress, limit, deadline, had_time=whole_call or limit < left)
        say(f"{part.name}: {entry.state} after {entry.seconds:.0f} s{f': {entry.note}' if entry.note else ''}")
        whole_call, available["data"] = False, available["data"] and entry.state != "no data"
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
    elif status == DataError.exit_status and "data" in part.needs:
        entry.state, entry.note = "no data", last_line(log)
    elif status is not None and status != Stopped.exit_status:
        entry.state, entry.note = "failed", f"status {status}: {last_line(log)}"
    elif deadline.stopped:
        entry.state, entry.note = "cut off", "on request"
    else:
        entry.state, entry.note = "cut off", "at its time limit; the next call continues"
        entry.cut_offs += 1
        if not part.resumable and had_time and entry.cut_offs >= MAX_CUT_OFFS:
            entry.state, entry.note = "failed", f"cut off {entry.cut_offs} times; give more --minutes, and --part"
