"""Every block in config/, with a small network and data, trains, validates, saves and resumes in mid-epoch on a GPU.
Blocks with equal training settings run once."""

from typing import Any

import pytest

from tests.conftest import CLASSES, ROOT
from tests.fake_cuda.golden_steps import key_of
from tests.gpu_runs import check_resume
from utils.config import Config, list_blocks, load_config

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "num_classes": CLASSES, "model": "resnet8", "stem": "7x7", "width": 1, "zero_init_residual": False,
    "batch_size": 8, "valid_batch_size_per_gpu": 8, "limit_valid_batches": 1, "max_epochs": 2,
    "num_data_workers": 0, "log_freq": 1000, "log_to_screen": False, "log_to_tensorboard": False,
    "enable_profiling": False, "stop_at_accuracy": None, "device": "cuda",
    "save_checkpoint": True,
    "enable_compile": False,  # compiled kernels compute nothing on the fake runtime
}  # fmt: skip


def shrink(config):
    """Return the smallest version of a block, with two micro-batches if it accumulates."""
    values = config.model_dump() | SMALL
    values |= {"image_size": 32} if config.dataset == "imagenet" else {"dataset": "shapes"}
    accumulates = config.micro_batch_size is not None and config.batch_size > config.micro_batch_size
    values["lr_warmup_epochs"] = min(config.lr_warmup_epochs, 1)
    values["lr_schedule"] = (1,) if config.schedule_kind == "step" else config.lr_schedule
    values["micro_batch_size"] = 4 if accumulates else None
    values["deterministic"] = config.deterministic or config.verify_every_steps is not None
    if config.data_loader == "dali":
        values["data_loader"] = "torchvision"
    return Config(**values)


def distinct():
    """Return the blocks that differ after shrinking, each named after its first."""
    found: dict[Any, Any] = {}
    for path in sorted((ROOT / "config").glob("*.yaml")):
        for name in list_blocks(path):
            config = shrink(load_config(path, name))
            schedule = config.schedule_kind, config.lr_warmup_by, config.lr_warmup_epochs > 0
            other = config.test_time_views, config.checkpoint_every_steps
            found.setdefault((key_of(config), schedule, other), pytest.param(config, id=f"{path.stem}-{name}"))
    return list(found.values())


@pytest.mark.parametrize("config", distinct())
def test_a_block_resumes_after_a_stop(config, pictures, tmp_path, monkeypatch):
    config = Config(**config.model_dump() | {"data_path": str(pictures)})
    check_resume(config, tmp_path, monkeypatch)
