"""The networks air192 and air192silu of these runs: what was used of the file, set in lines."""

from torch import Tensor, nn

from models.resnet import convolution


class Air(nn.Module):
    """Images [N, 3, H, W] -> logits [N, num_classes]; with SiLU it is `airbench` with `width` 4."""

    def __init__(self, num_classes: int, activation: type[nn.Module]) -> None:
        super().__init__()
        layers, before = [convolution(3, 32, activation=activation())], 32
        for channels in (64, 192, 384):
            layers.append(convolution(before, channels, pool=True, activation=activation()))
            layers.append(convolution(channels, channels, activation=activation()))
            before = channels
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images).amax((2, 3))) * 0.125


def air192(num_classes: int) -> nn.Module:
    """Named as in config.yaml."""
    return Air(num_classes, nn.ReLU)


def air192silu(num_classes: int) -> nn.Module:
    """Named as in config.yaml."""
    return Air(num_classes, nn.SiLU)
