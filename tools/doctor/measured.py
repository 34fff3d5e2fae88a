"""Measurements of devices: rates, fingerprints and a burn-in; over several ranks also versions and all-reduce.

A fingerprint is the result of a training whose network, data and steps never change. So it can be compared with the
device's own on an earlier day, and bit for bit with other devices of the same kind. Rounding depends on device, torch
and CUDA. In a burn-in all ranks train the configuration's network together on synthetic images, in rounds; after each
round every rank takes its fingerprint, which must not change, and reads sensors.
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tools.bench.common import build_measured, endless, time_action
from tools.bench.limits import ALL_REDUCE, measure_limits
from tools.doctor.findings import FINGERPRINT_REMEDY, Finding, compare_fingerprints, compare_values, judge, read_figures
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.environment import device_name, read_processors
from utils.program import command
from utils.run.meters import read_gpu
from utils.verify.fingerprints import fingerprint

TRIALS = 3
SLOW_BUS = 3.0  # GB/s, just below one 25 Gb/s network card
SECONDS = 3.0  # each device repeats the training for this long, at least twice
STEPS, IMAGES, SIDE, CLASSES = 12, 32, 16, 10
ROUND_SECONDS = 5.0  # of training
DRIFT = 0.1  # warn if the rate falls by more than this fraction from the first quarter to the last
WARM_UP_STEPS = 3  # in addition to those that capture a graph
EXTREMES = (("gpu_temperature_c", max, "at most {:.0f} °C"), ("gpu_power_w", max, "at most {:.0f} W"),
            ("gpu_clock_mhz", min, "at least {:.0f} MHz"))  # fmt: skip
BURN_IN_REMEDY = f"check the GPU's temperature, clocks, power and processes; {command('doctor')} lists its faults"


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


def describe(device: torch.device) -> str:
    """Name what the fingerprint depends on: the device, torch, and CUDA with cuDNN or the CPU's instruction set."""
    if device.type == "cuda":
        versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        return f"{device_name(device)}, torch {torch.__version__}, {versions}"
    # a processor's model, stepping and cache decide the order of sums; Arm reports other facts
    facts = next(iter(read_processors()), {})
    x86 = ("model name", "cpu family", "model", "stepping", "cache size")
    arm = ("CPU implementer", "CPU variant", "CPU part")
    name = ", ".join(facts[name] for name in (*x86, *arm) if name in facts) or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def check_device(device: torch.device) -> Finding:
    """Train repeatedly for `SECONDS`, at least twice, and check that all results agree. The message is "KIND:
    FINGERPRINT", so that other devices can be compared with it."""
    found: list[str] = []
    until = time.monotonic() + SECONDS
    while len(found) < 2 or time.monotonic() < until:
        found.append(train_fixed_network(device))
    usual, count = Counter(found).most_common(1)[0]
    differing = f", from which {len(found) - count} of {len(found)} differ" if count < len(found) else ""
    return judge("fingerprint", f"{describe(device)}: {usual}{differing}", FINGERPRINT_REMEDY, fail=bool(differing))


def train_fixed_network(device: torch.device) -> str:
    """Train for `STEPS` steps in float32 and `STEPS` more, on GPUs under bf16 autocast for their tensor cores; return a
    fingerprint of the weights and all losses."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 3, SIDE, SIDE, generator=generator).to(device)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator).to(device)
    with torch.random.fork_rng(devices=[]):  # the layers' initial weights are replaced below
        network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * (SIDE // 2) ** 2, CLASSES),
        )  # fmt: skip
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                bound = parameter[0].numel() ** -0.5
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
            elif parameter is network[-1].bias:
                parameter.zero_()
    network = network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    fingerprints = []
    with _deterministic():
        for half in (False, True):
            for _ in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half and device.type == "cuda"):
                    loss = nn.functional.cross_entropy(network(images).float(), labels)
                loss.backward()
                optimizer.step()
                fingerprints.append(fingerprint(loss.float()))
        fingerprints += [fingerprint(tensor) for tensor in network.state_dict().values()]
        total = fingerprint(torch.stack(fingerprints))
    return f"{int(total) % 2**64:016x}"


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use deterministic kernels and one thread, so that the number of cores does not change rounding."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


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
    speed = f"{median:,.1f} images/s, standard deviation {spread:.1%}, {drift:+.1%} from the first quarter to the last"
    equal = f"{differing} of {len(rates)} fingerprints differ" if differing else f"{len(rates)} equal fingerprints"
    parts = [f"{minutes:.1f} min, {len(rates)} rounds: {speed}", equal]
    for name, choose, text in EXTREMES:
        if values := [reading[name] for reading in readings if name in reading]:
            parts.append(text.format(choose(values)))
    finding = judge("burn-in", "; ".join(parts), BURN_IN_REMEDY, warn=drift < -DRIFT, fail=bool(differing))
    return replace(finding, figures={"images/s": median})
