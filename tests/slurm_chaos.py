"""Random faults under Slurm: jobs of two nodes on the test cluster must end like an uninterrupted run.

    python -m tests.slurm_chaos --faults 100 --seed 1

Needs root and tests/install_slurm.sh. Like tests.faults.chaos, but for a job: signals to its script and its steps, a
requeue, a scontrol that does not answer, a killed rank or torchrun, a stopped rank, a node that is powered off, a link
that is cut for a moment or for longer than Slurm waits. Slurm or the script requeues the job; after an expected FAILED
it is submitted again. Two jobs run at once. Each run must end COMPLETED 0:0, with results equal to the uninterrupted
run's, and leave nothing behind.
"""

import argparse
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.faults.chaos import find_leftovers, show
from tests.processes import make_command, wait_until
from tests.slurm_cluster import FINAL_STATES, OPTIONS, PYTHON, SlurmCluster, SlurmRun, link_project, why_not
from tools.shared.command_line import add_count, new_parser
from tools.shared.interrupted_runs import METRICS, add_limits, compare
from utils.errors import ConfigError, exit_in_a_line

NODES, AT_ONCE, MOST_FAULTS = 5, 2, 4
EPOCHS, STEPS_PER_EPOCH = 2, 30
SHORT_CUT, STOPPED = 1.5, 1.0  # seconds
PATIENCE = 300.0  # seconds to wait for an expected event
SETTINGS = {
    "dataset": "shapes", "num_classes": 10, "data_loader": "device", "device": "cpu", "model": "resnet8",
    "batch_size": 16, "valid_batch_size_per_gpu": 50, "limit_train_batches": STEPS_PER_EPOCH, "limit_valid_batches": 1,
    "max_epochs": EPOCHS, "lr_warmup_epochs": 0, "log_freq": 1, "log_to_tensorboard": "false", "deterministic": "true",
    "checkpoint_every_steps": 3, "rank_timeout_seconds": 25,
}  # fmt: skip
# train.py, without generating the unused training images, which would take a second.
TRAIN = """
import runpy, sys
if "--print-config" not in sys.argv:
    from utils.data.datasets import dataset as datasets
    datasets.NUM_SHAPES_TRAIN, datasets.NUM_SHAPES_VALID = 640, 100
runpy.run_path("{train}", run_name="__main__")
"""
# scontrol that fails as often as the file next to it says.
SCONTROL = """
left=$(cat "$0.fails" 2>/dev/null || echo 0)
if ((left)); then echo $((left - 1)) >"$0.fails"; exit 1; fi
exec /usr/bin/scontrol "$@"
"""


class ChaosRun(SlurmRun):
    """A training of two nodes, with a scontrol that can fail."""

    def __init__(self, cluster: SlurmCluster, project: Path, name: str) -> None:
        super().__init__(cluster, project, name, SETTINGS)
        self.commands = project / f"{name}.commands"
        self.commands.mkdir()
        make_command(self.commands, "scontrol", SCONTROL)
        self.start()

    def start(self) -> None:
        options, path = (*OPTIONS, "--exclusive"), f"{self.commands}:{PYTHON}:{os.environ['PATH']}"
        self.submit(words=("--config=default",), options=options, PATH=path)

    def starts(self) -> int:
        return len(self.records("start", "resume"))

    def ended(self) -> bool:
        return self.fields()["JobState"] in FINAL_STATES

    def steps_since(self, starts: int) -> int:
        """Steps since the start that followed `starts` earlier ones; 0 before it."""
        records = self.records("start", "resume", "step")
        begun = [number for number, record in enumerate(records) if record["kind"] != "step"]
        return len(records) - begun[starts] - 1 if len(begun) > starts else 0

    def nodes(self) -> list[str]:
        """Return the job's nodes, the head first."""
        return self.cluster.client("scontrol", "show", "hostnames", self.fields()["NodeList"]).split()

    def processes(self, node: str, pattern: str) -> list[int]:
        return [pid for pid, command in self.cluster.pids(node).items() if re.search(pattern, command)]

    def link(self, node: str, state: str) -> None:
        self.cluster.client("ip", "link", "set", f"v-{node}", state)

    def wait_for_restart(self, node: str) -> None:
        before = int(self.fields()["Restarts"])
        wait_until(f"restart without {node}", PATIENCE, lambda: self.ended() or int(self.fields()["Restarts"]) > before)


