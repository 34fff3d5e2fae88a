"""Silent corruption is caught: one of `verify_every_steps` steps, drawn from the seed, is trained twice and compared.

| what is compared | finds | names the rank by |
|---|---|---|
| two repetitions of the step | what went wrong in one of them | its loss, buffers, gradients before the all-reduce |
| shared state, after the step before and now | what changed in memory meanwhile | its state |
| shared state after the step, over the ranks | what went wrong earlier on one rank alone | the majority |

A third repetition tells which of two is odd. fingerprints.py says what is compared of a tensor. Where
repetitions round differently, on a GPU without `deterministic`, the first check measures by how much.
"""

import hashlib
import random
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.training.checks.fingerprints import Prints, read_prints, rounds_each_time_anew, start_prints, take_prints
from utils.training.checks.judgement import Evidence, tell
from utils.training.checks.step_state import KeptState, gradients, own_tensors, shared_tensors
from utils.training.config import TrainingConfig
from utils.training.learner import Learner
from utils.training.step import GraphedStep

MEASURED_REPETITIONS = 6  # of the first checked step, where they may differ
NOISE_FACTOR = 8  # times the largest distance between these is still no corruption


def is_due(config: TrainingConfig, steps: int) -> bool:
    """Whether the step after `steps` is checked: one of each `verify_every_steps`, at a place drawn from the seed."""
    every = config.verify_every_steps
    if every is None:
        return False
    window, place = divmod(steps, every)
    return place == random.Random(f"{config.seed} {window}").randrange(every)


@dataclass
class Repetition:
    """What one pass through the step came to, on one rank."""

    own: Prints  # of this rank's batch, loss, buffers and gradients before the all-reduce
    result: Prints  # of what all ranks have in common


@dataclass
class Cost:
    """Seconds of the checks beyond the steps that they are, and of these steps."""

    checks: int = 0
    extra: float = 0.0
    steps: float = 0.0


