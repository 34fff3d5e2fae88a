"""Verify exact resume: compare an uninterrupted run with runs that are killed at random moments and resumed.

    python -m tools.verify_resume --config=quickstart --set max_epochs=2 --set lr_warmup_epochs=1 --kills 5
    python -m tools.verify_resume --config=quickstart --set model=resnet8 --nproc 2

Each killed run is restarted by the same command until it has finished. Then its weights, optimizer, random states,
metrics.jsonl and learning rates must equal the uninterrupted run's bit for bit, and every start that found a good
checkpoint must have resumed from it. SIGKILL hits all processes of a run, at any moment of a start or as soon as a
checkpoint's temporary file appears.
"""

import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.shared.command_line import add_count, new_parser
from tools.shared.interrupted_runs import KINDS, METRICS, Attempt, RunCommand, add_limits, compare
from tools.shared.read_runs import read_records
from utils.config import load_config
from utils.config.command_line import add_config_arguments
from utils.errors import ExpectedError, exit_in_a_line
from utils.program import command

KILLS_PER_RUN = 8  # more kills need more runs


def verify(job: RunCommand, kills: int, generator: random.Random, work: Path) -> list[str]:
    """Return the differences between the uninterrupted run and the killed ones: none if resume is exact."""
    began, uninterrupted = time.monotonic(), work / "uninterrupted"
    train_and_kill(job, uninterrupted, None, generator)
    training = read_records(uninterrupted / METRICS, *KINDS)[-1]["seconds"]
    starting = time.monotonic() - began - training
    print(f"uninterrupted: {training:.1f} s of training after {starting:.1f} s of start-up", flush=True)
    struck = runs = resumed = 0
    while struck < kills:
        runs += 1
        folder, intended = work / f"killed-{runs}", min(KILLS_PER_RUN, kills - struck)
        delays = [generator.uniform(0, starting + 2 * training / intended) for _ in range(intended)]
        while moment := train_and_kill(job, folder, delays.pop() if delays else None, generator):
            struck += 1
            print(f"kill {struck} of {kills}: {moment}", flush=True)
        if differences := compare(uninterrupted, folder):
            return differences
        resumed += len(read_records(folder / METRICS, "resume"))
        shutil.rmtree(folder)
    print(f"{struck} kills over {runs} runs of {job.nproc} process(es); {resumed} starts resumed from a checkpoint")
    return []


def train_and_kill(job: RunCommand, folder: Path, delay: float | None, generator: random.Random) -> str:
    """Start the run, kill it after `delay` seconds or not at all (None), and return in what it was killed; "" if it has
    finished. Raises `ExpectedError` if it fails or ignores a good checkpoint."""
    from utils.run.checkpoint.io import newest_good

    has_checkpoint = newest_good(folder / "checkpoints")[0] is not None
    with Attempt(job, folder) as attempt:
        if killed := delay is not None and strike(attempt, delay, generator):
            attempt.kill()
        status, begun, output = attempt.wait(), attempt.has_begun(), attempt.end_of_output()
    if status != 0 and not killed:
        raise ExpectedError(f"a start ended with status {status}:\n{output}")
    # such a run would still be equal, as every start is deterministic
    if has_checkpoint and begun and read_records(folder / METRICS, "start", "resume")[-1]["kind"] == "start":
        raise ExpectedError(f"a start did not resume from its good checkpoint:\n{output}")
    return "" if status == 0 else "in training" if begun else "while starting"


def strike(attempt: Attempt, delay: float, generator: random.Random) -> bool:
    """Wait `delay` seconds and, in 40 % of all cases, for a write; return False if the run finished before."""
    moment = time.monotonic() + delay
    if not attempt.wait_until(lambda: time.monotonic() >= moment):
        return False
    if generator.random() < 0.4:
        if not attempt.wait_until(lambda: any((attempt.folder / "checkpoints").glob("*.tmp")), pause=0):
            return False
        time.sleep(generator.uniform(0, 0.003))
    return True


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict; return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = new_parser("verify_resume", __doc__, "0 equal; 1 different, hanging or failing; 2 usage. Needs Linux.")
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--kills", 5, "number of interruptions")
    add_count(parser, "--nproc", 1, "processes, started by torchrun")
    add_limits(parser, 1800.0)
    options = parser.parse_args(arguments)
    settings = ["log_to_screen=true", "log_to_tensorboard=false", "save_checkpoint=true", "deterministic=true"]
    settings += options.set  # the last one wins
    load_config(options.yaml_config, options.config, settings)
    train = [f"--config={options.config}", f"--yaml_config={options.yaml_config}"]
    train += [f"--set={setting}" for setting in settings]
    work = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=options.work_dir))
    job = RunCommand(train, options.nproc, options.timeout, time.monotonic() + options.total_timeout)
    try:
        differences = verify(job, options.kills, random.Random(options.seed), work)
    except ExpectedError as error:
        differences = [f"the runs could not be compared: {error}"]
    if differences:
        print("verdict: NOT EQUAL", *differences, f"the runs are in {work}", sep="\n  ")
    else:
        shutil.rmtree(work)
        print("verdict: EQUAL: weights, optimizer, random states, metrics.jsonl and learning rates, bit by bit")
    print(f"repeat with: {command('verify_resume')} {shlex.join(arguments)} --seed {options.seed}")
    return int(bool(differences))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the run under test
    sys.exit(main())
