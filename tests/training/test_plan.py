"""The plan: what a configuration means on a device, decided once and recorded."""

import json

import pytest

from tests.conftest import plan_on
from train import Trainer
from utils.errors import ConfigError

FASTEST = {
    "cpu": "eager, fused_optimizer, fuse_norm_relu, winograd, weight_products, keep_memory",
    "cuda": "compiled, graphed, prefetched, fused_optimizer",
}


@pytest.mark.parametrize("device", FASTEST)
def test_fastest_turns_on_what_the_device_has(tiny, device, monkeypatch):
    for name, found in (("has_bf16_kernels", True), ("missing_compiler", "")):
        monkeypatch.setattr(f"utils.training.plan.{name}", lambda found=found, **_: found)
    plan = plan_on(tiny("fastest", batch_size=32), device)
    assert str(plan) == f"batch 32 = 1 rank(s) x 1 accumulated x 32 images; {FASTEST[device]}"
    assert not any(plan.kernels.values()), "none is demanded by name"


def test_a_prediction_needs_no_step(tiny):
    """A run of a GPU, evaluated on a CPU."""
    config = tiny(enable_cuda_graphs=True, enable_extra_opts=True, micro_batch_size=8, batch_size=24)
    with pytest.raises(ConfigError, match="enable_cuda_graphs needs a CUDA device"):
        plan_on(config)
    assert not plan_on(config, training=False).graphed


def test_log_and_environment_hold_what_the_network_uses(tiny, one_rank, tmp_path):
    """airbench has no ReLU, so `auto` leaves the fused norm out, with a line that says so."""
    auto = {"fuse_norm_relu": "auto", "enable_nhwc": True, "model": "airbench"}
    trainer = Trainer(tiny(**auto, max_epochs=1, limit_train_batches=1), one_rank, tmp_path)
    trainer.train()
    plan, log = trainer.learner.plan, (tmp_path / "train.log").read_text()
    assert plan.kernels == {} and "skipped: fuse_norm_relu: the network has no BatchNorm2d before ReLU" in log
    assert f"{plan}; writes to {tmp_path}" in log
    assert json.loads((tmp_path / "environment.json").read_text())["plan"] == plan.describe()
