"""Build an optimizer, restore its state, set its learning rate."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.training.config import SpeedConfig
from utils.training.optimizers.muon import ADAM_BETA2, Muon
from utils.user_code import TIMM, call, is_user_code, user_code_errors

OURS = (torch.optim.SGD, torch.optim.AdamW, Muon)
CONFIGURED = ("lr", "initial_lr", "weight_decay", "momentum")  # options of any optimizer that settings decide


def build_optimizer(
    config: SpeedConfig, parameters: Iterable[nn.Parameter], filters: Iterable[nn.Parameter] | None = None, *,
    fused: bool = False, graphed: bool = False,
) -> torch.optim.Optimizer:  # fmt: skip
    """Build `optimizer` for `parameters`; `filters`: convolutions' weights, for Muon (None: all with four dimensions).
    EXTRA: `fused`: SGD or AdamW as one kernel; otherwise PyTorch chooses, on a GPU its foreach kernels. `graphed`: keep
    the learning rate in a tensor on the device, since a CUDA graph freezes numbers."""
    parameters = list(parameters)
    groups = _parameter_groups(config, parameters, {*map(id, parameters if filters is None else filters)})
    rate = torch.tensor(config.peak_lr, device=parameters[0].device) if graphed else config.peak_lr
    common: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    momentum: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
    optimizer: torch.optim.Optimizer
    if is_user_code(config.optimizer):
        optimizer = _build_external(config, groups)
    elif config.optimizer_kind == "muon":
        optimizer = Muon(groups, **common, **momentum, orthogonalise=config.newton_schulz_steps)
    elif config.optimizer == "adamw":
        betas = (config.momentum, ADAM_BETA2)
        optimizer = torch.optim.AdamW(groups, **common, betas=betas, fused=fused or None, capturable=graphed)
    else:
        optimizer = torch.optim.SGD(groups, **common, **momentum, fused=fused or None)
    _lay_out_buffers(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.peak_lr  # not the start of a rise, which torch calls so
    return optimizer


def _build_external(config: SpeedConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build timm's optimizer NAME, or call the user's function."""
    values: dict[str, Any] = {"lr": config.peak_lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    name = config.optimizer
    if not name.startswith(TIMM):
        optimizer = call("optimizer", name, ConfigError, params=groups, **values)
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        raise ConfigError(f"optimizer {name}: returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    try:
        from timm.optim import create_optimizer_v2
    except ImportError as error:
        raise ConfigError(f'optimizer {name}: timm cannot be imported ({error}); pip install ".[timm]"') from None
    with user_code_errors(f"optimizer {name} cannot be built with {values}", ConfigError):
        return create_optimizer_v2(groups, opt=name.removeprefix(TIMM), **values)


def _parameter_groups(config: SpeedConfig, parameters: list[nn.Parameter], known: set[int]) -> list[dict[str, Any]]:
    """Group the parameters by their treatment. Vectors are BatchNorm's parameters and biases. `known`: the ids of
    convolutions' parameters."""
    muon = config.optimizer_kind == "muon"
    if config.weight_decay_bn_bias and not muon:
        return [{"params": parameters}]
    adamw = {"orthogonalise": 0} if muon else {}
    vectors: dict[str, Any] = {"params": [parameter for parameter in parameters if parameter.ndim <= 1]} | adamw
    if not config.weight_decay_bn_bias:
        vectors["weight_decay"] = 0.0
    filters, others = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in [parameter for parameter in parameters if parameter.ndim > 1]:
        # convolutions, but no depthwise one [C, 1, h, w] and no scale [1, C, 1, 1]
        mixes_channels = id(parameter) in known and parameter.ndim == 4 and min(parameter.shape[:2]) > 1
        (filters if muon and mixes_channels else others).append(parameter)
    groups: list[dict[str, Any]] = [{"params": others} | adamw, vectors]
    return [{"params": filters}, *groups] if muon else groups


def _lay_out_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Give buffers the memory format of their parameters, and start the momentum of fused SGD at zero.

    PyTorch allocates a missing momentum in the first step, which gives the same result, unless a GradScaler skips that
    step (fp16 overflows at the initial scale of 65536): then the buffer is never written, and the next step reads
    arbitrary memory. A buffer saved in another memory format (`enable_nhwc` may change when a run is resumed) would be
    added in the wrong order, as fused kernels ignore strides.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group.get("fused") and group.get("momentum"):
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            state = optimizer.state.get(parameter, {})
            for name, saved in state.items():
                if isinstance(saved, Tensor) and saved.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=saved.dtype, device=saved.device).copy_(saved)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the optimizer's buffers; options such as momentum stay as configured now. An external optimizer may also
    count in its groups, so only the settings of this program stay."""
    ours = isinstance(optimizer, OURS)
    options = [
        {key: value for key, value in group.items() if key != "params" and (ours or key in CONFIGURED)}
        for group in optimizer.param_groups
    ]
    # before loading, since the option `fused` decides on which device PyTorch puts AdamW's step count
    groups = [saved | own for saved, own in zip(state["param_groups"], options, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})
    _lay_out_buffers(optimizer)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to `factor` times its peak, without waiting for the device."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
