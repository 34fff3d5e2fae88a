"""Whether devices compute right: a small fixed network is trained on each, and all must come to the same bits.

What it is trained on and for how long never changes, so that its fingerprint can be compared with that of an earlier
day, of another device of the kind, and of known_fingerprints.json. Rounding depends on device, torch and CUDA.
"""

import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.doctor.findings import Finding

if TYPE_CHECKING:
    import torch

KNOWN = Path(__file__).with_name("known_fingerprints.json")
SECONDS = 3.0  # of repetitions on each device, at least two
STEPS, IMAGES, SIDE, CLASSES = 12, 32, 16, 10
REMEDY = "leave the device out, and look whether it does so again: python -m tools.doctor"


@dataclass(frozen=True)
class DeviceFingerprints:
    """What one device came to."""

    where: str
    kind: str
    fingerprints: list[str]  # of each repetition


def train_on(devices: Sequence["torch.device"], host: str) -> list[DeviceFingerprints]:
    """Trains on each of these devices of `host`."""
    return [DeviceFingerprints(f"{device} of {host}", describe(device), repeat(device, SECONDS)) for device in devices]


def read_known(path: Path = KNOWN) -> dict[str, str]:
    """{kind of device and versions: its fingerprint}."""
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return known


def describe(device: "torch.device") -> str:
    """What the bits depend on: the kind of device, torch, and CUDA with cuDNN or the instructions of the processor."""
    import torch

    from utils.run.logging.environment import describe_environment

    environment = describe_environment(device, world_size=1)
    name, version = environment["device"], environment["torch"]
    if device.type == "cuda":
        return f"{name}, torch {version}, CUDA {environment['cuda']}, cuDNN {environment['cudnn']}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, torch {version}"


def repeat(device: "torch.device", seconds: float) -> list[str]:
    """The fingerprints of as many trainings as fit, at least two."""
    found: list[str] = []
    until = time.monotonic() + seconds
    while len(found) < 2 or time.monotonic() < until:
        found.append(train_fixed_network(device))
    return found


def train_fixed_network(device: "torch.device") -> str:
    """The fingerprint of weights and losses after `STEPS` steps in float32 and as many under bf16's autocast, which is
    what tensor cores compute."""
    import torch
    from torch import nn

    from utils.training.checks.fingerprints import fingerprint

    drawn = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 3, SIDE, SIDE, generator=drawn).to(device)
    labels = torch.randint(CLASSES, (IMAGES,), generator=drawn).to(device)
    with torch.random.fork_rng(devices=[]):  # layers draw what is replaced below
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
                parameter.copy_((2 * torch.rand(parameter.shape, generator=drawn) - 1) * bound)
            elif parameter is network[-1].bias:
                parameter.zero_()
    network = network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    prints = []
    with _deterministic():
        for half in (False, True):
            for _ in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half and device.type == "cuda"):
                    loss = nn.functional.cross_entropy(network(images).float(), labels)
                loss.backward()
                optimizer.step()
                prints.append(fingerprint(loss.float()))
        prints += [fingerprint(tensor) for tensor in network.state_dict().values()]
        total = fingerprint(torch.stack(prints))
    return f"{int(total) % 2**64:016x}"


def check_device(trained: DeviceFingerprints, known: Mapping[str, str]) -> Finding:
    """One device against itself, and against what is `known` of its kind."""
    found, kind = trained.fingerprints, trained.kind
    usual, count = Counter(found).most_common(1)[0]
    told = f"{trained.where.partition(' of ')[0]} trained a fixed network {len(found)} times, {kind}"
    if count < len(found):
        seen = f"{told}: {len(found) - count} of them did not come to {usual}, as the others did"
        return Finding("fingerprint", "fail", seen, REMEDY)
    if kind in known and known[kind] != usual:
        return Finding("fingerprint", "fail", f"{told}: {usual}, but known is {known[kind]}", REMEDY)
    beside = "as known" if kind in known else f"none is known in {KNOWN.name}"
    return Finding("fingerprint", "ok", f"{told}: {usual}, {beside}")


def compare_devices(devices: Sequence[DeviceFingerprints]) -> Finding:
    """All devices of one kind must come to the same: names those that do not come to what most do."""
    odd = []
    for kind in dict.fromkeys(trained.kind for trained in devices):
        alike = [(trained.where, trained.fingerprints[0]) for trained in devices if trained.kind == kind]
        usual, count = Counter(found for _, found in alike).most_common(1)[0]
        odd += [where for where, found in alike if found != usual or 2 * count <= len(alike) > 1]
    if odd:
        return Finding("fingerprints", "fail", f"not what most devices of the kind came to: {', '.join(odd)}", REMEDY)
    return Finding("fingerprints", "ok", f"{len(devices)} devices, equal within each kind")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels of one thread, so that no other number of cores rounds differently; undone at the end."""
    import torch

    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    threads, products = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = True, False, False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = before[1:]
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.set_num_threads(threads)


def _processor() -> str:
    """Name, family, model, stepping and cache, by which kernels choose the order of their sums; what Arm's have."""
    from utils.run.logging.environment import read_processors

    facts = next(iter(read_processors()), {})
    x86 = ("model name", "cpu family", "model", "stepping", "cache size")
    arm = ("CPU implementer", "CPU variant", "CPU part")
    return ", ".join(facts[name] for name in (*x86, *arm) if name in facts) or platform.machine()