class Verifier:
    """Trains a learner's steps in its place, and checks one of each `verify_every_steps`."""

    def __init__(self, learner: Learner, world: World) -> None:
        self.learner, self.config, self.world = learner, learner.config, world
        self.rounds = rounds_each_time_anew(self.config, world.device)
        self.bounds: dict[str, float] = {}  # {kind of tensor: distance that repetitions have by themselves}
        self.measured = not self.rounds
        self.left: tuple[list[str], Tensor, Tensor | None] | None = None  # shared state after the last step
        self.cost, self.told = Cost(), Cost()
        self._remarks: list[str] = []

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Collective: one step. Raises `CorruptionError` on all ranks where its check fails."""
        if self._is_due():
            self._check(images, labels)
        else:
            self.learner.train_step(images, labels)
        self.left = start_prints(shared_tensors(self.learner), sketched=False) if self._is_due() else None

    def remarks(self) -> list[str]:
        """For the log: what was measured, and what the checks since the last call cost."""
        remarks, self._remarks = self._remarks, []
        checks, every = self.cost.checks - self.told.checks, self.config.verify_every_steps
        if checks and every:
            extra, steps = self.cost.extra - self.told.extra, self.cost.steps - self.told.steps
            share = extra / (steps * every)
            remarks.append(f"Verified {checks} step(s), none wrong, in {extra:.2f} s: {share:.2%} of the training")
            self.told = Cost(self.cost.checks, self.cost.extra, self.cost.steps)
        return remarks

    def _is_due(self) -> bool:
        step = self.learner.step
        if isinstance(step, GraphedStep) and not step.captured:
            return False  # a step that is launched one by one, and its graph, need not round alike
        return is_due(self.config, self.learner.steps)

    def _check(self, images: Tensor, labels: Tensor) -> None:
        left = read_prints(*self.left).bits if self.left is not None else {}
        started = time.perf_counter()  # the device has caught up with the steps before
        kept = KeptState(self.learner, (images, labels))
        before = take_prints(kept.tensors(), sketched=False)
        at_rest = [name for name, bits in left.items() if before.bits.get(name) != bits]
        first = self._repeat(kept)
        if not self.measured:
            self._measure(kept, first)
        not_restored = self._go_back(kept, before)
        began = time.perf_counter()
        second = self._repeat(kept)
        step_seconds = time.perf_counter() - began
        own, result = self._apart(first.own, second.own), self._apart(first.result, second.result)
        state = self._shared_state(second)
        wrong = bool(at_rest or not_restored or own or result)
        looks = self.world.gather((wrong, hashlib.sha256(repr(state).encode()).hexdigest()))
        if any(wrong for wrong, _ in looks) or len({digest for _, digest in looks}) > 1:
            odd = ""
            if any(wrong for wrong, _ in looks):
                self._go_back(kept, before)
                odd = self._which_is_odd(first, second, self._repeat(kept))
            evidence = Evidence(describe_device(self.world), at_rest, not_restored, own, result, odd, state)
            raise CorruptionError(tell(self.learner.steps, self.world.gather(evidence)))
        self.cost.checks += 1
        self.cost.steps += step_seconds
        self.cost.extra += time.perf_counter() - started - step_seconds

    def _repeat(self, kept: KeptState) -> Repetition:
        """One pass through the step."""
        learner, own_gradients = kept.learner, kept.learner.own_gradients
        if own_gradients is not None:
            own_gradients.wanted = True
        learner.train_step(*kept.batch)
        everything = kept.tensors() | gradients(learner)
        own_names = {"images", "labels", *own_tensors(learner)}
        prints = take_prints(everything, sketched=self.rounds)
        own, result = _split(prints, own_names)
        if own_gradients is not None:
            own_gradients.wanted = False
            theirs = own_gradients.take()
            own = Prints(own.bits | theirs.bits, own.sketches | theirs.sketches)
        return Repetition(own, result)

    def _go_back(self, kept: KeptState, before: Prints) -> list[str]:
        """Restore; returns what is not as it was."""
        kept.restore()
        now = take_prints(kept.tensors(), sketched=False)
        return [name for name, bits in before.bits.items() if now.bits.get(name) != bits]

    def _shared_state(self, repetition: Repetition) -> dict[str, int]:
        """What must be the same on every rank: weights, their average, optimizer, loss scale."""
        if self.config.parallel == "no_communication":
            return {}
        return {
            name: bits for name, bits in repetition.result.bits.items() if not name.startswith(("gradient ", "buffer "))
        }

    def _apart(self, first: Prints, second: Prints) -> list[str]:
        """The tensors that lie further apart than repetitions do by themselves."""
        distances = first.distances(second)
        return [
            name
            for name, distance in distances.items()
            if not distance <= NOISE_FACTOR * self.bounds.get(_kind(name), 0.0)  # so that NaN is apart
        ]

    def _which_is_odd(self, first: Repetition, second: Repetition, third: Repetition) -> str:
        def agree(one: Repetition, other: Repetition) -> bool:
            return not (self._apart(one.own, other.own) or self._apart(one.result, other.result))

        if agree(second, third):
            return "the first of three repetitions is the odd one"
        if agree(first, third):
            return "the second of three repetitions is the odd one"
        return "no two of three repetitions agree"

    def _measure(self, kept: KeptState, first: Repetition) -> None:
        """Collective: how far repetitions of this step lie apart by themselves, on any rank."""
        found: dict[str, float] = {}
        repetitions = [first]
        for _ in range(MEASURED_REPETITIONS - 1):
            kept.restore()
            repetitions.append(self._repeat(kept))
        for number, one in enumerate(repetitions):
            for other in repetitions[:number]:
                distances = one.own.distances(other.own) | one.result.distances(other.result)
                for name, distance in distances.items():
                    found[_kind(name)] = max(found.get(_kind(name), 0.0), distance)
        for rank in self.world.gather(found):
            for kind, distance in rank.items():
                self.bounds[kind] = max(self.bounds.get(kind, 0.0), distance)
        self.measured = True
        if self.bounds:
            told = ", ".join(f"{kind} {distance:.1e}" for kind, distance in self.bounds.items())
            self._remarks.append(
                f"{MEASURED_REPETITIONS} repetitions of one step differ, as shares of a tensor's length: {told}; what "
                f"differs less than {NOISE_FACTOR} times as much is not found (deterministic: true finds every bit)"
            )
        else:
            self._remarks.append(
                f"{MEASURED_REPETITIONS} repetitions of one step were equal bit for bit, as all must be"
            )


def describe_device(world: World) -> str:
    """Host and device of this rank, with the device's UUID where it has one."""
    host = socket.gethostname()
    if world.device.type != "cuda":
        return f"host {host}, {world.device.type}"
    properties = torch.cuda.get_device_properties(world.device)
    return f"host {host}, {properties.name} GPU-{properties.uuid}"


def _split(prints: Prints, names: Iterable[str]) -> tuple[Prints, Prints]:
    """Those of `names`, and the others."""
    chosen = set(names)
    parts = []
    for inside in (True, False):
        bits = {name: value for name, value in prints.bits.items() if (name in chosen) == inside}
        sketches = {name: value for name, value in prints.sketches.items() if (name in chosen) == inside}
        parts.append(Prints(bits, sketches))
    return parts[0], parts[1]


def _kind(name: str) -> str:
    """The kind of a tensor by its name: all of a kind have one bound."""
    return " ".join(name.split(" ")[:-1]) or name
