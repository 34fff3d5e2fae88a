"""Process-wide switches: the note of `deterministic`, and that its runs are bitwise equal."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import build_model
from models.resnet import LOGIT_SCALE
from tools.verify_resume import compare
from train import Trainer
from utils.distributed.world import World
from utils.training.kernels.process import prepare_backends


@pytest.fixture(autouse=True)
def _as_before():
    """Restore PyTorch's defaults."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_deterministic_logs_what_it_does_and_costs(tiny):
    device = torch.device("cuda", 0)
    assert not any("deterministic" in note for note in prepare_backends(tiny(), device))
    (plain,) = prepare_backends(tiny(deterministic=True), device)
    (both,) = prepare_backends(tiny(deterministic=True, enable_extra_opts=True), device)
    for note in (plain, both):
        assert note.startswith(
            "deterministic: every run on this machine gives the same bits; on a GPU steps take longer"
        )
    assert "cudnn_benchmark" in both and "cudnn_benchmark" not in plain
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


class Operations(TorchDispatchMode):
    """Collects the names of operations, forward and backward."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("model", "stem", "works"),
    [
        *((model, "7x7", True) for model in ("resnet8", "resnet9", "resnet50", "vgg16", "vgg16_bn")),
        ("resnet50", "imagenet", True),
        *((model, "imagenet", False) for model in ("alexnet", "vgg16", "vgg16_bn")),
    ],
)
def test_small_networks_and_resnets_have_deterministic_kernels_on_cuda(tiny, model, stem, works):
    """`torch.use_deterministic_algorithms` documents two operations without."""
    config = tiny(model=model, stem=stem, deterministic=True)
    with torch.device("meta"):
        network, images = build_model(config), torch.empty(2, 3, 64, 64)
        with Operations() as operations:
            network(images[..., :32, :32] if stem == "7x7" else images).sum().backward()
    refused = {"adaptive_max_pool2d_backward", "_adaptive_avg_pool2d_backward"}
    assert "convolution_backward" in operations.names and refused.isdisjoint(operations.names) is works


def test_resnet9_pools_like_pytorchs_layer(tiny):
    """The same values and, after a ReLU, gradients: equal maxima other than 0 are unlikely."""
    model = build_model(tiny(model="resnet9"))
    kept = []
    model.layer3.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    images = torch.randn(8, 3, 32, 32)
    model(images).square().sum().backward()
    gradient = model.prep[0].weight.grad.clone()
    model.zero_grad()
    pooled = nn.AdaptiveMaxPool2d(1)(model.layer3(model.layer2(model.layer1(model.prep(images))))).flatten(1)
    assert torch.equal(kept[0].amax((2, 3)), pooled)
    (model.fc(pooled) * LOGIT_SCALE).square().sum().backward()
    torch.testing.assert_close(model.prep[0].weight.grad, gradient)


@pytest.mark.parametrize(
    ("device", "model"),
    [("cpu", "resnet8"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("resnet8", "resnet9"))],
)
def test_deterministic_runs_are_bitwise_equal(tiny, tmp_path, device, model):
    """Two equal runs, and one resumed in the first epoch."""
    world = World(rank=0, local_rank=0, world_size=1, device=torch.device(device))
    changes = {"enable_amp": True, "ema_decay": 0.9, "mixup_alpha": 0.2, "device": device, "model": model}
    config = tiny(deterministic=True, checkpoint_every_steps=1, keep_checkpoints=9, **changes)
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    for folder in (one, two):
        Trainer(config, world, folder, "tiny", "auto").train()
        assert torch.are_deterministic_algorithms_enabled()
    shutil.copytree(one, resumed)
    for path in sorted((resumed / "checkpoints").glob("step-*.pt"))[2:]:
        path.unlink()
    trainer = Trainer(config, world, resumed, "tiny", "auto")
    trainer.train()
    assert trainer.learner.steps == 8 and "epoch 1, batch 2, step 2" in (resumed / "train.log").read_text()
    assert compare(one, two) == []
    assert compare(one, resumed) == []
