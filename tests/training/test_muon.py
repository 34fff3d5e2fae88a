"""Muon against torch.optim.Muon and AdamW, and the properties of its update."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import plan_on
from utils.training.learner import Learner
from utils.training.optimizers import muon
from utils.training.optimizers.build import build_optimizer
from utils.training.optimizers.muon import ADAMW_RMS, orthogonalise

RATES = [0.01, 0.02, 0.01]
SHAPES = {"convolution": (8, 4, 3, 3), "same shape": (8, 4, 3, 3), "tall": (30, 2, 3, 3), "head": (5, 8), "norm": (8,)}


def trained(optimizer, parameters, number=float):
    """Return the parameters after a step at each of RATES as `number`, with the same random gradients in each call."""
    rng = np.random.default_rng(3)
    for rate in RATES:
        for parameter, shape in zip(parameters, SHAPES.values(), strict=True):
            parameter.grad = torch.from_numpy(rng.normal(size=shape).astype(np.float32)).view(parameter.shape)
        for group in optimizer.param_groups:
            group["lr"] = number(rate)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_every_parameter_is_trained_whatever_its_dimensions(tiny):
    """Only convolutions that mix channels are orthogonalised: no depthwise one, no scale."""
    shapes = [*([2] * dimensions for dimensions in range(7)), [8, 1, 3, 3], [1, 8, 1, 1]]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    groups = build_optimizer(tiny(optimizer="muon", lr=0.01), parameters).param_groups
    assert sorted(list(parameter.shape) for group in groups for parameter in group["params"]) == sorted(shapes)
    assert [list(p.shape) for group in groups if group["orthogonalise"] for p in group["params"]] == [[2, 2, 2, 2]]


@pytest.mark.parametrize("opt_level", ["O0", "O2"])
def test_a_parameter_of_its_own_is_no_convolution(tiny, one_rank, opt_level):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 10))
    network.scale = nn.Parameter(torch.ones(2, 4, 1, 1))
    config = tiny(optimizer="muon", lr=0.01, opt_level=opt_level, amp_dtype="bf16")
    groups = Learner(config, plan_on(config), lambda _: network, one_rank, 1).optimizer.param_groups
    assert [list(p.shape) for group in groups if group["orthogonalise"] for p in group["params"]] == [[4, 3, 3, 3]]


def start():
    rng = np.random.default_rng(1)
    return [nn.Parameter(torch.from_numpy(rng.normal(size=shape).astype(np.float32))) for shape in SHAPES.values()]


@pytest.mark.parametrize(("name", "steps"), [("muon", 5), ("muon/3", 3)])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay_vectors", [False, True])
def test_convolutions_train_as_pytorchs_muon_and_others_as_its_adamw(tiny, nesterov, decay_vectors, name, steps):
    options = {"lr": 0.01, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    config = tiny(optimizer=name, weight_decay_bn_bias=decay_vectors, **options)
    ours = trained(build_optimizer(config, parameters := start()), parameters)
    others = start()  # with a rate on the device, as in a CUDA graph
    torch.testing.assert_close(trained(build_optimizer(config, others[:3]), others, torch.tensor)[:3], ours[:3])

    theirs = [nn.Parameter(p.detach().flatten(1) if p.ndim > 2 else p.detach()) for p in start()]
    theirs_muon = torch.optim.Muon(theirs[:3], **options, ns_steps=steps, adjust_lr_fn="match_rms_adamw")
    vectors = {"params": theirs[4:], "weight_decay": 0.1 if decay_vectors else 0.0}
    adamw = torch.optim.AdamW([{"params": theirs[3:4]}, vectors], lr=0.01, betas=(0.9, 0.999), weight_decay=0.1)
    groups = [*theirs_muon.param_groups, *adamw.param_groups]
    both = SimpleNamespace(param_groups=groups, step=lambda: (theirs_muon.step(), adamw.step()))
    for one, other in zip(ours, trained(both, theirs), strict=True):
        # PyTorch's iteration rounds to bf16: a twentieth of an update, whose numbers are about ADAMW_RMS * rate
        bound = 0.05 * ADAMW_RMS * sum(RATES) if one.ndim == 4 else 0
        torch.testing.assert_close(one, other.view(one.shape), rtol=0, atol=bound)


@pytest.mark.parametrize("shape", [(16, 144), (200, 27)])
@pytest.mark.parametrize("steps", [3, 5])
def test_orthogonalise_equals_jordans_iteration_in_float64(shape, steps):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = (matrix.mT if shape[0] > shape[1] else matrix).double()
    x = x / x.norm()
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    expected = (x.mT if shape[0] > shape[1] else x) * 0.2 * max(shape) ** 0.5
    others = torch.stack([torch.zeros(shape), matrix, 1e-6 * matrix.flip(0)])  # each is scaled by itself
    orthogonal = orthogonalise(others, steps)
    torch.testing.assert_close(orthogonal[1].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(orthogonal[2], orthogonal[1].flip(0), rtol=1e-4, atol=1e-5)
    assert not orthogonal[0].any()


def test_the_iteration_in_bf16_keeps_the_singular_values_of_float32():
    matrices = torch.randn(2, 64, 576, generator=torch.Generator().manual_seed(0))
    matrices /= matrices.norm(dim=(1, 2), keepdim=True)
    expected = torch.linalg.svdvals(muon.newton_schulz_by_squares(matrices, 5))
    found = torch.linalg.svdvals(muon.newton_schulz(matrices.bfloat16(), 5).float())
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
