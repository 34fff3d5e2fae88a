"""The optimizer, and the learning rate as a function of the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from utils.training.keys import SpeedKeys
from utils.training.large_batch import LARS_TRUST_COEFFICIENT, Lamb, Lars

ADAMW_BETA2 = 0.999  # PyTorch's default, and Kingma and Ba's


def build_optimizer(
    keys: SpeedKeys, parameters: Iterable[nn.Parameter], *, graphed: bool = False
) -> torch.optim.Optimizer:
    """`optimizer` over `parameters`; EXTRA: SGD or AdamW as one fused kernel. `graphed`: for a step that is captured as
    a CUDA graph, which reads the learning rate from a tensor on the device, as numbers are frozen into it."""
    parameters = list(parameters)
    groups = _parameter_groups(keys, parameters)
    rate = torch.tensor(keys.peak_lr, device=parameters[0].device) if graphed else keys.peak_lr
    fused = keys.extra_opt("fused_optimizer") or None  # None: PyTorch's choice, a few kernels for all on a GPU
    optimizer: torch.optim.Optimizer
    if keys.optimizer == "lamb":
        optimizer = Lamb(groups, lr=keys.peak_lr, beta1=keys.momentum, weight_decay=keys.weight_decay)
    elif keys.optimizer == "lars":
        optimizer = Lars(
            groups,
            lr=keys.peak_lr,
            momentum=keys.momentum,
            weight_decay=keys.weight_decay,
            nesterov=keys.nesterov,
            trust_coefficient=LARS_TRUST_COEFFICIENT,
        )
    elif keys.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups,
            lr=rate,
            betas=(keys.momentum, ADAMW_BETA2),
            weight_decay=keys.weight_decay,
            fused=fused,
            capturable=graphed,  # GRAPHS: counts its steps on the device
        )
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=rate,
            momentum=keys.momentum,
            weight_decay=keys.weight_decay,
            nesterov=keys.nesterov,
            fused=fused,
        )
    _lay_out_buffers(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = keys.peak_lr
    return optimizer


def _parameter_groups(keys: SpeedKeys, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group, or two where BatchNorm and biases, all the parameters with one dimension, are treated differently."""
    layerwise = keys.optimizer in ("lars", "lamb")
    if keys.weight_decay_bn_bias and not layerwise:
        return [{"params": parameters}]
    vectors: dict[str, Any] = {"params": [parameter for parameter in parameters if parameter.ndim <= 1]}
    if not keys.weight_decay_bn_bias:
        vectors["weight_decay"] = 0.0
    if layerwise:
        vectors["adapt"] = False
    return [{"params": [parameter for parameter in parameters if parameter.ndim > 1]}, vectors]


def _lay_out_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Give the buffers of a fused kernel the memory format of their parameters, and SGD its momentum from the start.

    A missing momentum starts at zero, which gives the same trajectory as SGD's own first step. Without it, a GradScaler
    that skips the very first fused step (fp16 overflows at the initial scale of 65536) leaves a buffer that was
    allocated and never written, and the next step adds whatever memory held. A buffer that was saved in another memory
    format (`enable_nhwc` may change when a run is resumed) would be added in the wrong order, as the kernel walks raw
    memory.
    """
    for group in optimizer.param_groups:
        moments = ("momentum_buffer",) if group.get("momentum") else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"] if group.get("fused") else ():
            state = optimizer.state[parameter]
            for name in moments:
                saved = state.get(name)
                if saved is not None or name == "momentum_buffer":
                    state[name] = torch.zeros_like(parameter)
                if saved is not None:
                    state[name].copy_(saved)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the optimizer's buffers; options such as momentum stay those of the present configuration."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    # before loading, since PyTorch puts AdamW's count of steps where the fused kernel of the loaded options wants it
    groups = [saved | own for saved, own in zip(state["param_groups"], options, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})
    _lay_out_buffers(optimizer)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every parameter group's learning rate = its initial one x `factor`, without waiting for the device."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # waits for the device where the rate is kept there
            group["initial_lr"] = float(group["lr"])
        initial = group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(initial * factor)
        else:
            group["lr"] = initial * factor


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The first group's present learning rate; waits for the device where it is kept there."""
    return float(optimizer.param_groups[0]["lr"])
