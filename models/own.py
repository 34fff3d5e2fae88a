"""External networks: of a function of the user, `package.module:function`, and of timm, `timm:NAME`."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from models.config import TIMM, ModelConfig
from utils.errors import ConfigError
from utils.user_code import call, user_code_errors


def build_own(config: ModelConfig, image_side: int | None) -> nn.Module:
    """Call the user's function with `num_classes`; `ConfigError` if it returns no usable network."""
    model = call("model", config.model, ConfigError, num_classes=config.num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {config.model}: returned a {type(model).__name__}; expected a torch.nn.Module")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError(
            f"model {config.model}: has lazy layers, whose shapes are not known yet; give their shapes, or call the "
            "network once in your function"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model {config.model}: has no parameters to train; return a network that has some, with requires_grad"
        )
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"model {config.model}: has a {type(value).__name__} in its state, {name}; checkpoints hold tensors "
                "only: register it as a buffer"
            )
        if value.is_meta:
            raise ConfigError(
                f"model {config.model}: {name} is on the device meta, without values; build it on the CPU"
            )
    return model


def build_timm(config: ModelConfig, image_side: int | None) -> nn.Module:
    """Build timm's network NAME, initialised, for images of `image_side` pixels if it takes one size only."""
    name = config.model.removeprefix(TIMM)
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f'model {config.model}: timm cannot be imported ({error}); pip install ".[timm]"') from None
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:3]
        raise ConfigError(
            f"model {config.model}: timm has no such network"
            + (f"; did you mean {', '.join(near)}?" if near else "; python -c 'import timm; print(timm.list_models())'")
        )
    options: dict[str, Any] = {"num_classes": config.num_classes}
    pretrained = timm.models.get_pretrained_cfg(name)
    if image_side is not None and pretrained is not None and pretrained.fixed_input_size:
        options["img_size"] = image_side
    with user_code_errors(f"model {config.model} cannot be built with {options}", ConfigError):
        return timm.create_model(name, pretrained=False, **options)
