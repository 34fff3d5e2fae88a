"""All tensors that a training step changes, by name, and a snapshot that restores them."""

import torch
from torch import Tensor

from utils import seeds
from utils.training.averages import buffer_places
from utils.training.learner import Learner

Tensors = dict[str, Tensor]


def shared_tensors(learner: Learner) -> Tensors:
    """Tensors that are equal on all ranks that average their gradients: weights, their moving average, optimizer state,
    loss scale."""
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
    """Copy of a learner's state, its random generators and a batch. Restoring writes into the same memory, which CUDA
    graphs need."""

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
