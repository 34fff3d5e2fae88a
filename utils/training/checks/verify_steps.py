"""Detect silent corruption: train one step in every `verify_every_steps`, sampled from the seed, and the first steps of
each start, twice and compare.

| comparison | detects | finds the rank by |
|---|---|---|
| two repetitions of the step | an error in one | its layers' outputs, loss, buffers, gradients before the all-reduce |
| shared state after the previous step and now | a change in memory in between | its state |
| shared state after the step, over the ranks | an earlier error on one rank | the majority |

A third repetition shows which of two is wrong. fingerprints.py says how tensors are compared. On a GPU without
`deterministic`, where rounding varies, the first check measures how much repetitions differ.
"""

import hashlib
import itertools
import random
import socket
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.training.checks.faulty_ranks import Evidence, describe_fault
from utils.training.checks.fingerprints import (
    FIRST_STEPS,
    Fingerprints,
    LayerOutputs,
    Pending,
    find_layers,
    read_fingerprints,
    rounding_varies,
    start_fingerprints,
    take_fingerprints,
)
from utils.training.checks.step_state import Snapshot, gradients, shared_tensors
from utils.training.config import TrainingConfig
from utils.training.kernels.compilers import compiles
from utils.training.learner import Learner
from utils.training.step import GraphedStep

NOISE_REPETITIONS = 6  # of the first checked step, where rounding varies
NOISE_FACTOR = 8  # up to this many times the largest distance between these is no corruption


def is_due(config: TrainingConfig, steps: int) -> bool:
    """Whether the step after `steps` is checked: one in every `verify_every_steps`, sampled from the seed."""
    every = config.verify_every_steps
    if every is None:
        return False
    window, place = divmod(steps, every)
    return place == random.Random(f"{config.seed} {window}").randrange(every)


@dataclass
class Repetition:
    """Result of one pass through the step on one rank."""

    own: Fingerprints  # batch, layers' outputs, loss, buffers and gradients before the all-reduce
    result: Fingerprints  # what all ranks have in common
    seconds: float


@dataclass
class Cost:
    """Seconds of the checked steps themselves, seconds of their checks beyond that, and the number of all steps."""

    checks: int = 0
    extra: float = 0.0
    steps: float = 0.0
    trained: int = 0


