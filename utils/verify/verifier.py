"""Detect silent corruption: train one step in every `verify_every_steps`, sampled from the seed, and the first steps of
each start, twice from the same state. All bits must be equal, and those of weights and optimizer state on all ranks.
"""

import hashlib
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from utils import seeds
from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.program import command
from utils.training.averages import buffer_places
from utils.training.config import TrainingConfig
from utils.training.learner import Learner
from utils.training.step import GraphedUpdate
from utils.verify.fingerprints import GradientRecorder, take_fingerprints

FIRST_STEPS = 3  # of each start: one creates the optimizer's state, the next reads it, the third is like all later ones
Fingerprints = dict[str, int]
Tensors = dict[str, Tensor]


class Evidence(NamedTuple):  # of one rank
    device: str  # host and device
    own: list[str]  # tensors of this rank that differ between two repetitions, in the order of their computation
    result: list[str]  # tensors common to all ranks that differ between two repetitions
    state: Fingerprints  # of what must be equal on all ranks


def is_due(config: TrainingConfig, steps: int) -> bool:
    """Whether the step after `steps` is checked: one in every `verify_every_steps`, sampled from the seed."""
    every = config.verify_every_steps or 1
    window, place = divmod(steps, every)
    return place == random.Random(f"{config.seed} {window}").randrange(every)


class Verifier:
    """Trains a learner's steps, and checks those that are due."""

    def __init__(self, learner: Learner, world: World) -> None:
        self.learner, self.config, self.world = learner, learner.config, world
        self.recorder = GradientRecorder(learner.model, graphed=learner.plan.graphed)
        self.checked, self.seconds = 0, 0.0  # steps and seconds of their checks, since the last remarks
        self._trained_to, self._first_steps = -1, 0  # number of the last step; first steps that are still to be checked

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Collective: one step. Raises `CorruptionError` on all ranks if its check fails."""
        if self.learner.steps != self._trained_to:  # a start, or a checkpoint has been restored
            self._first_steps = FIRST_STEPS
        update = self.learner.update  # a captured graph's eager steps round differently
        comparable = not isinstance(update, GraphedUpdate) or update.replays(images)
        if comparable and (self._first_steps > 0 or is_due(self.config, self.learner.steps)):
            self._check(images, labels)
            self._first_steps -= 1
        else:
            self.learner.train_step(images, labels)
        self._trained_to = self.learner.steps

    def remarks(self) -> list[str]:
        """Remarks for the log: the checks since the last call, and their cost."""
        remarks = [f"Verified {self.checked} step(s), none wrong, in {self.seconds:.2f} s"] if self.checked else []
        self.checked, self.seconds = 0, 0.0
        return remarks

    def _check(self, images: Tensor, labels: Tensor) -> None:
        snapshot = Snapshot(self.learner, (images, labels))
        first_own, first_result = self._repeat(images, labels)
        started = time.perf_counter()  # the first repetition is the step itself, and may compile
        snapshot.restore()
        second_own, second_result = self._repeat(images, labels)
        own, result = _differing(first_own, second_own), _differing(first_result, second_result)
        state = {} if self.config.parallel == "no_communication" else second_result
        digest = hashlib.sha256(repr(state).encode()).hexdigest()
        ranks = self.world.all_gather((bool(own or result), digest))
        if any(wrong for wrong, _ in ranks) or len({digest for _, digest in ranks}) > 1:
            evidence = Evidence(describe_device(self.world), own, result, state)
            raise CorruptionError(describe_fault(self.learner.steps, self.world.all_gather(evidence)))
        self.checked += 1
        self.seconds += time.perf_counter() - started

    def _repeat(self, images: Tensor, labels: Tensor) -> tuple[Fingerprints, Fingerprints]:
        """Run the step once; return fingerprints of this rank's own tensors and of those that all ranks share."""
        with self.recorder.recorded():
            self.learner.train_step(images, labels)
        own = {"images": images, "labels": labels} | own_tensors(self.learner)
        return take_fingerprints(own, self.recorder.gradients), take_fingerprints(shared_tensors(self.learner))


def _differing(first: Fingerprints, second: Fingerprints) -> list[str]:
    return [name for name in first | second if first.get(name) != second.get(name)]


def shared_tensors(learner: Learner) -> Tensors:
    """Tensors that are equal on all ranks: weights, their moving average, optimizer state, loss scale."""
    named = dict(learner.model.named_parameters())
    tensors: Tensors = {f"weight {name}": parameter for name, parameter in named.items()}
    tensors |= {f"master weight {name}": master for name, master in learner.weights.masters.items()}
    if learner.ema is not None:
        tensors |= {f"average {name}": parameter for name, parameter in learner.ema.network.named_parameters()}
    for name, parameter in zip(named, learner.weights.parameters(), strict=True):
        entries = learner.optimizer.state.get(parameter, {})
        tensors |= {f"{key} {name}": value for key, value in entries.items() if isinstance(value, Tensor)}
    return tensors | learner.loss_scaler.tensors()


