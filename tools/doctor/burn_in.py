"""Burn-in: train for minutes and check that the machine stays as fast, as cool and as correct as at the start.

All ranks train the configuration's network together on synthetic images, in rounds. After each round every rank trains
the fixed network of fingerprints.py, whose result must not change, and reads sensors.
"""

import statistics
import time
from functools import partial

from tools.bench.common import time_action
from tools.bench.training import build_measured, endless
from tools.doctor.findings import Finding
from tools.doctor.fingerprints import train_fixed_network
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.run.meters import read_gpu

ROUND_SECONDS = 5.0  # of training
DRIFT = 0.1  # warn if the rate falls by more than this fraction from the first quarter to the last
WARM_UP_STEPS = 3  # in addition to those that capture a graph
EXTREMES = (("gpu_temperature_c", max, "at most {:.0f} °C"), ("gpu_power_w", max, "at most {:.0f} W"),
            ("gpu_clock_mhz", min, "at least {:.0f} MHz"))  # fmt: skip
REMEDY = "check the GPU's temperature, clocks, power and other processes; python -m tools.doctor lists its faults"


def burn_in(config: Config, world: World, minutes: float) -> Finding:
    """Collective: train for `minutes`, at least two rounds; return this rank's finding."""
    # synthetic shapes need no files
    config = config.model_copy(update={"dataset": "shapes", "num_classes": 10, "data_loader": "device"})
    batch = next(iter(endless(build_loaders(config, open_dataset(config, world), world).train)))
    learner = build_measured(config, world, image_side=batch[0].shape[-1])

    def train(steps: int) -> None:
        for _ in range(steps):
            learner.train_step(*batch)

    train(WARM_UP_STEPS + learner.plan.capture_steps)
    steps = max(1, round(ROUND_SECONDS / max(world.all_gather(time_action(world.device, partial(train, 1))))))
    rates, fingerprints, readings = list[float](), list[str](), list[dict[str, float]]()
    began = time.monotonic()
    while world.broadcast(len(rates) < 2 or time.monotonic() < began + 60 * minutes):
        rates.append(steps * config.batch_size / time_action(world.device, partial(train, steps)))
        readings.append(read_gpu(world.device))
        fingerprints.append(train_fixed_network(world.device))
    return judge_rounds((time.monotonic() - began) / 60, rates, fingerprints, readings)


def judge_rounds(minutes: float, rates: list[float], prints: list[str], readings: list[dict[str, float]]) -> Finding:
    """Fail on a changed fingerprint, warn on a falling rate. Of each round: `rates` in images/s over all ranks,
    `readings` {name in metrics.jsonl: value after its training}."""
    quarter = max(1, len(rates) // 4)
    median, spread = statistics.median(rates), statistics.pstdev(rates) / statistics.mean(rates)
    drift = statistics.median(rates[-quarter:]) / statistics.median(rates[:quarter]) - 1
    differing = sum(found != statistics.mode(prints) for found in prints)
    extremes = [
        text.format(choose(values))
        for name, choose, text in EXTREMES
        if (values := [reading[name] for reading in readings if name in reading])
    ]
    parts = [
        f"{minutes:.1f} min, {len(rates)} rounds: {median:,.1f} images/s, standard deviation {spread:.1%}, "
        f"{drift:+.1%} from the first quarter to the last",
        f"{differing} of {len(rates)} fingerprints differ" if differing else f"{len(rates)} equal fingerprints",
        *extremes,
    ]
    level = "fail" if differing else "warn" if drift < -DRIFT else "ok"
    return Finding("burn-in", level, "; ".join(parts), "" if level == "ok" else REMEDY, figures={"images/s": median})
