"""Verify exact resume: compare an uninterrupted run with runs that are killed at random moments and resumed.

    python -m tools.verify_resume --config=quickstart --set max_epochs=2 --set lr_warmup_epochs=1 --kills 5
    python -m tools.verify_resume --config=quickstart --set model=resnet8 --nproc 2

SIGKILL hits all processes of a run, in its start-up, in training or when a checkpoint's temporary file appears; the
same command restarts it until it has finished. Then its weights, optimizer, random states, metrics.jsonl and learning
rates must equal the uninterrupted run's bit for bit, and starts that found a good checkpoint must have resumed from it.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.common import above_zero, add_count, make_folder, new_parser, path_argument
from utils.config import load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.launch import torchrun_here
from utils.errors import ExpectedError, exit_in_a_line
from utils.program import TRAIN
from utils.run.checkpoint import newest_good, read_checkpoint
from utils.run.config import MEASURED
from utils.run.logger import METRICS, read_records

KINDS = ("step", "epoch", "end")  # records of metrics.jsonl that must be equal; others record starts and stops
KILL_SECONDS = 30.0  # seconds that a process may take to end after SIGKILL
KILLS_PER_RUN, RUNS_PER_KILL = 8, 10  # at most; a run may end before it is killed


@dataclass(frozen=True)
class RunCommand:
    """How to start the run under test, the same at every start."""

    train_arguments: list[str]
    nproc: int
    timeout: float  # seconds after which a start counts as hanging

    def start(self, folder: Path, environment: Mapping[str, str], output: Path) -> Any:
        """Start the run; return its `subprocess.Popen`, or an object with the same `poll`, `wait` and `returncode`. Its
        processes, orphans too, are identified by their standard output."""
        (rendezvous := folder.with_name(f"{folder.name}.rendezvous")).unlink(missing_ok=True)  # of the previous start
        launcher, more = torchrun_here(self.nproc, rendezvous) if self.nproc > 1 else ([sys.executable], {})
        command, env = [*launcher, str(TRAIN), *self.train_arguments, f"--run-dir={folder}"], {**environment, **more}
        with output.open("wb") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)


class Attempt(AbstractContextManager["Attempt"]):
    """One start of the run. Leaving the `with` block kills all of its processes."""

    def __init__(self, job: RunCommand, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_name(f"{folder.name}.output")
        self.deadline = time.monotonic() + job.timeout
        self.status_file, self.starts_before = folder.with_name(f"{folder.name}.status"), self.starts()
        self.status_file.unlink(missing_ok=True)
        self.process = job.start(folder, os.environ | {"TRAIN_EXIT_STATUS_FILE": str(self.status_file)}, self.log)

    def wait_until(self, reached: Callable[[], bool], pause: float = 0.001) -> bool:
        """Wait until `reached`; False if the run ended before. Raises `ExpectedError` if it hangs."""
        while not reached():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > self.deadline:
                raise ExpectedError(f"a run takes too long and may hang; its output ends:\n{self.end_of_output()}")
            time.sleep(pause)
        return True

    def wait(self) -> int:
        """Return the run's exit status, from rank 0's file: torchrun turns every failure into 1."""
        self.wait_until(lambda: self.process.poll() is not None, pause=0.01)
        written = self.status_file.read_text().strip() if self.status_file.exists() else ""
        return int(written) if written and self.process.returncode >= 0 else self.process.returncode

    def starts(self) -> list[dict[str, Any]]:
        return read_records(self.folder, "start", "resume")

    def has_begun(self) -> bool:
        """Return whether training has begun; from then on it handles signals."""
        return self.starts() not in ([], self.starts_before)  # fewer if the folder was moved aside

    def end_of_output(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def kill(self, *_: object) -> None:
        """Send SIGKILL to every process of the run until none is left."""
        deadline = time.monotonic() + KILL_SECONDS
        while processes := find_processes(self.folder):
            if time.monotonic() > deadline:
                raise ExpectedError(f"processes {processes} do not end after SIGKILL; see the kernel's log (dmesg)")
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait(KILL_SECONDS)

    __exit__ = kill


def compare(uninterrupted: Path, killed: Path) -> list[str]:
    """Return up to 20 differences of two finished runs: in records, the newest checkpoint and the best weights."""
    sides = []
    for folder in (uninterrupted, killed):
        state = newest_good(folder / "checkpoints")[1] or {}
        best = read_checkpoint(folder / "checkpoints/best.pt")
        records = read_records(folder, *KINDS)
        content = {METRICS: [{key: value for key, value in row.items() if key not in MEASURED} for row in records]}
        content |= {key: state[key] for key in state.keys() - {"seconds", "timing", "versions"}}
        content |= {f"{key} of best.pt": best[key] for key in ("model", "average", "epoch")}
        sides.append(dict(_flatten("", content)))
    left, right = sides
    differing = [where for where in sorted({*left, *right}) if left.get(where) != right.get(where)][:20]
    return [f"{where}: {left.get(where)!s:.80} uninterrupted, {right.get(where)!s:.80} killed" for where in differing]


def _flatten(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each value in a nested structure; type, shape and digest of a tensor."""
    if isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flatten(f"{where}.{key}" if where else str(key), part)
    elif isinstance(value, torch.Tensor):
        content = bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        yield where, (str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()[:16])
    else:
        yield where, value