Strike = Callable[[ChaosRun, int], None]
RANK, AGENT = r"python\S* -u train\.py", r"python\S* -m tools\.torchrun"


def _send(times: int, *targets: str) -> Strike:
    """Send SIGUSR1 to the script or SIGTERM to the steps, or both."""

    def strike(run: ChaosRun, node: int) -> None:
        for target in targets * times:
            run.cluster.cancel(run.job, *{"script": ("-b", "-s", "USR1"), "steps": ("-s", "TERM")}[target])

    return strike


def _silence_scontrol(run: ChaosRun, node: int) -> None:
    (run.commands / "scontrol.fails").write_text(str(1 + node))
    run.cluster.cancel(run.job, "-b", "-s", "USR1")


def _requeue(run: ChaosRun, node: int) -> None:
    run.cluster.client("scontrol", "requeue", str(run.job))


def _kill(pattern: str) -> Strike:
    def strike(run: ChaosRun, node: int) -> None:
        os.kill(run.processes(run.nodes()[node], pattern)[0], signal.SIGKILL)

    return strike


def _stop(run: ChaosRun, node: int) -> None:
    (rank, *_) = run.processes(run.nodes()[node], RANK)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(STOPPED)
    os.kill(rank, signal.SIGCONT)


def _power_off(run: ChaosRun, node: int) -> None:
    name = run.nodes()[node]
    run.cluster.kill_node(name)
    run.wait_for_restart(name)
    run.cluster.boot_node(name)


def _cut(run: ChaosRun, node: int) -> None:
    name = run.nodes()[node]
    run.link(name, "down")
    time.sleep(SHORT_CUT)
    run.link(name, "up")


def _cut_for_long(run: ChaosRun, node: int) -> None:
    """Cut the link until the job restarts without the node; the isolated rank must end by itself."""
    name = run.nodes()[node]
    run.link(name, "down")
    run.wait_for_restart(name)
    wait_until(f"end of the isolated rank on {name}", PATIENCE, lambda: not run.processes(name, RANK))
    run.link(name, "up")


@dataclass(frozen=True)
class SlurmFaultKind:
    """One kind of fault, the event that must follow, and the message that must name it."""

    strike: Strike
    then: str = "continues"
    sides: int = 1  # number of error messages allowed: after a cut, each side of the network prints one
    named: str = ""  # regex that the job's or Slurm's log must match; `{rank}` is the rank on node `{name}`


LOST = "requeue job JobId={job} due to failure of node {name}"
KINDS = {
    "USR1 to the script": SlurmFaultKind(_send(1, "script"), "requeued", named="stopped on SIGUSR1"),
    "TERM to the steps": SlurmFaultKind(_send(1, "steps"), "requeued", named="stopped on SIGTERM"),
    "USR1 and TERM": SlurmFaultKind(_send(1, "script", "steps"), "requeued", named="stopped on SIG(USR1|TERM)"),
    "storm of signals": SlurmFaultKind(
        _send(4, "script", "steps"), "requeued", named="stopped on SIG(USR1|TERM)|ended by a signal"
    ),
    "scontrol fails": SlurmFaultKind(_silence_scontrol, "requeued", named="stopped on SIGUSR1"),
    "requeue": SlurmFaultKind(_requeue, "requeued", named="stopped on SIGTERM"),
    "kill of a rank": SlurmFaultKind(_kill(RANK), "fails", named=r"rank {rank}\b"),
    "kill of torchrun": SlurmFaultKind(_kill(AGENT), "requeued", named="torchrun was killed|rank {rank}|lost contact"),
    "stop of a rank": SlurmFaultKind(_stop),
    "node off": SlurmFaultKind(_power_off, "requeued", named=LOST),
    "link cut": SlurmFaultKind(_cut),
    "link cut for long": SlurmFaultKind(_cut_for_long, "requeued", named=LOST, sides=2),
}


