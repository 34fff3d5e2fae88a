"""LARS and LAMB: optimizers for large batches, which scale each layer's step in proportion to its weights.

BatchNorm and biases, in a group with `layerwise` false, get the plain update, as is usual. The learning rate multiplies
the whole update, as in torch.optim.SGD. Tests compare both with the papers' formulas.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

LARS_TRUST_COEFFICIENT = 0.001  # You, Gitman and Ginsburg 2017, section 5
ADAM_BETA2 = 0.999  # default of Kingma and Ba, of You et al. 2019 for LAMB, and of PyTorch
LAMB_EPSILON = 1e-6


class ForeachOptimizer(torch.optim.Optimizer, ABC):
    """Base of LARS, LAMB and Muon: updates all parameters of a group at once. `options`: defaults of the groups;
    capturable: keep learning rate and step counts on the device, for a CUDA graph."""

    def __init__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: float | bool) -> None:
        super().__init__(parameters, options)

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
        """Update the parameters of a group in place."""

    def _buffers(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        """Return the state `name` of each parameter; it starts at 0."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def _descend(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Subtract the learning rate times the updates."""
        if group["capturable"]:  # GRAPHS: the rate stays on the device
            torch._foreach_sub_(parameters, torch._foreach_mul(updates, group["lr"]))
        else:
            torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))

    def _adam(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], beta1: float, epsilon: float
    ) -> list[Tensor]:
        """Return Adam's updates before the learning rate and the sign (Kingma and Ba 2014, arXiv:1412.6980)."""
        first, second = self._bias_corrections(parameters, beta1, captured=group["capturable"])
        means, squares = self._buffers("mean", parameters), self._buffers("square", parameters)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, ADAM_BETA2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - ADAM_BETA2)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, second))
        torch._foreach_add_(roots, epsilon)
        return list(torch._foreach_div(torch._foreach_div(means, first), roots))

    def _bias_corrections(self, parameters: list[Tensor], beta1: float, *, captured: bool) -> tuple[Any, Any]:
        """Count this update of each parameter, and return the divisors of Adam's means and squares. GRAPHS: counts and
        divisors stay on the device, and the first parameter's serve all, since a graph updates the same ones each
        time."""
        steps = []
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device if captured else "cpu")
            steps.append(state["step"])
        torch._foreach_add_(steps, 1)
        if captured:
            return 1 - beta1 ** steps[0], 1 - ADAM_BETA2 ** steps[0]
        counts = [int(step) for step in steps]
        return [1 - beta1**count for count in counts], [1 - ADAM_BETA2**count for count in counts]


class Lars(ForeachOptimizer):
    """SGD with momentum; each layer's gradient is scaled by trust_coefficient x |w| / (|g| + weight_decay x |w|).

    You, Gitman and Ginsburg 2017, arXiv:1708.03888, equation 6.
    Options: lr, momentum, weight_decay, nesterov, trust_coefficient, layerwise.
    """

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        updates = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["layerwise"]:
            weight_norms, gradient_norms = _norms(parameters), _norms(gradients)
            scale = group["trust_coefficient"] * weight_norms / (gradient_norms + group["weight_decay"] * weight_norms)
            torch._foreach_mul_(updates, _scales(weight_norms, gradient_norms, scale))
        buffers = self._buffers("momentum_buffer", parameters)
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        if group["nesterov"]:
            torch._foreach_add_(updates, buffers, alpha=group["momentum"])
        self._descend(group, parameters, updates if group["nesterov"] else buffers)


class Lamb(ForeachOptimizer):
    """Adam with decoupled weight decay; each layer's update r is scaled by |w| / |r|.

    You et al. 2019, arXiv:1904.00962, algorithm 2, with phi(x) = x. Options: lr, beta1, weight_decay, layerwise.
    """

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        updates = self._adam(group, parameters, gradients, group["beta1"], LAMB_EPSILON)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["layerwise"]:
            weight_norms, update_norms = _norms(parameters), _norms(updates)
            torch._foreach_mul_(updates, _scales(weight_norms, update_norms, weight_norms / update_norms))
        self._descend(group, parameters, updates)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norms of N tensors, [N]."""
    return torch.stack(torch._foreach_norm(tensors))


def _scales(first: Tensor, second: Tensor, scale: Tensor) -> list[Tensor]:
    """Return scale [N] as N scalars, but 1 where either norm is 0, so weights that start at 0 can change."""
    return list(torch.where((first > 0) & (second > 0), scale, 1.0).unbind())
