"""Process-wide switches: the note of `deterministic`, and that its runs are bitwise equal."""

import os
import shutil

import pytest
import torch

from tests.conftest import plan_on, run
from tools.verify_resume import compare
from utils.distributed.world import World
from utils.training.learner import prepare_backends


def test_deterministic_is_noted_and_disables_cudnn_benchmark(tiny):
    config = tiny(deterministic=True, enable_extra_opts=True)
    assert not plan_on(tiny(), "cuda").notes
    [plain], [both] = plan_on(tiny(deterministic=True), "cuda").notes, plan_on(config, "cuda").notes
    assert both == f"{plain}, and without cudnn_benchmark"
    prepare_backends(config, plan_on(config, "cuda"))
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(("opts", "limit"), [(["fused_optimizer", "cudnn_benchmark/3"], 3), (True, 10)])
def test_cudnn_times_so_many_algorithms(tiny, opts, limit):
    config, torch.backends.cudnn.benchmark_limit = tiny(enable_extra_opts=opts), 7
    prepare_backends(config, plan_on(config, "cuda"))
    assert torch.backends.cudnn.benchmark and torch.backends.cudnn.benchmark_limit == limit


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet8", "resnet9"])
def test_deterministic_runs_are_bitwise_equal(tiny, tmp_path, model):
    """Two equal runs, and one resumed in the first epoch."""
    world = World(rank=0, local_rank=0, world_size=1, device=torch.device("cuda"))
    changes = {"enable_amp": True, "ema_decay": 0.9, "mixup_alpha": 0.2, "device": "cuda", "model": model}
    config = tiny(deterministic=True, checkpoint_every_steps=1, keep_checkpoints=9, **changes)
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    for folder in (one, two):
        run(config, world, folder)
    shutil.copytree(one, resumed)
    for path in sorted((resumed / "checkpoints").glob("step-*.pt"))[2:]:
        path.unlink()
    assert run(config, world, resumed).learner.steps == 8
    assert "epoch 1, batch 2, step 2" in (resumed / "train.log").read_text()
    assert compare(one, two) == compare(one, resumed) == []
