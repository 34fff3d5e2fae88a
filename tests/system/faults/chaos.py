"""Inject random faults into runs, and check that each run ends like an uninterrupted one and reports its faults.

    python -m tests.system.faults.chaos --faults 300 --seed 1
    python -m tests.system.faults.chaos --faults 30 --seed 1 --nproc 2 --only 7

Each run meets up to eight faults: kills of a rank or a loader worker, one or many signals, a process that is stopped
for a while or gets little of its core, a clock set back, full or broken disks, a newest checkpoint that is
damaged or unreadable. They strike after random steps. The same seed and number repeat a run (`--only NUMBER`), except
for the exact moment at which a signal arrives. The same command is started until the run has finished. Then:
- final weights, optimizer, random states and metrics.jsonl equal the uninterrupted run's;
- every start ended with the expected status and named its fault and rank, in at most one error message;
- no process, temporary file or lock is left, and metrics.jsonl has exactly the starts that trained.
"""

import fcntl
import json
import os
import random
import re
import runpy
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from pathlib import Path

from tests.processes import fork, free_port, torchrun_variables
from tests.system.faults.kinds import KINDS, Fault, damage, plan_faults
from tools.common import add_count, new_parser, print_table
from tools.verify_resume import KINDS as RECORDS
from tools.verify_resume import Attempt, RunCommand, compare, find_processes
from utils.errors import ExpectedError, exit_in_a_line
from utils.program import TRAIN
from utils.run.logger import METRICS, read_records

FILES_OF_LIBRARIES = ("torchinductor_", "pymp-")  # a cache, and sockets of killed workers
EPOCHS, STEPS_PER_EPOCH, MOST_FAULTS = 2, 16, 8
SETTINGS = {
    "dataset": "shapes", "num_classes": 10, "data_loader": "torchvision", "num_data_workers": 1, "device": "cpu",
    "model": "resnet8", "batch_size": 8, "valid_batch_size_per_gpu": 20, "limit_train_batches": STEPS_PER_EPOCH,
    "limit_valid_batches": 1, "max_epochs": EPOCHS, "log_freq": 1, "log_to_tensorboard": False, "deterministic": True,
    "checkpoint_every_steps": 2, "keep_checkpoints": 3, "rank_timeout_seconds": 60}  # fmt: skip


@dataclass(frozen=True)
class ForkedRun(RunCommand):
    """A run of `nproc` ranks that meet at rank 0, as under `srun` and `mpirun`. A start takes tenths of a second."""

    faults: list[Fault] = ()

    def start(self, folder, environment, output):
        output.write_bytes(b"")
        arguments, port, processes = [str(TRAIN), *self.train_arguments, f"--run-dir={folder}"], free_port(), []
        for rank in range(self.nproc):
            mine = [fault for fault in self.faults if fault.rank == rank]
            own = {**environment, **torchrun_variables(rank, self.nproc, port)}
            processes.append(fork(_train, arguments, own, output, mine))
        return ForkedRanks(processes)


class ForkedRanks:
    """The processes of one start, with the interface of `subprocess.Popen`."""

    def __init__(self, processes):
        self.processes, self.returncode = processes, None

    def poll(self):
        """Return None until all have ended, then the status of a killed rank, otherwise the first nonzero status."""
        statuses = [process.exitcode for process in self.processes]
        if None not in statuses:
            self.returncode = min(statuses) if min(statuses) < 0 else next(filter(None, statuses), 0)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for all ranks, at most `timeout` seconds for each, and return `poll`."""
        for process in self.processes:
            process.join(timeout)
        return self.poll()


def _train(arguments, environment, output, faults):
    """Run train.py in this forked process, as the rank given by its environment."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    _arm(faults)
    sys.argv = arguments
    runpy.run_path(str(TRAIN), run_name="__main__")


def _arm(faults):
    """Let the faults of this rank strike, now or after their steps."""
    from utils.training.learner import Learner

    train = Learner.train_step

    def train_and_strike(self, *batch):
        train(self, *batch)
        for fault in faults:
            if fault.step == self.steps and not KINDS[fault.kind].before:
                if fault.delay:
                    timer = threading.Timer(fault.delay, _strike, [fault])
                    timer.daemon = True
                    timer.start()
                else:
                    _strike(fault)

    Learner.train_step = train_and_strike
    for fault in faults:
        if KINDS[fault.kind].before:
            _strike(fault)


def _strike(fault):
    os.write(1, f"{fault.mark}\n".encode())  # one write, so that no other thread's output divides the line
    KINDS[fault.kind].strike()


def campaign(job, seed, numbers, faults, work):
    """Run until `faults` faults have struck; return ({kind: faults that struck}, the same of runs with problems, the
    problems). Runs with problems are kept in `work`."""
    uninterrupted = work / "uninterrupted"
    with Attempt(job, uninterrupted) as attempt:
        if (status := attempt.wait()) != 0:
            raise ExpectedError(f"the uninterrupted run failed with status {status}:\n{attempt.end_of_output()}")
    struck, unexpected, problems = Counter(), Counter(), []
    for number in numbers:
        folder, met = work / f"run-{number}", []
        try:
            plan = plan_faults(seed, number, EPOCHS * STEPS_PER_EPOCH, job.nproc, MOST_FAULTS)
            met, wrong = meet_faults(job, plan, folder)
            wrong = wrong or [f"differs: {difference}" for difference in compare(uninterrupted, folder)]
        except ExpectedError as error:  # it hangs
            wrong = [str(error)]
        wrong += find_leftovers(folder)
        struck.update(fault.kind for fault in met)
        unexpected.update(fault.kind for fault in met if wrong)
        faced = ", ".join(f"{fault.kind} after step {fault.step}" for fault in met) or "none struck"
        print(f"run {number}: {faced}: {'UNEXPECTED' if wrong else 'as expected'}", flush=True)
        problems += [f"run {number}: {problem}" for problem in wrong]
        if not wrong:
            shutil.rmtree(folder)
        if struck.total() >= faults:
            break
    return struck, unexpected, problems


