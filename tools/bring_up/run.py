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

from tools.bring_up.estimates import Known, seconds_of
from tools.bring_up.ledger import Entry, Ledger
from tools.bring_up.parts import EAGER, Part, Setting, absent, passed_tests, words
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


@dataclass
class Clock:
    """When this call must end, and whether it was asked to end now. Times are of time.monotonic."""

    deadline: float
    stopped: bool = False

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def stop(self, *_: object) -> None:
        """A signal's handler."""
        self.stopped = True


def run_parts(
    parts: Sequence[Part], setting: Setting, ledger: Ledger, known: Known, clock: Clock, save: Callable[[], None],
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Run what is not settled yet, in order; what does not fit the time left waits. `save` is called after each."""
    whole_call = True  # nothing has been measured in this call yet
    for part in parts:
        entry = ledger.entry(part.name)
        if entry.settled or clock.stopped:
            continue
        missing = absent(part.needs, ledger.machine)
        if missing:
            entry.state, entry.note = "left out", f"needs {', '.join(missing)}"
            say(f"{part.name}: left out: {entry.note}")
            continue
        # what goes on does so as it began, whatever the part `compile` has found out since
        began = part.goes_on and entry.command
        now = replace(setting, eager_wins=EAGER in entry.command if began else known.eager_wins())
        estimate = seconds_of(part, now, entry, known)
        left = clock.left() - GRACE
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
        _run(part, now, ledger, limit, clock, had_time=whole_call or limit < left)
        say(f"{part.name}: {entry.state} after {entry.seconds:.0f} s{f': {entry.note}' if entry.note else ''}")
        whole_call = False
        ledger.write()
        save()


def _run(part: Part, setting: Setting, ledger: Ledger, limit: float, clock: Clock, *, had_time: bool) -> None:
    entry = ledger.entry(part.name)
    folder = setting.folder(part)
    folder.mkdir(parents=True, exist_ok=True)
    entry.command = words(part, setting)
    entry.calls += 1
    entry.state, entry.note, entry.host = "running", "", ledger.machine.get("host", "")
    ledger.write()
    started = time.monotonic()
    log = folder / f"log-{entry.calls}.txt"
    status = run_limited(entry.command, log, limit, clock)
    entry.seconds += time.monotonic() - started
    _judge(part, entry, status, log, asked=clock.stopped, had_time=had_time)


def _judge(part: Part, entry: Entry, status: int | None, log: Path, *, asked: bool, had_time: bool) -> None:
    """Done, failed or cut off. `status`: None where the part was ended from here; `had_time`: it had all that a part
    can have."""
    if status == 0 or (status == NO_TESTS and passed_tests(log.parent)):
        entry.state = "done"
    elif status is not None and status != STOPPED:
        entry.state, entry.note = "failed", f"status {status}: {last_line(log)}"
    else:
        entry.state = "cut off"
        entry.note = "on request" if asked else "at its limit; goes on in the next call"
        entry.cut_offs += not asked
        if not (part.goes_on or asked) and had_time and entry.cut_offs >= TRIES:
            entry.state, entry.note = (
                "failed",
                f"cut off {entry.cut_offs} times; give more --minutes, and --again",
            )


def run_limited(command: Sequence[str], log: Path, limit: float, clock: Clock) -> int | None:
    """The exit status of a command, whose output goes into `log`; None where it was ended after `limit` seconds or by a
    signal to this process. Nothing that it started is left behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CODE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509 - there are no threads here
        )  # fmt: skip
        ends = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < ends and not clock.stopped:
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
