"""Steps of several ranks over a network of chosen bandwidth and delay on this machine, beside their forecast.

Each rank is a host with a network of its own (wires.py), and gloo reduces DDP's buckets over it. The computing of the
configuration's network is replaced by sleeping, layer by layer, so that ranks need no core each: what is measured is
the communication and how much of it backward hides. The forecast (tools/scaling_model.py) is given the step of one
rank, how much it varies, and the bandwidth and delay that were asked for, nothing else.
"""

import argparse
import json
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
from tools.bench.fabric_rank import WARM_UP, run_carrier, run_rank
from tools.bench.wires import why_not
from tools.command_line import add_count
from tools.output import print_table
from tools.predict_scaling import layer_costs
from tools.scaling_model import Forecast, Machine, Work, make_buckets, predict
from utils.config import Config
from utils.data.workers import check_sockets
from utils.errors import ConfigError, ExpectedError
from utils.run.environment import describe_environment

CASES = "2:20:1,4:20:1,8:20:1,16:20:1,4:100:1,8:100:1,16:100:1,8:50:5,16:50:5"
ANSWER_SECONDS = 120.0  # to start the ranks of a case, beside what its steps should take


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
    check_keys(config)
    cases = read_cases(options.cases)
    if reason := why_not():
        raise ConfigError(f"bench fabric cannot run here: {reason}")
    check_sockets(1)  # the ranks hand over their wires' ends through such
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


def check_keys(config: Config) -> None:
    """`ConfigError` for what would change the measurement and not the forecast."""
    for key, value in {"parallel": "ddp", "enable_sync_bn": False}.items():
        if getattr(config, key) != value:
            found = json.dumps(getattr(config, key))
            raise ConfigError(f"{key} {found}: bench fabric forecasts only {json.dumps(value)}; --set {key}={value}")


def read_cases(text: str) -> list[Case]:
    """The cases of `--cases`."""
    cases = []
    for word in text.split(","):
        try:
            ranks, megabits, milliseconds = word.split(":")
            case = Case(int(ranks), float(megabits), float(milliseconds))
        except ValueError:
            raise ConfigError(f"--cases {text!r}: {word!r}: expected RANKS:MBIT/S:MS, as in 4:100:0.5") from None
        if not (2 <= case.ranks <= 64 and 0.1 <= case.megabits <= 10_000 and 0 <= case.milliseconds <= 10_000):
            raise ConfigError(
                f"--cases {text!r}: {word!r}: expected 2 to 64 ranks, 0.1 to 10000 Mbit/s and 0 to 10000 ms"
            )
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
    expected = step if case.ranks == 1 else foretell(case, step, 0.0, config, layers).step
    limit = ANSWER_SECONDS + 3 * expected * (WARM_UP + steps)
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
                arguments = (rank, case.ranks, layers, step, steps, limit, config, store, its_carrier, give_answer)
                process = context.Process(target=run_rank, args=arguments, daemon=True)
                process.start()
                processes.append(process)
                give_answer.close()
                answers.append(answer)
                if ours is not None and its_carrier is not None:
                    its_carrier.close()
                    carriers.append(ours)
            if carriers:
                wires = (carriers, case.megabits * 1e6 / 8, case.milliseconds / 1e3)
                process = context.Process(target=run_carrier, args=wires, daemon=True)
                process.start()
                processes.append(process)
            return gather(case, answers, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()


def gather(case: Case, answers: Sequence[Connection], seconds: float) -> dict[str, Any]:
    """The slowest rank's answer; `ExpectedError` where a rank gives none for so many seconds."""
    given: list[dict[str, Any]] = []
    missing = list(answers)
    while missing:
        ready = wait(missing, seconds)
        if not ready:
            raise ExpectedError(
                f"case {case}: {len(missing)} ranks gave no answer for {seconds:.0f} s, thrice the forecast and "
                f"{ANSWER_SECONDS:.0f} s; take fewer --steps, more Mbit/s, or a smaller --set model"
            )
        for answer in ready:
            assert isinstance(answer, Connection)
            try:
                given.append(answer.recv())
            except EOFError:
                raise ExpectedError(f"case {case}: a rank ended early; its error is above") from None
            missing.remove(answer)
    return max(given, key=lambda values: float(values["seconds"]))
