"""The smallest network with a layer of each kind: thousands of its steps take a minute."""

from torch import nn


def tiny(num_classes: int) -> nn.Module:
    """Images [N, 3, H, W] of at least 16 pixels -> logits [N, num_classes]."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, num_classes),
    )  # fmt: skip
