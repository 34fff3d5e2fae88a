"""Precision: apex's levels against float32, master weights, loss scaling and skipped steps."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.conftest import read_records
from train import Trainer
from utils.errors import ConfigError
from utils.run.checkpoint.io import read_checkpoint
from utils.training import precision as precision_module
from utils.training.kernels.process import prepare_backends
from utils.training.optimizers.build import build_optimizer
from utils.training.precision import LossScaler, MasterWeights, Precision, choose_precision
from utils.training.step import check_graphs

CPU = torch.device("cpu")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


def batches(number):
    """Images [16, 3, 8, 8] whose class is the quarter that is bright."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        labels = torch.randint(0, 4, (16,), generator=generator)
        images = 0.5 * torch.randn(16, 3, 8, 8, generator=generator)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 2)
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        yield images, labels


def losses(config, precision, steps=60):
    """Train; return the loss of each step, and model, weights and scaler afterwards."""
    model = network()
    weights = MasterWeights(model, precision)
    optimizer = build_optimizer(config, weights.parameters())
    scaler = LossScaler(precision.device_type, precision.loss_scale)
    history = []
    for images, labels in batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(precision.forward(model, images), labels)
        scaler.scale(loss).backward()
        weights.move_gradients_to_masters()
        scaler.step(optimizer)
        scaler.update()
        weights.copy_masters_to_model()
        history.append(loss.item())
    return torch.tensor(history), model, weights, scaler


LEVELS = [
    Precision("cpu", "O1"),
    Precision("cpu", "O3", keep_batchnorm_fp32=False),
    Precision("cpu", "O3", keep_batchnorm_fp32=True),
    Precision("cpu", "O2", loss_scale=128.0),
    Precision("cpu", "O1", torch.float16, loss_scale="dynamic"),
    Precision("cpu", "O2", torch.float16, loss_scale=1024.0),
]


@pytest.mark.parametrize("precision", LEVELS, ids=str)
def test_every_level_trains_like_float32(tiny, precision):
    config = tiny(lr=0.05, enable_extra_opts=precision.loss_scale is not None)  # fused kernels unscale
    steps = 12 if precision.low_precision_dtype is torch.float16 else 60  # PyTorch only emulates fp16 on a CPU
    reference, *_ = losses(config, Precision("cpu"), steps)
    history, *_ = losses(config, precision, steps)
    assert reference[0] > 1.2 > reference[-1]
    tolerance = {"O1": 0.02, "O2": 0.02, "O3": 0.1}[precision.level]
    torch.testing.assert_close(history, reference, rtol=tolerance, atol=tolerance)


CUDA = torch.device("cuda", 0)
BF16, FP16 = "bf16 autocast", "fp16 autocast, loss scale dynamic"


@pytest.mark.parametrize(
    ("changes", "on_cpu", "on_gpu"),
    [
        ({}, "float32", "float32"),
        ({"enable_amp": True}, BF16, FP16),
        ({"opt_level": "O1", "amp_dtype": "bf16"}, BF16, BF16),
        ({"opt_level": "O0", "enable_amp": True}, "float32", "float32"),
        ({"opt_level": "O2"}, "O2: bf16 weights, float32 BatchNorm, float32 master weights",
         "O2: fp16 weights, float32 BatchNorm, float32 master weights, loss scale dynamic"),
        ({"opt_level": "O3"}, "O3: bf16 weights, bf16 BatchNorm", "O3: fp16 weights, fp16 BatchNorm"),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True, "amp_dtype": "bf16"},
         "O3: bf16 weights, float32 BatchNorm", "O3: bf16 weights, float32 BatchNorm"),
    ],
)  # fmt: skip
def test_settings_choose_the_precision(tiny, monkeypatch, changes, on_cpu, on_gpu):
    monkeypatch.setattr(precision_module, "has_bf16_kernels", lambda: True)
    assert [str(choose_precision(tiny(**changes), device)) for device in (CPU, CUDA)] == [on_cpu, on_gpu]


