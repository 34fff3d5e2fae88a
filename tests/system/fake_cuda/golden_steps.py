"""Launches, waits and copies of one training step of each CIFAR block, counted on the fake CUDA runtime.

    python -m tests.system.fake_cuda.golden_steps          # rewrite golden_steps.txt
    python -m tests.system.fake_cuda.golden_steps GROUP... # print the lines of groups of blocks

The Trainer's loop runs on black images of the block's size, in one process; dataparallel has two devices. A step spans
two polls for signals: the prefetch of the next batch and the step itself, without log points.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

import train
from tests.conftest import plan_on
from tests.system.fake_cuda import runtime
from tests.system.fake_cuda.arithmetic import Arithmetic
from tests.system.fake_cuda.build import build, variables
from utils.config import Config, list_blocks, load_config
from utils.data import build as data
from utils.distributed.world import World
from utils.run.logger import RunLogger
from utils.training import learner

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_suffix(".txt")
FILES = (ROOT / "config/cifar10.yaml", ROOT / "config/cifar100.yaml")
# Settings that do not affect a step: blocks that differ only in them are counted once.
NOT_OF_THE_STEP = re.compile(
    r"(lr|log|limit|checkpoint|profiling|cifar100|rank_timeout)_.*|lr|seed|data_path"
    "|max_epochs|weight_decay|momentum|stop_at_accuracy|test_time_views|valid_batch_size_per_gpu"
    "|validate_every_epochs|save_checkpoint|num_data_workers|enable_profiling"
    "|pretrained|keep_checkpoints|cpu_kernels"
)
COMPILED = "compiled"
WIDTHS = (9, 7, 8, 6, 11, 8)
HEADER = f"{'block':49} launches graphs in them waits  to device to host  replaced; same step as"


def versions():
    """Return the versions that the counts depend on."""
    return f"torch {torch.__version__.split('+')[0]}"


def count(work):
    """Count launches by the host, graphs among them and their kernels, host waits, and bytes to device and to host."""
    ledger = runtime.Ledger(work)
    graphs = [entry.amount for entry in ledger.kernels if entry.name == "graph"]
    copied = [ledger.bytes_copied(direction) for direction in ("to device", "to host")]
    return len(ledger.kernels), len(graphs), sum(graphs), len(ledger.waits), *copied


def as_counted(config):
    """Return the block as it runs here, and a description of its replaced settings."""
    changes: dict[str, object] = {"num_data_workers": 0, "enable_profiling": False, "log_freq": 1000}
    changes |= {"log_to_screen": False, "log_to_tensorboard": False, "limit_train_batches": None}
    replaced = {}
    if config.data_loader == "dali":
        replaced["data_loader"] = "synthetic"
    if plan_on(config, "cuda").compiled:
        replaced["model"] = "resnet8"  # a large one takes minutes to compile
        changes["zero_init_residual"] = False  # which it does not have
    return Config(**config.model_dump() | changes | replaced), ", ".join(map(" ".join, replaced.items()))


def key_of(config):
    """Return a key that is equal for blocks with equal steps: the settings that affect a step."""
    precision = plan_on(config, "cuda").precision
    values = {key: value for key, value in config.model_dump().items() if not NOT_OF_THE_STEP.fullmatch(key)}
    for key in ("enable_extra_opts", "enable_amp", "amp_dtype", "opt_level", "keep_batchnorm_fp32", "loss_scale"):
        del values[key]
    kind = precision.dtype, precision.level, precision.keep_batchnorm_fp32
    values["precision"] = precision.level == "O0" or kind
    values["loss_scale"] = "dynamic" if precision.loss_scale == "dynamic" else precision.loss_scale is not None
    values |= {key: config.extra_opt(key) for key in ("fused_optimizer", "zero_grad_set_to_none", "cudnn_benchmark")}
    return json.dumps(values, sort_keys=True, default=str)


def count_step(config):
    """Return the counts of one step after warm-up and capture, which must equal the counts of the step before."""
    device = torch.device("cuda", 0)
    steps = plan_on(config, "cuda").capture_steps + 4
    config = Config(**config.model_dump() | {"limit_train_batches": steps})
    with tempfile.TemporaryDirectory() as folder:
        trainer = train.Trainer(config, World(rank=0, local_rank=0, world_size=1, device=device), Path(folder))
        marks: list[int] = []
        trainer._log_point = lambda number, images: None
        trainer._stop_or_save = lambda: marks.append(runtime.position())
        logger = RunLogger(Path(folder), enabled=False, to_screen=False)
        with logger.open() as trainer.run.log, runtime.record() as ledger:
            trainer.train_one_epoch()
    before, last = (count(ledger.work[start:end]) for start, end in list(pairwise(marks))[-2:])
    if last != before:
        raise RuntimeError(f"steps differ from each other: {before}, then {last}")
    return last


def prepare():
    """Skip initialisation and data loading, since nothing is computed except values that the host reads."""
    for name in ("kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "normal_", "uniform_"):
        setattr(torch.nn.init, name, lambda tensor, *arguments, **options: tensor)
    opened, build_optimizer = train.open_dataset, learner.build_optimizer

    def computed(*arguments, **options):
        with Arithmetic():  # PyTorch's optimizers compare a learning rate on the device with 0
            return build_optimizer(*arguments, **options)

    def step_anyway(scaler, optimizer, state, *_):
        sum(found.item() for found in state["found_inf_per_device"].values())  # waits; the value is garbage
        optimizer.step()

    train.open_dataset = lambda config, world, fetch: (
        data.black_images(config) if config.dataset in data.DATASET_SIZES else opened(config, world)
    )
    learner.build_optimizer = computed
    torch.amp.GradScaler._maybe_opt_step = step_anyway


def groups():
    """Return {group: [(FILE#BLOCK, its configuration)]}, a group for each file and one for compiled steps."""
    found: dict[str, list[tuple[str, Config]]] = {path.name: [] for path in FILES} | {COMPILED: []}
    for path in FILES:
        for name in list_blocks(path):
            config = load_config(path, name)
            group = COMPILED if plan_on(config, "cuda").compiled else path.name
            found[group].append((f"{path.name}#{name}", config))
    return found


def rows(group):
    """Yield the table's lines of a group's blocks."""
    counted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for block, own in groups()[group]:
        config, replaced = as_counted(own)
        key = key_of(config)
        if key not in counted:
            counted[key] = block, count_step(config)
        first, step = counted[key]
        numbers = "".join(f"{number:>{width}}" for number, width in zip(step, WIDTHS, strict=True))
        yield f"{block:49}{numbers}  {'; '.join(filter(None, [replaced, first if first != block else '']))}".rstrip()


def recorded():
    """Return the versions that the table was counted with, and its line for each block."""
    first, _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# ").split(" | ")[0], {line.split()[0]: line for line in lines}


def main(arguments):
    if not runtime.is_active():
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder))
            environment = os.environ | variables(Path(folder)) | {"FAKE_CUDA_DEVICES": "2"}
            command = [sys.executable, "-m", __spec__.name, *arguments]
            return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    prepare()
    if arguments:
        for group in arguments:
            print("\n".join(rows(group)))
    else:
        lines = {line.split()[0]: line for group in groups() for line in rows(group)}
        ordered = [lines[f"{path.name}#{name}"] for path in FILES for name in list_blocks(path)]
        head = [f"# {versions()} | python -m tests.system.fake_cuda.golden_steps | counts of one step", HEADER]
        TABLE.write_text("\n".join([*head, *ordered]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
