"""LARS and LAMB: optimizers that give each layer a step in proportion to its weights, for large batches.

In both, only matrices and filters are scaled so; a group with `adapt` false, for BatchNorm and biases, gets the plain
update, as is usual. The learning rate multiplies the whole update, as in torch.optim.SGD. Tests hold both equal to the
papers' formulas.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

LARS_TRUST_COEFFICIENT = 0.001  # You, Gitman and Ginsburg 2017, section 5
ADAM_BETA2 = 0.999  # Kingma and Ba's, and that of LAMB: You et al. 2019
LAMB_EPSILON = 1e-6


class LayerwiseOptimizer(torch.optim.Optimizer, ABC):
    """One update of every parameter that has a gradient, for these and Muon; `options` are the defaults of a group."""

    def __init__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: float | bool) -> None:
        super().__init__(parameters, {"adapt": True, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters, [parameter.grad for parameter in parameters])
        return None

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change the parameters of a group in place."""

    def _buffers(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        """The state `name` of each parameter, which begins at 0."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def _adam(self, parameters: list[Tensor], gradients: list[Tensor], beta1: float, epsilon: float) -> list[Tensor]:
        """Adam's steps, at a learning rate of -1 (Kingma and Ba 2014, arXiv:1412.6980)."""
        for parameter in parameters:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        step = self.state[parameters[0]]["step"]
        means, squares = self._buffers("mean", parameters), self._buffers("square", parameters)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, ADAM_BETA2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - ADAM_BETA2)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - ADAM_BETA2**step))
        torch._foreach_add_(roots, epsilon)
        return list(torch._foreach_div(torch._foreach_div(means, 1 - beta1**step), roots))


class Lars(LayerwiseOptimizer):
    """SGD with momentum whose gradient each layer scales by trust_coefficient x |w| / (|g| + weight_decay x |w|).

    You, Gitman and Ginsburg 2017, arXiv:1708.03888, equation 6.
    Options: lr, momentum, weight_decay, nesterov, trust_coefficient.
    """

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        updates = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["adapt"]:
            weights, slopes = _norms(parameters), _norms(gradients)
            scale = group["trust_coefficient"] * weights / (slopes + group["weight_decay"] * weights)
            torch._foreach_mul_(updates, _where_both(weights, slopes, scale))
        buffers = self._buffers("momentum_buffer", parameters)
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        if group["nesterov"]:
            torch._foreach_add_(updates, buffers, alpha=group["momentum"])
        torch._foreach_add_(parameters, updates if group["nesterov"] else buffers, alpha=-float(group["lr"]))


class Lamb(LayerwiseOptimizer):
    """Adam with decoupled weight decay whose update r each layer scales by |w| / |r|.

    You et al. 2019, arXiv:1904.00962, algorithm 2, with phi(x) = x. Options: lr, beta1, weight_decay.
    """

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        updates = self._adam(parameters, gradients, group["beta1"], LAMB_EPSILON)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, lengths = _norms(parameters), _norms(updates)
            torch._foreach_mul_(updates, _where_both(weights, lengths, weights / lengths))
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))


def _norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each of N tensors, [N]."""
    return torch.stack(torch._foreach_norm(tensors))


def _where_both(first: Tensor, second: Tensor, scale: Tensor) -> list[Tensor]:
    """scale [N] as N scalars, 1 where one of the norms is 0: weights that start at 0 must be able to leave it."""
    return list(torch.where((first > 0) & (second > 0), scale, 1.0).unbind())
