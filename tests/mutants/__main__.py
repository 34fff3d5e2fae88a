"""Mutation test: each mutant breaks one promise of the code by a small change, and the tests named with it must fail.

    python -m tests.mutants                        # all mutants
    python -m tests.mutants --only seed Slurm      # mutants whose names contain one of these texts

The mutants are in the YAML files of this folder: {changed file: [{name, old, new, tests, k}]}. `name` describes the
mistake; `old` must occur exactly once in the file; `tests` are test files, `k` is pytest's -k for them. Each mutant is
tested in a copy of the working tree's tracked files. Not part of .ci/run: it takes about an hour on two cores.

Exit status: 0 all killed; 1 some survived; 2 some could not be tested: `old` is stale, no test is selected, or tests
fail without the mutant.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NO_TESTS = 5  # pytest's exit status


def read_mutants(folder):
    """Read the mutants of all YAML files in `folder`: each an entry with "table", the file's name, and "file"."""
    return [
        {"table": path.stem, "file": file, "k": ""} | entry
        for path in sorted(folder.glob("*.yaml"))
        for file, entries in YAML(typ="safe").load(path).items()
        for entry in entries
    ]


def run_tests(root, tests, k, limit, mutant=None):
    """Run tests on a copy of the files that git tracks; return pytest's status, -1 after `limit` s, None if stale."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = f"git ls-files -z | xargs -0 cp -P --parents -t {folder}"
        subprocess.run(copy, shell=True, cwd=root, stderr=subprocess.DEVNULL, check=False)  # without deleted files
        if mutant:
            path = Path(folder, mutant["file"])
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text.count(mutant["old"]) != 1:
                return None
            path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests.split()]
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen([*command, "-k", k], cwd=folder, **how)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:  # with its child processes
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_all(root, mutants, jobs, limit):
    """Test all mutants; print and return the state of each."""
    selected: dict[str, set[str]] = {}  # {test files: the tests that mutants select from them}
    for mutant in mutants:
        selected.setdefault(mutant["tests"], set()).add(mutant["k"])

    def passes(tests):
        parts = selected[tests]
        k = "" if "" in parts else " or ".join(f"({part})" for part in sorted(parts))
        return run_tests(root, tests, k, limit * len(parts)) == 0

    def decide(mutant):
        state = "untested"
        if sound[mutant["tests"]]:
            status = run_tests(root, mutant["tests"], mutant["k"], limit, mutant)
            state = {0: "survived", NO_TESTS: "untested", None: "stale"}.get(status, "killed")
        print("{:9} {table}: {name} ({file}; {tests})".format(state, **mutant), flush=True)
        return state

    with ThreadPoolExecutor(jobs) as pool:
        sound = dict(zip(selected, pool.map(passes, selected), strict=True))
        return list(pool.map(decide, mutants))


def main(argv=None, folder=HERE, root=ROOT):
    """Print a line for each mutant and the score; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for a test run (default: 300)")
    options = parser.parse_args(argv)
    mutants = read_mutants(folder)
    if options.only:
        mutants = [mutant for mutant in mutants if any(text in mutant["name"] for text in options.only)]
    states = run_all(root, mutants, options.jobs, options.limit)
    for table in sorted({mutant["table"] for mutant in mutants}):
        counts = Counter(state for mutant, state in zip(mutants, states, strict=True) if mutant["table"] == table)
        print(f"{table}: {counts['killed']} of {counts.total()} killed, {dict(counts)}")
    return 2 if {"stale", "untested"} & {*states} else int("survived" in states)


if __name__ == "__main__":
    sys.exit(main())
