"""Prove that a killed run loses nothing: compare an uninterrupted run with runs that are killed at random moments.

    python -m tools.verify_resume --config=quickstart --set max_epochs=2 --set lr_warmup_epochs=1 --kills 5
    python -m tools.verify_resume --config=quickstart --set model=resnet8 --nproc 2 --signal TERM

Each killed run is started again by the same command until it is finished. Then weights, optimizer, random states,
metrics.jsonl and learning rates must equal those of the uninterrupted run, bit by bit; and every start that finds a
good checkpoint must have resumed from it. A run takes at most KILLS_PER_RUN kills; further kills go to another run.
They come during the start, during training, and as soon as a checkpoint's temporary file appears; with several
processes, to all of them at once or to one alone.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.command_line import add_config_arguments, add_count, new_parser, seconds
from tools.follow import TRAIN
from tools.history import read_records
from utils.config import load_config
from utils.distributed.launch import torchrun_here
from utils.errors import ConfigError, ExpectedError, Stopped, exit_in_a_line

KILLS_PER_RUN = 8
METRICS = "metrics.jsonl"
KINDS = ("step", "epoch", "end")  # records of metrics.jsonl that must be equal; the others record starts and stops
TAG = "VERIFY_RESUME_RUN"  # marks every process of a run in its environment, orphans included
MOMENTS = {"training": 0.5, "a write": 0.35, "the start": 0.15}  # and how often
# of metrics.jsonl: never the same twice
TIMES = frozenset({"seconds", "epoch_seconds", "images_per_sec", "data_wait", "memory_gb"})
TO_DIE = 30.0  # seconds that a process may take to end after SIGKILL


@dataclass(frozen=True)
class Job:
    """How to start the run that is put to the test."""

    train_arguments: list[str]
    nproc: int
    timeout: float  # seconds that one start may take before it counts as hanging
    end: float  # of everything, by the monotonic clock

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command line, the same at every start, and what it needs in its environment."""
        if self.nproc > 1:
            rendezvous = folder.with_name(f"{folder.name}.rendezvous")
            rendezvous.unlink(missing_ok=True)  # of the start before, whose ranks are dead
            start, environment = torchrun_here(self.nproc, rendezvous)
        else:
            start, environment = [sys.executable], {}
        return [*start, str(TRAIN), *self.train_arguments, f"--run-dir={folder}"], environment


@dataclass(frozen=True)
class Kill:
    """One interruption, as drawn."""

    signal: signal.Signals
    moment: str
    delay: float  # seconds after the start, or after training began
    short_delay: float  # seconds after a temporary file appeared
    victim: int | None  # a rank; None: all processes


