"""A rehearsal of tools.bring_up: interrupts every part, then repeats the command until all parts are done.

    python -m tests.rehearse_bring_up DIR MINUTES [ARGUMENTS OF bring_up] > transcript.txt    # DIR: not there yet

Each part is interrupted in a call of MINUTES: by their end, or earlier by a signal to the command, in turn SIGTERM,
SIGINT and SIGKILL, as soon as a training has written its first figures, a test has passed, or a bench has run for some
seconds. Prints each command with its output, and at the end how each part resumed.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.bring_up.__main__ import UNFINISHED
from tools.bring_up.parts import PARTS, Part
from tools.bring_up.progress import BringUpProgress, read_progress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
LIMIT = 300.0  # seconds until a part must be under way
BENCH_SECONDS = 4.0  # a bench writes nothing until its end: interrupt it after this
WIDTH = 200
LONGER = ("--set=max_epochs=8", "--set=save_checkpoint=true")  # so that a training can be interrupted


def start(out: Path, arguments: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tools.bring_up", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def report(arguments: Sequence[str], lines: Sequence[str], status: int, out: Path, note: str = "") -> None:
    print(f"$ python -m tools.bring_up --out DIR {' '.join(arguments)}{note}")
    for line in lines:
        print(f"    {line.rstrip().replace(str(out), 'DIR')}"[:WIDTH])
    print(f"    exit status {status}", flush=True)


def is_under_way(part: Part, folder: Path, began: float) -> bool:
    """Return whether a part has done some of its work, but not all."""
    if part.epochs:
        metrics, checkpoints = folder / "run/metrics.jsonl", folder / "run/checkpoints"
        rows = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
        return any(json.loads(row)["kind"] == "epoch" for row in rows[:-1]) and any(checkpoints.glob("*.pt"))
    if "pytest" in part.command:
        return any(" PASSED" in path.read_text("utf-8", "replace") for path in folder.glob("log-*.txt"))
    return time.monotonic() - began > BENCH_SECONDS


def interrupt(part: Part, number: signal.Signals, out: Path, arguments: Sequence[str]) -> None:
    """Call this part and end it by a signal to the command."""
    words = [*arguments, "--part", part.name]
    process, lines, sent = start(out, words), [], False
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"{part.name}: about"):
            began = time.monotonic()
            while process.poll() is None and time.monotonic() < began + LIMIT:
                if is_under_way(part, out / "parts" / part.name, began):
                    process.send_signal(number)
                    sent = True
                    break
                time.sleep(0.02)
    report(words, lines, process.wait(), out, f"    # {number.name} under way" if sent else "")


def outcomes(progress: BringUpProgress, out: Path) -> Iterator[str]:
    """Yield how each part ended, after how many calls, and how the last call resumed."""
    for part in PARTS:
        entry = progress.of(part.name)
        logs = sorted((out / "parts" / part.name).glob("log-*.txt"), key=lambda path: int(path.stem[4:]))
        text = logs[-1].read_text("utf-8", "replace") if logs else ""
        resumed = re.search(r"Resuming from .*?(epoch \d+, batch \d+, step \d+)", text)
        tests = re.search(r"\d+ passed.*?\d+ deselected", text)
        what = f"resumed from {resumed[1]}" if resumed else tests[0] if tests else ""
        yield f"{part.name:22} {entry.state:9} calls {entry.calls}  {what or entry.note}".rstrip()


def main(arguments: Sequence[str]) -> int:
    out, minutes, rest = Path(arguments[0]).resolve(), arguments[1], ["--small", *LONGER, *arguments[2:]]
    for position, part in enumerate(PARTS):
        interrupt(part, SIGNALS[position % len(SIGNALS)], out, [*rest, "--minutes", minutes])
    status = UNFINISHED
    while status == UNFINISHED:
        process = start(out, rest)
        lines, _ = process.communicate()
        status = process.wait()
        report(rest, lines.splitlines(), status, out)
    print(*outcomes(read_progress(out), out), sep="\n")
    for path in sorted((out / "packed").iterdir()):
        print(f"DIR/packed/{path.name}: {path.stat().st_size:,} bytes")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
