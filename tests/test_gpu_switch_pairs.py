"""Each pair of switches that affect a step trains, validates, saves and resumes in mid-epoch on a GPU."""

import itertools
import random
import types
import typing
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from tests.conftest import TINY
from tests.gpu_runs import GPU, check_resume
from utils.config import Config
from utils.distributed.config import DistributedConfig
from utils.errors import ConfigError
from utils.training.config import OptimizerConfig, PrecisionConfig, RecipeConfig, SpeedConfig
from utils.training.precision import choose_precision
from utils.training.step import check_graphs

pytestmark = pytest.mark.gpu

QUICK = 16  # rows, with 95 % of the pairs; later ones are slow
# Values to try for numbers and lists; other settings' values follow from their types.
NUMBERS: dict[str, list[Any]] = {
    "clip_grad_norm": [None, 1.0], "ema_decay": [None, 0.9], "label_smoothing": [0.0, 0.1],
    "loss_scale": [None, "dynamic", 128.0], "optimizer": ["sgd", "adamw", "muon"], "micro_batch_size": [None, 4],
    "mixup_alpha": [0.0, 0.2], "cutmix_alpha": [0.0, 1.0], "cutout_size": [0, 8], "checkpoint_every_steps": [None, 2],
    "progressive": [{}, {"progressive_image_sizes": [[16, 0.5]]}],
}  # fmt: skip
OTHERS = ["enable_nhwc", "deterministic", "rnd_horizontal_flip"]
# compiled kernels compute nothing on the fake runtime; schedules only change the learning rate; cpu_kernels is for CPUs
EXCLUDED = {"enable_compile", "lr_schedule", "lr_scale_rule", "lr_warmup_by", "cpu_kernels"}
RUN = {"batch_size": 8, "valid_batch_size_per_gpu": 8, "limit_valid_batches": 1, "log_freq": 1000, "lr": 0.01}
RUN |= {"device": "cuda", "max_epochs": 2, "log_to_screen": False}


def values_of(key):
    """Return all values of a setting that is a bool or one of a few names, including null if allowed; else none."""

    def spread(kind):
        if kind is bool:
            yield from (False, True)
        elif kind is types.NoneType:
            yield None
        elif typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
        elif typing.get_origin(kind) in (types.UnionType, typing.Union):
            yield from itertools.chain.from_iterable(map(spread, typing.get_args(kind)))

    return list(dict.fromkeys(spread(Config.model_fields[key].annotation)))


def switches():
    """Return {setting: values} of all settings that affect a step, including future ones."""
    groups = (OptimizerConfig, PrecisionConfig, RecipeConfig, DistributedConfig, SpeedConfig)
    keys = dict.fromkeys(key for group in groups for key in vars(group)["__annotations__"])
    found = {key: values_of(key) for key in [*keys, *OTHERS] if key not in {*EXCLUDED, *NUMBERS}}
    found["parallel"].remove("no_communication")  # compares several ranks
    loaders = {"data_loader": ["device", "torchvision", "synthetic"]}
    return {key: values for key, values in found.items() if len(values) > 1} | loaders | NUMBERS


def configure(row):
    """Return a whole configuration of {setting: index of its value}; ValueError or ConfigError if they are
    incompatible."""
    changes = {key: CHOSEN[key][number] for key, number in row.items()}
    sizes = changes.pop("progressive", {})
    config = Config(**TINY | changes | sizes | RUN)
    check_graphs(config, choose_precision(config, GPU), GPU)
    return config


CHOSEN = switches()
EXTRA, NHWC = {"enable_extra_opts": 1}, {"enable_nhwc": 1}
# what a pair may need in addition
NEEDED = ({}, EXTRA, NHWC, EXTRA | NHWC, {"amp_dtype": CHOSEN["amp_dtype"].index("bf16")})


def covering_rows():
    """Return few rows that contain every allowed pair of values, and the pairs that no row contains."""
    choices = [(key, number) for key, values in CHOSEN.items() for number in range(len(values))]
    left = {frozenset(pair) for pair in itertools.combinations(choices, 2) if pair[0][0] != pair[1][0]}
    generator, rows = random.Random(0), []
    for group, pair in itertools.product(NEEDED, sorted(left, key=sorted)):
        row = group | dict(pair)
        if pair not in left or not is_allowed(row):
            continue
        for key in generator.sample([key for key in CHOSEN if key not in row], len(CHOSEN) - len(row)):
            gains = [
                (sum(frozenset({(key, number), old}) in left for old in row.items()), -number)
                for number in range(len(CHOSEN[key]))
            ]
            for _, number in sorted(gains, reverse=True):
                if is_allowed(row | {key: -number}):
                    row[key] = -number
                    break
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows, left


def is_allowed(row):
    with suppress(ValueError, ConfigError):
        return bool(configure(row))
    return False


ROWS, REFUSED = covering_rows()


def test_refused_pairs():
    assert Counter(tuple(sorted(key for key, _ in pair)) for pair in REFUSED) == {
        ("nesterov", "optimizer"): 1,
        ("enable_cuda_graphs", "enable_extra_opts"): 1,
        ("enable_cuda_graphs", "parallel"): 1,
        ("ema_decay", "opt_level"): 2,
        ("loss_scale", "opt_level"): 2,
        ("enable_sync_bn", "fuse_norm_relu"): 1,
        ("enable_nhwc", "fuse_norm_relu"): 1,
        ("fuse_norm_relu", "parallel"): 1,
    }


QUICK_AND_SLOW = [*ROWS[:QUICK], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[QUICK:])]


@pytest.mark.parametrize("row", QUICK_AND_SLOW, ids=range(len(ROWS)))
def test_switches_train_together_and_resume_after_a_stop(row, tmp_path, monkeypatch):
    check_resume(configure(row), tmp_path, monkeypatch)
