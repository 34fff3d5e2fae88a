"""Process-wide switches: the note of `deterministic`, and that its runs are bitwise equal."""

import shutil

import pytest
import torch

from tests.conftest import plan_on
from tools.verify_resume import compare
from train import Trainer
from utils.distributed.world import World
from utils.training.learner import prepare_backends


@pytest.fixture(autouse=True)
def _as_before():
    """Restore PyTorch's defaults."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_deterministic_logs_what_it_does_and_costs(tiny):
    config = tiny(deterministic=True, enable_extra_opts=True)
    assert not plan_on(tiny(), "cuda").notes
    [plain], [both] = plan_on(tiny(deterministic=True), "cuda").notes, plan_on(config, "cuda").notes
    prepare_backends(config, plan_on(config, "cuda"))
    for note in (plain, both):
        assert note.startswith(
            "deterministic: every run on this machine gives the same bits; on a GPU steps take longer"
        )
    assert "cudnn_benchmark" in both and "cudnn_benchmark" not in plain
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


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
