"""The model keys, and the table of networks. No torch: the builders are imported when a network is built."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from utils.base_config import KeyFlag, OneOf, SharedConfig
from utils.user_code import OWN_FORM, OWN_PATTERN, is_user_code


@dataclass(frozen=True)
class Network:
    """What the configuration must know of a network."""

    builder: str  # "module:function", which takes ModelConfig and returns the network
    from_elsewhere: bool = False  # its builder takes the image's side too, and the keys below are not for it
    own_stem: bool = False  # made for small images, with a stem of its own; such networks have a width, too
    only_imagenet: bool = False  # made for large images


_LARGE = Network("models.resnet:build_large_resnet")
_SMALL = Network("models.resnet:build_small_resnet", own_stem=True)
_VGG = Network("models.vgg:build_vgg")

NETWORKS = {
    "resnet18": _LARGE,
    "resnet34": _LARGE,
    "resnet50": _LARGE,
    "resnet101": _LARGE,
    "resnet152": _LARGE,
    "resnet8": _SMALL,
    "resnet20": _SMALL,
    "resnet56": _SMALL,
    "resnet9": Network("models.resnet:build_resnet9", own_stem=True),
    "airbench": Network("models.airbench:build_airbench", own_stem=True),
    "airbench96": Network("models.airbench:build_airbench", own_stem=True),
    "vgg16": _VGG,
    "vgg16_bn": _VGG,
    "alexnet": Network("models.vgg:build_imagenet", only_imagenet=True),
}
TIMM = "timm:"
FORMS = {OWN_FORM: OWN_PATTERN, "timm:NAME": r"^timm:[\w.-]+$"}
_OWN = Network("models.own:build_own", from_elsewhere=True)
_TIMM = Network("models.own:build_timm", from_elsewhere=True)


def find_network(model: str) -> Network:
    """What must be known of the network that the key `model` names."""
    if is_user_code(model):
        return _TIMM if model.startswith(TIMM) else _OWN
    return NETWORKS[model]


class ModelConfig(SharedConfig):
    """model"""

    model: Annotated[str, OneOf(NETWORKS, FORMS), KeyFlag.FIXED_ON_RESUME] = "resnet50"
    """torchvision's ResNets, VGG16 and AlexNet, or small: resnet8, 9, 20, 56, airbench. vgg16_bn has BatchNorm;
    resnet8, 20 and 56 are He's for CIFAR; resnet9 is Page's, airbench and airbench96 are after
    Jordan's, for few epochs. Or your own, package.module:function, which is called with num_classes, or one of timm's,
    timm:NAME."""
    stem: Annotated[Literal["7x7", "3x3", "imagenet"], KeyFlag.FIXED_ON_RESUME] = "7x7"
    """First convolution of large ResNets: 7x7 (the tutorial's) or 3x3, stride 1, no max-pool. imagenet: torchvision's
    own, for 224 pixels; so are VGG16 and AlexNet with it."""
    width: Annotated[int, Field(ge=1, le=64), KeyFlag.FIXED_ON_RESUME] = 1
    """Small ResNets and airbench: times 16 channels in the first stage. He's have 1, Page's and Jordan's 4."""

    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """A file of weights that a new run begins with; null: random ones. safetensors, a checkpoint of this program, or a
    state dict such as torchvision's .pth files; a head for another number of classes is replaced."""

    @model_validator(mode="after")
    def _check_model(self) -> "ModelConfig":
        network = find_network(self.model)
        small = [name for name, other in NETWORKS.items() if other.own_stem]
        if self.width != 1 and not network.own_stem:
            raise ValueError(f"width {self.width} is for {', '.join(small)}; model {self.model} needs 1")
        if network.only_imagenet and self.stem != "imagenet":
            raise ValueError(f"model {self.model} is for large images: stem must be imagenet, not {self.stem}")
        if network.from_elsewhere and self.stem != "7x7":
            raise ValueError(f"stem {self.stem} is for this program's networks; model {self.model} needs 7x7")
        if self.stem == "imagenet" and network.own_stem:
            raise ValueError(f"model {self.model} is for small images; stem imagenet needs another model")
        return self