class Attempt:
    """One start of the run, in processes of its own; leaving the `with` block ends every one of them."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.folder, self.deadline = folder, min(time.monotonic() + job.timeout, job.end)
        self.log = folder.with_name(f"{folder.name}.output")
        self.status_file = folder.with_name(f"{folder.name}.status")
        self.status_file.unlink(missing_ok=True)
        self.starts_before = read_records(folder / METRICS, "start", "resume")
        command, environment = job.command(folder)
        environment = os.environ | environment | {TAG: str(folder), "TRAIN_EXIT_STATUS_FILE": str(self.status_file)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait_until(self, reached: Callable[[], bool], pause: float = 0.001) -> bool:
        """Wait for something; False where the run ended before. `ExpectedError` where it hangs."""
        while not reached():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > self.deadline:
                raise ExpectedError(
                    f"longer than --timeout or --total-timeout, so it may hang; its last words:\n{self.last_words()}"
                )
            time.sleep(pause)
        return True

    def wait(self) -> int:
        """The run's exit status, as rank 0 wrote it where torchrun would turn every failure into 1."""
        self.wait_until(lambda: self.process.poll() is not None)
        written = self.status_file.read_text().strip() if self.status_file.exists() else ""
        return int(written) if written and self.process.returncode >= 0 else self.process.returncode

    def strike(self, kill: Kill) -> bool:
        """Wait for the moment and send the signal; False where the run was finished before."""
        if kill.moment != "the start" and not self.wait_until(self.has_begun):
            return False
        moment = time.monotonic() + kill.delay
        if not self.wait_until(lambda: time.monotonic() >= moment):
            return False
        victims = self.victims(kill)  # looked up before the write begins, since it takes as long as a write
        if kill.moment == "a write":
            if not self.wait_until(self.is_writing, pause=0):
                return False
            time.sleep(kill.short_delay)
        for process in victims:
            _send(process, kill.signal)
        if kill.victim is None and kill.signal == signal.SIGKILL:
            _kill_all(self.folder)
        return True

    def has_begun(self) -> bool:
        """Whether training has begun: from here on it handles signals."""
        starts = read_records(self.folder / METRICS, "start", "resume")
        return bool(starts) and starts != self.starts_before  # fewer where the folder was moved aside

    def victims(self, kill: Kill) -> list[int]:
        """The processes that get the signal: those of all ranks where the chosen one has not started."""
        ranks = _ranks(self.folder)
        return [ranks[kill.victim]] if kill.victim in ranks else list(ranks.values())

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, or was when its writer was killed."""
        try:
            return any(name.endswith(".tmp") for name in os.listdir(self.folder / "checkpoints"))
        except FileNotFoundError:
            return False

    def check_resumed(self, earlier: set[Path]) -> None:
        """`ExpectedError` where it started from the beginning, although there was a good checkpoint.

        Such a run may be equal all the same, as every start is deterministic. `earlier`: what was moved aside before.
        """
        starts = read_records(self.folder / METRICS, "start", "resume")
        if self.has_begun() and starts[-1]["kind"] == "start":
            raise ExpectedError(f"a start did not go on from its good checkpoint:\n{self.last_words()}")
        if new := _moved_aside(self.folder) - earlier:
            raise ExpectedError(f"a start moved its good checkpoint aside, to {min(new)}:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-2000:]

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        _kill_all(self.folder)
        self.process.wait(TO_DIE)


def verify(job: Job, kills: int, number: signal.Signals, seed: int, work: Path) -> list[str]:
    """What differs between the uninterrupted run and the killed ones, which should be nothing."""
    draw = random.Random(seed)
    began = time.monotonic()
    uninterrupted = work / "uninterrupted"
    with Attempt(job, uninterrupted) as attempt:
        if (status := attempt.wait()) != 0:
            raise ExpectedError(f"the uninterrupted run failed with status {status}:\n{attempt.last_words()}")
    training = read_records(uninterrupted / METRICS, *KINDS)[-1]["seconds"]
    starting = max(0.1, time.monotonic() - began - training)
    print(f"uninterrupted: {training:.1f} s of training after {starting:.1f} s of starting", flush=True)

    counts: Counter[str] = Counter()
    differences: list[str] = []
    runs = resumed = 0
    while counts.total() < kills and not differences:
        runs += 1
        folder = work / f"killed-{runs}"
        intended = min(KILLS_PER_RUN, kills - counts.total())
        mean = training / intended
        for struck in _train_through(
            job, folder, [_draw_kill(draw, number, mean, starting, job.nproc) for _ in range(intended)]
        ):
            counts[struck] += 1
            print(f"kill {counts.total()} of {kills}: {number.name} {struck}", flush=True)
        differences = compare(uninterrupted, folder)
        resumed += len(read_records(folder / METRICS, "resume"))
        if not differences:
            shutil.rmtree(folder)
    struck_when = ", ".join(f"{count} {when}" for when, count in counts.most_common())
    print(f"{counts.total()} kills over {runs} runs of {job.nproc} process(es): {struck_when}")
    print(f"{resumed} starts went on from a checkpoint")
    return differences


def _draw_kill(draw: random.Random, number: signal.Signals, mean: float, starting: float, nproc: int) -> Kill:
    """`mean`: seconds of training that a run may have between two kills, on average."""
    moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    delay = draw.uniform(0, starting) if moment == "the start" else draw.uniform(0, 2 * mean)
    victim = draw.randrange(nproc) if nproc > 1 and (number != signal.SIGKILL or draw.random() < 0.5) else None
    return Kill(number, moment, delay, draw.uniform(0, 0.003), victim)


def _train_through(job: Job, folder: Path, kills: list[Kill]) -> Iterator[str]:
    """Start the run again and again until it is finished; yields where each kill struck."""
    from utils.run.checkpoint import newest_good

    left = list(kills)
    while True:
        has_checkpoint = newest_good(folder / "checkpoints")[0] is not None
        earlier = _moved_aside(folder)
        with Attempt(job, folder) as attempt:
            kill = left.pop(0) if left else None
            struck = kill is not None and attempt.strike(kill)
            began = attempt.has_begun()
            status = attempt.wait()
            if has_checkpoint:
                attempt.check_resumed(earlier)
            if kill is None or not struck:
                if status != 0:
                    raise ExpectedError(f"a start after a kill failed with status {status}:\n{attempt.last_words()}")
                return
            # after the end of training, the signal may have met an interpreter that was exiting
            finished = bool(read_records(folder / METRICS, "end"))
            if kill.signal != signal.SIGKILL and began and not finished and status not in (0, Stopped.exit_status):
                raise ExpectedError(f"asked to stop, the run ended with status {status}:\n{attempt.last_words()}")
        whom = "all processes" if kill.victim is None else f"rank {kill.victim}"
        if attempt.is_writing():
            yield f"to {whom} with a checkpoint half-written"
        else:
            yield f"to {whom} in training" if began else f"to {whom} while starting"
        if status == 0:  # the signal came too late to stop anything
            return


def _moved_aside(folder: Path) -> set[Path]:
    """Where starts from the beginning have moved what was in `folder`."""
    return {path for path in folder.parent.glob(f"{folder.name}.*") if path.suffix[1:].isdigit()}


def compare(uninterrupted: Path, killed: Path) -> list[str]:
    """What differs between two finished runs."""
    from utils.run.checkpoint import newest_good, read_checkpoint

    states = [newest_good(folder / "checkpoints")[1] or {} for folder in (uninterrupted, killed)]
    best = [read_checkpoint(folder / "checkpoints" / "best.pt") for folder in (uninterrupted, killed)]
    records = [_records(folder) for folder in (uninterrupted, killed)]
    rates = [[record["learning_rate"] for record in run if "learning_rate" in record] for run in records]
    sides: dict[str, Sequence[Any]] = {METRICS: records, "learning rates": rates}
    sides |= {key: [state.get(key) for state in states] for key in sorted(states[0].keys() - {"seconds", "versions"})}
    sides |= {f"{key} of best.pt": [state[key] for state in best] for key in ("model", "epoch")}
    return [difference for name, (left, right) in sides.items() for difference in _differences(name, left, right)][:20]


def _differences(where: str, left: Any, right: Any) -> Iterator[str]:
    """One line for each value in which two nested ones differ."""
    import torch

    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys():
        for key in left:
            yield from _differences(f"{where}.{key}", left[key], right[key])
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{where}[{number}]", one, other)
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            yield f"{where}: {left.dtype} {tuple(left.shape)} uninterrupted, {right.dtype} {tuple(right.shape)} killed"
        elif not torch.equal(left, right):
            yield f"{where}: apart by {(left.double() - right.double()).abs().max().item():.3g}"
    elif left != right:
        yield f"{where}: {str(left)[:80]} uninterrupted, {str(right)[:80]} killed"


def _records(folder: Path) -> list[dict[str, Any]]:
    records = read_records(folder / METRICS, *KINDS)
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def _processes(folder: Path) -> dict[int, bytes]:
    """Every process of the run in `folder`, with its environment; of this machine's /proc."""
    mark = f"{TAG}={folder}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark in environment:
                found[int(entry.name)] = environment
    return found


