"""Fingerprints of tensors, computed on the device: tensors that differ in a bit have different fingerprints.

A fingerprint is a multilinear hash over the integers mod 2^64 (Lemire and Kaser 2014, "Strongly universal string
hashing is fast"): each word of at most 32 bits is multiplied by an odd factor of its position, and the products are
summed. An odd factor has an inverse, so a change of one word always changes the fingerprint. Changes of several words,
swaps included, cancel by chance only, with a probability of at most about 2^-32.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.training.config import TrainingConfig
from utils.training.kernels.compilers import wants_graphs

FIRST_STEPS = 3  # of each start: one creates the optimizer's state, the next reads it, the third is like all later ones
CHUNK = 2**20  # numbers at once; bounds the memory of factors and products
CHUNK_FACTOR = 0x1E3779B97F4A7C15  # odd
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
WORKING_BYTES = 3 * 8 * CHUNK  # factors, products, and the numbers in float64
Pending = tuple[list[str], Tensor, Tensor | None]  # names [N], fingerprints [N] and sketches [N, 2] on the device


@cache
def factors(device: torch.device) -> Tensor:
    """Odd factors of `CHUNK` positions, int64, the same in every process; torch's global generator is not used."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1).to(device)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Hash all bits of a tensor of any type in the order of its indices, whatever its memory format: a scalar int64 on
    its device."""
    bits = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    odd = factors(tensor.device)
    first, *others = bits.split(CHUNK)
    total = (first * odd[: len(first)]).sum()
    for chunk in others:
        total = total * CHUNK_FACTOR + (chunk * odd[: len(chunk)]).sum()
    return total


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Sum the numbers with random signs, and their squares: float64 [2] on the tensor's device (the sketch of Alon,
    Matias and Szegedy 1996). On devices whose rounding varies, the fingerprints of repetitions differ but their
    sketches are close."""
    numbers = tensor.detach().reshape(-1)
    odd = factors(tensor.device)
    totals = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for chunk in numbers.split(CHUNK):
        wide = chunk.double()
        totals += torch.stack([torch.where(odd[: len(chunk)] > 0, wide, -wide).sum(), wide.square().sum()])
    return totals


@dataclass
class Fingerprints:
    """Fingerprints and sketches of several tensors by name, on the host; sketches only if they were requested."""

    bits: dict[str, int]
    sketches: dict[str, tuple[float, float]]

    def distances(self, other: "Fingerprints") -> dict[str, float]:
        """{name: distance} for each tensor that differs: the difference of the signed sums relative to the tensor's
        Euclidean norm; infinite without sketches."""
        names = [name for name in self.bits | other.bits if self.bits.get(name) != other.bits.get(name)]
        return {name: self._distance(other, name) for name in names}

    def _distance(self, other: "Fingerprints", name: str) -> float:
        if name not in self.sketches or name not in other.sketches:
            return float("inf")
        (mine, my_square), (theirs, their_square) = self.sketches[name], other.sketches[name]
        if my_square == their_square == 0 or not (math.isfinite(my_square) or math.isfinite(their_square)):
            return 0.0  # 0 and -0; or a gradient that overflowed, which the loss scale handles
        return abs(mine - theirs) / max(my_square, their_square) ** 0.5


def take_fingerprints(tensors: Mapping[str, Tensor], *, sketched: bool) -> Fingerprints:
    """Compute the fingerprints of `tensors`; waits for the device."""
    return read_fingerprints(start_fingerprints(tensors, sketched=sketched))


def start_fingerprints(tensors: Mapping[str, Tensor], *, sketched: bool) -> Pending:
    """Start the fingerprints of `tensors` without waiting for the device."""
    device = next(iter(tensors.values())).device  # of the first: AdamW may count its steps on the host
    bits = torch.stack([fingerprint(tensor).to(device) for tensor in tensors.values()])
    sketches = torch.stack([sketch(tensor).to(device) for tensor in tensors.values()]) if sketched else None
    return list(tensors), bits, sketches


