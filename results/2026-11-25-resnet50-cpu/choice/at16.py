"""The tutorial's ResNet50; in validation it resizes the images to 16 pixels, the size that a probe trains with."""

import torch
from torch.nn import functional
from torchvision.models import resnet50


class At16(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = resnet50(num_classes=num_classes)
        self.net.conv1 = torch.nn.Conv2d(3, 64, 7, stride=1, padding=3, bias=False)
        self.net.maxpool = torch.nn.Identity()
        torch.nn.init.kaiming_normal_(self.net.conv1.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        if not self.training and x.shape[-1] > 16:
            x = functional.interpolate(x, size=(16, 16), mode="bilinear", antialias=True, align_corners=False)
        return self.net(x)


def build(num_classes):
    return At16(num_classes)


def build_zero(num_classes):
    model = At16(num_classes)
    for block in [
        b for layer in (model.net.layer1, model.net.layer2, model.net.layer3, model.net.layer4) for b in layer
    ]:
        torch.nn.init.zeros_(block.bn3.weight)
    return model
