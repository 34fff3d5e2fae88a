"""The training step of this project, timm, Lightning and plain PyTorch: same network, precision, layout and data.

pip install ".[peers]" && python -m tools.bench peers --config=fastest
"""

import argparse
import importlib
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from models import build_model
from tools.bench import common
from tools.bench.training import Rung, alone, endless, fed_images_per_sec
from tools.bench.workers import Trial, process
from tools.shared.command_line import add_count
from tools.shared.output import print_table
from utils.base_config import as_yaml
from utils.config import Config
from utils.data.build import Loader, build_loaders, image_side, open_dataset
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.logging.environment import device_name
from utils.training.batches import prefetch
from utils.training.kernels.backends import prepare_backends
from utils.training.kernels.compilers import compiles, wants_graphs
from utils.training.optimizers.build import build_optimizer
from utils.training.precision import Precision, choose_precision

# the other trainers' steps here know these values only
EXPECTED = {
    "optimizer": "sgd", "clip_grad_norm": None, "label_smoothing": 0.0, "micro_batch_size": None, "ema_decay": None,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="fastest", trials=5)
    add_count(parser, "--iters", 20, "timed steps of a trial")
    add_count(parser, "--warmup", 3, "steps before them", least=0)


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    if config.opt_level not in (None, "O0", "O1"):
        raise ConfigError(f"opt_level {config.opt_level}: the other trainers have no such level; use O0 or O1")
    for key, expected in EXPECTED.items():
        if (value := getattr(config, key)) != expected:
            remedy = f"use {as_yaml(expected)}"
            raise ConfigError(f"{key} {as_yaml(value)}: the other trainers' steps here lack it; {remedy}")
    world = alone(config)
    with ExitStack() as stack:
        built = rows_of(config, world.device).items()
        processes = [(name, stack.enter_context(process(build)), its_config) for name, (build, its_config) in built]
        steps = {name: build_there(its_config) for name, build_there, its_config in processes}
        for step in steps.values():
            step(2, 1)  # compiles
        cases = {name: partial(step, options.warmup, options.iters) for name, step in steps.items()}
        results = common.measure(cases, options.trials, warm_up=0)
    ours = results["this project"]["full"].median
    rows = [(name, f"{row['full']:,.1f}", f"{ours / row['full'].median:.3f}") for name, row in results.items()]
    setting = f"{config.model}, batch {config.batch_size}, {choose_precision(config, world.device)}"
    title = f"{setting}, {device_name(world.device)}: median (min-max)"
    print_table(title, ["training step", "images/s", "this project's relative speed"], rows)
    common.write_report(options.json, "peers", config, world, results)
    return 0


def rows_of(config: Config, device: torch.device) -> dict[str, tuple[Callable[[Config], Trial], Config]]:
    """Return {row: (function that builds its trial, its configuration)}.

    The table has rows with and without one switch that only this project has: `enable_cuda_graphs` on a GPU,
    `keep_cpu_memory` on a CPU.
    """
    peers: dict[str, Callable[[Config], Trial]] = {
        "timm": timm_trial,
        "lightning": lightning_trial,
        "plain PyTorch": plain_trial,
    }
    rows: dict[str, tuple[Callable[[Config], Trial], Config]] = {"this project": (OurStep, config)}
    if wants_graphs(config, device):
        own = config.model_copy(update={"enable_cuda_graphs": False})
        rows["this project, without enable_cuda_graphs"] = (OurStep, own)
    rows |= {name: (build, config) for name, build in peers.items()}
    if device.type == "cpu" and config.keep_cpu_memory is not False:
        own = config.model_copy(update={"keep_cpu_memory": False})
        rows |= {f"{name}, without keep_cpu_memory": (build, own) for name, build in peers.items()}
    return rows


class OurStep(Rung):
    """This project's loader and step, without the other measurements of a rung."""

    def __call__(self, warmup: int, iters: int) -> dict[str, float]:
        step = self.learner.train_step
        return {"full": fed_images_per_sec(self.config, self.world, self.loader, warmup, iters, step)}