def _ranks(folder: Path) -> dict[int, int]:
    """rank -> process. A rank's children, such as loader workers, share its environment.

    A run without torchrun is rank 0 alone, and so is a torchrun that has not started its ranks yet."""
    processes = _processes(folder)
    numbers = {process: re.search(rb"(?:^|\0)RANK=(\d+)", environment) for process, environment in processes.items()}
    ranks, first = {}, {}
    for process, number in numbers.items():
        parent = int(_status(process)[1])
        if number is not None and numbers.get(parent) is None:
            ranks[int(number[1])] = process
        elif parent not in processes:
            first[0] = process
    return ranks or first


def _status(process: int) -> list[str]:
    """State, parent and so on of a process; those of a dead one where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _kill_all(folder: Path) -> None:
    """SIGKILL to every process of the run, until none is left."""
    deadline = time.monotonic() + TO_DIE
    while processes := [process for process in _processes(folder) if _status(process)[0] not in ("Z", "X")]:
        if time.monotonic() > deadline:
            raise ExpectedError(f"processes {processes} do not end after SIGKILL")
        for process in processes:
            _send(process, signal.SIGKILL)
        time.sleep(0.01)


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdict; returns the exit status."""
    options = parser().parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    settings = ["log_to_screen=true", "log_to_tensorboard=false", "save_checkpoint=true", "deterministic=true"]
    settings += options.set  # the last one wins
    train = [f"--config={options.config}", f"--yaml_config={options.yaml_config}"]
    train += [f"--set={setting}" for setting in settings]
    repeat = ["python", "-m", "tools.verify_resume", "--config", options.config, f"--yaml_config={options.yaml_config}"]
    repeat += [f"--set={setting}" for setting in options.set]
    repeat += [f"--kills={options.kills}", f"--signal={options.signal}", f"--nproc={options.nproc}"]
    end = f"seed {seed}, repeat with: {shlex.join(repeat)} --seed {seed}"
    load_config(options.yaml_config, options.config, settings)
    try:
        work = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=options.work_dir))
    except OSError as error:
        named = f"--work-dir {options.work_dir}: " if options.work_dir else ""
        raise ConfigError(f"{named}{error.strerror}; name a folder that can be written with --work-dir") from None
    job = Job(train, options.nproc, options.timeout, time.monotonic() + options.total_timeout)
    try:
        verdict = "NOT EQUAL"
        differences = verify(job, options.kills, signal.Signals[f"SIG{options.signal}"], seed, work)
    except ExpectedError as error:
        verdict, differences = "FAILED, so that nothing could be compared", [str(error)]
    except KeyboardInterrupt:
        print(f"the runs so far are in {work}", file=sys.stderr)
        raise
    if differences:
        print(f"verdict: {verdict}\n  " + "\n  ".join(differences))
        print(f"the runs are in {work}\n{end}")
        return 1
    shutil.rmtree(work)
    print("verdict: EQUAL: weights, optimizer, random states, metrics.jsonl and learning rates, bit by bit")
    print(end)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    statuses = "0 equal; 1 different, hanging or failing; 2 usage; 130 interrupted. Needs Linux."
    parser = new_parser("verify_resume", __doc__, statuses)
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--kills", 5, "interruptions in all")
    parser.add_argument("--signal", choices=("KILL", "TERM", "USR1"), default="KILL", help="(default: KILL)")
    add_count(parser, "--nproc", 1, "processes, started by torchrun", "K")
    parser.add_argument("--seed", type=int, metavar="S", help="of the moments and victims (default: drawn and printed)")
    for option, default, what in (("--timeout", 1800.0, "one start"), ("--total-timeout", 86400.0, "everything")):
        help_text = f"{what} may take this long (default: {default:g})"
        parser.add_argument(option, type=seconds, default=default, metavar="SECONDS", help=help_text)
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where the runs are written (default: temporary)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly end, which ends the run under test too
    sys.exit(main())
