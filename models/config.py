"""The model settings and the names of the networks. No torch here: a builder is imported when its network is built."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from utils.base_config import KeyFlag, PathText, SharedConfig
from utils.user_code import OwnCode, TimmName

Resnet = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
Small = Literal["resnet8", "resnet20", "resnet56", "resnet9", "airbench", "airbench96"]  # for small images only
Network = Literal[Resnet, Small, "vgg16", "vgg16_bn", "alexnet"]
TORCHVISION_RESNETS, SMALL = get_args(Resnet), get_args(Small)
# the stems of all other networks are fixed; 7x7 then means the network's own
STEMS: dict[str, tuple[str, ...]] = dict.fromkeys(TORCHVISION_RESNETS, ("7x7", "3x3", "imagenet"))
STEMS |= {"vgg16": ("7x7", "imagenet"), "vgg16_bn": ("7x7", "imagenet"), "alexnet": ("imagenet",)}


class ModelConfig(SharedConfig):
    """model"""

    model: Annotated[Network | OwnCode | TimmName, KeyFlag.FIXED_ON_RESUME] = "resnet50"
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
    pretrained: PathText | None = None
    """File of weights that a new run starts from; null: random weights. safetensors, a checkpoint of this program, or a
    state dict such as torchvision's .pth files; a head for another number of classes is replaced."""

    @model_validator(mode="after")
    def _check_model(self) -> "ModelConfig":
        if self.width != 1 and self.model not in SMALL:
            raise ValueError(f"width {self.width} is for {', '.join(SMALL)}; model {self.model} needs 1")
        if self.zero_init_residual and self.model not in TORCHVISION_RESNETS:
            residual = ", ".join(TORCHVISION_RESNETS)
            raise ValueError(f"zero_init_residual is for {residual}; model {self.model} needs false")
        if self.stem not in (stems := STEMS.get(self.model, ("7x7",))):
            raise ValueError(f"stem {self.stem} is not for model {self.model}; expected {' or '.join(stems)}")
        return self
