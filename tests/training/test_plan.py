"""The plan: what a configuration means on a device, decided once and recorded."""

import json

import pytest
import torch

from tests.conftest import plan_on
from train import Trainer
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.training.plan import make_plan


@pytest.mark.parametrize(("device", "named"), {
    "cpu": "eager, fused_optimizer, fuse_norm_relu, winograd, weight_products, keep_memory",
    "cuda": "compiled, graphed, prefetched, fused_optimizer",
}.items())  # fmt: skip
def test_fastest_turns_on_what_the_device_has(tiny, device, named, monkeypatch):
    for name, found in (("has_bf16_kernels", True), ("missing_compiler", "")):
        monkeypatch.setattr(f"utils.training.plan.{name}", lambda found=found, **_: found)
    plan = plan_on(tiny("fastest", batch_size=32), device)
    assert str(plan) == f"batch 32 = 1 rank(s) x 1 accumulated x 32 images; {named}"
    assert not any(plan.kernels.values()), "none is demanded by name"
    for allowed in ({"enable_amp": True}, {"opt_level": "O1"}, {"amp_dtype": "bf16", "opt_level": "O2"}):
        several_gpus = plan_on(tiny("fastest", parallel="dataparallel", **{"amp_dtype": "auto"} | allowed), "cuda")
        assert not several_gpus.graphed and not several_gpus.compiled


GRAPHS, O3 = {"enable_cuda_graphs": True, "enable_extra_opts": True}, {"opt_level": "O3", "amp_dtype": "fp16"}
DATAPARALLEL, CHECKED = {"parallel": "dataparallel"}, {"verify_every_steps": 3}
ON_CPU = "needs a CUDA device, this run is on cpu"


@pytest.mark.parametrize(("changes", "device", "ranks", "message"), [
    (GRAPHS, "cpu", 1, f"enable_cuda_graphs {ON_CPU}; use false or auto"),
    ({"enable_sync_bn": True}, "cpu", 2, f"enable_sync_bn {ON_CPU}"),
    (DATAPARALLEL, "cpu", 1, f"dataparallel {ON_CPU}"),
    (DATAPARALLEL, "cuda", 2, "dataparallel is one process for all GPUs, not 2"),
    ({"parallel": "no_communication"}, "cuda", 1, "no_communication compares several ranks"),
    (CHECKED, "cuda", 1, "needs deterministic true"),
    ({"enable_amp": True, "amp_dtype": "fp16"}, "cpu", 1, f"amp_dtype fp16 {ON_CPU}"),
    ({"opt_level": "O3", "fuse_norm_relu": True, "enable_nhwc": True}, "cpu", 1, "needs BatchNorm in float32 on a CPU"),
    ({"opt_level": "O3", "loss_scale": 128}, "cuda", 1, r"loss_scale 128\.0 with opt_level O3: PyTorch does not"),
    # in fp16, weights of resnet8 went from 1 to 1213 and 80 in two steps; in bf16 to 1.02
    (O3 | {"optimizer": "adamw"}, "cuda", 1, "optimizer adamw with opt_level O3 needs amp_dtype bf16"),
    (O3 | {"optimizer": "muon/3"}, "cuda", 1, "optimizer muon/3 with opt_level O3 needs amp_dtype bf16"),
    ({"optimizer": "muon", "enable_cuda_graphs": "auto", "enable_amp": True}, "cuda", 1, "cannot scale the loss"),
])  # fmt: skip
def test_what_this_device_or_number_of_ranks_cannot_train_is_refused(tiny, changes, device, ranks, message):
    """Even so, a run of a GPU can be evaluated on a CPU."""
    world = World(0, 0, ranks, torch.device(device))
    with pytest.raises(ConfigError, match=message):
        make_plan(tiny(**changes), world)
    changed = {"deterministic": True, "amp_dtype": "bf16", "loss_scale": None}
    predicted = make_plan(tiny(**changes | changed), world, training=False)
    assert not predicted.graphed and not predicted.notes[1:]
    if device == "cuda" and "parallel" not in changes:
        make_plan(tiny(**changes | changed), world)


@pytest.mark.parametrize(("parallel", "device", "ranks"), [("no_communication", "cpu", 2), ("dataparallel", "cuda", 1)])
def test_a_mode_for_measurements_has_a_warning(tiny, parallel, device, ranks):
    plan = make_plan(tiny(parallel=parallel), World(0, 0, ranks, torch.device(device)))
    assert plan.notes[0].startswith(f"WARNING: parallel={parallel}: ")


def test_log_and_environment_hold_what_the_network_uses(tiny, one_rank, tmp_path):
    """airbench has no ReLU, so `auto` leaves the fused norm out, with a line that says so."""
    auto = {"fuse_norm_relu": "auto", "enable_nhwc": True, "model": "airbench"}
    trainer = Trainer(tiny(**auto, max_epochs=1, limit_train_batches=1), one_rank, tmp_path)
    trainer.train()
    plan, log = trainer.learner.plan, (tmp_path / "train.log").read_text()
    assert plan.kernels == {} and "skipped: fuse_norm_relu: the network has no BatchNorm2d before ReLU" in log
    assert f"{plan}; writes to {tmp_path}" in log
    assert json.loads((tmp_path / "environment.json").read_text())["plan"] == plan.describe()