O3 = {"opt_level": "O3", "amp_dtype": "fp16"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opt_level": "O3", "loss_scale": 128}, r"loss_scale 128\.0 with opt_level O3: PyTorch does not unscale"),
        # in fp16, weights of resnet8 went from 1 to 1213 and 80 in two steps; in bf16 to 1.02
        (O3 | {"optimizer": "adamw"}, "optimizer adamw with opt_level O3 needs amp_dtype bf16"),
        (O3 | {"optimizer": "muon"}, "optimizer muon with opt_level O3 needs amp_dtype bf16"),
        ({"optimizer": "muon", "enable_cuda_graphs": "auto", "enable_amp": True}, "cannot scale the loss"),
    ],
)
def test_what_a_gpu_cannot_train_in_is_refused(tiny, changes, message):
    config = tiny(**changes)
    with pytest.raises(ConfigError, match=message):
        check_graphs(config, choose_precision(config, CUDA), CUDA)
    config = tiny(**changes | {"amp_dtype": "bf16", "loss_scale": None})
    check_graphs(config, choose_precision(config, CUDA), CUDA)


@pytest.mark.parametrize("enabled", [False, True])
def test_enable_tf32_sets_the_backends(tiny, enabled):
    notes = prepare_backends(tiny(enable_tf32=enabled), CPU)
    assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == enabled
    assert notes == (["enable_tf32: no effect on a CPU"] if enabled else [])
    prepare_backends(tiny(), CPU)


def test_master_gradients_keep_their_memory(tiny):
    """A CUDA graph that zeroes kept gradients does so at their addresses."""
    _, model, weights, _ = losses(tiny(), Precision("cpu", "O2"), 1)
    (half, master), places = (model[0].weight, weights.masters["0.weight"]), set()
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        weights.move_gradients_to_masters()
        places.add(master.grad.data_ptr())
        assert half.grad is None and torch.equal(master.grad, torch.full_like(master, value))
    assert len(places) == 1


@pytest.mark.parametrize(("level", "batchnorm"), [("O2", True), ("O2", False), ("O3", True), ("O3", False)])
def test_levels_cast_as_in_the_table(tiny, level, batchnorm):
    _, model, weights, _ = losses(tiny(), Precision("cpu", level, keep_batchnorm_fp32=batchnorm), 2)
    assert model[0].weight.dtype == model[5].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == model[1].running_mean.dtype == (torch.float32 if batchnorm else torch.bfloat16)
    half = ["0.weight", *([] if batchnorm else ["1.weight", "1.bias"]), "5.weight", "5.bias"]
    assert list(weights.masters) == (half if level == "O2" else [])
    for name, master in weights.masters.items():
        assert master.dtype == torch.float32 and torch.equal(model.state_dict()[name], master.bfloat16()), name


def test_master_weights_collect_updates_that_half_weights_lose(tiny):
    config = tiny(lr=1e-5, momentum=0.0, weight_decay=0.0)
    moved = {}
    for level in ("O2", "O3"):
        before = network()[5].weight
        _, _, weights, _ = losses(config, Precision("cpu", level), 3)
        after = weights.state_dict()["5.weight"]
        moved[level] = (after != before.to(after.dtype)).float().mean().item()
    assert moved["O2"] > 0.95
    assert moved["O3"] < 0.1  # only those near zero


def test_a_tied_weight_is_saved_in_full_precision_under_each_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weights = MasterWeights(model, Precision("cpu", "O2"))
    weights.masters["0.weight"].data += 1e-4
    saved = weights.state_dict()
    assert saved["1.weight"].dtype == torch.float32 and torch.equal(saved["0.weight"], saved["1.weight"])


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_level_resumes_bitwise_and_saves_full_precision(tiny, one_rank, tmp_path, level):
    def run(folder, epochs, resume="auto"):
        config = tiny(opt_level=level, max_epochs=epochs, enable_extra_opts=True)
        trainer = Trainer(config, one_rank, tmp_path / folder, "tiny", resume)
        trainer.train()
        return trainer

    whole = run("whole", 2).learner
    run("parts", 1)
    parts = run("parts", 2, resume=str(tmp_path / "parts")).learner
    assert all(map(torch.equal, whole.weights.parameters(), parts.weights.parameters()))
    assert all(map(torch.equal, whole.model.state_dict().values(), parts.model.state_dict().values()))
    saved = read_checkpoint(max((tmp_path / "whole/checkpoints").glob("step-*.pt")))["model"]
    assert saved["fc.weight"].dtype == (torch.float32 if level == "O2" else torch.bfloat16)
    assert torch.equal(saved["fc.weight"].bfloat16(), whole.model.fc.weight)


