"""Steps of 2 to 16 ranks over a network of chosen bandwidth and delay on this machine, beside their forecast.

Each rank is a host with a network of its own (wires.py), and gloo reduces DDP's buckets over it. The computing of the
configuration's network is replaced by sleeping, layer by layer, so that ranks need no core each: what is measured is
the communication and how much of it backward hides. The forecast (tools/scaling_model.py) is given the step of one rank
and the bandwidth and delay that were asked for, nothing else.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.bench import common
from tools.bench.fabric_rank import run_carrier, run_rank
from tools.bench.wires import why_not
from tools.command_line import add_count
from tools.output import print_table
from tools.predict_scaling import layer_costs
from tools.scaling_model import Forecast, Machine, Work, make_buckets, predict
from utils.config import Config
from utils.errors import ConfigError, ExpectedError
from utils.run.environment import describe_environment

CASES = "2:20:1,4:20:1,8:20:1,16:20:1,4:100:1,8:100:1,16:100:1,8:50:5,16:50:5"
ANSWER_SECONDS = 120.0  # for all steps of one case


class Case(NamedTuple):
    """Ranks, and the network between them."""

    ranks: int
    megabits: float  # per second, that each rank sends
    milliseconds: float  # from one rank to another

    def __str__(self) -> str:
        return f"{self.ranks}:{self.megabits:g}:{self.milliseconds:g}"


ALONE = Case(1, 0, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tools.bench fabric`."""
    common.add_arguments(parser, config="quickstart")
    parser.set_defaults(set=["model=resnet20", "bucket_cap_mb=0.5"])  # small, so that carrying it costs little
    form = "RANKS:MBIT/S:MS"
    parser.add_argument("--cases", default=CASES, metavar=f"{form},...", help=f"default: {CASES}")
    add_count(parser, "--steps", 6, "steps of a trial that count")
    add_count(parser, "--step-ms", 400, "milliseconds that the computing of a step takes")


def run(options: argparse.Namespace) -> int:
    """Measure, print measured beside forecast, write the report."""
    config = common.read_config(options)
    cases = read_cases(options.cases)
    if reason := why_not():
        raise ConfigError(f"bench fabric cannot run here: {reason}")
    layers = layer_costs(config)
    gradients = sum(size for size, _ in layers)
    buckets: dict[Case, list[int]] = {}

    def trial(case: Case) -> Mapping[str, float]:
        values = run_case(case, config, layers, options.step_ms / 1e3, options.steps)
        print(f"{case}: {values['seconds'] * 1e3:.1f} ms a step", file=sys.stderr)
        buckets[case] = values["buckets"]
        return {name: values[name] for name in ("seconds", "deviation")}

    trials = {str(case): partial(trial, case) for case in (ALONE, *cases)}
    measured = common.measure(trials, options.trials, warm_up=0)
    results = {str(case): compare(case, config, layers, measured) | {"buckets": buckets[case]} for case in cases}
    alone = common.Sample(tuple(1e3 * seconds for seconds in measured[str(ALONE)]["seconds"].values))
    print_table(
        f"{config.model} asleep, {gradients / 1e6:.2f} MB of gradients; one rank's step {alone:.1f} ms",
        ("ranks:Mbit/s:ms", "step, ms", "forecast, ms", "efficiency", "forecast", "error, points"),
        [table_row(name, values) for name, values in results.items()],
    )
    if options.json:
        environment = describe_environment(torch.device("cpu"), 1)
        common.write_results(options.json, "fabric", config, results, environment=environment)
    return 0


def table_row(name: str, values: Mapping[str, Any]) -> list[str]:
    """The cells of a case: milliseconds of a step, measured and forecast, and the efficiencies."""
    return [
        name,
        f"{1e3 * values['step_seconds']:.0f}",
        f"{1e3 * values['forecast_seconds']:.0f}",
        f"{100 * values['efficiency']:.1f} %",
        f"{100 * values['forecast_efficiency']:.1f} %",
        f"{values['error_points']:+.1f}",
    ]


