"""Check that devices compute correctly: train a small fixed network on each and compare the results bit for bit.

Network, data and steps never change. So a device's fingerprint can be compared with its own on an earlier day, and
with other devices of the same kind. Rounding depends on device, torch and CUDA.
"""

import platform
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tools.doctor.findings import FINGERPRINT_REMEDY, Finding, judge
from utils.environment import device_name, read_processors
from utils.verify.fingerprints import fingerprint

SECONDS = 3.0  # each device repeats the training for this long, at least twice
STEPS, IMAGES, SIDE, CLASSES = 12, 32, 16, 10


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
