"""Check that devices compute correctly: train a small fixed network on each and compare the results bit for bit.

Network, data and steps never change. So a device's fingerprint can be compared with its own on an earlier day, with
other devices of the same kind, and with known_fingerprints.json. Rounding depends on device, torch and CUDA.
"""

import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tools.doctor.findings import Finding
from utils.run.logging.environment import describe_environment, read_processors
from utils.training.checks.fingerprints import fingerprint

KNOWN = Path(__file__).with_name("known_fingerprints.json")
SECONDS = 3.0  # each device repeats the training for this long, at least twice
STEPS, IMAGES, SIDE, CLASSES = 12, 32, 16, 10
REMEDY = "exclude the device, and run python -m tools.doctor again to see whether it recurs"


@dataclass(frozen=True)
class DeviceFingerprints:
    """The fingerprints of one device, one for each repetition."""

    where: str
    kind: str
    fingerprints: list[str]


def train_on(devices: Sequence[torch.device], host: str) -> list[DeviceFingerprints]:
    """Train on each of these devices of `host`."""
    return [DeviceFingerprints(f"{device} of {host}", describe(device), repeat(device, SECONDS)) for device in devices]


def read_known() -> dict[str, str]:
    """Return {kind of device and versions: fingerprint}."""
    known: dict[str, str] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return known


def describe(device: torch.device) -> str:
    """Name what the fingerprint depends on: the device, torch, and CUDA with cuDNN or the CPU's instruction set."""
    environment = describe_environment(device, world_size=1)
    name, version = environment["device"], environment["torch"]
    if device.type == "cuda":
        return f"{name}, torch {version}, CUDA {environment['cuda']}, cuDNN {environment['cudnn']}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, torch {version}"


def repeat(device: torch.device, seconds: float) -> list[str]:
    """Train repeatedly for `seconds`, at least twice; return the fingerprints."""
    found: list[str] = []
    until = time.monotonic() + seconds
    while len(found) < 2 or time.monotonic() < until:
        found.append(train_fixed_network(device))
    return found


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


def check_device(trained: DeviceFingerprints, known: Mapping[str, str]) -> Finding:
    """Check that all repetitions on a device agree, and agree with the known fingerprint of its kind."""
    found, kind = trained.fingerprints, trained.kind
    usual, count = Counter(found).most_common(1)[0]
    subject = f"{trained.where.partition(' of ')[0]} trained a fixed network {len(found)} times, {kind}"
    if count < len(found):
        message = f"{subject}: {len(found) - count} of the fingerprints differ from {usual}"
        return Finding("fingerprint", "fail", message, REMEDY)
    if kind in known and known[kind] != usual:
        return Finding("fingerprint", "fail", f"{subject}: {usual}, but the known fingerprint is {known[kind]}", REMEDY)
    reference = "as known" if kind in known else f"not in {KNOWN.name}"
    return Finding("fingerprint", "ok", f"{subject}: {usual}, {reference}")


def compare_devices(devices: Sequence[DeviceFingerprints]) -> Finding:
    """Check that all devices of one kind have the same fingerprint; name those that differ from the majority."""
    outliers = []
    for kind in dict.fromkeys(trained.kind for trained in devices):
        alike = [(trained.where, trained.fingerprints[0]) for trained in devices if trained.kind == kind]
        usual, count = Counter(found for _, found in alike).most_common(1)[0]
        outliers += [where for where, found in alike if found != usual or 2 * count <= len(alike) > 1]
    if outliers:
        message = f"differ from most devices of their kind: {', '.join(outliers)}"
        return Finding("fingerprints", "fail", message, REMEDY)
    return Finding("fingerprints", "ok", f"{len(devices)} devices, equal within each kind")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use deterministic kernels and one thread, so that the number of cores does not change rounding."""
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
    """Name the processor by the facts that decide the order of sums: model, stepping, cache; Arm: what it reports."""
    facts = next(iter(read_processors()), {})
    x86 = ("model name", "cpu family", "model", "stepping", "cache size")
    arm = ("CPU implementer", "CPU variant", "CPU part")
    return ", ".join(facts[name] for name in (*x86, *arm) if name in facts) or platform.machine()