def meet_faults(job, starts, folder):
    """Start the run until it has finished; return (the faults that struck, problems)."""
    met, wrong, trained = [], [], 0
    for faults in starts:
        for fault in faults:
            if fault.kind in ("damaged checkpoint", "cut-off checkpoint"):
                damage(max((folder / "checkpoints").glob("step-*.pt")), cut=fault.kind.startswith("cut"))
        with Attempt(replace(job, faults=faults), folder) as attempt:
            status = attempt.wait()
            while find_processes(folder):  # the workers of killed ranks
                if time.monotonic() > attempt.deadline:
                    raise ExpectedError(f"processes {find_processes(folder)} of {folder} do not end")
                time.sleep(0.05)
            trained += attempt.has_begun()
            output = attempt.log.read_text(errors="replace")
        struck = [fault for fault in faults if fault.mark in output]
        finished = bool(read_records(folder, RECORDS[-1]))
        met += struck
        wrong += check_start(struck, status, output, job.nproc, finished)
        if wrong or status == 0:
            break
    records = len(read_records(folder, "start", "resume"))
    wrong += [f"{records} starts in {METRICS}, {trained} that trained"] if records != trained else []
    return met, wrong or ([] if finished else ["did not reach its end"])


def check_start(struck, status, output, nproc, finished):
    """Return the problems of a start: another status than its last fault's, a fault that had to be named and is not,
    several messages. A fault may come after the training has `finished`, too late to end the start."""
    ended_by = [fault for fault in struck if KINDS[fault.kind].statuses]
    expected = KINDS[ended_by[-1].kind].statuses if ended_by else (0,)
    too_late = finished and status == 0
    end, wrong = output[-800:], []
    if status not in expected and not too_late:
        wrong.append(f"status {status} after {[fault.kind for fault in struck]}, expected {expected}: {end}")
    silent = status < 0 and (nproc == 1 or finished)  # a killed process prints nothing
    for fault in struck if not silent else []:
        pattern = KINDS[fault.kind].named.format(rank=fault.rank, who=f"rank {fault.rank}: " if nproc > 1 else "")
        if not (too_late and fault in ended_by) and not re.search(pattern, output):
            wrong.append(f"{fault.kind} is not named ({pattern!r}): {end}")
    errors = re.findall(r"^error: .*", output, re.MULTILINE)
    return wrong + ([f"several messages: {errors}"] if len(errors) > 1 else [])


def find_leftovers(folder):
    """Return the temporary files and the lock that a finished run has left behind."""
    left = [f"left behind: {path.name}" for path in folder.rglob("*.tmp")]
    with suppress(FileNotFoundError), (folder / ".lock").open() as lock:  # not there if it failed before
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            left.append("left behind: a lock that is held")
    return left


def _is_of_a_library(path):
    # DataLoader opens empty files as a probe when a worker has died; they stay if its signal comes meanwhile
    is_probe = re.fullmatch("tmp.{8}", path.name) and path.is_file() and not path.stat().st_size
    return path.name.startswith(FILES_OF_LIBRARIES) or bool(is_probe)


@exit_in_a_line
def main(argv=None):
    """Run the campaign, print its table, and return the exit status."""
    statuses = "0 all as expected; 1 something unexpected; 2 usage; 130 interrupted. Needs Linux."
    parser = new_parser("chaos", __doc__, statuses)
    parser.prog = "python -m tests.system.faults.chaos"
    add_count(parser, "--faults", 10, "faults in total, at least")
    add_count(parser, "--nproc", 1, "ranks")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat only the run with this number")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random choices")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one start (default: %(default)g)")
    parser.add_argument("--work-dir", help="folder for the runs (default: a temporary one)")
    options = parser.parse_args(argv)
    seed, nproc, faults = options.seed, options.nproc, options.faults
    os.environ["OMP_NUM_THREADS"] = "1"
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.work_dir))
    print(f"seed {seed}, in {work}", flush=True)
    train = ["--config=default", *(f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items())]
    numbers = iter(range(1, faults + 1) if options.only is None else [options.only])
    get_temp_dir()  # outside `temporary`, since multiprocessing removes it at exit
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:  # not below --work-dir: sockets need a short path
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # inherited by forked ranks
        struck, unexpected, problems = campaign(ForkedRun(train, nproc, options.timeout), seed, numbers, faults, work)
        left = [path for path in Path(temporary).iterdir() if not _is_of_a_library(path)]
        problems += [f"left behind in TMPDIR: {path.name}" for path in left]
    rows = [[kind, str(struck[kind]), str(unexpected[kind])] for kind in KINDS]
    rows.append(["all", str(struck.total()), str(unexpected.total())])
    print_table("", ["fault", "met", "in runs with problems"], rows)
    if problems:
        print("\n".join(problems) + f"\nverdict: {len(problems)} UNEXPECTED; the runs are in {work}")
    else:
        shutil.rmtree(work)
        print("verdict: every run ended like the uninterrupted one")
    print(f"repeat with: python -m tests.system.faults.chaos --faults {faults} --nproc {nproc} --seed {seed}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