def read_cases(text: str) -> list[Case]:
    """The cases of `--cases`."""
    cases = []
    for word in text.split(","):
        try:
            ranks, megabits, milliseconds = word.split(":")
            case = Case(int(ranks), float(megabits), float(milliseconds))
        except ValueError:
            raise ConfigError(f"--cases {word}: expected RANKS:MBIT/S:MS, as in 4:100:0.5") from None
        if not (2 <= case.ranks <= 64 and case.megabits > 0 and case.milliseconds >= 0):
            raise ConfigError(f"--cases {word}: expected 2 to 64 ranks, a bandwidth above 0 and a delay of at least 0")
        cases.append(case)
    return cases


def compare(
    case: Case, config: Config, layers: Sequence[tuple[int, float]], measured: common.Results
) -> dict[str, Any]:
    """What was measured beside what is forecast from one rank's step."""
    alone, step = (measured[str(which)]["seconds"] for which in (ALONE, case))
    noise = measured[str(ALONE)]["deviation"].median / alone.median
    forecast = foretell(case, alone.median, noise, config, layers)
    efficiency = alone.median / step.median
    return {
        "step": step,
        "alone": alone,
        "step_seconds": step.median,
        "forecast_seconds": forecast.step,
        "efficiency": efficiency,
        "forecast_efficiency": forecast.efficiency,
        "error_points": 100 * (forecast.efficiency - efficiency),
    }


def foretell(case: Case, step: float, noise: float, config: Config, layers: Sequence[tuple[int, float]]) -> Forecast:
    """The model's forecast. gloo reduces in one ring over all ranks, as NCCL does within a node; nothing else costs."""
    machine = Machine(
        gpus_per_node=case.ranks,
        intra=case.megabits * 1e6 / 8,
        intra_latency=case.milliseconds / 1e3,
        memory=float("inf"),
        interference=0.0,
        noise=noise,
        floor=0.0,
    )
    buckets = make_buckets(layers, int(config.bucket_cap_mb * 2**20))
    return predict(Work(step, config.batch_size, buckets), case.ranks, machine)


def run_case(
    case: Case, config: Config, layers: Sequence[tuple[int, float]], step: float, steps: int
) -> dict[str, Any]:
    """What the slowest rank answers after `steps` steps: "seconds" of a step, their "deviation", DDP's "buckets"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once for all ranks
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes: list[ForkServerProcess] = []
        answers: list[Connection] = []
        carriers: list[Connection] = []
        try:
            for rank in range(case.ranks):
                answer, give_answer = context.Pipe(duplex=False)
                ours, its_carrier = context.Pipe() if case.ranks > 1 else (None, None)
                arguments = (rank, case.ranks, layers, step, steps, config, store, its_carrier, give_answer)
                processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
                processes[-1].start()
                give_answer.close()
                answers.append(answer)
                if ours is not None and its_carrier is not None:
                    its_carrier.close()
                    carriers.append(ours)
            if carriers:
                wires = (carriers, case.megabits * 1e6 / 8, case.milliseconds / 1e3)
                processes.append(context.Process(target=run_carrier, args=wires, daemon=True))
                processes[-1].start()
            return gather(case, answers)
        finally:
            for process in processes:
                process.kill()
                process.join()


def gather(case: Case, answers: Sequence[Connection]) -> dict[str, Any]:
    """The slowest rank's answer; `ExpectedError` where a rank gives none."""
    given: list[dict[str, Any]] = []
    missing = list(answers)
    while missing:
        ready = wait(missing, ANSWER_SECONDS)
        if not ready:
            raise ExpectedError(f"case {case}: {len(missing)} ranks gave no answer for {ANSWER_SECONDS:.0f} s")
        for answer in ready:
            assert isinstance(answer, Connection)
            try:
                given.append(answer.recv())
            except EOFError:
                raise ExpectedError(f"case {case}: a rank ended early; its error is above") from None
            missing.remove(answer)
    return max(given, key=lambda values: float(values["seconds"]))