def own_tensors(learner: Learner) -> Tensors:
    """Tensors of this rank only: the sums of loss and correct predictions, and BatchNorm's buffers."""
    return {"loss": learner.sums.sums} | {f"buffer {name}": buffer for name, buffer in learner.named_buffers()}


class Snapshot:
    """Copy of a learner's state, random generators and a batch; `restore` keeps the memory, as CUDA graphs need."""

    def __init__(self, learner: Learner, batch: tuple[Tensor, Tensor]) -> None:
        self.learner = learner
        tensors = [*batch, *own_tensors(learner).values(), *shared_tensors(learner).values()]
        self.buffers = [(owner, name, owner[name]) for owner, name in buffer_places(learner.model, learner.validated)]
        self.pairs = [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]
        self.entries = {parameter: dict(entries) for parameter, entries in learner.optimizer.state.items()}
        self.groups = [  # the learning rate of a CUDA graph keeps its memory; other tensors may be counts
            {key: value.clone() if isinstance(value, Tensor) and key != "lr" else value for key, value in group.items()}
            for group in learner.optimizer.param_groups
        ]
        parameters = {*learner.model.parameters(), *learner.weights.parameters()}
        self.without_gradient = [parameter for parameter in parameters if parameter.grad is None]
        self.steps, self.random = learner.steps, seeds.random_state()
        self.updates = 0 if learner.ema is None else learner.ema.updates

    @torch.no_grad()
    def restore(self) -> None:
        learner = self.learner
        learner.optimizer.state.clear()  # a parameter's first step creates entries
        for parameter, entries in self.entries.items():
            learner.optimizer.state[parameter] = dict(entries)
        for group, saved in zip(learner.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(saved)  # an external optimizer may count its steps here
        for owner, name, buffer in self.buffers:  # the step may have assigned a new tensor
            owner[name] = buffer
        torch._foreach_copy_([tensor for tensor, _ in self.pairs], [saved for _, saved in self.pairs])
        for parameter in self.without_gradient:  # else a gradient of -0.0 would be added to zeros, which gives 0.0
            parameter.grad = None
        learner.steps = self.steps
        if learner.ema is not None:
            learner.ema.updates = self.updates
        seeds.restore_random_state(self.random)


def describe_device(world: World) -> str:
    """Host and device of this rank, with the UUID of a GPU."""
    gpu = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    return f"host {socket.gethostname()}, {f'{gpu.name} GPU-{gpu.uuid}' if gpu else world.device.type}"


def describe_fault(step: int, ranks: Sequence[Evidence]) -> str:
    """Return the message of the error that ends the run; `step` counts from 1.

    Causes are checked before their effects: by the all-reduce, one wrong gradient changes the result on all ranks."""
    how, remedy = "differs between two repetitions of the step", "start the same command again"
    faulty = [rank for rank, seen in enumerate(ranks) if seen.own]
    if faulty:
        tensors = ranks[faulty[0]].own
    elif faulty := [rank for rank, seen in enumerate(ranks) if seen.result]:
        tensors = ranks[faulty[0]].result
        if 1 < len(faulty) == len(ranks):
            how += " though no rank's own gradients do: the sum over the ranks went wrong"
    else:
        faulty, tensors = outlier_ranks([seen.state for seen in ranks])
        how = "differs from the other ranks, since this step or an earlier one"
        # their gradients have entered the sums of all ranks since then
        remedy = "resume with --resume from a checkpoint before the last checked step"
    named = "; ".join(f"rank {rank} ({ranks[rank].device})" for rank in faulty)
    more = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
    remedy = f"remove that machine, check it with {command('doctor')}, and {remedy}"
    start = f"silent corruption in step {step} on {named}: {tensors[0]}{more} {how}"
    return f"{start}\nnothing of this step was saved: {remedy}; an own network must keep its state in buffers"


def outlier_ranks(states: Sequence[Fingerprints]) -> tuple[list[int], list[str]]:
    """Ranks that differ from the majority, and the tensors that differ; all ranks without a majority, as of two."""
    whole = [tuple(state.items()) for state in states]
    (common, count), *_ = Counter(whole).most_common(1)
    outliers = [rank for rank, state in enumerate(whole) if 2 * count <= len(states) or state != common]
    return outliers, [name for name in states[0] if len({state.get(name) for state in states}) > 1]