def read_fingerprints(pending: Pending) -> Fingerprints:
    """Copy fingerprints to the host; waits for the device."""
    names, bits, sketches = pending
    pairs = [] if sketches is None else [(total, squares) for total, squares in sketches.tolist()]
    return Fingerprints(dict(zip(names, bits.tolist(), strict=True)), dict(zip(names, pairs, strict=False)))


class LocalGradients:
    """Fingerprints of this rank's gradients before the all-reduce, in buffers that a CUDA graph can write to."""

    def __init__(self, model: nn.Module, device: torch.device, *, sketched: bool) -> None:
        self.device, self.sketched = device, sketched
        self.enabled = False
        self.names = [f"own gradient {name}" for name, _ in model.named_parameters()]
        self.index = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self.bits = torch.zeros(len(self.names), dtype=torch.int64, device=device)
        self.sketches = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        factors(device)  # before a capture, whose allocations do not outlive it

    @torch.no_grad()
    def record(self, bucket: dist.GradBucket) -> None:
        """Take the fingerprints of a bucket before it is averaged. During capture always: a replayed graph runs no
        Python, so `enabled` could not switch it on."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (self.enabled or capturing):
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index = self.index[id(parameter)]
            self.bits[index] = fingerprint(gradient)
            if self.sketched:
                self.sketches[index] = sketch(gradient)

    def read(self) -> Fingerprints:
        """Return the fingerprints of the last step; waits for the device."""
        return read_fingerprints((self.names, self.bits, self.sketches if self.sketched else None))


class LayerOutputs:
    """Fingerprints of what each layer returns in one step, in the order of the forward pass. Hooks take them, which
    exist only during that step. Several micro-batches give one fingerprint."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.bits: dict[str, Tensor] = {}
        self.sketches: dict[str, Tensor] = {}

    @contextmanager
    def recorded(self, *, sketched: bool) -> Iterator[None]:
        """Record the step in the `with` block."""
        self.bits, self.sketches = {}, {}
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(self._record, f"output {name}", sketched)))
            yield

    def _record(self, name: str, sketched: bool, layer: nn.Module, inputs: object, output: object) -> None:
        if not isinstance(output, Tensor):
            return
        if output.is_contiguous(memory_format=torch.channels_last):
            output = output.permute(0, 2, 3, 1)  # in the order of the memory, so that it is not copied
        self.bits[name] = self.bits.get(name, 0) * CHUNK_FACTOR + fingerprint(output)
        if sketched:
            self.sketches[name] = self.sketches.get(name, 0) + sketch(output)

    def read(self) -> Fingerprints:
        """Return the fingerprints of the recorded step; waits for the device."""
        if not self.bits:
            return Fingerprints({}, {})
        sketches = torch.stack([*self.sketches.values()]) if self.sketches else None
        return read_fingerprints(([*self.bits], torch.stack([*self.bits.values()]), sketches))


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that the network's forward pass calls by name: its children, or their items if they are lists
    of modules. In a ResNet these are the stem's layers, the residual blocks and the head."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        listed = isinstance(child, nn.Sequential | nn.ModuleList)
        found |= {f"{name}.{item}": layer for item, layer in find_layers(child).items()} if listed else {name: child}
    return found


def rounding_varies(config: TrainingConfig, device: torch.device) -> bool:
    """Whether repetitions of a step may round differently on this device."""
    return device.type == "cuda" and not config.deterministic


def describe_verification(config: TrainingConfig, device: torch.device) -> list[str]:
    """Describe for the log what `verify_every_steps` detects on this device."""
    every = config.verify_every_steps
    if every is None:
        return []
    begin = "after the capture" if wants_graphs(config, device) else "of each start"
    which = f"one step in {every}, and the first {FIRST_STEPS} {begin}, are trained twice"
    promise = "all bits must be equal"
    if rounding_varies(config, device):
        which = f"one step in {every} is trained twice"
        promise = (
            "without deterministic: true a GPU may round differently each time, so the first check measures this "
            "variation, and only larger differences are detected"
        )
    return [f"verify_every_steps {every}: {which}; {promise}"]