def scaled_steps(scaler, gradients, fused=True):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    for gradient in gradients:
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.full((4,), gradient) * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach()


@pytest.mark.parametrize(
    ("fused", "scale", "gradients", "left", "skipped"),
    [
        (False, "dynamic", [math.inf, 1.0, math.nan, 1.0, math.inf], 65536 / 8, 3),
        (True, 128.0, [1.0, math.inf, 1.0], 128, 1),
    ],
)
def test_skipped_steps_are_counted_and_change_nothing(fused, scale, gradients, left, skipped):
    """Only a dynamic scale falls."""
    scaler = LossScaler("cpu", scale)
    after = scaled_steps(scaler, gradients, fused)
    assert scaler.metrics() == {"loss_scale": left, "skipped_steps": skipped}
    torch.testing.assert_close(after, torch.full((4,), 0.8))


def test_scaler_state_is_restored():
    before, after, constant = LossScaler("cpu", "dynamic"), LossScaler("cpu", "dynamic"), LossScaler("cpu", 8.0)
    scaled_steps(before, [math.inf, 1.0])
    for scaler in (after, constant):
        scaler.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.state_dict() == before.state_dict()
    assert after.metrics() == {"loss_scale": 32768, "skipped_steps": 1}
    assert constant.metrics() == {"loss_scale": 8, "skipped_steps": 1}
    assert LossScaler("cpu", None).state_dict() == {}


def test_scale_and_skipped_steps_are_logged(tiny, one_rank, tmp_path):
    Trainer(tiny(enable_amp=True, amp_dtype="bf16", loss_scale=64), one_rank, tmp_path, "tiny", "auto").train()
    for row in read_records(tmp_path, "step") + read_records(tmp_path, "epoch"):
        assert (row["loss_scale"], row["skipped_steps"]) == (64, 0)
    assert "bf16 autocast, loss scale 64" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("layout", [{}, {"enable_nhwc": True, "enable_extra_opts": True}], ids=["plain", "fast"])
def test_o2_in_bf16_is_bitwise_equal_to_o1(tiny, one_rank, layout):
    """Both round the same weights, images and gradients; O2 rounds all weights in one operation."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10) for _ in range(2)]
    found = []
    for level in ("O1", "O2"):
        learner = Trainer(tiny(opt_level=level, amp_dtype="bf16", batch_size=16, lr=0.02, **layout), one_rank).learner
        for images, labels in batches:
            learner.train_step(images, labels)
        found.append(learner.weights.state_dict() | {"sums": learner.sums.sums})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_auto_disables_bf16_without_kernels_for_it(tiny, monkeypatch):
    monkeypatch.setattr(precision_module, "has_bf16_kernels", lambda: False)
    monkeypatch.setattr(precision_module, "gpu_has_bf16", lambda: False)
    for changes in ({"enable_amp": "auto"}, {"enable_amp": "auto", "amp_dtype": "bf16"}, {"enable_amp": True}):
        found = str(choose_precision(tiny(**changes), CPU))
        assert found.startswith("float32: enable_amp has no effect, this processor has no bf16 kernels")
    for changes in ({"enable_amp": True, "amp_dtype": "bf16"}, {"opt_level": "O1"}):
        assert str(choose_precision(tiny(**changes), CPU)) == BF16
    with pytest.raises(ConfigError, match="amp_dtype fp16 needs a CUDA device"):
        choose_precision(tiny(enable_amp="auto", amp_dtype="fp16"), CPU)
    found = str(choose_precision(tiny(enable_amp="auto", amp_dtype="bf16"), CUDA))
    assert found.startswith("float32: enable_amp has no effect, this GPU has no bf16 kernels")
    assert str(choose_precision(tiny(enable_amp="auto"), CUDA)) == FP16
