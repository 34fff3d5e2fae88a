"""A rehearsal of tools.bring_up in short calls, from tools.pack's pieces, on the fake CUDA runtime.

    python -m tests.rehearse_calls DIR --data data/cifar-100-python --transcript results/DATE-rehearsal/transcript.txt

The machine is an empty folder below DIR (not there yet), with a Python that has only what tools.pack expects there, and
without network if this is root. Each call brings one more folder of pieces, of the last commit, and runs the commands
that tools.pack prints, until nothing is left to do. Each must end by itself within its minutes and two more, for
unpacking and for building the fake runtime. Exit status: the last call's, and 1 if a call broke a limit.
"""

import argparse
import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# tools.pack imports them while sys.path is replaced
import packaging.requirements
import packaging.utils  # noqa: F401

from tools import pack
from tools.bring_up.__main__ import UNFINISHED
from tools.bring_up.parts import PARTS
from tools.bring_up.progress import BringUpProgress, read_progress
from tools.shared.command_line import minutes
from tools.shared.processes import Deadline, run_limited
from utils.errors import DataError
from utils.program import CODE

TARGET = ("3.12", "2.11")  # Python and torch there
VERSIONS = """import importlib.metadata as found, json, sys, sysconfig
print(json.dumps(["%d.%d" % sys.version_info[:2], found.version("torch"), sysconfig.get_path("purelib")]))"""
NO_NETWORK = ("unshare", "--net", "bash", "-c", 'ip link set lo up && exec bash -c "$1"', "bash")
SMALL = "--small --set=dataset=cifar100 --set=num_classes=100"  # so that parts wait for the data
MAX_CALLS, MAX_FILES, MAX_FILE, MAX_BYTES = 20, 8, 16 * 2**20, 64 * 2**20


class Transcript:
    """Prints lines and writes them to a file, without the folders of this machine."""

    def __init__(self, path: Path, hidden: dict[str, str]) -> None:
        self.path, self.hidden, self.text = path, hidden, ""
        path.parent.mkdir(parents=True, exist_ok=True)

    def say(self, *lines: str) -> None:
        for line in lines:
            shown = functools.reduce(lambda text, names: text.replace(*names), self.hidden.items(), line)
            print(shown, flush=True)
            self.text += f"{shown}\n"
        self.path.write_text(self.text, encoding="utf-8")


def outcomes(progress: BringUpProgress, out: Path) -> Iterator[str]:
    """Yield how each part ended, after how many calls, and how the last call resumed."""
    for part in PARTS:
        entry = progress.of(part.name)
        logs = sorted((out / "parts" / part.name).glob("log-*.txt"), key=lambda path: int(path.stem[4:]))
        text = logs[-1].read_text("utf-8", "replace") if logs else ""
        resumed = re.search(r"Resuming from .*?(epoch \d+, batch \d+, step \d+)", text)
        tests = re.search(r"\d+ passed.*?(?= in )", text)
        what = f"resumed from {resumed[1]}" if resumed else tests[0] if tests else ""
        yield f"{part.name:22} {entry.state:9} calls {entry.calls}  {what or entry.note}".rstrip()


def describe(python: str) -> tuple[str, str, str] | None:
    """Return version, torch's version and packages' folder of a Python; None if it has no torch."""
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
    return None if done.returncode else tuple(json.loads(done.stdout))


def choose_python() -> tuple[str, tuple[str, str, str]]:
    """Return the target's Python if it is installed, else this one, each with its description."""
    python = shutil.which(f"python{TARGET[0]}")
    if python and (found := describe(python)) and found[1].startswith(TARGET[1]):
        return python, found
    here = describe(sys.executable)
    assert here is not None
    return sys.executable, here


