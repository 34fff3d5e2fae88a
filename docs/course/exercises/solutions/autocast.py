"""A solution of exercises/autocast.py."""

from torch import Tensor, nn
from torch.nn import functional


def forward(network: nn.Sequential, images: Tensor) -> Tensor:
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight = layer.weight.bfloat16()
            bias = None if layer.bias is None else layer.bias.bfloat16()
            if isinstance(layer, nn.Conv2d):
                shape = layer.stride, layer.padding, layer.dilation, layer.groups
                images = functional.conv2d(images.bfloat16(), weight, bias, *shape)
            else:
                images = functional.linear(images.bfloat16(), weight, bias)
        else:
            images = layer(images)
    return images
