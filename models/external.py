"""Other networks: VGG16 and AlexNet, a user's function `package.module:function`, and `timm:NAME`."""

from collections import OrderedDict
from typing import Any

import torchvision
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchvision.models.vgg import cfgs, make_layers

from models.config import ModelConfig
from models.resnet import initialise
from utils.errors import ConfigError
from utils.user_code import TIMM, call, user_code_errors


def build_own(config: ModelConfig) -> nn.Module:
    """Call the user's function with `num_classes`; `ConfigError` if it returns no usable network."""
    model = call("model", config.model, ConfigError, num_classes=config.num_classes)
    if not isinstance(model, nn.Module) or not any(weight.requires_grad for weight in model.parameters()):
        expected = "expected a torch.nn.Module with trained parameters"
        raise ConfigError(f"model {config.model}: {expected}, not {model!r:.60}")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or is_lazy(value) or value.is_meta or value.is_complex():
            remedy = "use buffers for state, give lazy layers their shapes, and build the network on the CPU"
            raise ConfigError(f"model {config.model}: {name} of its state is no tensor of real numbers; {remedy}")
    return model


def build_timm(config: ModelConfig, image_side: int | None) -> nn.Module:
    """Build timm's network NAME, initialised, for images of `image_side` pixels if it takes one size only."""
    name, options = config.model.removeprefix(TIMM), dict[str, Any](num_classes=config.num_classes)
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f'model {config.model}: timm cannot be imported ({error}); pip install ".[timm]"') from None
    with user_code_errors(f"model {config.model}", ConfigError):
        if image_side is not None and getattr(timm.models.get_pretrained_cfg(name), "fixed_input_size", False):
            options["img_size"] = image_side
        return timm.create_model(name, pretrained=False, **options)


def build_vgg(config: ModelConfig) -> nn.Module:
    """Build VGG16 (arXiv:1409.1556): images [N, 3, 32, 32] -> logits [N, num_classes]; stem imagenet: torchvision's.
    The thirteen convolutions return [N, 512, 1, 1], so one linear layer replaces torchvision's three for 224 pixels,
    which have 120 M parameters, and 14.7 M are left."""
    if config.stem == "imagenet":
        return build_imagenet(config)
    features = make_layers(cfgs["D"], batch_norm=config.model == "vgg16_bn")
    model = nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), fc=nn.Linear(512, config.num_classes)))
    initialise(model)
    return model


def build_imagenet(config: ModelConfig) -> nn.Module:
    """Build torchvision's VGG16 or AlexNet: images [N, 3, 224, 224] -> logits [N, num_classes]."""
    return getattr(torchvision.models, config.model)(num_classes=config.num_classes)
