"""Measurements: rates of a device, slow devices and a burn-in; over several ranks also versions and all-reduce.

In a burn-in all ranks train the configuration's network together on synthetic images, in rounds. After each round every
rank trains the fixed network of fingerprints.py, whose result must not change, and reads sensors.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tools.bench.common import time_action
from tools.bench.limits import ALL_REDUCE, measure_limits
from tools.bench.training import build_measured, endless
from tools.doctor.findings import Finding, compare_fingerprints, compare_values, judge, read_figures
from tools.doctor.fingerprints import train_fixed_network
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.run.meters import read_gpu

TRIALS = 3
SLOW_BUS = 3.0  # GB/s, just below one 25 Gb/s network card
ROUND_SECONDS = 5.0  # of training
DRIFT = 0.1  # warn if the rate falls by more than this fraction from the first quarter to the last
WARM_UP_STEPS = 3  # in addition to those that capture a graph
EXTREMES = (("gpu_temperature_c", max, "at most {:.0f} °C"), ("gpu_power_w", max, "at most {:.0f} W"),
            ("gpu_clock_mhz", min, "at least {:.0f} MHz"))  # fmt: skip
BURN_IN_REMEDY = "check the GPU's temperature, clocks, power and processes; python -m tools.doctor lists its faults"


def check_limits(device: torch.device) -> Finding:
    """Measure matrix products, copies of memory, and on a GPU copies from the host; warn if its memory is in use."""
    gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if gpu else (1, 1)
    kind = "bf16" if gpu else "float32"
    found = measure_limits(World(0, 0, 1, device), TRIALS, (f"product {kind}", "memory", "host"))
    product = max(found[f"product {kind}, TFLOP/s"].values)  # the best trial, since other processes disturb some
    figures = {f"{kind} TFLOP/s": product, "memory GB/s": found["memory, GB/s"].median}
    if gpu:
        figures["from the host GB/s"] = found["host to device, GB/s"].median
    name = f"{torch.cuda.get_device_name(device)}, {free / total:.0%} of its memory free" if gpu else "CPU"
    message = ", ".join([name, *(f"{what} {value:,.3g}" for what, value in figures.items())])
    remedy = "another process uses its memory: nvidia-smi shows which"
    return replace(judge("limits", message, remedy, warn=free < 0.8 * total), figures=figures)


def compare_devices(findings: Sequence[Finding]) -> list[Finding]:
    """Compare fingerprints, and rates of matrix products only: ranks that copy at the same time disturb each other."""
    compared = compare_fingerprints(findings)
    for name, values in read_figures(findings).items():
        if name.endswith("TFLOP/s") and len(values) > 1:
            compared += compare_values(name, values, values, "the median")
    return compared


def check_versions(versions: Sequence[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """Check that all ranks have the software of most ranks. `versions`: (where, {name: version}) for each rank."""
    texts = [", ".join(f"{name} {version}" for name, version in found.items()) for _, found in versions]
    usual, remedy = statistics.mode(texts), "use one environment or image on all nodes"
    differing = [
        Finding("versions", "fail", f"{text}; most ranks: {usual}", remedy, where)
        for (where, _), text in zip(versions, texts, strict=True)
        if text != usual
    ]
    return differing or [Finding("versions", "ok", usual)]


def check_all_reduce(world: World) -> Finding:
    """Collective: measure an all-reduce of 100 MB, and check its bus bandwidth on GPUs."""
    rate = measure_limits(world, TRIALS, (ALL_REDUCE,))[ALL_REDUCE].median
    bus = 2 * (world.world_size - 1) / world.world_size * rate
    message = f"100 MB over {world.world_size} ranks: {rate:.2f} GB/s, bus bandwidth {bus:.2f} GB/s"
    remedy = "NCCL_DEBUG=INFO prints the network in use; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another"
    slow = world.device.type == "cuda" and bus < SLOW_BUS
    return replace(judge("all-reduce", message, remedy, warn=slow), figures={"GB/s": rate})


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
    finding = judge("burn-in", "; ".join(parts), BURN_IN_REMEDY, warn=drift < -DRIFT, fail=bool(differing))
    return replace(finding, figures={"images/s": median})
