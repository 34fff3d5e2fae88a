"""Shared by all tests: small configurations, data, and the choice of tests that this machine can run."""

import copy
import json
import os
import shutil
import signal

# Before torch is imported, and for child processes too: threads that spin on shared cores are up to 100 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_shards import make_folders
from tools import prepare_data
from tools.common import as_settings
from train import Trainer
from utils.config import Config, list_blocks, load_config
from utils.config.command_line import parse_arguments
from utils.distributed.world import World
from utils.kernels.norm_relu import FUSED
from utils.kernels.use import use_kernels
from utils.quotas import usable_cores
from utils.run.config import MEASURED
from utils.training.learner import Learner
from utils.training.plan import make_plan

ROOT = Path(__file__).resolve().parent.parent
CIFAR100 = ROOT / "config/cifar100.yaml"
FILES = sorted((ROOT / "config").glob("*.yaml"))
BLOCKS = [pytest.param(path, name, id=f"{path.stem}-{name}") for path in FILES for name in list_blocks(path)]
CLASSES = 10

# A whole run in about a second: synthetic shapes, the smallest network, few batches, plain float32.
TINY = {
    "dataset": "shapes", "num_classes": 10, "data_loader": "device", "model": "resnet8", "device": "cpu",
    "batch_size": 32, "valid_batch_size_per_gpu": 100, "limit_train_batches": 4, "limit_valid_batches": 2,
    "max_epochs": 2, "log_freq": 2, "log_to_tensorboard": False, "num_data_workers": 0}  # fmt: skip
BATCHES, POLLS = 4, 4 + 2  # of an epoch: training steps, and polls for requests, one after each batch


def as_options(values: Mapping[str, Any]) -> list[str]:
    return [f"--set={setting}" for setting in as_settings(values)]


TINY_OPTIONS = as_options(TINY)

# All additions of recipes to a step.
RECIPE = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "cutout_size": 8, "ema_decay": 0.9}
RECIPE |= {"progressive_image_sizes": [[16, 0.5]]}


@pytest.fixture(autouse=True)
def _as_before():
    """Restore PyTorch's defaults after a test that was deterministic."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.benchmark_limit = 10


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("made") / "folders")


@pytest.fixture(scope="session")
def packed(folders):
    """The images of `folders` in shards: 5 for training, of 4 or 5 images, and 3 for validation."""
    assert prepare_data.main(["--shards", f"{folders.parent}/shards", f"--from={folders}", "--images_per_shard=5"]) == 0
    return folders.parent / "shards"


@pytest.fixture
def copied(packed, tmp_path):
    """A copy of `packed` to be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "copied"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Ten classes of two training JPEGs and one validation JPEG of 32 pixels."""
    return make_folders(tmp_path_factory.mktemp("pictures"), [f"class-{n}" for n in range(CLASSES)], 2, 1, 32)


def tiny_config(block: str = "default", **changes: Any) -> Config:
    """A block of config/cifar100.yaml cut down to a second."""
    values = load_config(CIFAR100, block).model_dump() | TINY
    values["lr_warmup_epochs"] = min(values["lr_warmup_epochs"], 1)
    return Config(**values | changes)


@pytest.fixture(scope="session")
def tiny():
    """tiny(block="default", **changes), see `tiny_config`."""
    return tiny_config


@pytest.fixture(scope="session")
def one_rank():
    """A single process on the CPU."""
    return World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def run(config, world, folder, resume="auto"):
    """Train a whole run and return its trainer."""
    trainer = Trainer(config, world, folder, "tiny", resume)
    trainer.train()
    return trainer


@pytest.fixture(scope="session")
def finished(one_rank, tmp_path_factory):
    """The folder of a run of three epochs with all its checkpoints, to be copied or read."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(tiny_config(max_epochs=3, keep_checkpoints=9), one_rank, folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def cifar_path():
    """The folder with the real CIFAR binaries; skips the test if the environment variable CIFAR_DATA is not set."""
    folder = os.environ.get("CIFAR_DATA")
    if not folder:
        pytest.skip("CIFAR_DATA is not set: the folder that holds cifar-100-binary/ and cifar-10-batches-bin/")
    return Path(folder)


@pytest.fixture
def refused(capsys):
    """refused(*arguments): train.py's error for a wrong command line, one or two lines with exit status 2."""

    def refuse(*arguments: str) -> str:
        with pytest.raises(SystemExit) as leaving:
            parse_arguments(arguments)
        out, err = capsys.readouterr()
        assert (leaving.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") <= 2, err
        assert err.replace("\n", "").isprintable()
        return err

    return refuse


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, since tests of several processes often wait."""
    return usable_cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def interrupt(trainer, poll, action):
    """Do `action` right before the poll for requests with this number."""
    really, numbers = trainer.requests.poll, iter(range(1, 1000))

    def poll_and_act():
        if next(numbers) == poll:
            action()
        return really()

    trainer.requests.poll = poll_and_act


def stop(trainer, poll):
    """Ask for a stop there, as the signal handler does."""
    interrupt(trainer, poll, lambda: setattr(trainer.requests, "signal", signal.SIGTERM))


def contents(folder):
    """{name: bytes} of the files of a folder, except the log and the lock."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("train.log", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_records(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Records in the metrics.jsonl of a run, all or of one kind."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if kind in ("", record["kind"])]


def without_times(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove what differs in every run."""
    return [{name: value for name, value in record.items() if name not in {"time", *MEASURED}} for record in records]


def plan_on(config, device="cpu", **options):
    """The plan of one process on a device, which need not be there."""
    return make_plan(config, World(0, 0, 1, torch.device(device)), **options)


def replace_layers(config, model, device="cpu"):
    """Give `model` our layers as a run on this device does; return {kernel that it cannot use: reason}."""
    plan = plan_on(config, device)
    return use_kernels(model, plan.kernels, config.stem_channels, plan.precision.dtype, torch.device(device))


def is_fused(module: nn.Module) -> bool:
    """Whether the module calls its layers by our fused method."""
    fused = [method for _, method in FUSED.values()]
    return any(getattr(value, "__func__", None) in fused for value in vars(module).values())


def change_byte(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class Small(nn.Module):
    """Compiles in seconds: images [N, 3, 32, 32] -> logits [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.Linear(4, 10)

    def forward(self, images):
        return self.fc(self.norm(self.conv(images)).relu().mean((2, 3)))


def check_equal_training(learners: list[Learner]) -> None:
    """Three steps of two learners on the same images give equal weights, up to the order of sums, and so does a fourth
    step from the other's state; the states have the same names."""
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    for _ in range(3):
        for learner in learners:
            learner.model.train()
            learner.train_step(images, labels)
    states = [copy.deepcopy(learner.state_dict()) for learner in learners]
    for learner, state in zip(learners, reversed(states), strict=True):
        learner.load_state_dict(state)
        learner.train_step(images, labels)
    first, second = (learner.model.state_dict() for learner in learners)
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)
