"""The optimizer, and the learning rate as a function of the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.training.config import SpeedConfig
from utils.training.optimizers.lars_lamb import LARS_TRUST_COEFFICIENT, Lamb, Lars
from utils.training.optimizers.muon import Muon, muon_groups

ADAMW_BETA2 = 0.999  # PyTorch's default, and Kingma and Ba's
# Before, the fused SGD of a CPU leaves most of a half-precision weight as it is (pytorch/pytorch#191763); as
# measured: 2.11.0, 2.12.0, 2.12.1 and 2.13.0 do, 2.14.1 does not.
RIGHT_FUSED_HALVES = "2.14"


def build_optimizer(
    config: SpeedConfig, parameters: Iterable[nn.Parameter], *, graphed: bool = False
) -> torch.optim.Optimizer:
    """`optimizer` over `parameters`; EXTRA: SGD or AdamW as one fused kernel. `graphed`: for a step that is captured as
    a CUDA graph, which reads the learning rate from a tensor on the device, as numbers are frozen into it."""
    parameters = list(parameters)
    groups = _parameter_groups(config, parameters)
    rate = torch.tensor(config.peak_lr, device=parameters[0].device) if graphed else config.peak_lr
    fused = fuses(config, parameters) or None  # None: PyTorch's choice, a few kernels for all on a GPU
    optimizer: torch.optim.Optimizer
    if config.optimizer == "lamb":
        optimizer = Lamb(groups, lr=config.peak_lr, beta1=config.momentum, weight_decay=config.weight_decay)
    elif config.optimizer == "lars":
        optimizer = Lars(
            groups,
            lr=config.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            trust_coefficient=LARS_TRUST_COEFFICIENT,
        )
    elif config.optimizer == "muon":
        optimizer = Muon(
            muon_groups(parameters, decay_vectors=config.weight_decay_bn_bias),
            lr=config.peak_lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    elif config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups,
            lr=rate,
            betas=(config.momentum, ADAMW_BETA2),
            weight_decay=config.weight_decay,
            fused=fused,
            capturable=graphed,  # GRAPHS: counts its steps on the device
        )
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fused,
        )
    _lay_out_buffers(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.peak_lr
    return optimizer


def fuses(config: SpeedConfig, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether `optimizer` over `parameters` is one fused kernel: not where PyTorch's is wrong, and `ConfigError` where
    that is asked for by name."""
    if not config.extra_opt("fused_optimizer"):
        return False
    halves = any(parameter.device.type == "cpu" and parameter.element_size() == 2 for parameter in parameters)
    if config.optimizer != "sgd" or not halves or torch.__version__ >= RIGHT_FUSED_HALVES:
        return True
    if config.fused_optimizer:
        raise ConfigError(
            f"fused_optimizer true with half weights on a CPU: PyTorch's kernel is wrong in torch {torch.__version__}; "
            "use fused_optimizer false or opt_level O2, or install torch 2.14 or newer"
        )
    return False


def _parameter_groups(config: SpeedConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group, or two where BatchNorm and biases, all the parameters with one dimension, are treated differently."""
    layerwise = config.optimizer in ("lars", "lamb")
    if config.weight_decay_bn_bias and not layerwise:
        return [{"params": parameters}]
    vectors: dict[str, Any] = {"params": [parameter for parameter in parameters if parameter.ndim <= 1]}
    if not config.weight_decay_bn_bias:
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
