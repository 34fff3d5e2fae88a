"""Runs the parts of a bring-up one after the other, each in a process of its own, until the time is up."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tools.bring_up.parts import EAGER, SMALL_SECONDS, CallSettings, Part, absent, passed_tests, words
from tools.bring_up.progress import BringUpProgress, PartProgress, read_results
from tools.shared.read_runs import read_run_folder
from utils.program import CODE

GRACE = 20.0  # seconds that a part has to save and end after SIGTERM, before it is killed
LEAST = 40.0  # seconds: what goes on by itself is not begun with less, for its start alone takes some
PATIENCE = 4.0  # times the estimate, at least FLOOR: a part that has the time is given up then, since it may hang
FLOOR = 300.0
MARGIN = 1.3  # a training writes checkpoints, which cost some of its time, unless it fits with this margin
TRIES = 2  # a part that begins again each time is given up when it was cut off so often
NO_TESTS = 5  # pytest's status where all tests have passed in earlier calls
STOPPED = 75  # train.py's, with everything saved
PR_SET_PDEATHSIG = 1
START = 25.0  # seconds of a run of train.py: Python, imports, data, graphs
COMPILING = 60.0
VALIDATION = 50_000 + 10_000 / 3  # images of an epoch, where one of validation costs a third of one of training


@dataclass
class Deadline:
    """When this call must end, and whether it was asked to end now. Times are of time.monotonic."""

    moment: float
    stopped: bool = False

    def left(self) -> float:
        return self.moment - time.monotonic()

    def stop(self, *_: object) -> None:
        """A signal's handler."""
        self.stopped = True


def _rate(out: Path, part: str, rung: str) -> float | None:
    """Images/s of a rung of one of the two ladders, where it is measured."""
    return read_results(out, part).get("rungs", {}).get(rung, {}).get("full", {}).get("median")


def eager_wins(out: Path) -> bool:
    """Whether compilation makes the step slower here, under CUDA graphs where these run."""
    for pair in (("eager-graphs", "compiled-graphs"), ("eager", "compiled")):
        eager, compiled = (_rate(out, "compile", rung) for rung in pair)
        if eager and compiled:
            return eager > compiled
    return False


def seconds_of(part: Part, call: CallSettings, entry: PartProgress) -> float:
    """Seconds until the part is done, by what was measured in this folder, else by the table's guess."""
    if call.small:
        return SMALL_SECONDS
    run, rate = call.folder(part) / "run", _rate(call.out, "ladder", part.rung)
    if part.epochs and (run / "metrics.jsonl").exists() and (epochs := read_run_folder(run).epochs):
        return START + (part.epochs - len(epochs)) * epochs[-1]["seconds"] / len(epochs)
    if part.epochs and rate:
        compiling = COMPILING if part.name == "accuracy" and not call.eager_wins else 0.0
        return START + compiling + part.epochs * VALIDATION / rate
    if part.goes_on:
        return max(part.seconds - entry.seconds, part.seconds / 10)
    # it begins again, and has shown how long it takes at least
    return max(part.seconds, 1.5 * entry.seconds / max(1, entry.calls)) if entry.cut_offs else part.seconds


def run_parts(
    parts: Sequence[Part], call: CallSettings, progress: BringUpProgress, deadline: Deadline, save: Callable[[], None],
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Run what is not settled yet, in order; what does not fit the time left waits. `save` is called after each."""
    whole_call = True  # nothing has been measured in this call yet
    for part in parts:
        entry = progress.of(part.name)
        if entry.settled or deadline.stopped:
            continue
        missing = absent(part.needs, progress.machine)
        if missing:
            entry.state, entry.note = "left out", f"needs {', '.join(missing)}"
            say(f"{part.name}: left out: {entry.note}")
            continue
        # what goes on does so as it began, whatever the part `compile` has found out since
        began = part.goes_on and entry.command
        now = replace(call, eager_wins=EAGER in entry.command if began else eager_wins(call.out))
        estimate = seconds_of(part, now, entry)
        left = deadline.left() - GRACE
        if left < (LEAST if part.goes_on else estimate) and not (whole_call and left > 0):
            if entry.state != "cut off":
                entry.state = "waiting"
            entry.note = f"needs about {estimate:.0f} s, {max(0.0, left):.0f} s were left"
            say(f"{part.name}: waits: {entry.note}")
            continue
        # the records are trained without writing checkpoints, unless this is their only way to the end
        now = replace(now, checkpoints=MARGIN * estimate > left or entry.cut_offs > 0)
        say(f"{part.name}: about {estimate:.0f} s ({part.what})")
        limit = min(left, max(FLOOR, PATIENCE * estimate))
        _run(part, now, progress, limit, deadline, had_time=whole_call or limit < left)
        say(f"{part.name}: {entry.state} after {entry.seconds:.0f} s{f': {entry.note}' if entry.note else ''}")
        whole_call = False
        progress.write()
        save()


def _run(
    part: Part, call: CallSettings, progress: BringUpProgress, limit: float, deadline: Deadline, *, had_time: bool
) -> None:
    """Run a part: it is done, failed or cut off. `had_time`: it has all that a part can have."""
    entry, folder = progress.of(part.name), call.folder(part)
    folder.mkdir(parents=True, exist_ok=True)
    entry.command = words(part, call)
    entry.calls += 1
    entry.state, entry.note, entry.host = "running", "", progress.machine.get("host", "")
    progress.write()
    started, log = time.monotonic(), folder / f"log-{entry.calls}.txt"
    status = run_limited(entry.command, log, limit, deadline)
    entry.seconds += time.monotonic() - started
    if status == 0 or (status == NO_TESTS and passed_tests(folder)):
        entry.state = "done"
    elif status is not None and status != STOPPED:
        entry.state, entry.note = "failed", f"status {status}: {last_line(log)}"
    elif deadline.stopped:
        entry.state, entry.note = "cut off", "on request"
    else:
        entry.state, entry.note = "cut off", "at its limit; goes on in the next call"
        entry.cut_offs += 1
        if not part.goes_on and had_time and entry.cut_offs >= TRIES:
            entry.state, entry.note = "failed", f"cut off {entry.cut_offs} times; give more --minutes, and --part"


def run_limited(command: Sequence[str], log: Path, limit: float, deadline: Deadline) -> int | None:
    """The exit status of a command, whose output goes into `log`; None where it was ended after `limit` seconds or by a
    signal to this process. Nothing that it started is left behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CODE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509 - there are no threads here
        )  # fmt: skip
        ends = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < ends and not deadline.stopped:
                time.sleep(0.05)
            ended_itself = process.poll() is not None
            if not ended_itself:
                _signal_group(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
    # a run may reach its end, or fail, in the grace
    return process.returncode if ended_itself or process.returncode == 0 else None


def _die_with_parent() -> None:
    """Also when this process is killed: a part that measures on by itself would spoil what the next call measures."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def last_line(log: Path) -> str:
    """What a log says last, or its last error."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]
