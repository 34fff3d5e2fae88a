"""The training step of this project, timm, Lightning and plain PyTorch: same network, precision, layout and data.

pip install ".[peers]" && python -m tools.bench peers --config=fastest
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models import build_model
from tools.bench import common
from tools.bench.common import Fed, OurStep, alone, endless
from tools.common import print_table
from utils.base_config import as_yaml
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.data.datasets.dataset import Dataset
from utils.distributed.world import World
from utils.environment import device_name
from utils.errors import ConfigError
from utils.training.batches import prefetch
from utils.training.learner import prepare_backends
from utils.training.optimizers.build import build_optimizer
from utils.training.plan import Plan, make_plan

EXPECTED = {  # the other trainers' steps here know these values only
    "optimizer": ("sgd",), "clip_grad_norm": (None,), "label_smoothing": (0.0,), "micro_batch_size": (None,),
    "ema_decay": (None,), "opt_level": (None, "O0", "O1"),
}  # fmt: skip
OURS = "this project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="fastest", iters=20, warmup=3)


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    for key, known in EXPECTED.items():
        if (value := getattr(config, key)) not in known:
            raise ConfigError(f"{key} {as_yaml(value)}: the other trainers here lack it; use {as_yaml(known[0])}")
    world = alone(config)
    steps, plans = (options.warmup, options.iters), dict[str, Any]()
    builds = {name: partial(build, own, *steps) for name, (build, own) in rows_of(config, world).items()}
    with common.in_processes(builds, plans) as cases:
        *_, results = common.measure(cases, options.trials)
    ours = results[OURS]["full"].median
    rows = [(name, f"{row['full']:,.1f}", f"{ours / row['full'].median:.3f}") for name, row in results.items()]
    setting = f"{config.model}, batch {config.batch_size}, {make_plan(config, world).precision}"
    title = f"{setting}, {device_name(world.device)}: median (min-max)"
    print_table(title, ["training step", "images/s", "this project's relative speed"], rows)
    common.write_report(options.json, "peers", config, world, results, plans)
    return 0


Build = Callable[[Config, int, int], common.Case]  # of configuration, steps that do not count, timed steps


def rows_of(config: Config, world: World) -> dict[str, tuple[Build, Config]]:
    """Return {row: (function that builds its case, its configuration)}, also without the switch that only this project
    has: `enable_cuda_graphs` on a GPU, `cpu_kernels: [keep_memory]` on a CPU."""
    peers: dict[str, Build] = {"timm": timm_case, "lightning": lightning_case, "plain PyTorch": plain_case}
    rows: dict[str, tuple[Build, Config]] = {OURS: (OurStep, config)} | {name: (peers[name], config) for name in peers}
    if make_plan(config, world).graphed:
        own = config.model_copy(update={"enable_cuda_graphs": False})
        rows[f"{OURS}, without enable_cuda_graphs"] = (OurStep, own)
    if world.device.type == "cpu" and config.cpu_kernel("keep_memory"):
        own = config.model_copy(update={"cpu_kernels": False})  # its other kernels are this project's own
        rows |= {f"{name}, without keep_memory": (build, own) for name, build in peers.items()}
    return rows


def timm_case(config: Config, warmup: int, iters: int) -> common.Case:
    """timm's train_one_epoch without its logging: task, autocast and NativeScaler or plain backward, optimizer."""
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask
    from timm.utils import NativeScaler

    device, model, plan, dataset = _prepare(config)
    optimizer = create_optimizer_v2(
        model, opt="sgd" if config.nesterov else "momentum", lr=config.peak_lr, momentum=config.momentum,
        weight_decay=config.weight_decay, filter_bias_and_bn=False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = plan.fused_optimizer or None, None
    task = ClassificationTask(model, criterion=nn.CrossEntropyLoss(), device=device, verbose=False)
    if plan.compiled:
        task.compile()
    scaler = NativeScaler(device=device.type) if plan.precision.loss_scale is not None else None
    task.train()

    def step(images: Tensor, labels: Tensor) -> None:
        with plan.precision.autocast():
            loss = task(images, labels)["loss"]
        if scaler is not None:
            scaler(loss, optimizer, parameters=model.parameters())
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    return Fed(config, plan, step, warmup, iters, dataset)


def lightning_case(config: Config, warmup: int, iters: int) -> common.Case:
    """Lightning's Trainer.fit with `barebones`, which switches everything off but training."""
    import lightning

    logging.getLogger("lightning").setLevel(logging.ERROR)  # otherwise it prints a page of advice in every trial
    warnings.filterwarnings("ignore", module="lightning")
    device, model, plan, dataset = _prepare(config)
    forward = torch.compile(model, dynamic=False) if plan.compiled else model

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.steps, self.started, self.ended = model, 0, 0.0, 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
            if self.steps == warmup:
                torch.get_device_module(device).synchronize(device)
                self.started = time.perf_counter()
            self.steps += 1
            return nn.functional.cross_entropy(forward(batch[0]), batch[1])

        def on_train_batch_end(self, *_: object) -> None:
            """Stop the clock after the last update: `fit` moves model and optimizer to the CPU before it returns."""
            if self.steps == warmup + iters:
                torch.get_device_module(device).synchronize(device)
                self.ended = time.perf_counter()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(config, self.model.parameters(), fused=plan.fused_optimizer)

    loader = build_loaders(config, dataset, alone(config)).train
    mixed = "bf16-mixed" if plan.precision.loss_scale is None else "16-mixed"
    precision: Any = "32-true" if plan.precision.level == "O0" else mixed

    def trial() -> dict[str, float]:
        module = Module()
        trainer = lightning.Trainer(
            barebones=True, max_steps=warmup + iters, max_epochs=-1, devices=1,
            precision=precision, accelerator=device.type,
        )  # fmt: skip
        trainer.fit(module, prefetch(plan, endless(loader), device))
        return {"full": iters * config.batch_size / (module.ended - module.started)}

    return trial


def plain_case(config: Config, warmup: int, iters: int) -> common.Case:
    """A loop of PyTorch's own parts: autocast, GradScaler, cross-entropy, backward, optimizer."""
    device, model, plan, dataset = _prepare(config)
    forward = torch.compile(model, dynamic=False) if plan.compiled else model
    optimizer = build_optimizer(config, model.parameters(), fused=plan.fused_optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=plan.precision.loss_scale is not None)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with plan.precision.autocast():
            loss = nn.functional.cross_entropy(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Fed(config, plan, step, warmup, iters, dataset)


def _prepare(config: Config) -> tuple[torch.device, nn.Module, Plan, Dataset]:
    """Return what all trainers share: the device, the network with the seed's weights, the plan, the data."""
    world = alone(config)
    dataset, plan = open_dataset(config, world), make_plan(config, world)
    prepare_backends(config, plan)
    torch.manual_seed(config.seed)
    model = build_model(config, dataset.train.image_shape[-1]).to(world.device)
    model = model.to(memory_format=plan.memory_format)  # type: ignore[call-overload]
    return world.device, model, plan, dataset
