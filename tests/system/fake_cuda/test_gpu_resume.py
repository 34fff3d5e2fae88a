"""Every block in config/, and each pair of switches that affect a step, trains, validates, saves and resumes in
mid-epoch on a GPU, with a small network and data. A step of every block makes as many launches, waits and copies as
golden_steps.txt says, which this command writes in a few minutes:

    GOLDEN_STEPS=write bash tests/system/fake_cuda/run.sh -n 0 -k block_resumes
"""

import itertools
import json
import os
import random
import signal
from collections import Counter
from contextlib import nullcontext, suppress

import pytest
import torch

from tests.conftest import BLOCKS, CLASSES, ROOT, TINY, plan_on, read_records
from tests.system.fake_cuda import runtime
from train import Trainer
from utils.config import Config, load_config
from utils.distributed.config import DistributedConfig
from utils.distributed.world import World
from utils.errors import ConfigError, Stopped
from utils.training import step
from utils.training.config import OptimizerConfig, PrecisionConfig, RecipeConfig, SpeedConfig
from utils.training.step import GraphedUpdate

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)  # before what follows loads every block

GPU = torch.device("cuda", 0)
STOP_AFTER, WARMUP = 3, 3  # steps; without DDP, 3 warm-up steps before a capture are enough
STEPS, GRAPHED_STEPS = 4, 10  # in one epoch or two; a graph is captured before and after the stop, and replayed last
RECORDED = ("loss/train", "acc1/train", "loss/valid", "acc1/valid", "images/valid", "learning_rate")


def train(config, folder, stop_after=None):
    """Train a whole run, or `stop_after` steps until SIGTERM. Return the trainer; host waits in its last step; counts
    from the end of the step before to its end: launches by the host, graphs among them and their kernels, host waits,
    bytes to the device and to the host."""
    trainer = Trainer(config, World(rank=0, local_rank=0, world_size=1, device=GPU), folder, "run", "auto")
    train_step, begins, ends = trainer.learner.train_step, [], [0]
    position = runtime.position if runtime.is_active() else lambda: 0

    def watched(images, labels):
        begins.append(position())
        train_step(images, labels)
        ends.append(position())
        if trainer.learner.steps == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.learner.train_step = watched
    stops = pytest.raises(Stopped, match=r"after \d+ batches") if stop_after else nullcontext()
    with stops, runtime.record() if runtime.is_active() else nullcontext(runtime.Ledger()) as ledger:
        trainer.train()
    done = runtime.Ledger(ledger[ends[-2] : ends[-1]])
    graphs = [entry.amount for entry in done.kernels if entry.name == "graph"]
    copied = [done.bytes_copied(direction) for direction in ("to device", "to host")]
    waits = runtime.Ledger(ledger[begins[-1] : ends[-1]]).waits
    return trainer, waits, [len(done.kernels), len(graphs), sum(graphs), len(done.waits), *copied]


def read_epochs(folder):
    epochs = read_records(folder, "epoch")
    assert "loss/valid" in epochs[-1]  # earlier ones depend on validate_every_epochs
    return [{key: row[key] for key in RECORDED if key in row} for row in epochs]