class Verifier:
    """Trains a learner's steps, and checks those that are due."""

    def __init__(self, learner: Learner, world: World) -> None:
        self.learner, self.config, self.world = learner, learner.config, world
        self.rounding_varies = rounding_varies(self.config, world.device)
        self.noise: dict[str, float] = {}  # {kind of tensor: largest distance between repetitions by rounding}
        self.noise_measured = not self.rounding_varies
        # A fault that repeating a step finds is transient, so repeating the step once more to look for the layer would
        # find none: the repetitions that are compared record their layers. Compiled and captured steps run no hooks.
        hooked = not (isinstance(learner.step, GraphedStep) or compiles(self.config, world.device))
        self.outputs = LayerOutputs(find_layers(learner.model) if hooked else {})
        self.state_after_last_step: Pending | None = None
        self.cost = Cost()  # since the last remarks
        self._trained_to, self._first_steps = -1, 0  # number of the last step; first steps that are still to be checked
        self._remarks: list[str] = []

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Collective: one step. Raises `CorruptionError` on all ranks if its check fails."""
        if self.learner.steps != self._trained_to:  # a start, or a checkpoint has been restored
            self.state_after_last_step = None
            # where rounding varies, a sampled check measures it: a fault at the start would count as rounding
            self._first_steps = 0 if self.config.verify_every_steps is None or self.rounding_varies else FIRST_STEPS
        if self._is_due(images):
            self._check(images, labels)
            self._first_steps -= 1
        else:
            self.learner.train_step(images, labels)
        self._trained_to = self.learner.steps
        self.cost.trained += 1
        self.state_after_last_step = None
        if self._is_due(images):
            self.state_after_last_step = start_fingerprints(shared_tensors(self.learner), sketched=False)

    def remarks(self) -> list[str]:
        """Remarks for the log: the measured variation of rounding, and the cost of the checks since the last call."""
        remarks, self._remarks = self._remarks, []
        cost = self.cost
        if cost.checks:
            fraction = cost.extra / (cost.steps / cost.checks * cost.trained)
            remarks.append(
                f"Verified {cost.checks} step(s), none wrong, in {cost.extra:.2f} s: {fraction:.2%} of the training"
            )
            self.cost = Cost()
        return remarks

    def _is_due(self, images: Tensor) -> bool:
        step = self.learner.step
        if isinstance(step, GraphedStep) and not step.replays(images):
            return False  # eager steps and the graph may round differently
        return self._first_steps > 0 or is_due(self.config, self.learner.steps)

    def _check(self, images: Tensor, labels: Tensor) -> None:
        last_state = {} if self.state_after_last_step is None else read_fingerprints(self.state_after_last_step).bits
        started = time.perf_counter()  # the device has finished the previous steps
        snapshot = Snapshot(self.learner, (images, labels))
        before = take_fingerprints(snapshot.tensors(), sketched=False)
        changed_at_rest = [name for name, bits in last_state.items() if before.bits.get(name) != bits]
        first = self._repeat(snapshot)
        if not self.noise_measured:
            self._measure_noise(snapshot, first)
        not_restored = self._restore(snapshot, before)
        second = self._repeat(snapshot)
        own, result = self._differing_tensors(first, second)
        state = self._shared_state(second)
        wrong_here = bool(changed_at_rest or not_restored or own or result)
        ranks = self.world.all_gather((wrong_here, hashlib.sha256(repr(state).encode()).hexdigest()))
        wrong = any(wrong for wrong, _ in ranks)
        if wrong or len({digest for _, digest in ranks}) > 1:
            outlier = ""
            if wrong:
                self._restore(snapshot, before)
                outlier = self._outlier(first, second, self._repeat(snapshot))
            device, layers = describe_device(self.world), bool(self.outputs.bits)
            evidence = Evidence(device, changed_at_rest, not_restored, own, result, outlier, state, layers)
            raise CorruptionError(describe_fault(self.learner.steps, self.world.all_gather(evidence)))
        self.cost.checks += 1
        self.cost.steps += second.seconds
        # the first repetition is the step itself, and may compile
        self.cost.extra += time.perf_counter() - started - first.seconds

    def _repeat(self, snapshot: Snapshot) -> Repetition:
        """Run the step once."""
        learner, local_gradients, started = self.learner, self.learner.local_gradients, time.perf_counter()
        if local_gradients is not None:
            local_gradients.enabled = True
        with self.outputs.recorded(sketched=self.rounding_varies):
            learner.train_step(*snapshot.batch)
        own = take_fingerprints(snapshot.own_tensors(), sketched=self.rounding_varies)
        result = take_fingerprints(shared_tensors(learner) | gradients(learner), sketched=self.rounding_varies)
        outputs = self.outputs.read()
        batch = {name: own.bits[name] for name in ("images", "labels")}  # in the order of cause and effect
        own = Fingerprints(batch | outputs.bits | own.bits, outputs.sketches | own.sketches)
        if local_gradients is not None:
            local_gradients.enabled = False
            local = local_gradients.read()
            own = Fingerprints(own.bits | local.bits, own.sketches | local.sketches)
        return Repetition(own, result, time.perf_counter() - started)

    def _restore(self, snapshot: Snapshot, before: Fingerprints) -> list[str]:
        """Restore the snapshot; return the tensors that still differ from `before`."""
        snapshot.restore()
        now = take_fingerprints(snapshot.tensors(), sketched=False)
        return [name for name, bits in before.bits.items() if now.bits.get(name) != bits]

    def _shared_state(self, repetition: Repetition) -> dict[str, int]:
        """Fingerprints that must be equal on all ranks: weights, their average, optimizer state, loss scale."""
        if self.config.parallel == "no_communication":
            return {}
        return {name: bits for name, bits in repetition.result.bits.items() if not name.startswith("gradient ")}

    def _differing_tensors(self, first: Repetition, second: Repetition) -> tuple[list[str], list[str]]:
        """Names of the rank's own tensors, and of those in common, that differ by more than rounding."""
        own, result = first.own.distances(second.own), first.result.distances(second.result)
        return self._beyond_rounding(own), self._beyond_rounding(result)

    def _beyond_rounding(self, distances: dict[str, float]) -> list[str]:
        return [
            name
            for name, distance in distances.items()
            if not distance <= NOISE_FACTOR * self.noise.get(_kind(name), 0.0)  # "not <=": NaN differs
        ]

    def _outlier(self, first: Repetition, second: Repetition, third: Repetition) -> str:
        if not any(self._differing_tensors(second, third)):
            return "the first of three repetitions differs"
        if not any(self._differing_tensors(first, third)):
            return "the second of three repetitions differs"
        return "no two of three repetitions agree"

    def _measure_noise(self, snapshot: Snapshot, first: Repetition) -> None:
        """Collective: measure how much repetitions of this step differ by rounding, on any rank."""
        found: dict[str, float] = {}
        repetitions = [first]
        for _ in range(NOISE_REPETITIONS - 1):
            snapshot.restore()
            repetitions.append(self._repeat(snapshot))
        for one, other in itertools.combinations(repetitions, 2):
            distances = one.own.distances(other.own) | one.result.distances(other.result)
            for name, distance in distances.items():
                found[_kind(name)] = max(found.get(_kind(name), 0.0), distance)
        for rank in self.world.all_gather(found):
            for kind, distance in rank.items():
                self.noise[kind] = max(self.noise.get(kind, 0.0), distance)
        self.noise_measured = True
        if self.noise:
            noise = ", ".join(f"{kind} {distance:.1e}" for kind, distance in self.noise.items())
            self._remarks.append(
                f"{NOISE_REPETITIONS} repetitions of one step differ by these fractions of a tensor's norm: {noise}; "
                f"up to {NOISE_FACTOR} times as much is not detected (deterministic: true detects every bit)"
            )
        else:
            self._remarks.append(
                f"{NOISE_REPETITIONS} repetitions of one step were bitwise equal; a later difference is corruption"
            )


def describe_device(world: World) -> str:
    """Host and device of this rank, with the UUID of a GPU."""
    host = socket.gethostname()
    if world.device.type != "cuda":
        return f"host {host}, {world.device.type}"
    properties = torch.cuda.get_device_properties(world.device)
    return f"host {host}, {properties.name} GPU-{properties.uuid}"


def _kind(name: str) -> str:
    """Kind of a tensor by its name; all tensors of a kind have one noise bound."""
    return " ".join(name.split(" ")[:-1]) or name
