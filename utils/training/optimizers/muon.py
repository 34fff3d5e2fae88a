"""Muon: orthogonalised updates for convolutions that mix channels, AdamW for all other parameters.

K. Jordan et al. 2024 ("Muon: an optimizer for hidden layers in neural networks"). The sizes of both updates are matched
as in Liu et al. 2025 (arXiv:2502.16982), so one learning rate and one weight decay serve both. A convolution
[out, in, height, width] is treated as a matrix [out, in x height x width]. torch.optim.Muon takes only matrices and has
no rule for other parameters; a test compares both on matrices.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, of the Newton-Schulz iteration
ADAMW_RMS = 0.2  # root mean square of AdamW's usual update at a learning rate of 1: Liu et al., section 2.2
ADAMW_EPSILON = 1e-8
ADAM_BETA2 = 0.999  # default of Kingma and Ba, and of PyTorch
MIN_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Updates all parameters of a group at once. Options of a group: lr (a tensor for a CUDA graph), momentum (beta1 of
    AdamW), nesterov, weight_decay (decoupled from the gradient), orthogonalise (Newton-Schulz steps; 0: AdamW)."""

    def __init__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(parameters, options | {"capturable": True})  # a restored "step" goes to the parameter's device

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters, [parameter.grad for parameter in parameters])
        return None

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        rate, momentum, gpu = group["lr"], group["momentum"], parameters[0].is_cuda
        if not group["orthogonalise"]:
            counts = self._states("step", parameters, lambda parameter: torch.zeros((), device=parameter.device))
            adamw(
                parameters, gradients, self._states("mean", parameters), self._states("square", parameters), [], counts,
                foreach=not gpu, fused=gpu, capturable=gpu, amsgrad=False, beta1=momentum, beta2=ADAM_BETA2, lr=rate,
                weight_decay=group["weight_decay"], eps=ADAMW_EPSILON, maximize=False,
            )  # fmt: skip
            return
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        updates = self._states("momentum_buffer", parameters)
        torch._foreach_lerp_(updates, gradients, 1 - momentum)
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, updates, momentum))
        updates = orthogonalise_filters(updates, group["orthogonalise"])
        if isinstance(rate, Tensor):  # GRAPHS: it stays on the device
            torch._foreach_sub_(parameters, torch._foreach_mul(updates, rate))
        else:
            torch._foreach_add_(parameters, updates, alpha=-rate)

    def _states(
        self, name: str, parameters: list[Tensor], start: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> list[Tensor]:
        """Return the state `name` of each parameter, which begins as `start(parameter)`."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = start(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def orthogonalise_filters(filters: list[Tensor], steps: int) -> list[Tensor]:
    """`orthogonalise` each [out, in, height, width] as a matrix; filters of equal shape are one batch of matrices.

    ResNet50's 53 convolutions have 20 shapes: fewer, larger kernels on a GPU, and the same time on two CPU cores.
    """
    same_shape: dict[torch.Size, list[int]] = {}
    for number, one in enumerate(filters):
        same_shape.setdefault(one.shape, []).append(number)
    results = list(filters)
    for shape, numbers in same_shape.items():
        batch = orthogonalise(torch.stack([filters[number].flatten(1) for number in numbers]), steps)
        for number, matrix in zip(numbers, batch, strict=True):
            results[number] = matrix.reshape(shape)
    return results


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """[N, rows, columns] -> nearly U V' of each singular value decomposition U S V', scaled to the size of AdamW's
    update. After five steps all but the smallest singular values are near 1, between 0.6 and 1.2.

    In bf16 on a GPU with tensor cores for bf16, as in torch.optim.Muon; elsewhere in float32: on a CPU without kernels
    for bf16 its products are up to 90 times slower.
    """
    rows, columns = matrices.shape[1:]
    x = (matrices.mT if rows > columns else matrices).float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    if x.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False):
        x = newton_schulz(x.bfloat16(), steps)
    else:
        x = newton_schulz_by_squares(x, steps)
    return (x.mT if rows > columns else x).to(matrices.dtype) * (ADAMW_RMS * math.sqrt(max(rows, columns)))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Jordan's iteration: x becomes a x + (b x x' + c (x x')^2) x. It corrects the rounding of its earlier steps."""
    first, second, third = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=second, alpha=third), x, beta=first)
    return x


def newton_schulz_by_squares(x: Tensor, steps: int) -> Tensor:
    """The same iteration, faster in float32 on a CPU: the polynomials of the square x x' are multiplied together,
    and x, usually much wider, only once, by their product. bf16 would lose the smallest singular values."""
    first, second, third = COEFFICIENTS
    square, one = x @ x.mT, torch.eye(x.shape[1], device=x.device)
    factors: list[Tensor] = []
    for _ in range(steps):
        if factors:
            square = factors[-1] @ square @ factors[-1]
        factors.append(torch.baddbmm(square, square, square, beta=second, alpha=third).add_(one, alpha=first))
    return functools.reduce(lambda product, factor: factor @ product, factors) @ x
