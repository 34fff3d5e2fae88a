"""Muon: the step of each convolution is made orthogonal; all other parameters are AdamW's.

K. Jordan et al. 2024 ("Muon: an optimizer for hidden layers in neural networks"). The sizes of both steps are matched
as in Liu et al. 2025 (arXiv:2502.16982), so that one learning rate and one weight decay serve both. A convolution
[out, in, height, width] counts as a matrix [out, in x height x width]. torch.optim.Muon takes matrices alone and has no
second rule for the rest; a test holds both equal where there are only matrices.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from utils.training.optimizers.lars_lamb import LayerwiseOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration; these and the steps are Jordan's
STEPS = 5
MATCHED = 0.2  # root mean square of AdamW's usual step at a learning rate of 1: Liu et al., section 2.2
EPSILON = 1e-8  # AdamW's
LEAST_NORM = 1e-7


class Muon(LayerwiseOptimizer):
    """Options of a group: lr, momentum (beta1 of AdamW), nesterov, weight_decay (decoupled from the gradient), and
    adapt: whether its parameters are those whose steps are made orthogonal."""

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        rate, momentum = float(group["lr"]), group["momentum"]
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        if group["adapt"]:
            steps = self._buffers("momentum_buffer", parameters)
            torch._foreach_lerp_(steps, gradients, 1 - momentum)
            if group["nesterov"]:
                steps = list(torch._foreach_lerp(gradients, steps, momentum))
            steps = [orthogonalise(step.flatten(1)).view(step.shape) for step in steps]
        else:
            steps = self._adam(parameters, gradients, momentum, EPSILON)
        torch._foreach_add_(parameters, steps, alpha=-rate)


def orthogonalise(matrix: Tensor) -> Tensor:
    """[rows, columns] -> nearly U V' of the singular value decomposition U S V', times the size of AdamW's step.
    All but the smallest singular values end near 1, between 0.6 and 1.2.

    Jordan's iteration of Newton and Schulz multiplies the matrix x by polynomials of the small square matrix x x',
    which commute with each other. So they are multiplied first, and x, mostly much wider, by their product alone. In
    float32, without TF32, with which the smallest would be lost; torch.optim.Muon takes bf16, in which a CPU's products
    are up to 90 times as slow.
    """
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        return _orthogonalise(matrix)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _orthogonalise(matrix: Tensor) -> Tensor:
    first, second, third = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).float()
    x = x / x.norm().clamp(min=LEAST_NORM)
    square = x @ x.mT
    one, factors = torch.eye(len(x), device=x.device), None
    for step in range(STEPS):
        factor = torch.addmm(square, square, square, beta=second, alpha=third).add_(one, alpha=first)
        factors = factor if factors is None else factor @ factors
        if step < STEPS - 1:
            square = factor @ square @ factor
    x = factors @ x
    return (x.mT if tall else x).to(matrix.dtype) * (MATCHED * math.sqrt(max(matrix.shape)))


def muon_groups(parameters: list[nn.Parameter], *, decay_vectors: bool) -> list[dict[str, Any]]:
    """Convolutions; matrices, such as the last layer's, and embeddings; BatchNorm and biases, decayed only with
    `decay_vectors`."""
    convolutions, matrices, vectors = (
        [parameter for parameter in parameters if kind(parameter.ndim)]
        for kind in (lambda ndim: ndim == 4, lambda ndim: ndim in (2, 3), lambda ndim: ndim < 2)
    )
    undecayed = {} if decay_vectors else {"weight_decay": 0.0}
    return [
        {"params": convolutions},
        {"params": matrices, "adapt": False},
        {"params": vectors, "adapt": False, **undecayed},
    ]