def bare_python(python: str, packages: Path, folder: Path) -> None:
    """Make an environment whose packages are links to those in `packages` that tools.pack expects on the target."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    [own] = folder.glob("lib/python3*/site-packages")
    before, sys.path = sys.path, [str(packages)]
    try:
        names = pack.closure(pack.THERE, {}, TARGET[0], optional=True)
        there = [importlib.metadata.distribution(name) for name in names]
    finally:
        sys.path = before
    names = {path.parts[0] for found in there for path in found.files or ()} - {"..", "__pycache__"}
    for name in names:
        (own / name).symlink_to(packages / name)


def check_limits(packed: Path, status: int | None) -> Iterator[str]:
    """Yield what the target would not have allowed in a call."""
    if status is None:
        yield "it did not end by itself"
    sizes = [path.stat().st_size for path in packed.glob("*")]
    if len(sizes) > MAX_FILES or max(sizes, default=0) > MAX_FILE or sum(sizes) > MAX_BYTES:
        yield f"it left {len(sizes)} files of {sum(sizes):,} bytes, the largest of {max(sizes):,} bytes"


def rehearse(folder: Path, data: Path, length: float, transcript: Path) -> int:
    """Pack, then call until nothing is left to do; returns the exit status."""
    python, (version, torch, packages) = choose_python()
    hidden = {str(folder): "DIR", str(CODE): "CHECKOUT", str(data.parent): "DATA", packages: "PACKAGES"}
    say = Transcript(transcript, hidden).say
    say(f"Python {version}, torch {torch}; the target: Python {TARGET[0]}, torch {TARGET[1]}")
    machine, pieces = folder / "machine", folder / "pieces"
    machine.mkdir(parents=True)
    bare_python(python, Path(packages), folder / "python")
    alone = subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    say("network: none" if alone else "network: not cut, which needs root")
    absent = sorted({"dali", *(name for name, group in pack.GROUPS.items() if not all(map(is_installed, group)))})
    words = ["--out", str(pieces), "--data", str(data), "--python", version, *(f"--without={name}" for name in absent)]
    packing = [sys.executable, "-m", "tools.pack", *words]
    packed = subprocess.run(packing, cwd=CODE, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    say(f"$ python -m tools.pack {' '.join(words)}", *packed)
    commands = [line.strip() for line in packed if line.startswith("    ")]
    start = commands[-1].replace("python3 -m tools", "bash tests/fake_cuda/with.sh --compute python3 -m tools")
    commands[-1] = start.replace("--minutes 9", f"--minutes {length:g} {SMALL}")
    script = "\n".join([f"cd {machine}", *commands])
    path = f"{folder}/python/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    isolated = ["env", "-i", f"PATH={path}", f"HOME={machine}"]
    command = [*isolated, *(NO_NETWORK if alone else ("bash", "-c")), script]
    say("each call runs:", *(f"    {line}" for line in commands))
    brought, limit, broken = sorted(pieces.iterdir()), 60 * (length + 2), False
    out = machine / "bring-up/bring-up"
    for number in range(1, MAX_CALLS + 1):
        if number <= len(brought):
            shutil.copytree(brought[number - 1], machine / brought[number - 1].name)
        began, log = time.monotonic(), folder / f"call-{number}.txt"
        status = run_limited(command, log, limit, Deadline(began + limit))
        took, problems = time.monotonic() - began, list(check_limits(out / "packed", status))
        say("", f"== call {number}, with {', '.join(sorted(path.name for path in machine.glob('[0-9]*')))}")
        say(*log.read_text("utf-8", "replace").splitlines(), f"status {status} after {took:.0f} of {limit:.0f} s")
        say(*(f"BROKEN LIMIT: {problem}" for problem in problems))
        broken |= bool(problems)
        if broken or not (status == UNFINISHED or (status == DataError.exit_status and number < len(brought))):
            break
    say("", *outcomes(read_progress(out), out))
    say(*(f"packed/{path.name}: {path.stat().st_size:,} bytes" for path in sorted((out / "packed").glob("*"))))
    return 1 if broken or status is None else status


def is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearse_calls")
    parser.add_argument("dir", type=Path, metavar="DIR", help="a new folder, of some 2 GB")
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-100's folder")
    parser.add_argument("--minutes", type=minutes, default=4.0, help="of each call (default: 4)")
    parser.add_argument("--transcript", type=Path, required=True, help="file for the whole output")
    options = parser.parse_args(arguments)
    return rehearse(options.dir.resolve(), options.data.resolve(), options.minutes, options.transcript)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