@dataclass(frozen=True)
class SlurmFault:
    """A randomly chosen fault, `steps` steps and `delay` seconds after a start."""

    kind: str
    steps: int
    delay: float
    node: int


def random_faults(seed: int, number: int) -> list[SlurmFault]:
    """Choose the faults of one run; kinds that cost a restart, which takes long, are three times rarer."""
    generator = random.Random(f"slurm/{seed}/{number}")
    weights = [3 if kind.then == "continues" else 1 for kind in KINDS.values()]
    names = generator.choices(list(KINDS), weights, k=generator.randint(2, MOST_FAULTS))
    return [
        SlurmFault(name, generator.randint(4, 9), generator.uniform(0, 0.3), generator.randrange(2)) for name in names
    ]


def inject(run: ChaosRun, faults: list[SlurmFault]) -> tuple[list[tuple[SlurmFault, bool]], list[str]]:
    """Inject the faults and wait for the end; return (the injected faults, whether each was named) and the problems."""
    met: list[tuple[SlurmFault, bool]] = []
    wrong: list[str] = []
    starts = steps = 0
    for fault in faults:
        steps += fault.steps

        def ready(starts: int = starts, steps: int = steps) -> bool:
            return run.steps_since(starts) >= steps or run.ended()

        wait_until(f"{steps} steps of {run.folder.name}", PATIENCE, ready)
        time.sleep(fault.delay)
        if run.records("end") or run.ended():
            break
        job, before, kind = run.job, len(run.log()), KINDS[fault.kind]
        name = run.nodes()[fault.node]
        restarts = int(run.fields()["Restarts"])
        try:
            kind.strike(run, fault.node)
        except (IndexError, ProcessLookupError):  # the process has already ended
            break
        if kind.then != "continues":
            wrong += _follow(run, kind, restarts)
            starts, steps = run.starts(), 0
        new = run.log()[before:]
        errors = re.findall(r"^error: .*", new, re.MULTILINE)
        finished = bool(run.records("end"))
        pattern = kind.named.format(rank=fault.node, name=name, job=job)
        named = finished or re.search(pattern, new + run.cluster.controller_log()) is not None
        met.append((fault, named))
        wrong += [] if named else [f"{fault.kind} is not named: {new[-800:]}"]
        wrong += [f"{fault.kind}: several messages: {errors}"] if len(errors) > kind.sides else []
        if wrong:
            break
    fields = run.cluster.wait(run.job, PATIENCE)
    if (end := (fields["JobState"], fields["ExitCode"])) != ("COMPLETED", "0:0"):
        wrong.append(f"ended as {end}: {run.log()[-800:]}")
    return met, wrong


def _follow(run: ChaosRun, kind: SlurmFaultKind, restarts: int) -> list[str]:
    """Wait for the event that must follow a fault; return what happened instead, if anything else did."""

    def settled() -> bool:
        fields = run.fields()
        return fields["JobState"] in {*FINAL_STATES, "RUNNING"} and (run.ended() or int(fields["Restarts"]) > restarts)

    wait_until(f"end of job {run.job}", PATIENCE, settled)
    fields = run.fields()
    if fields["JobState"] == "COMPLETED":
        return []  # the fault came too late
    if kind.then == "requeued":
        return [] if int(fields["Restarts"]) > restarts else [f"{fields['JobState']} {fields['ExitCode']}"]
    if fields["JobState"] != "FAILED":
        return [f"{fields['JobState']}, restarts {fields['Restarts']}; expected FAILED"]
    run.start()
    return []


