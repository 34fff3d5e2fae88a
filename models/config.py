"""The model settings and the table of networks. No torch here: a builder is imported when its network is built."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from utils.base_config import KeyFlag, OneOf, SharedConfig
from utils.user_code import OWN_FORM, OWN_PATTERN, is_user_code


@dataclass(frozen=True)
class Network:
    """A network as the configuration sees it."""

    builder: str  # "module:name" of a function or class that takes ModelConfig and returns the network
    residual: bool = False  # torchvision's ResNets: zero_init_residual applies
    external: bool = False  # of the user or timm: the builder also takes the image side; stem and width do not apply
    small: bool = False  # for small images only: `width` applies, the stem is fixed
    large_images_only: bool = False


_LARGE = Network("models.resnet:build_large_resnet", residual=True)
_SMALL = Network("models.resnet:build_small_resnet", small=True)
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
    "resnet9": Network("models.resnet:ResNet9", small=True),
    "airbench": Network("models.airbench:Airbench", small=True),
    "airbench96": Network("models.airbench:Airbench", small=True),
    "vgg16": _VGG,
    "vgg16_bn": _VGG,
    "alexnet": Network("models.vgg:build_imagenet", large_images_only=True),
}
TIMM = "timm:"
FORMS = {OWN_FORM: OWN_PATTERN, "timm:NAME": r"^timm:[\w.-]+$"}
_OWN = Network("models.own:build_own", external=True)
_TIMM = Network("models.own:build_timm", external=True)


def find_network(model: str) -> Network:
    """Return the entry of the network that the setting `model` names."""
    if is_user_code(model):
        return _TIMM if model.startswith(TIMM) else _OWN
    return NETWORKS[model]


class ModelConfig(SharedConfig):
    """model"""

    model: Annotated[str, OneOf(NETWORKS, FORMS), KeyFlag.FIXED_ON_RESUME] = "resnet50"
    """torchvision's ResNets, VGG16 and AlexNet, or small: resnet8, 9, 20, 56, airbench. vgg16_bn has BatchNorm.
    resnet8, 20 and 56 are He's networks for CIFAR. resnet9 is Page's; airbench and airbench96 follow Jordan's; all
    three are for few epochs. package.module:function is a function of your own, called with num_classes; timm:NAME is
    a network of timm."""
    stem: Annotated[Literal["7x7", "3x3", "imagenet"], KeyFlag.FIXED_ON_RESUME] = "7x7"
    """First convolution of torchvision's ResNets: 7x7 (the tutorial's) or 3x3, stride 1, no max-pool. imagenet: their
    own, also of VGG16 and AlexNet, for 224 pixels. The other networks have their own and need 7x7."""
    zero_init_residual: Annotated[bool, KeyFlag.FIXED_ON_RESUME] = False
    """torchvision's ResNets: each residual block starts as the identity, with a last BatchNorm weight of 0. Goyal et
    al. (arXiv:1706.02677) train large batches so."""
    width: Annotated[int, Field(ge=1, le=64), KeyFlag.FIXED_ON_RESUME] = 1
    """Small ResNets and airbench: the first stage has 16 times this many channels. He uses 1, Page and Jordan 4."""

    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """File of weights that a new run starts from; null: random weights. safetensors, a checkpoint of this program, or a
    state dict such as torchvision's .pth files; a head for another number of classes is replaced."""

    @model_validator(mode="after")
    def _check_model(self) -> "ModelConfig":
        network = find_network(self.model)
        if self.width != 1 and not network.small:
            small = [name for name, other in NETWORKS.items() if other.small]
            raise ValueError(f"width {self.width} is for {', '.join(small)}; model {self.model} needs 1")
        residual = ", ".join(name for name, other in NETWORKS.items() if other.residual)
        if self.zero_init_residual and not network.residual:
            raise ValueError(f"zero_init_residual is for {residual}; model {self.model} needs false")
        if network.large_images_only and self.stem != "imagenet":
            raise ValueError(f"model {self.model} is for large images, stem {self.stem} is not; stem must be imagenet")
        if network.external and self.stem != "7x7":
            raise ValueError(f"stem {self.stem} is for this program's networks; model {self.model} needs 7x7")
        if self.stem == "3x3" and not network.residual:
            raise ValueError(f"stem 3x3 is for {residual}; model {self.model} needs 7x7")
        if self.stem == "imagenet" and network.small:
            raise ValueError(f"model {self.model} is for small images; stem imagenet needs another model")
        return self
