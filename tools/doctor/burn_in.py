"""Burn-in: train for minutes and check that the machine stays as fast, as cool and as correct as at the start.

All ranks train the configuration's network together on synthetic images, in rounds. After each round every rank trains
the fixed network of fingerprints.py, whose result must not change, and reads sensors and error counters.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.common import time_action
from tools.bench.training import build_measured, capture_steps, endless
from tools.doctor.findings import Finding
from tools.doctor.fingerprints import train_fixed_network
from tools.doctor.gpus import gpu_checks
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.run.meters import read_gpu

ROUND_SECONDS = 5.0  # of training
DRIFT = 0.1  # warn if the rate falls by more than this fraction from the first quarter to the last
WARM_UP_STEPS = 3  # in addition to those that capture a graph
EXTREMES = (
    ("gpu_temperature_c", max, "at most {:.0f} °C"),
    ("gpu_power_w", max, "at most {:.0f} W"),
    ("gpu_clock_mhz", min, "at least {:.0f} MHz"),
)
REMEDY = "check the GPU's temperature, clocks, power and other processes; python -m tools.doctor lists its faults"


@dataclass(frozen=True)
class Round:
    """One rank's measurements of one round."""

    rate: float  # images/s over all ranks
    fingerprint: str
    sensors: dict[str, float]  # {name in metrics.jsonl: value after its training}
    faults: tuple[str, ...] = ()  # new faults of the node's GPUs


def burn_in(config: Config, world: World, minutes: float) -> Finding:
    """Collective: train for `minutes`, at least two rounds; return this rank's finding."""
    # synthetic shapes need no files
    config = config.model_copy(update={"dataset": "shapes", "num_classes": 10, "data_loader": "device"})
    learner = build_measured(config, world)
    batch = next(iter(endless(build_loaders(config, open_dataset(config, world), world).train)))

    def train(steps: int) -> float:
        def action() -> None:
            for _ in range(steps):
                learner.train_step(*batch)

        return time_action(world.device, action)

    train(WARM_UP_STEPS + capture_steps(config, world.device))
    steps = max(1, round(ROUND_SECONDS / max(world.all_gather(train(1)))))
    rounds: list[Round] = []
    known = _faults()  # reported by the `gpu health` check
    began = time.monotonic()
    until = began + 60 * minutes
    while world.broadcast(len(rounds) < 2 or time.monotonic() < until):
        rate = steps * config.batch_size / train(steps)
        sensors = read_gpu(world.device)
        faults = tuple(fault for fault in _faults() if fault not in known) if world.local_rank == 0 else ()
        rounds.append(Round(rate, train_fixed_network(world.device), sensors, faults))
    return judge_rounds(rounds, (time.monotonic() - began) / 60)


def _faults() -> tuple[str, ...]:
    return tuple(finding.message for finding in gpu_checks() if finding.level == "fail")


def judge_rounds(rounds: Sequence[Round], minutes: float) -> Finding:
    """Fail on a changed fingerprint or a new fault, warn on a falling rate."""
    rates = [one.rate for one in rounds]
    quarter = max(1, len(rates) // 4)
    median, spread = statistics.median(rates), statistics.pstdev(rates) / statistics.mean(rates)
    drift = statistics.median(rates[-quarter:]) / statistics.median(rates[:quarter]) - 1
    fingerprints = [one.fingerprint for one in rounds]
    differing = sum(found != statistics.mode(fingerprints) for found in fingerprints)
    faults = list(dict.fromkeys(fault for one in rounds for fault in one.faults))
    parts = [
        f"{minutes:.1f} min, {len(rounds)} rounds: {median:,.1f} images/s, standard deviation {spread:.1%}, "
        f"{drift:+.1%} from the first quarter to the last",
        f"{differing} of {len(rounds)} fingerprints differ" if differing else f"{len(rounds)} equal fingerprints",
        *_extremes(rounds),
        *faults,
    ]
    level = "fail" if differing or faults else "warn" if drift < -DRIFT else "ok"
    return Finding("burn-in", level, "; ".join(parts), "" if level == "ok" else REMEDY, figures={"images/s": median})


def _extremes(rounds: Sequence[Round]) -> list[str]:
    """Describe the round with the highest temperature, power, and lowest clock; empty without sensors."""
    found = []
    for name, choose, text in EXTREMES:
        if values := [one.sensors[name] for one in rounds if name in one.sensors]:
            found.append(text.format(choose(values)))
    return found
