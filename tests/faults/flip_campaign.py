"""A campaign of bit flips in one training: how many changed their step, and how many of these were found and named."""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.faults.flips import KINDS, Flip, Flipper
from utils.config import Config
from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.training.batches import Batch
from utils.training.checks.step_state import Snapshot, Tensors, gradients, own_tensors, shared_tensors
from utils.training.checks.verify_steps import Verifier
from utils.training.learner import Learner, build_learner

SIDE = 16  # pixels


@dataclass
class FlipCounts:
    """Results for one kind of tensor."""

    flips: int = 0
    changed: int = 0  # the step's result: weights, optimizer, gradients, buffers or loss
    caught: int = 0  # changed and detected
    named: int = 0  # caught, with the right rank and no other
    not_changed: int = 0  # the whole result is the same
    detected_without_change: int = 0  # the flip was still in the batch or the state


@dataclass
class Outcome:
    """Results of a campaign."""

    flips: dict[str, FlipCounts] = field(default_factory=lambda: {kind: FlipCounts() for kind in KINDS})
    missed: list[str] = field(default_factory=list)
    misnamed: list[str] = field(default_factory=list)
    clean_steps: int = 0
    alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0


def tiny_network(num_classes: int) -> nn.Module:
    """Build the smallest network with a layer of each kind: images [N, 3, H, W], H >= 16 -> logits [N, num_classes]."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, num_classes),
    )  # fmt: skip


def build_tiny(config: Config, world: World) -> tuple[Learner, Verifier]:
    """Collective: build the learner of a campaign and the verifier of its steps."""
    learner = build_learner(config, lambda config: tiny_network(config.num_classes), world, 1000)
    return learner, Verifier(learner, world)


def random_batches(learner: Learner, world: World) -> Iterator[Batch]:
    """Yield batches of this rank forever: random images [N, 3, SIDE, SIDE] with random labels."""
    generator = torch.Generator().manual_seed(world.rank)
    shape = (learner.batch.rank_batch_size, 3, SIDE, SIDE)
    while True:
        labels = torch.randint(learner.config.num_classes, shape[:1], generator=generator)
        yield torch.rand(shape, generator=generator).to(world.device), labels.to(world.device)


def run_campaign(
    learner: Learner, verifier: Verifier, batches: Iterator[Batch], *, flips: int, clean: int, seed: int
) -> Outcome:
    """Collective: run `clean` checked steps, then `flips` flips, each in a checked step that is undone."""
    outcome, started = Outcome(), time.perf_counter()
    learner.model.train()
    for _ in range(clean):
        train_cleanly(learner, verifier, next(batches), outcome)
    for number in range(flips):
        images, labels = next(batches)
        flip = draw_flip(number, seed, verifier.world.world_size, learner.steps)
        flip_once(learner, verifier, flip, (images.clone(), labels.clone()), outcome)
        train_cleanly(learner, verifier, (images, labels), outcome)
    outcome.seconds = time.perf_counter() - started
    return outcome


def train_cleanly(learner: Learner, verifier: Verifier, batch: Batch, outcome: Outcome) -> None:
    """Collective: train one checked step without a flip."""
    outcome.clean_steps += 1
    try:
        verifier.train_step(*batch)
    except CorruptionError as error:
        outcome.alarms.append(str(error))
        verifier.state_after_last_step = None  # of a step that raised


def draw_flip(number: int, seed: int, ranks: int, step: int) -> Flip:
    """Sample a flip, the same on every rank; the kinds take turns."""
    generator = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    return Flip(kind, generator.randrange(ranks), step, f"{seed} {number} of the tensor", generator.choice((1, 2)))


def flip_once(learner: Learner, verifier: Verifier, flip: Flip, batch: Batch, outcome: Outcome) -> None:
    """Collective: flip a bit in one checked step, then restore the state."""
    world = verifier.world
    before, last_state = Snapshot(learner, batch), verifier.state_after_last_step
    learner.train_step(*batch)
    expected = {name: tensor.detach().clone() for name, tensor in _result(learner).items()}
    before.restore()
    changed = False

    def compare() -> None:
        nonlocal changed
        changed = not _equal(expected, _result(learner))

    error = None
    with Flipper(verifier, flip, world.rank, after_pass=compare) as flipper:
        try:
            verifier.train_step(*batch)
        except CorruptionError as raised:
            error = raised
    struck = next(filter(None, world.all_gather(flipper.struck)), "nothing")
    changed = any(world.all_gather(changed))
    before.restore()
    verifier.state_after_last_step = last_state
    _count(outcome, flip, struck, changed, error)


def _count(outcome: Outcome, flip: Flip, struck: str, changed: bool, error: CorruptionError | None) -> None:
    tally, named = outcome.flips[flip.kind], [int(rank) for rank in re.findall(r"rank (\d+) \(", str(error))]
    what = f"{struck}, rank {flip.rank}, repetition {flip.repetition}, step {flip.step + 1}"
    tally.flips += 1
    if not changed:
        tally.not_changed += 1
        tally.detected_without_change += error is not None
        return
    tally.changed += 1
    tally.caught += error is not None
    tally.named += named == [flip.rank]
    if error is None:
        outcome.missed.append(what)
    elif named != [flip.rank]:
        outcome.misnamed.append(f"{what}: {str(error).splitlines()[0]}")


def _result(learner: Learner) -> Tensors:
    return shared_tensors(learner) | own_tensors(learner) | gradients(learner)


def _equal(first: Tensors, second: Tensors) -> bool:
    """Compare bitwise: NaN equals itself, and 0 differs from -0."""
    return first.keys() == second.keys() and all(torch.equal(_bits(first[name]), _bits(second[name])) for name in first)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
