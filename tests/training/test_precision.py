"""Precision: apex's levels against float32, master weights, loss scaling and skipped steps."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.conftest import plan_on, read_records, run
from train import Trainer
from utils.distributed.world import World
from utils.training import plan as plan_module
from utils.training.learner import Learner, prepare_backends
from utils.training.plan import choose_precision
from utils.training.precision import LossScaler, Precision, Weights


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))


def trained(config, precision, steps):
    """Train on images [16, 3, 8, 8] whose class is the brightest channel; return losses and learner."""
    plan, world = replace(plan_on(config), precision=precision), World(0, 0, 1, CPU)
    learner = Learner(config, plan, lambda _: network(), world, steps)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        labels = torch.randint(0, 3, (16,), generator=generator)
        images = torch.randn(16, 3, 8, 8, generator=generator)
        images[torch.arange(16), labels] += 1
        learner.train_step(images, labels)
        losses.append(learner.sums.average_since_last(world)["loss"])
    return torch.tensor(losses), learner


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.mark.parametrize("precision", [
    Precision("cpu", "O1", BF16),
    Precision("cpu", "O3", BF16, keep_batchnorm_fp32=False),
    Precision("cpu", "O3", BF16, keep_batchnorm_fp32=True),
    Precision("cpu", "O1", torch.float16, loss_scale="dynamic"),
    Precision("cpu", "O2", torch.float16, loss_scale=1024.0),
], ids=str)  # fmt: skip
def test_every_level_trains_like_float32(tiny, precision):
    config = tiny(lr=0.01, enable_extra_opts=precision.loss_scale is not None)  # fused kernels unscale
    (reference, _), (losses, _) = trained(config, Precision("cpu"), 12), trained(config, precision, 12)
    assert reference[0] > 1.2 > reference[-1]
    tolerance = 0.1 if precision.level == "O3" else 0.03
    torch.testing.assert_close(losses, reference, rtol=tolerance, atol=tolerance)


AUTOCAST, SCALED = "bf16 autocast", "fp16 autocast, loss scale dynamic"


@pytest.mark.parametrize(("changes", "on_cpu", "on_gpu"), [
    ({}, "float32", "float32"),
    ({"enable_amp": True}, AUTOCAST, SCALED),
    ({"opt_level": "O1", "amp_dtype": "bf16"}, AUTOCAST, AUTOCAST),
    ({"opt_level": "O0", "enable_amp": True}, "float32", "float32"),
    ({"opt_level": "O2"}, "O2: bf16 weights, float32 BatchNorm, float32 master weights",
     "O2: fp16 weights, float32 BatchNorm, float32 master weights, loss scale dynamic"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": False, "amp_dtype": "bf16"},
     "O2: bf16 weights, bf16 BatchNorm, float32 master weights",
     "O2: bf16 weights, bf16 BatchNorm, float32 master weights"),
    ({"opt_level": "O3"}, "O3: bf16 weights, bf16 BatchNorm", "O3: fp16 weights, fp16 BatchNorm"),
    ({"opt_level": "O3", "keep_batchnorm_fp32": True, "amp_dtype": "bf16"},
     "O3: bf16 weights, float32 BatchNorm", "O3: bf16 weights, float32 BatchNorm"),
])  # fmt: skip
def test_settings_choose_the_precision(tiny, monkeypatch, changes, on_cpu, on_gpu):
    monkeypatch.setattr(plan_module, "has_bf16_kernels", lambda: True)
    assert [str(choose_precision(tiny(**changes), device)) for device in (CPU, CUDA)] == [on_cpu, on_gpu]


@pytest.mark.parametrize("enabled", [False, True])
def test_enable_tf32_sets_the_backends(tiny, enabled):
    config = tiny(enable_tf32=enabled)
    prepare_backends(config, plan_on(config))
    assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == enabled
    for level, formats in (("O0", ["float32", "tf32" if enabled else "float32"]), ("O1", ["bf16", "fp16"])):
        chosen = [choose_precision(tiny(enable_tf32=enabled, opt_level=level), device) for device in (CPU, CUDA)]
        assert [precision.number_format for precision in chosen] == formats
    assert plan_on(config).notes == (("enable_tf32: no effect on a CPU",) if enabled else ())
    prepare_backends(tiny(), plan_on(tiny()))


@pytest.mark.parametrize(("level", "batchnorm"), [("O2", True), ("O2", False), ("O3", True), ("O3", False)])
def test_levels_cast_as_in_the_table_and_masters_keep_their_gradients_memory(tiny, level, batchnorm):
    """A CUDA graph that zeroes kept gradients does so at their addresses."""
    _, learner = trained(tiny(), Precision("cpu", level, BF16, keep_batchnorm_fp32=batchnorm), 2)
    model, weights = learner.model, learner.weights
    assert model[0].weight.dtype == model[3].weight.dtype == torch.bfloat16
    learner.plan.precision.cast_weights(vectors := nn.BatchNorm1d(4))
    found = {value.dtype for value in (vectors.weight, model[1].weight, model[1].running_mean)}
    assert found == {torch.float32 if batchnorm else torch.bfloat16}
    half = ["0.weight", *([] if batchnorm else ["1.weight", "1.bias"]), "3.weight", "3.bias"]
    assert list(weights.masters) == (half if level == "O2" else [])
    for name, master in weights.masters.items():
        before, parameter = master.grad.data_ptr(), model.get_parameter(name)
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16()), name
        parameter.grad = torch.ones_like(parameter)
    weights.move_gradients_to_masters()
    for name, master in weights.masters.items():
        assert model.get_parameter(name).grad is None and torch.equal(master.grad, torch.ones_like(master))
    assert not weights.masters or before == master.grad.data_ptr()


def test_master_weights_collect_updates_that_half_weights_lose(tiny):
    config, moved = tiny(lr=1e-5, momentum=0.0, weight_decay=0.0), {}
    for level in ("O2", "O3"):
        before, (_, learner) = network()[3].weight, trained(config, Precision("cpu", level, BF16), 3)
        after = learner.state_dict()["model"]["3.weight"]  # as a checkpoint has it
        moved[level] = (after != before.to(after.dtype)).float().mean().item()
    assert moved["O2"] > 0.9 and moved["O3"] < 0.1  # only those near zero


def test_a_tied_weight_is_saved_in_full_precision_under_each_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weights = Weights(model, Precision("cpu", "O2", BF16).cast_weights(model))
    weights.masters["0.weight"].data += 1e-4
    saved = weights.state_dict()
    assert saved["1.weight"].dtype == torch.float32 and torch.equal(saved["0.weight"], saved["1.weight"])


def test_scale_and_skipped_steps_are_logged(tiny, one_rank, tmp_path):
    run(tiny(enable_amp=True, amp_dtype="bf16", loss_scale=64, max_epochs=1), one_rank, tmp_path)
    for row in read_records(tmp_path, "step") + read_records(tmp_path, "epoch"):
        assert (row["loss_scale"], row["skipped_steps"]) == (64, 0)
    assert "bf16 autocast, loss scale 64" in (tmp_path / "train.log").read_text()


def scaled_steps(scaler, gradients, fused=True):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    for gradient in gradients:
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.full((4,), gradient) * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach()


@pytest.mark.parametrize(("fused", "scale", "gradients", "left", "skipped"), [
    (False, "dynamic", [math.inf, 1.0, math.nan, 1.0, math.inf], 65536 / 8, 3),
    (True, 128.0, [1.0, math.inf, 1.0], 128, 1),
])  # fmt: skip
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
    monkeypatch.setattr(plan_module, "has_bf16_kernels", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    auto, true, bf16 = {"enable_amp": "auto"}, {"enable_amp": True}, {"amp_dtype": "bf16"}
    none = "float32: enable_amp has no effect, this {} has no bf16 kernels; amp_dtype=bf16 with true forces it".format
    for device, expected, *settings in (
        (CPU, none("processor"), auto, auto | bf16, true), (CPU, AUTOCAST, true | bf16, {"opt_level": "O1"}),
        (CUDA, none("GPU"), auto | bf16), (CUDA, SCALED, auto),
    ):  # fmt: skip
        assert [str(choose_precision(tiny(**changes), device)) for changes in settings] == [expected] * len(settings)