def find_processes(folder: Path) -> list[int]:
    """Return every living process of the run in `folder`, from /proc."""
    output, found = os.path.realpath(folder.with_name(f"{folder.name}.output")), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # also of a zombie
            if os.readlink(entry / "fd/1") == output:
                found.append(int(entry.name))
    return found


def verify(job: RunCommand, kills: int, generator: random.Random, work: Path) -> list[str]:
    """Return the differences between the uninterrupted run and the killed ones: none if resume is exact."""
    began, uninterrupted = time.monotonic(), work / "uninterrupted"
    train_and_kill(job, uninterrupted, (), generator)
    training = read_records(uninterrupted, *KINDS)[-1]["seconds"]
    starting = time.monotonic() - began - training
    print(f"uninterrupted: {training:.1f} s of training after {starting:.1f} s of start-up", flush=True)
    struck = runs = resumed = 0
    while struck < kills and runs < RUNS_PER_KILL * kills:
        runs += 1
        folder, intended = work / f"killed-{runs}", min(KILLS_PER_RUN, kills - struck)
        longest = starting, 2 * training / (intended + 1)
        plans = [(1.0, *longest), *[(0.75, *longest)] * (intended - 1)]  # the last kill of a run is always in training
        while moment := train_and_kill(job, folder, plans.pop() if plans else (), generator):
            struck += 1
            print(f"kill {struck} of {kills}: {moment}", flush=True)
        if differences := compare(uninterrupted, folder):
            return differences
        resumed += len(read_records(folder, "resume"))
        shutil.rmtree(folder)
    print(f"{struck} kills over {runs} runs of {job.nproc} process(es); {resumed} starts resumed from a checkpoint")
    if not resumed:
        raise ExpectedError("no start resumed, so nothing was shown; use more --kills or checkpoint_every_steps")
    return []


def train_and_kill(job: RunCommand, folder: Path, plan: Sequence[float], generator: random.Random) -> str:
    """Start the run and kill it. `plan`: the fraction of kills in training, which follow a checkpoint, and most seconds
    of start-up and of training before a kill; () for none. 40 % wait for the next write of one; none follows the end of
    training. Return in what it was killed, "" if it has ended. `ExpectedError` if it fails or forgets a checkpoint."""
    checkpoints = folder / "checkpoints"
    killed, has_checkpoint = False, newest_good(checkpoints)[0] is not None
    with Attempt(job, folder) as attempt:
        if plan:
            fraction, starting, training = plan
            in_training = generator.random() < fraction  # drawn apart: training may be much shorter than start-up
            if in_training:
                attempt.wait_until(lambda: attempt.has_begun() and any(checkpoints.glob("step-*.pt")), pause=0.01)
            moment = time.monotonic() + generator.uniform(0, training if in_training else starting)
            write = generator.random() < 0.4
            killed = attempt.wait_until(lambda: time.monotonic() >= moment) and not read_records(folder, "end")
            if killed and write:
                killed = attempt.wait_until(lambda: any(checkpoints.glob("*.tmp")), pause=0)
                time.sleep(generator.uniform(0, 0.003))
        if killed:
            attempt.kill()
        status, begun, output = attempt.wait(), attempt.has_begun(), attempt.end_of_output()
    if status != 0 and not killed:
        raise ExpectedError(f"a start ended with status {status}:\n{output}")
    # such a run would still be equal, as every start is deterministic
    if has_checkpoint and begun and attempt.starts()[-1]["kind"] == "start":
        raise ExpectedError(f"a start did not resume from its good checkpoint:\n{output}")
    return "" if status == 0 else "in training" if begun else "while starting"


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("verify_resume", __doc__, "0 equal; 1 different, hanging or failing; 2 usage. Needs Linux.")
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--kills", 5, "number of interruptions")
    add_count(parser, "--nproc", 1, "processes, started by torchrun")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random choices")
    parser.add_argument("--timeout", type=above_zero, default=1800.0, help="seconds of a start (default: %(default)g)")
    parser.add_argument("--work-dir", type=path_argument, help="folder for the runs (default: a temporary one)")
    options = parser.parse_args(argv)
    settings = ["log_to_screen=true", "log_to_tensorboard=false", "save_checkpoint=true", "deterministic=true"]
    settings += options.set  # the last one wins
    load_config(options.yaml_config, options.config, settings)
    if options.work_dir is not None:
        make_folder(options.work_dir, "--work-dir")
    block = f"--config={options.config}", f"--yaml_config={options.yaml_config}"
    work = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=options.work_dir))
    job = RunCommand([*block, *(f"--set={setting}" for setting in settings)], options.nproc, options.timeout)
    try:
        differences = verify(job, options.kills, random.Random(options.seed), work)
    except ExpectedError as error:
        differences = [f"the runs could not be compared: {error}"]
    if differences:
        print("verdict: NOT EQUAL", *differences, f"the runs are in {work}", sep="\n  ")
    else:
        shutil.rmtree(work)
        print("verdict: EQUAL: weights, optimizer, random states, metrics.jsonl and learning rates, bit by bit")
    print(f"to repeat it: --seed={options.seed}")
    return int(bool(differences))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the run under test
    sys.exit(main())
