"""The settings and networks of the blocks in config/ train two short epochs on a CPU."""

import math
from typing import Any

import pytest

import train
from tests.conftest import BLOCKS, CLASSES, read_records
from utils.config import Config, load_config
from utils.config.command_line import Arguments

# Settings that a CPU does not support are replaced by these.
NEEDS_GPUS: dict[str, Any] = {
    "parallel": "ddp", "enable_sync_bn": False, "enable_cuda_graphs": False, "loss_scale": None, "amp_dtype": "auto",
    "data_loader": "torchvision",
}  # fmt: skip
SHORT = {
    "max_epochs": 2, "limit_train_batches": 1, "limit_valid_batches": 1, "device": "cpu", "num_data_workers": 0,
    "log_to_screen": False, "log_to_tensorboard": False, "enable_compile": False, "stop_at_accuracy": None,
    "profiling_epoch_start": 2,
}  # fmt: skip


def shorten(config, **changes):
    """Shorten a block to two epochs of one batch."""
    values = config.model_dump() | SHORT | changes
    values["lr_warmup_epochs"] = min(config.lr_warmup_epochs, 1)
    values["lr_schedule"] = (1,) if config.schedule_kind == "step" else config.lr_schedule
    values |= {key: value for key, value in NEEDS_GPUS.items() if key != "data_loader" or values[key] == "dali"}
    values["micro_batch_size"] = config.micro_batch_size and min(config.micro_batch_size, values["batch_size"])
    return Config(**values)


def run(config, folder):
    """Train through the main of train.py."""
    arguments = Arguments(config, "block", folder, "never", dry_run=False)
    assert train.main(arguments) == 0
    epochs = read_records(folder, "epoch")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert all(math.isfinite(epoch["loss/train"]) for epoch in epochs)
    validated = epochs if config.validate_every_epochs == 1 else epochs[-1:]
    assert all(math.isfinite(epoch["loss/valid"]) for epoch in validated)


def _with_small_network(path, name):
    """Return the shortened block with the smallest network, and synthetic shapes or small pictures."""
    config = load_config(path, name)
    changes = {"num_classes": CLASSES, "model": "resnet8", "stem": "7x7", "width": 1, "save_checkpoint": False}
    changes |= {"zero_init_residual": False}
    changes |= {"image_size": 32} if config.dataset == "imagenet" else {"dataset": "shapes"}
    return shorten(config, **changes, batch_size=8, valid_batch_size_per_gpu=8).model_dump(mode="json")


def _blocks_with_every_setting():
    """Choose few blocks that together cover the settings of all: each string, and each other value as true or false."""
    settings = {
        block: {
            (key, value if isinstance(value, str) else bool(value))
            for key, value in _with_small_network(*block.values).items()
        }
        for block in BLOCKS
    }
    chosen, uncovered = [], set().union(*settings.values())
    while uncovered:
        chosen.append(max(settings, key=lambda block: len(settings[block] & uncovered)))
        uncovered -= settings[chosen[-1]]
    return chosen


@pytest.mark.parametrize(("path", "name"), _blocks_with_every_setting())
def test_every_setting_of_a_block_trains(path, name, tmp_path, pictures):
    config = Config(**_with_small_network(path, name))
    where = {"data_path": str(pictures)} if config.dataset == "imagenet" else {}
    run(config.model_copy(update=where), tmp_path)
