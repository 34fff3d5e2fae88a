"""All that a training step changes: by name, kept, and put back as it was."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils import seeds
from utils.training.learner import Learner

Tensors = dict[str, Tensor]


def shared_tensors(learner: Learner) -> Tensors:
    """What is equal on all ranks that average their gradients: weights, their average, optimizer, loss scale."""
    model = learner.model
    tensors: Tensors = {f"weight {name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"master weight {name}": master for name, master in learner.weights.masters.items()}
    if learner.ema is not None:
        tensors |= {f"average {name}": parameter for name, parameter in learner.ema.network.named_parameters()}
    for name, parameter in updated_parameters(learner).items():
        entries = learner.optimizer.state.get(parameter, {})
        tensors |= {f"{key} {name}": value for key, value in entries.items() if isinstance(value, Tensor)}
    return tensors | learner.loss_scaler.tensors()


def own_tensors(learner: Learner) -> Tensors:
    """What each rank has its own of: BatchNorm's buffers, and the sums of loss and hits."""
    return {"loss": learner.sums.sums} | {f"buffer {name}": buffer for name, buffer in learner.named_buffers()}


def gradients(learner: Learner) -> Tensors:
    """What the optimizer has last made a step by."""
    found = {f"gradient {name}": parameter.grad for name, parameter in updated_parameters(learner).items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def updated_parameters(learner: Learner) -> dict[str, torch.nn.Parameter]:
    """The parameters that the optimizer updates, by the names that they have in the model."""
    names = (name for name, _ in learner.model.named_parameters())
    return dict(zip(names, learner.weights.parameters(), strict=True))


@dataclass
class KeptState:
    """A learner, its random generators and a batch, as they were; tensors stay in their memory, for CUDA graphs."""

    learner: Learner
    batch: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        learner = self.learner
        self.pairs = [(tensor, tensor.detach().clone()) for tensor in self.tensors().values()]
        self.entries: dict[Tensor, dict[str, Any]] = {
            parameter: dict(entries) for parameter, entries in learner.optimizer.state.items()
        }
        self.steps, self.random = learner.steps, seeds.random_state()
        self.updates = 0 if learner.ema is None else learner.ema.updates

    def tensors(self) -> Tensors:
        """All that is kept, by name, as it is now."""
        batch = dict(zip(("images", "labels"), self.batch, strict=True))
        return batch | own_tensors(self.learner) | shared_tensors(self.learner)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        learner = self.learner
        learner.optimizer.state.clear()  # some entries come with a parameter's first step
        for parameter, entries in self.entries.items():
            learner.optimizer.state[parameter] = dict(entries)
        torch._foreach_copy_([tensor.detach() for tensor, _ in self.pairs], [kept for _, kept in self.pairs])
        learner.steps = self.steps
        if learner.ema is not None:
            learner.ema.updates = self.updates
        seeds.restore_random_state(self.random)
