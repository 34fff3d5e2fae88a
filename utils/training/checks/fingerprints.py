"""Numbers on the device that stand for whole tensors: two that differ in a bit have different fingerprints.

The fingerprint is multilinear hashing over the integers mod 2^64 (Lemire and Kaser 2014, "Strongly universal string
hashing is fast"): each word of at most 32 bits times an odd factor of its position, summed. An odd factor has an
inverse, so that a change of one word always shows; changes of several, an exchange among them, cancel by chance alone,
with a probability of at most about 2^-32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.training.config import TrainingConfig

CHUNK = 2**20  # numbers at once: what bounds the memory for factors and products
CHUNK_FACTOR = 0x1E3779B97F4A7C15  # odd
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
WORKING_BYTES = 3 * 8 * CHUNK  # factors, products, and the numbers in float64


@cache
def factors(device: torch.device) -> Tensor:
    """The odd factors of `CHUNK` positions, int64: the same in every process, from a generator of its own."""
    drawn = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=drawn) | 1).to(device)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Of all bits of a tensor of any type and layout, each at its index: a scalar int64 on its device."""
    bits = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    odd = factors(tensor.device)
    first, *others = bits.split(CHUNK)
    total = (first * odd[: len(first)]).sum()
    for chunk in others:
        total = total * CHUNK_FACTOR + (chunk * odd[: len(chunk)]).sum()
    return total


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """The sum of all numbers with a random sign each, and of their squares, float64 [2] on the tensor's device. For
    devices that round differently each time: there fingerprints cannot be equal, but these are close."""
    numbers = tensor.detach().reshape(-1)
    odd = factors(tensor.device)
    totals = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for chunk in numbers.split(CHUNK):
        wide = chunk.double()
        totals += torch.stack([torch.where(odd[: len(chunk)] > 0, wide, -wide).sum(), wide.square().sum()])
    return totals


@dataclass
class Prints:
    """What stands for several tensors, on the host: {name: fingerprint}, and {name: sketch} where they are wanted."""

    bits: dict[str, int]
    sketches: dict[str, tuple[float, float]]

    def distances(self, other: "Prints") -> dict[str, float]:
        """{name: how far apart}, for each tensor that is not the same in both: the difference of the signed sums as a
        share of the tensor's Euclidean length; without sketches infinite."""
        names = [name for name in self.bits | other.bits if self.bits.get(name) != other.bits.get(name)]
        return {name: self._distance(other, name) for name in names}

    def _distance(self, other: "Prints", name: str) -> float:
        if name not in self.sketches or name not in other.sketches:
            return float("inf")
        (mine, my_square), (theirs, their_square) = self.sketches[name], other.sketches[name]
        if my_square == their_square == 0 or not (math.isfinite(my_square) or math.isfinite(their_square)):
            return 0.0  # 0 and -0; a gradient that overflowed, which the loss scale is there for
        return abs(mine - theirs) / max(my_square, their_square) ** 0.5


def take_prints(tensors: Mapping[str, Tensor], *, sketched: bool) -> Prints:
    """The prints of all `tensors`; waits for the device."""
    return read_prints(*start_prints(tensors, sketched=sketched))


def start_prints(tensors: Mapping[str, Tensor], *, sketched: bool) -> tuple[list[str], Tensor, Tensor | None]:
    """What `read_prints` takes, without waiting for the device: names [N], fingerprints [N], sketches [N, 2]."""
    device = next(iter(tensors.values())).device  # of the first: AdamW may count its steps on the host
    bits = torch.stack([fingerprint(tensor).to(device) for tensor in tensors.values()])
    drawn = torch.stack([sketch(tensor).to(device) for tensor in tensors.values()]) if sketched else None
    return list(tensors), bits, drawn


def read_prints(names: list[str], bits: Tensor, sketches: Tensor | None) -> Prints:
    """Brings them to the host."""
    drawn = [] if sketches is None else [(total, squares) for total, squares in sketches.tolist()]
    return Prints(dict(zip(names, bits.tolist(), strict=True)), dict(zip(names, drawn, strict=False)))


@dataclass
class OwnGradients:
    """Fingerprints of this rank's gradients before they are averaged, where a CUDA graph can write them too."""

    model: nn.Module
    device: torch.device
    sketched: bool
    wanted: bool = False
    places: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [f"own gradient {name}" for name, _ in self.model.named_parameters()]
        self.places = {id(parameter): place for place, parameter in enumerate(self.model.parameters())}
        self.bits = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)
        self.sketches = torch.zeros(len(self.names), 2, dtype=torch.float64, device=self.device)
        factors(self.device)  # a capture allocates nothing that must stay

    @torch.no_grad()
    def look(self, bucket: dist.GradBucket) -> None:
        """At a bucket before it is averaged; a graph has no Python in it, and so always looks."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (self.wanted or capturing):
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            place = self.places[id(parameter)]
            self.bits[place] = fingerprint(gradient)
            if self.sketched:
                self.sketches[place] = sketch(gradient)

    def take(self) -> Prints:
        """Of the last step; waits for the device."""
        return read_prints(self.names, self.bits, self.sketches if self.sketched else None)


def rounds_each_time_anew(config: TrainingConfig, device: torch.device) -> bool:
    """Whether repetitions of a step may differ in their last digits on this device."""
    return device.type == "cuda" and not config.deterministic


def describe_verification(config: TrainingConfig, device: torch.device) -> list[str]:
    """What `verify_every_steps` promises here, for the log."""
    every = config.verify_every_steps
    if every is None:
        return []
    promise = "every bit of it must be equal"
    if rounds_each_time_anew(config, device):
        promise = (
            "without deterministic: true a GPU may round differently each time, so that the first check measures "
            "how far repetitions lie apart, and only what is further is found"
        )
    return [f"verify_every_steps {every}: one of {every} steps is trained twice; {promise}"]
