"""Each pair of switches that affect a step trains, validates, saves and resumes in mid-epoch on a GPU."""

import itertools
import random
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
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
Row = dict[str, Any]
Pair = frozenset[tuple[str, int]]  # two settings, each with the index of one of its values
# Values to try for numbers and lists; other settings' values follow from their types.
NUMBERS: dict[str, list[Any]] = {
    "clip_grad_norm": [None, 1.0],
    "ema_decay": [None, 0.9],
    "label_smoothing": [0.0, 0.1],
    "loss_scale": [None, "dynamic", 128.0],
    "micro_batch_size": [None, 4],
    "mixup_alpha": [0.0, 0.2],
    "cutmix_alpha": [0.0, 1.0],
    "cutout_size": [0, 8],
    "checkpoint_every_steps": [None, 2],
    "progressive": [{}, {"progressive_image_sizes": [[16, 0.5]]}],
}
OTHERS = ["enable_nhwc", "deterministic", "rnd_horizontal_flip"]
# compiled kernels compute nothing on the fake runtime; schedules only change the learning rate; three are CPU settings
EXCLUDED = {"enable_compile", "lr_schedule", "lr_scale_rule", "lr_warmup_by"}
EXCLUDED |= {"keep_cpu_memory", "conv_weight_products", "conv_winograd"}
RUN = {"batch_size": 8, "valid_batch_size_per_gpu": 8, "limit_valid_batches": 1, "log_freq": 1000, "lr": 0.01}
RUN |= {"device": "cuda", "max_epochs": 2, "log_to_screen": False}


def values_of(key: str) -> list[Any]:
    """Return all values of a setting that is a bool or one of a few names, including null if allowed; else none."""

    def spread(kind: Any) -> Iterator[Any]:
        if kind is bool:
            yield from (False, True)
        elif kind is types.NoneType:
            yield None
        elif typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
        elif typing.get_origin(kind) in (types.UnionType, typing.Union):
            yield from itertools.chain.from_iterable(map(spread, typing.get_args(kind)))

    return list(dict.fromkeys(spread(Config.model_fields[key].annotation)))


def switches() -> dict[str, list[Any]]:
    """Return {setting: values} of all settings that affect a step, including future ones."""
    groups = (OptimizerConfig, PrecisionConfig, RecipeConfig, DistributedConfig, SpeedConfig)
    keys = dict.fromkeys(key for group in groups for key in vars(group)["__annotations__"])
    found = {key: values_of(key) for key in [*keys, *OTHERS] if key not in {*EXCLUDED, *NUMBERS}}
    found["parallel"].remove("no_communication")  # compares several ranks
    loaders = {"data_loader": ["device", "torchvision", "synthetic"]}
    return {key: values for key, values in found.items() if len(values) > 1} | loaders | NUMBERS


def configure(row: Row) -> Config:
    """Return a whole configuration; ValueError or ConfigError if the row's values are incompatible."""
    values = TINY | {key: value for key, value in row.items() if key != "progressive"} | row.get("progressive", {})
    config = Config(**values | RUN)
    check_graphs(config, choose_precision(config, GPU), GPU)
    return config


def is_allowed(row: Row) -> bool:
    try:
        configure(row)
    except (ValueError, ConfigError):
        return False
    return True


def pairs_of(values: dict[str, Iterable[int]]) -> set[Pair]:
    """Return all pairs of two settings' values, as indices into `switches()`."""
    return {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(values, 2)
        for x, y in itertools.product(values[a], values[b])
    }


def complete(row: Row, chosen: dict[str, list[Any]]) -> Row | None:
    """Add what the row's values need: the group switch, one value of another setting, or both; None if refused."""
    groups: list[Row] = [{}] if "enable_extra_opts" in row else [{}, {"enable_extra_opts": True}]
    others: list[Row] = [{key: value} for key, values in chosen.items() if key not in row for value in values]
    candidates = (row | group | other for other in [{}, *others] for group in groups)
    return next(filter(is_allowed, candidates), None)


def covering_rows() -> tuple[list[Row], set[Pair]]:
    """Return few rows that contain every allowed pair of values, and the refused pairs."""
    chosen, generator, rows = switches(), random.Random(0), list[Row]()
    left = pairs_of({key: range(len(values)) for key, values in chosen.items()})
    for pair in sorted(left, key=sorted):
        row = complete({key: chosen[key][number] for key, number in pair}, chosen) if pair in left else None
        if row is None:
            continue
        numbers = {key: chosen[key].index(value) for key, value in row.items()}
        for key in generator.sample([key for key in chosen if key not in row], len(chosen) - len(row)):
            gain = [
                sum(frozenset({(key, number), old}) in left for old in numbers.items())
                for number in range(len(chosen[key]))
            ]
            for number in sorted(range(len(gain)), key=gain.__getitem__, reverse=True):
                if is_allowed(row | {key: chosen[key][number]}):
                    row[key], numbers[key] = chosen[key][number], number
                    break
        left -= pairs_of({key: [number] for key, number in numbers.items()})
        rows.append(row)
    return rows, left


ROWS, REFUSED = covering_rows()


def test_refused_pairs() -> None:
    assert Counter(tuple(sorted(key for key, _ in pair)) for pair in REFUSED) == {
        ("nesterov", "optimizer"): 2,
        ("fused_optimizer", "optimizer"): 3,
        ("enable_cuda_graphs", "parallel"): 1,
        ("ema_decay", "opt_level"): 2,
        ("enable_sync_bn", "fuse_norm_relu"): 1,
        ("enable_nhwc", "fuse_norm_relu"): 1,
    }


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(number), marks=() if number < QUICK else pytest.mark.slow)
        for number, row in enumerate(ROWS)
    ],
)
def test_switches_train_together_and_resume_after_a_stop(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resume(configure(row), tmp_path, monkeypatch)