def timm_trial(config: Config) -> Trial:
    """timm's train_one_epoch without its logging: task, autocast and NativeScaler or plain backward, optimizer."""
    create_optimizer = _import("timm.optim").create_optimizer_v2
    from timm.task import ClassificationTask
    from timm.utils import NativeScaler

    world, model, precision, loader = _prepare(config)
    optimizer = create_optimizer(
        model, opt="sgd" if config.nesterov else "momentum", lr=config.lr, momentum=config.momentum,
        weight_decay=config.weight_decay, filter_bias_and_bn=False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = config.extra_opt("fused_optimizer") or None, None
    task = ClassificationTask(model, criterion=nn.CrossEntropyLoss(), device=world.device, verbose=False)
    if compiles(config, world.device):
        task.compile()
    scaler = NativeScaler(device=world.device.type) if precision.loss_scale is not None else None
    task.train()

    def step(images: Tensor, labels: Tensor) -> None:
        with precision.autocast():
            loss = task(images, labels)["loss"]
        if scaler is not None:
            scaler(loss, optimizer, parameters=model.parameters())
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    return lambda warmup, iters: {"full": fed_images_per_sec(config, world, loader, warmup, iters, step)}


def lightning_trial(config: Config) -> Trial:
    """Lightning's Trainer.fit with `barebones`, which switches everything off but training."""
    lightning = _import("lightning")
    logging.getLogger("lightning").setLevel(logging.ERROR)  # otherwise it prints a page of advice in every trial
    warnings.filterwarnings("ignore", module="lightning")
    world, model, precision, loader = _prepare(config)
    forward = torch.compile(model, dynamic=False) if compiles(config, world.device) else model

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Records when its timed steps began and ended."""

        def __init__(self, warmup: int, iters: int) -> None:
            super().__init__()
            self.model, self.steps, self.warmup, self.iters = model, 0, warmup, iters
            self.started = self.ended = 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
            if self.steps == self.warmup:
                common.synchronize(world.device)
                self.started = time.perf_counter()
            self.steps += 1
            images, labels = batch
            return nn.functional.cross_entropy(forward(images), labels)

        def on_train_batch_end(self, *_: object) -> None:
            """Stop the clock after the last update: `fit` moves model and optimizer to the CPU before it returns."""
            if self.steps == self.warmup + self.iters:
                common.synchronize(world.device)
                self.ended = time.perf_counter()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(config, self.model.parameters())

    class Batches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
        """The project's loader, endlessly."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            return prefetch(config, endless(loader), world.device)

    names = {"O0": "32-true", "O1": "16-mixed" if precision.loss_scale is not None else "bf16-mixed"}

    def trial(warmup: int, iters: int) -> dict[str, float]:
        module = Module(warmup, iters)
        trainer = lightning.Trainer(
            barebones=True, max_steps=warmup + iters, max_epochs=-1, devices=1, precision=names[precision.level],
            accelerator="gpu" if world.device.type == "cuda" else "cpu",
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
        return {"full": iters * config.batch_size / (module.ended - module.started)}

    return trial


def plain_trial(config: Config) -> Trial:
    """A loop of PyTorch's own parts: autocast, GradScaler, cross-entropy, backward, optimizer."""
    world, model, precision, loader = _prepare(config)
    forward = torch.compile(model, dynamic=False) if compiles(config, world.device) else model
    optimizer = build_optimizer(config, model.parameters())
    scaler = torch.amp.GradScaler(world.device.type, enabled=precision.loss_scale is not None)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return lambda warmup, iters: {"full": fed_images_per_sec(config, world, loader, warmup, iters, step)}


def _prepare(config: Config) -> tuple[World, nn.Module, Precision, Loader]:
    """Return what all trainers share: the device, the network with the seed's weights, its precision, the loader."""
    world = alone(config)
    prepare_backends(config, world.device)
    torch.manual_seed(config.seed)
    model = build_model(config, image_side(config)).to(world.device)
    if config.enable_nhwc:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loader = build_loaders(config, open_dataset(config, world), world).train
    return world, model, choose_precision(config, world.device), loader


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'{name.partition(".")[0]} cannot be imported ({error}); pip install ".[peers]"') from None
