"""Verify exact resume: compare an uninterrupted run with runs that are killed at random moments and resumed.

    python -m tools.verify_resume --config=quickstart --set max_epochs=2 --set lr_warmup_epochs=1 --kills 5
    python -m tools.verify_resume --config=quickstart --set model=resnet8 --nproc 2 --signal TERM

Each killed run is restarted by the same command until it has finished. Then its weights, optimizer, random states,
metrics.jsonl and learning rates must equal the uninterrupted run's bit for bit, and every start that found a good
checkpoint must have resumed from it. A run receives at most KILLS_PER_RUN kills; more kills need more runs. They come
during start-up, during training, and as soon as a checkpoint's temporary file appears; with several processes, they hit
all or one.
"""

import argparse
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.shared.command_line import add_count, new_parser
from tools.shared.interrupted_runs import (
    KINDS,
    METRICS,
    Attempt,
    RunCommand,
    add_limits,
    compare,
    find_ranks,
    kill_all,
    moved_aside,
    send,
)
from tools.shared.read_runs import read_records
from utils.config import load_config
from utils.config.command_line import add_config_arguments
from utils.errors import ConfigError, ExpectedError, Stopped, exit_in_a_line
from utils.program import command

KILLS_PER_RUN = 8
MOMENTS = {"training": 0.5, "a write": 0.35, "the start": 0.15}  # with their probabilities


@dataclass(frozen=True)
class Kill:
    """One randomly chosen interruption."""

    signal: signal.Signals
    moment: str
    delay: float  # seconds after the start, or after training began
    short_delay: float  # seconds after a temporary file appeared
    victim: int | None  # a rank; None: all processes


def verify(job: RunCommand, kills: int, number: signal.Signals, seed: int, work: Path) -> list[str]:
    """Return the differences between the uninterrupted run and the killed ones: none if resume is exact."""
    generator = random.Random(seed)
    began = time.monotonic()
    uninterrupted = work / "uninterrupted"
    with Attempt(job, uninterrupted) as attempt:
        if (status := attempt.wait()) != 0:
            raise ExpectedError(f"the uninterrupted run failed with status {status}:\n{attempt.end_of_output()}")
    training = read_records(uninterrupted / METRICS, *KINDS)[-1]["seconds"]
    starting = max(0.1, time.monotonic() - began - training)
    print(f"uninterrupted: {training:.1f} s of training after {starting:.1f} s of start-up", flush=True)

    counts: Counter[str] = Counter()
    differences: list[str] = []
    runs = resumed = 0
    while counts.total() < kills and not differences:
        runs += 1
        folder = work / f"killed-{runs}"
        intended = min(KILLS_PER_RUN, kills - counts.total())
        mean = training / intended
        for struck in _train_through(
            job, folder, [_random_kill(generator, number, mean, starting, job.nproc) for _ in range(intended)]
        ):
            counts[struck] += 1
            print(f"kill {counts.total()} of {kills}: {number.name} {struck}", flush=True)
        differences = compare(uninterrupted, folder)
        resumed += len(read_records(folder / METRICS, "resume"))
        if not differences:
            shutil.rmtree(folder)
    struck_when = ", ".join(f"{count} {when}" for when, count in counts.most_common())
    print(f"{counts.total()} kills over {runs} runs of {job.nproc} process(es): {struck_when}")
    print(f"{resumed} starts resumed from a checkpoint")
    return differences


def _random_kill(generator: random.Random, number: signal.Signals, mean: float, starting: float, nproc: int) -> Kill:
    """Choose moment and victim; `mean`: average seconds of training between two kills."""
    moment = generator.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    delay = generator.uniform(0, starting) if moment == "the start" else generator.uniform(0, 2 * mean)
    one_rank = nproc > 1 and (number != signal.SIGKILL or generator.random() < 0.5)
    victim = generator.randrange(nproc) if one_rank else None
    return Kill(number, moment, delay, generator.uniform(0, 0.003), victim)


