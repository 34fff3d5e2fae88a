"""Mutation test: each mutant breaks one promise of the code by a small change, and the tests named with it must fail.

    python -m tests.mutants                        # all mutants
    python -m tests.mutants --only seed Slurm      # mutants whose names contain one of these texts
    python -m tests.mutants --list

The mutants are in the YAML files of this folder: {changed file: [{name, old, new, tests, k}]}. `name` describes the
mistake; `old` must occur exactly once in the file; `tests` are test files, `k` is pytest's -k for them. Each mutant is
tested in a copy of the working tree's tracked files. Not part of .ci/run: it takes about 25 minutes on two cores.

Exit status: 0 all killed; 1 some survived; 2 some could not be tested: `old` is stale, no test is selected, or tests
fail without the mutant.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NO_TESTS = 5  # pytest's exit status
State = Literal["killed", "survived", "stale", "untested"]


@dataclass(frozen=True)
class Mutant:
    """One wrong change, and the tests that should fail."""

    table: str  # the name of its YAML file
    file: str
    name: str
    old: str
    new: str
    tests: str  # files, with spaces between
    k: str = ""  # empty: all tests of these files


def read_mutants(folder: Path) -> list[Mutant]:
    """Read the mutants of all YAML files in `folder`."""
    return [
        Mutant(path.stem, file, **fields)
        for path in sorted(folder.glob("*.yaml"))
        for file, listed in YAML(typ="safe").load(path).items()
        for fields in listed
    ]


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yield a temporary folder with the tracked files of `root`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(root / name):
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, target, follow_symlinks=False)
        yield Path(folder)


def run_tests(folder: Path, tests: str, k: str, limit: float) -> int:
    """Return pytest's exit status; -1 after `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests.split()]
    process = subprocess.Popen(
        [*command, *(["-k", k] if k else [])],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        if process.poll() is None:  # with its child processes
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_tests(root: Path, mutants: Sequence[Mutant], limit: float, pool: ThreadPoolExecutor) -> Mapping[str, bool]:
    """Return {test files: whether the tests that mutants select from them pass without a mutant}."""
    selected: dict[str, set[str]] = {}
    for mutant in mutants:
        selected.setdefault(mutant.tests, set()).add(mutant.k)

    def passes(tests: str) -> bool:
        parts = selected[tests]
        k = "" if "" in parts else " or ".join(f"({part})" for part in sorted(parts))
        with copied(root) as folder:
            return run_tests(folder, tests, k, limit * len(parts)) == 0

    return dict(zip(selected, pool.map(passes, selected), strict=True))


def run_mutant(root: Path, mutant: Mutant, limit: float) -> State:
    """Test a mutant whose tests pass without it."""
    with copied(root) as folder:
        path = folder / mutant.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(mutant.old) != 1:
            return "stale"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        status = run_tests(folder, mutant.tests, mutant.k, limit)
    return {0: "survived", NO_TESTS: "untested"}.get(status, "killed")  # type: ignore[return-value]


def run_all(root: Path, mutants: Sequence[Mutant], jobs: int, limit: float) -> dict[Mutant, State]:
    """Test all mutants and print each state."""
    with ThreadPoolExecutor(jobs) as pool:
        sound = check_tests(root, mutants, limit, pool)

        def decide(mutant: Mutant) -> State:
            state = run_mutant(root, mutant, limit) if sound[mutant.tests] else "untested"
            print(f"{state:9} {mutant.table}: {mutant.name} ({mutant.file}; {mutant.tests})", flush=True)
            return state

        return dict(zip(mutants, pool.map(decide, mutants), strict=True))


def main(argv: Sequence[str] | None = None, folder: Path = HERE, root: Path = ROOT) -> int:
    """Print a line for each mutant and the score; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the mutants' names and exit")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at a time (default: 2)")
    parser.add_argument(
        "--limit", type=float, default=300, metavar="SECONDS", help="a longer test run kills the mutant (default: 300)"
    )
    options = parser.parse_args(argv)
    mutants = read_mutants(folder)
    if options.only:
        mutants = [mutant for mutant in mutants if any(text in mutant.name for text in options.only)]
    if options.list:
        print("\n".join(f"{mutant.table}: {mutant.name} ({mutant.file})" for mutant in mutants))
        return 0
    states = run_all(root, mutants, options.jobs, options.limit)
    for table in sorted({mutant.table for mutant in mutants}):
        counts = Counter(state for mutant, state in states.items() if mutant.table == table)
        print(f"{table}: {counts['killed']} of {counts.total()} killed, {dict(counts)}")
    found = set(states.values())
    return 2 if found & {"stale", "untested"} else int("survived" in found)


if __name__ == "__main__":
    sys.exit(main())
