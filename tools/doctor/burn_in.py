"""Minutes of training under watch: whether a machine stays as fast, as cool and as right as it was at first.

Rounds of training of the configuration's network on drawn images, over all ranks together; after each, the fixed
network of fingerprints.py, whose bits may never change, and what sensors and counters say.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.doctor.findings import Finding

if TYPE_CHECKING:
    from utils.config import Config
    from utils.distributed.world import World

ROUND_SECONDS = 5.0  # of training
DRIFT = 0.1  # of the rate, from the first quarter to the last; what is more is a warning
WARM_UP_STEPS = 3  # and those that capture a graph
EXTREMES = (
    ("gpu_temperature_c", max, "at most {:.0f} °C"),
    ("gpu_power_w", max, "at most {:.0f} W"),
    ("gpu_clock_mhz", min, "at least {:.0f} MHz"),
)
REMEDY = "look at its heat, clocks and power, and for another process there; python -m tools.doctor tells of its faults"


@dataclass(frozen=True)
class Round:
    """What one rank saw of one round."""

    rate: float  # images/s of all ranks in training
    fingerprint: str
    sensors: dict[str, float]  # means over the round, by their names in metrics.jsonl
    faults: tuple[str, ...] = ()  # what fails of the node's GPUs


def burn_in(config: "Config", world: "World", minutes: float) -> Finding:
    """Collective: trains for so long, at least two rounds; what this rank found."""
    from tools.bench.common import time_action
    from tools.bench.training import build_measured, capture_steps, endless
    from tools.doctor.fingerprints import train_fixed_network
    from utils.data.build import build_loaders, open_dataset
    from utils.run.telemetry.sensors import Sensors, find_sensors

    # shapes need no file; what is learned is of no interest
    drawn = config.model_copy(update={"dataset": "shapes", "num_classes": 10, "data_loader": "device"})
    learner = build_measured(drawn, world)
    batch = next(iter(endless(build_loaders(drawn, open_dataset(drawn, world), world).train)))

    def train(steps: int) -> float:
        def action() -> None:
            for _ in range(steps):
                learner.train_step(*batch)

        return time_action(world.device, action)

    train(WARM_UP_STEPS + capture_steps(drawn, world.device))
    steps = max(1, round(ROUND_SECONDS / max(world.gather(train(1)))))  # the same on all ranks
    rounds: list[Round] = []
    known = _faults()  # the doctor's other lines tell of them
    began = time.monotonic()
    until = began + 60 * minutes
    with Sensors(find_sensors(world.device)[0]) as sensors:
        while world.broadcast(len(rounds) < 2 or time.monotonic() < until):
            seconds = train(steps)
            faults = tuple(fault for fault in _faults() if fault not in known) if world.local_rank == 0 else ()
            rate = steps * config.batch_size / seconds
            rounds.append(Round(rate, train_fixed_network(world.device), sensors.close_window(), faults))
    return judge(rounds, (time.monotonic() - began) / 60)


def _faults() -> tuple[str, ...]:
    from tools.doctor.gpus import gpu_checks

    return tuple(finding.message for finding in gpu_checks() if finding.level == "fail")


def judge(rounds: Sequence[Round], minutes: float) -> Finding:
    """The verdict, with spread and drift of the rate."""
    rates = [one.rate for one in rounds]
    quarter = max(1, len(rates) // 4)
    median, spread = statistics.median(rates), statistics.pstdev(rates) / statistics.mean(rates)
    drift = statistics.median(rates[-quarter:]) / statistics.median(rates[:quarter]) - 1
    prints = [one.fingerprint for one in rounds]
    odd = sum(found != statistics.mode(prints) for found in prints)
    faults = list(dict.fromkeys(itertools.chain.from_iterable(one.faults for one in rounds)))
    parts = [
        f"{minutes:.1f} min, {len(rounds)} rounds: {median:,.1f} images/s, standard deviation {spread:.1%}, "
        f"{drift:+.1%} from the first quarter to the last",
        f"{odd} of {len(prints)} fingerprints differ from the others" if odd else f"{len(prints)} equal fingerprints",
        *_extremes(rounds),
        *faults,
    ]
    level = "fail" if odd or faults else "warn" if drift < -DRIFT else "ok"
    return Finding("burn-in", level, "; ".join(parts), "" if level == "ok" else REMEDY, figures={"images/s": median})


def _extremes(rounds: Sequence[Round]) -> list[str]:
    """The hottest, hungriest and slowest round, as far as sensors tell."""
    found = []
    for name, choose, text in EXTREMES:
        if values := [one.sensors[name] for one in rounds if name in one.sensors]:
            found.append(text.format(choose(values)))
    return found