def check_resume(config, folder, monkeypatch):
    """Train and validate with and without a stop; both must be bitwise equal. The host must wait in a step only for a
    scaled loss without the fused update. Return the counts of the last step (see `train`)."""
    monkeypatch.setattr(step, "GRAPH_WARMUP_STEPS", WARMUP)
    plan = plan_on(config, "cuda")
    changes = {"limit_train_batches": (GRAPHED_STEPS if plan.graphed else STEPS) // config.max_epochs}
    if not runtime.is_active():  # a GPU promises equal bits only with it
        changes["deterministic"] = True
    config = Config(**config.model_dump() | changes)
    whole, waits, counts = train(config, folder / "whole")
    learner = whole.learner
    waiting = plan.precision.loss_scale is not None and not config.extra_opt("fused_optimizer")
    assert bool(waits) is (runtime.is_active() and waiting), waits
    train(config, folder / "stopped", STOP_AFTER)
    resumed, *_ = train(config, folder / "stopped")
    for trainer in (whole, resumed):
        assert trainer.learner.steps == changes["limit_train_batches"] * config.max_epochs
        captured = isinstance(trainer.learner.update, GraphedUpdate) and trainer.learner.update.captured
        assert captured is plan.graphed
    torch.testing.assert_close(resumed.learner.state_dict(), learner.state_dict(), rtol=0, atol=0)
    assert read_epochs(folder / "stopped") == read_epochs(folder / "whole")
    assert resumed.run.best == whole.run.best
    return counts


RUN = {
    "device": "cuda", "batch_size": 8, "valid_batch_size_per_gpu": 8, "limit_valid_batches": 1, "max_epochs": 2,
    "lr": 0.01, "log_freq": 1000, "log_to_screen": False, "log_to_tensorboard": False, "num_data_workers": 0,
}  # fmt: skip

# The blocks at their smallest; those that are then equal run once.
SMALL = RUN | {
    "num_classes": CLASSES, "model": "resnet8", "stem": "7x7", "width": 1, "zero_init_residual": False,
    "momentum": 0.9, "weight_decay": 1e-4, "lr_decay_factor": 0.1, "seed": 0, "limit_train_batches": STEPS,
    "stop_at_accuracy": None, "save_checkpoint": True, "enable_profiling": False, "cpu_kernels": False,
    "enable_compile": False,  # compiled kernels compute nothing on the fake runtime
}  # fmt: skip


def shrink(config):
    """Return the smallest version of a block, with two micro-batches if it accumulates."""
    values = config.model_dump() | SMALL
    values |= {"image_size": 32} if config.dataset == "imagenet" else {"dataset": "shapes"}
    accumulates = config.micro_batch_size is not None and config.batch_size > config.micro_batch_size
    values["lr_warmup_epochs"] = min(config.lr_warmup_epochs, 1.0)
    values["lr_schedule"] = (1,) if config.schedule_kind == "step" else config.lr_schedule
    values["micro_batch_size"] = 4 if accumulates else None
    values["deterministic"] = config.deterministic or config.verify_every_steps is not None
    if config.data_loader == "dali":
        values["data_loader"] = "torchvision"
    return values


DISTINCT = {}  # each named after its first block
for path, name in (block.values for block in BLOCKS):
    values = shrink(load_config(path, name)) | {"data_path": None}
    DISTINCT.setdefault(json.dumps(values), pytest.param(values, id=f"{path.stem}-{name}"))
GOLDEN = ROOT / "tests/system/fake_cuda/golden_steps.txt"
if os.environ.get("GOLDEN_STEPS") == "write":
    GOLDEN.write_text("")


@pytest.mark.parametrize("values", DISTINCT.values())
def test_a_block_resumes_after_a_stop(values, pictures, tmp_path, monkeypatch, request):
    counts = check_resume(Config(**values | {"data_path": str(pictures)}), tmp_path, monkeypatch)
    line = " ".join(map(str, [torch.__version__.partition("+")[0], request.node.callspec.id, *counts]))
    if os.environ.get("GOLDEN_STEPS") == "write":
        with GOLDEN.open("a") as file:
            file.write(f"{line}\n")
    elif runtime.is_active() and GOLDEN.read_text().startswith(torch.__version__.partition("+")[0]):
        assert line in GOLDEN.read_text().splitlines(), "if intended: write golden_steps.txt again"


QUICK = 16  # rows, with 95 % of the pairs; later ones are slow
# Values to try for numbers and lists; other settings' values follow from their types.
NUMBERS = {
    "clip_grad_norm": [None, 1.0], "ema_decay": [None, 0.9], "label_smoothing": [0.0, 0.1],
    "loss_scale": [None, "dynamic", 128.0], "optimizer": ["sgd", "adamw", "muon"], "micro_batch_size": [None, 4],
    "mixup_alpha": [0.0, 0.2], "cutmix_alpha": [0.0, 1.0], "cutout_size": [0, 8], "checkpoint_every_steps": [None, 2],
    "progressive_image_sizes": [[], [[16, 0.5]]], "data_loader": ["device", "torchvision", "synthetic"],
    "parallel": ["ddp", "dataparallel"],  # no_communication compares several ranks
}  # fmt: skip
OTHERS = ["enable_nhwc", "deterministic", "rnd_horizontal_flip"]
# compiled kernels compute nothing on the fake runtime; schedules only change the learning rate; cpu_kernels is for CPUs
EXCLUDED = {"enable_compile", "lr_schedule", "lr_scale_rule", "lr_warmup_by", "cpu_kernels"}


def values_of(schema):
    """Return the values of a setting that is a bool or one of a few names, with null if allowed, from its schema."""
    few = {"boolean": [False, True], "null": [None]}
    parts = schema.get("anyOf", [schema])
    return [value for part in parts for value in part.get("enum", few.get(part.get("type"), []))]


def switches():
    """Return {setting: values} of all settings that affect a step, including future ones."""
    schemas = Config.model_json_schema()["properties"]
    groups = (OptimizerConfig, PrecisionConfig, RecipeConfig, DistributedConfig, SpeedConfig)
    keys = [key for group in groups for key in vars(group)["__annotations__"]]
    found = {key: values_of(schemas[key]) for key in [*keys, *OTHERS] if key not in {*EXCLUDED, *NUMBERS}}
    return {key: values for key, values in found.items() if len(values) > 1} | NUMBERS


def configure(row):
    """Return a whole configuration of {setting: index of its value}; ValueError or ConfigError if they are
    incompatible."""
    config = Config(**TINY | {key: CHOSEN[key][number] for key, number in row.items()} | RUN)
    plan_on(config, "cuda")
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
        if pair not in left or not is_allowed(row := group | dict(pair)):
            continue
        for key in generator.sample([key for key in CHOSEN if key not in row], len(CHOSEN) - len(row)):
            allowed = [(key, number) for number in range(len(CHOSEN[key])) if is_allowed(row | {key: number})]
            new = [sum(frozenset({choice, old}) in left for old in row.items()) for choice in allowed]
            row |= [allowed[new.index(max(new))]]
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows, left


def is_allowed(row):
    with suppress(ValueError, ConfigError):
        return bool(configure(row))
    return False


ROWS, REFUSED = covering_rows()


def test_refused_pairs():
    assert Counter(" ".join(sorted(key for key, _ in pair)) for pair in REFUSED) == {
        "nesterov optimizer": 1, "enable_cuda_graphs parallel": 1, "ema_decay opt_level": 2, "loss_scale opt_level": 2,
        "enable_sync_bn fuse_norm_relu": 1, "enable_nhwc fuse_norm_relu": 1, "fuse_norm_relu parallel": 1,
    }  # fmt: skip


QUICK_AND_SLOW = [*ROWS[:QUICK], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[QUICK:])]


@pytest.mark.parametrize("row", QUICK_AND_SLOW, ids=range(len(ROWS)))
def test_switches_train_together_and_resume_after_a_stop(row, tmp_path, monkeypatch):
    check_resume(configure(row), tmp_path, monkeypatch)