def _train_through(job: RunCommand, folder: Path, kills: list[Kill]) -> Iterator[str]:
    """Restart the run until it has finished; yield a description of each kill."""
    from utils.run.checkpoint.io import newest_good

    remaining = list(kills)
    while True:
        has_checkpoint = newest_good(folder / "checkpoints")[0] is not None
        earlier = moved_aside(folder)
        with Attempt(job, folder) as attempt:
            kill = remaining.pop(0) if remaining else None
            struck = kill is not None and strike(attempt, kill)
            began = attempt.has_begun()
            status = attempt.wait()
            if has_checkpoint:
                attempt.check_resumed(earlier)
            if kill is None or not struck:
                if status != 0:
                    raise ExpectedError(f"a start after a kill failed with status {status}:\n{attempt.end_of_output()}")
                return
            # after the end of training, the signal may have reached an exiting interpreter
            finished = bool(read_records(folder / METRICS, "end"))
            if kill.signal != signal.SIGKILL and began and not finished and status not in (0, Stopped.exit_status):
                raise ExpectedError(f"asked to stop, the run ended with status {status}:\n{attempt.end_of_output()}")
        if status == 0:  # the signal came too late to stop anything
            return
        victim = "all processes" if kill.victim is None else f"rank {kill.victim}"
        if attempt.is_writing():
            yield f"to {victim} with a checkpoint half-written"
        else:
            yield f"to {victim} in training" if began else f"to {victim} while starting"


def strike(attempt: Attempt, kill: Kill) -> bool:
    """Wait for the moment and send the signal; return False if the run finished before."""
    if kill.moment != "the start" and not attempt.wait_until(attempt.has_begun):
        return False
    moment = time.monotonic() + kill.delay
    if not attempt.wait_until(lambda: time.monotonic() >= moment):
        return False
    ranks = find_ranks(attempt.folder)  # before the write begins: the search takes as long as a write
    victims = [ranks[kill.victim]] if kill.victim in ranks else list(ranks.values())  # all, if it has not started
    if kill.moment == "a write":
        if not attempt.wait_until(attempt.is_writing, pause=0):
            return False
        time.sleep(kill.short_delay)
    for process in victims:
        send(process, kill.signal)
    if kill.victim is None and kill.signal == signal.SIGKILL:
        kill_all(attempt.folder)
    return True


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict; return the exit status."""
    options = parser().parse_args(argv)
    settings = ["log_to_screen=true", "log_to_tensorboard=false", "save_checkpoint=true", "deterministic=true"]
    settings += options.set  # the last one wins
    load_config(options.yaml_config, options.config, settings)
    train = [f"--config={options.config}", f"--yaml_config={options.yaml_config}"]
    train += [f"--set={setting}" for setting in settings]
    repeat = f"{command('verify_resume')} {shlex.join(sys.argv[1:] if argv is None else argv)}"
    end = f"seed {options.seed}, repeat with: {repeat} --seed {options.seed}"
    try:
        work = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=options.work_dir))
    except OSError as error:
        named = f"--work-dir {options.work_dir}: " if options.work_dir else ""
        raise ConfigError(f"{named}{error.strerror}; give a writable folder with --work-dir") from None
    job = RunCommand(train, options.nproc, options.timeout, time.monotonic() + options.total_timeout)
    try:
        verdict = "NOT EQUAL"
        differences = verify(job, options.kills, signal.Signals[f"SIG{options.signal}"], options.seed, work)
    except ExpectedError as error:
        verdict, differences = "FAILED: the runs could not be compared", [str(error)]
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
    statuses = "0 equal; 1 different, hanging or failing; 2 usage; 130 interrupted. Needs Linux."
    parser = new_parser("verify_resume", __doc__, statuses)
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--kills", 5, "number of interruptions")
    parser.add_argument("--signal", choices=("KILL", "TERM", "USR1"), default="KILL", help="(default: KILL)")
    add_count(parser, "--nproc", 1, "processes, started by torchrun")
    add_limits(parser, 1800.0)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the run under test
    sys.exit(main())
