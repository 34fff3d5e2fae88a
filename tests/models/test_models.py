"""The networks: parameters, FLOPs, shapes, memory format."""

import pytest
import torch
import torchvision
from torch import nn

from models import build_model


@pytest.mark.parametrize(("model", "stem", "num_classes", "parameters"), [
    ("resnet50", "7x7", 100, 23_712_932),  # as in the tutorial
    ("resnet18", "3x3", 10, 11_173_962),  # as in the widely used pytorch-cifar
    ("resnet20", "7x7", 10, 272_474),  # 0.27 M in table 6 of He et al., with projection shortcuts
    ("resnet56", "7x7", 10, 855_770),  # 0.85 M there
    ("resnet9", "7x7", 10, 6_573_130),  # Page's, with a bias in the last layer
    ("airbench", "7x7", 10, 2_495_658),  # its convolutions, 2 per channel of BatchNorm, a last layer of 384 x 10
    ("airbench96", "7x7", 10, 4_118_698),  # counted in the same way
    ("vgg16", "7x7", 10, 14_719_818),  # torchvision's convolutions and one linear layer
    ("vgg16", "imagenet", 1000, 138_357_544),  # this and the following: torchvision's documentation
    ("resnet50", "imagenet", 1000, 25_557_032),
    ("alexnet", "imagenet", 10, 57_044_810),  # with 1000 classes 61,100,840
])  # fmt: skip
def test_number_of_parameters(tiny, model, stem, num_classes, parameters):
    width = 4 if model in ("resnet9", "airbench", "airbench96") else 1
    with torch.device("meta"):
        built = build_model(tiny(model=model, stem=stem, num_classes=num_classes, width=width))
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters


@pytest.mark.parametrize(("model", "squares"), [("resnet18", 707), ("resnet50", 255_850), ("resnet8", 4.53),
    ("resnet9", 27.5), ("airbench", 7.01), ("airbench96", 14.0), ("vgg16", 3.45)])  # fmt: skip
def test_a_gradient_step_lowers_the_loss_of_every_network(tiny, model, squares):
    """All parameters have a gradient: no part is unused. Its size tells the initialisation, layers and factors."""
    torch.manual_seed(0)
    built, images, labels = build_model(tiny(model=model)), torch.randn(4, 3, 32, 32), torch.arange(4)
    parameters = list(built.parameters())
    before = nn.functional.cross_entropy(built(images), labels)
    gradients = torch.autograd.grad(before, parameters)
    assert all(gradient.any() for gradient in gradients)
    length = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    assert length.item() == pytest.approx(squares, rel=0.05)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.01 * gradient / length)  # lowers a linear loss by 0.01
        assert 0.005 < before - nn.functional.cross_entropy(built(images), labels) < 0.015


@pytest.mark.parametrize(("model", "stem"), [("resnet18", "7x7"), ("resnet50", "3x3")])
def test_torchvisions_resnets_are_initialised_as_their_papers_say(tiny, model, stem):
    """The stem with variance 2 / (outputs x kernel), as in He et al. 2015 (arXiv:1502.01852). With zero_init_residual,
    a block's output is the ReLU of its shortcut; block 1 of layer1 has the shortcut without a convolution."""
    torch.manual_seed(0)
    network = build_model(tiny(model=model, stem=stem, zero_init_residual=True))
    assert network.conv1(torch.randn(2, 3, 32, 32)).shape == (2, 64, 32, 32)
    assert network.conv1.weight.std().item() == pytest.approx((2 / (64 * int(stem[0]) ** 2)) ** 0.5, rel=0.05)
    block = network.layer1[1]
    features = torch.randn(2, block.conv1.in_channels, 4, 4)
    assert torch.equal(block(features), features.relu())


def test_vgg_of_small_images_computes_torchvisions_features(tiny):
    ours = build_model(tiny(model="vgg16_bn", num_classes=10)).eval()
    reference = torchvision.models.vgg16_bn(init_weights=False, num_classes=10).eval()
    ours.features.load_state_dict(reference.features.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = reference.features(images)
        assert features.shape == (2, 512, 1, 1)
        assert torch.equal(ours(images), ours.fc(features.flatten(1)))
