"""Process-wide switches: what `deterministic` says, and that its runs are equal to the last bit."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tools.verify_resume import compare
from train import Trainer
from utils.backends import prepare_backends
from utils.config import Config
from utils.distributed import Distributed


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leaves the switches of this process as PyTorch has them."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_deterministic_says_what_it_does_and_costs(tiny: Callable[..., Config]) -> None:
    device = torch.device("cuda", 0)
    assert not any("deterministic" in note for note in prepare_backends(tiny(), device))
    (plain,) = prepare_backends(tiny(deterministic=True), device)
    (both,) = prepare_backends(tiny(deterministic=True, cudnn_benchmark=True), device)
    for note in (plain, both):
        assert note.startswith(
            "deterministic: every run on this machine gives the same bits; on a GPU steps take longer"
        )
    assert "cudnn_benchmark" in both and "cudnn_benchmark" not in plain
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_deterministic_runs_are_equal_to_the_last_bit(tiny: Callable[..., Config], tmp_path: Path, device: str) -> None:
    """Two that begin alike, and one that goes on from the middle of the first epoch."""
    place = Distributed(rank=0, local_rank=0, world_size=1, device=torch.device(device))
    changes = {"enable_amp": True, "ema_decay": 0.9, "mixup_alpha": 0.2, "device": device}
    config = tiny(deterministic=True, checkpoint_every_steps=1, keep_checkpoints=9, **changes)
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    for folder in (one, two):
        Trainer(config, place).train(folder, "tiny", "auto")
        assert torch.are_deterministic_algorithms_enabled()
    shutil.copytree(one, resumed)
    for path in sorted((resumed / "checkpoints").glob("step-*.pt"))[2:]:
        path.unlink()
    trainer = Trainer(config, place)
    trainer.train(resumed, "tiny", "auto")
    assert trainer.step == 8 and "epoch 1, batch 2, step 2" in (resumed / "train.log").read_text()
    assert compare(one, two) == []
    assert compare(one, resumed) == []