def leftovers(run: ChaosRun) -> list[str]:
    """Return what a finished run should not have left behind."""
    left = find_leftovers(run.folder)
    left += [f"left behind: {path.name}" for path in run.folder.parent.glob(f".slurm-{run.job}")]
    logged = run.log().count("Starting Training Loop...")
    return left + ([f"{run.starts()} starts in {METRICS}, {logged} in the log"] if run.starts() != logged else [])


def campaign(
    cluster: SlurmCluster, project: Path, seed: int, faults: int, end: float
) -> tuple[Counter[str], list[str]]:
    """Run until this many faults were injected; return the counts and the problems."""
    uninterrupted = ChaosRun(cluster, project, "uninterrupted")
    assert cluster.wait(uninterrupted.job, PATIENCE)["JobState"] == "COMPLETED", uninterrupted.log()
    counts, problems, lock, numbers = Counter[str](), list[str](), threading.Lock(), itertools.count(1)

    def work() -> None:
        while time.monotonic() < end:
            with lock:
                number = next(numbers)
                if sum(count for name, count in counts.items() if name.endswith(": met")) >= faults:
                    return
            run = ChaosRun(cluster, project, f"run-{number}")
            chosen = random_faults(seed, number)
            try:
                met, wrong = inject(run, chosen)
                wrong += leftovers(run) + ([] if wrong else compare(uninterrupted.folder, run.folder))
            except AssertionError as error:
                met, wrong = [(fault, False) for fault in chosen], [f"{error}: {run.log()[-800:]}"]
                cluster.cancel(run.job)
            with lock:
                for fault, named in met:
                    counts.update([f"{fault.kind}: met"])
                    counts.update([f"{fault.kind}: survived"] * (not wrong) + [f"{fault.kind}: named"] * named)
                problems.extend(f"run {number}: {problem}" for problem in wrong)
                injected = ", ".join(f"{fault.kind} (node {fault.node})" for fault, _ in met) or "none injected"
                ended = "\n  ".join(["UNEXPECTED", *wrong]) if wrong else "as expected"
                print(f"run {number}: {injected}: {ended}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(work) for _ in range(AT_ONCE)]:
            done.result()
        # before the threads end, because a node that a thread booted ends with the thread
        for name in cluster.hosts:
            left = [command for command in cluster.pids(name).values() if "python" in command]
            problems += [f"left behind on {name}: {command}" for command in left]
    return counts, problems


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = parser_of_this()
    options = parser.parse_args(argv)
    if reason := why_not():
        raise ConfigError(f"no Slurm cluster on this machine: {reason}")
    seed = options.seed
    end = time.monotonic() + options.total_timeout
    with tempfile.TemporaryDirectory(prefix="slurm-", dir=options.work_dir) as folder:
        project = link_project(Path(folder) / "project")
        (project / "train.py").write_text(TRAIN.format(train=ROOT / "train.py"))
        with SlurmCluster(Path(folder) / "cluster", NODES) as cluster:
            counts, problems = campaign(cluster, project, seed, options.faults, end)
    show(counts, {kind: bool(properties.named) for kind, properties in KINDS.items()})
    print("\n".join(problems) or "verdict: every run ended like the uninterrupted one")
    print(f"repeat with: python -m tests.slurm_chaos --faults {options.faults} --seed {seed}")
    return int(bool(problems))


def parser_of_this() -> argparse.ArgumentParser:
    statuses = "0 all as expected; 1 something unexpected; 2 usage, or no cluster here"
    parser = new_parser("slurm_chaos", __doc__, statuses)
    parser.prog = "python -m tests.slurm_chaos"
    add_count(parser, "--faults", 10, "minimum number of faults")
    add_limits(parser, PATIENCE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
