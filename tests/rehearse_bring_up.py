"""A rehearsal of tools.bring_up: cuts off every part in the midst of its work, then calls it until nothing is left.

    python -m tests.rehearse_bring_up DIR MINUTES [ARGUMENTS OF bring_up] > transcript.txt    # DIR: not there yet

Each part is cut off in a call of MINUTES: by their end, or before by a signal to the command, in turn SIGTERM, SIGINT
and SIGKILL, as soon as a training has written its first figures, one of the tests has passed, or a bench has worked for
some seconds. Prints each command and what it said, and at the end how each part went on.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.bring_up.command import UNFINISHED
from tools.bring_up.parts import PARTS, Part
from tools.bring_up.progress import BringUpProgress, read_progress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
LIMIT = 300.0  # seconds that a part may need to come to the midst of its work
IN_ITS_MIDST = 4.0  # seconds of a part that writes nothing until its end
WIDTH = 200
LONGER = ("--set=max_epochs=8", "--set=save_checkpoint=true")  # so that a training is caught before its end


def start(out: Path, arguments: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tools.bring_up", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tell(arguments: Sequence[str], lines: Sequence[str], status: int, out: Path, note: str = "") -> None:
    print(f"$ python -m tools.bring_up --out DIR {' '.join(arguments)}{note}")
    for line in lines:
        print(f"    {line.rstrip().replace(str(out), 'DIR')}"[:WIDTH])
    print(f"    exit status {status}", flush=True)


def in_its_midst(part: Part, folder: Path, began: float) -> bool:
    """Whether a part has done some of its work, and not all."""
    if part.epochs:
        metrics, checkpoints = folder / "run/metrics.jsonl", folder / "run/checkpoints"
        rows = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
        return any(json.loads(row)["kind"] == "epoch" for row in rows[:-1]) and any(checkpoints.glob("*.pt"))
    if "pytest" in part.command:
        return any(" PASSED" in path.read_text("utf-8", "replace") for path in folder.glob("log-*.txt"))
    return time.monotonic() - began > IN_ITS_MIDST


def cut_off(part: Part, number: signal.Signals, out: Path, arguments: Sequence[str]) -> None:
    """One call of this part, ended by a signal to the command."""
    words = [*arguments, "--part", part.name]
    process, lines, sent = start(out, words), [], False
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"{part.name}: about"):
            began = time.monotonic()
            while process.poll() is None and time.monotonic() < began + LIMIT:
                if in_its_midst(part, out / "parts" / part.name, began):
                    process.send_signal(number)
                    sent = True
                    break
                time.sleep(0.02)
    tell(words, lines, process.wait(), out, f"    # {number.name} in its midst" if sent else "")


def went_on(progress: BringUpProgress, out: Path) -> Iterator[str]:
    """Of each part how it ended, after how many calls, and what shows that the last call went on."""
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
        cut_off(part, SIGNALS[position % len(SIGNALS)], out, [*rest, "--minutes", minutes])
    status = UNFINISHED
    while status == UNFINISHED:
        process = start(out, rest)
        lines, _ = process.communicate()
        status = process.wait()
        tell(rest, lines.splitlines(), status, out)
    print(*went_on(read_progress(out), out), sep="\n")
    for path in sorted((out / "packed").iterdir()):
        print(f"DIR/packed/{path.name}: {path.stat().st_size:,} bytes")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
