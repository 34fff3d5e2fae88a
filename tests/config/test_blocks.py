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
    "data_loader": "torchvision"}  # fmt: skip
SHORT = {
    "max_epochs": 2, "limit_train_batches": 1, "limit_valid_batches": 1, "device": "cpu", "num_data_workers": 0,
    "log_to_screen": False, "log_to_tensorboard": False, "enable_compile": False, "stop_at_accuracy": None,
    "profiling_epoch_start": 2, "num_classes": CLASSES, "model": "resnet8", "stem": "7x7", "width": 1,
    "save_checkpoint": False, "zero_init_residual": False, "batch_size": 8, "valid_batch_size_per_gpu": 8}  # fmt: skip


def shorten(path, name):
    """Return a block's settings, cut to two epochs of one batch, the smallest network, and shapes or small pictures."""
    config = load_config(path, name)
    values = config.model_dump() | SHORT
    values |= {key: value for key, value in NEEDS_GPUS.items() if key != "data_loader" or values[key] == "dali"}
    values["lr_warmup_epochs"] = min(config.lr_warmup_epochs, 1)
    values["lr_schedule"] = (1,) if config.schedule_kind == "step" else config.lr_schedule
    values["micro_batch_size"] = config.micro_batch_size and min(config.micro_batch_size, values["batch_size"])
    values |= {"image_size": 32} if config.dataset == "imagenet" else {"dataset": "shapes"}
    return Config(**values).model_dump(mode="json")


def _blocks_with_every_setting():
    """Choose few blocks that together cover the settings of all: each string, and each other value as true or false."""
    settings: dict[Any, set[Any]] = {}
    for block in BLOCKS:
        values = shorten(*block.values).items()
        settings[block] = {(key, value if isinstance(value, str) else bool(value)) for key, value in values}
    chosen, uncovered = [], set().union(*settings.values())
    while uncovered:
        chosen.append(max(settings, key=lambda block: len(settings[block] & uncovered)))
        uncovered -= settings[chosen[-1]]
    return chosen


@pytest.mark.parametrize(("path", "name"), _blocks_with_every_setting())
def test_every_setting_of_a_block_trains(path, name, tmp_path, pictures):
    config = Config(**shorten(path, name))
    config = config.model_copy(update={"data_path": str(pictures)} if config.dataset == "imagenet" else {})
    assert train.main(Arguments(config, "block", tmp_path, "never", dry_run=False)) == 0
    epochs = read_records(tmp_path, "epoch")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    validated = epochs if config.validate_every_epochs == 1 else epochs[-1:]
    losses = [epoch["loss/train"] for epoch in epochs] + [epoch["loss/valid"] for epoch in validated]
    assert all(map(math.isfinite, losses))
