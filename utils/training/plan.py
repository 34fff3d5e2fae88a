"""The plan: what a configuration means on this device and number of ranks.

It is made before data and network are built. Later code reads the plan, not the settings that say `auto`. The log,
environment.json and reports of tools.bench show it with only the kernels that the network can use.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from utils.base_config import as_yaml
from utils.distributed.ddp import WARNINGS
from utils.distributed.world import GlobalBatch, World, divide_batch
from utils.errors import ConfigError
from utils.program import missing_compiler
from utils.training.config import HAVE_FUSED_KERNEL, SpeedConfig, TrainingConfig
from utils.training.precision import Level, Precision

ADAPTIVE = ("adamw", "muon")  # optimizers that keep squared gradients, in the format of the weights
# PyTorch requires 11 steps before it captures a graph with DDP (its notes on CUDA graphs), 3 without.
GRAPH_WARMUP_STEPS = 11
# Evaluation and export predict only, also where the training step could not run.
PREDICTION: dict[str, Any] = {
    "enable_cuda_graphs": False, "enable_sync_bn": False, "fuse_norm_relu": False, "lr_warmup_epochs": 0,
    "micro_batch_size": None, "parallel": "ddp", "verify_every_steps": None,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The switches that are on. `kernels`: {name of `fuse_norm_relu` or `cpu_kernels`: whether the configuration
    demands it, so that an error follows if the network cannot use it}."""

    precision: Precision
    global_batch: GlobalBatch
    memory_format: torch.memory_format  # of weights and images
    compiled: bool
    graphed: bool
    prefetched: bool
    fused_optimizer: bool
    kernels: dict[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the log: what takes time, and settings that have no effect here

    @property
    def capture_steps(self) -> int:
        """Steps up to the one that captures a graph, all slow; 0 without graphs."""
        return GRAPH_WARMUP_STEPS + 1 if self.graphed else 0

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        switches = {name: getattr(self, name) for name in ("compiled", "graphed", "prefetched", "fused_optimizer")}
        figures = {"precision": str(self.precision), "batch": str(self.global_batch)}
        return {**figures, **switches, "kernels": list(self.kernels)}

    def __str__(self) -> str:
        on = [name for name, value in self.describe().items() if value is True] + list(self.kernels)
        return f"batch {self.global_batch}; {', '.join(on if self.compiled else ['eager', *on])}"


def make_plan(config: TrainingConfig, world: World, *, training: bool = True) -> Plan:
    """Decide what `config` means on this device and number of ranks; without `training`, for predictions only. Raises
    `ConfigError` for what cannot be."""
    device, gpu = world.device, world.device.type == "cuda"
    if not training:
        config = config.model_copy(update=PREDICTION | {"batch_size": world.world_size})
    own_gpu = gpu and config.parallel != "dataparallel"  # whose threads can neither compile nor capture a step
    precision, missing = choose_precision(config, device), missing_compiler(gpu=gpu)  # AMP: COMPILE:
    compiled = config.enable_compile is True or (config.enable_compile == "auto" and own_gpu and not missing)
    if compiled and missing and training:
        raise ConfigError(f"enable_compile needs {missing}; else set enable_compile to false or auto")
    plan = Plan(
        precision=precision,
        global_batch=divide_batch(config.batch_size, world.world_size, config.micro_batch_size),
        memory_format=torch.channels_last if config.enable_nhwc else torch.contiguous_format,  # NHWC:
        compiled=compiled,
        graphed=config.enable_cuda_graphs is not False and own_gpu,  # GRAPHS:
        prefetched=config.enable_prefetch is not False and gpu,  # PREFETCH:
        # EXTRA: before torch 2.14 it does not update most half-precision weights on a CPU (pytorch/pytorch#191763)
        fused_optimizer=config.extra_opt("fused_optimizer") and (gpu or precision.level != "O3"),
    )
    plan = replace(plan, kernels=_choose_kernels(config, plan, device, missing))
    _check_devices(config, plan, world)
    return replace(plan, notes=tuple(_notes(config, plan, gpu=gpu)))


def has_bf16_kernels() -> bool:
    """Whether oneDNN has bf16 kernels for this processor; x86 needs AVX-512. Without them PyTorch converts each number,
    and ResNets train about ten times slower than in float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def gpu_has_bf16() -> bool:
    """Whether the GPU has units for bf16; older than Ampere emulate it. True without a GPU."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(config: SpeedConfig, device: torch.device) -> Precision:
    """AMP: choose the precision for the settings on this device. On a processor or GPU without bf16 kernels, `auto`
    of `enable_amp` or `amp_dtype` disables autocast in bf16."""
    level: Level = config.opt_level or ("O1" if config.enable_amp else "O0")
    if config.amp_dtype == "fp16" and level != "O0" and device.type != "cuda":
        raise ConfigError(f"amp_dtype fp16 needs a CUDA device, this run is on {device.type}; use bf16 or auto")
    is_auto = level == "O1" and config.opt_level is None and "auto" in (config.enable_amp, config.amp_dtype)
    fp16 = config.amp_dtype == "fp16" or (config.amp_dtype == "auto" and device.type == "cuda")
    remark = ""
    if is_auto and not fp16 and not (has_bf16_kernels() if device.type == "cpu" else gpu_has_bf16()):
        level = "O0"
        this = "processor" if device.type == "cpu" else "GPU"
        remark = f": enable_amp has no effect, this {this} has no bf16 kernels; amp_dtype=bf16 with true forces it"
    scale = config.loss_scale or ("dynamic" if fp16 and level in ("O1", "O2") else None)
    if level == "O3" and fp16 and config.optimizer_kind in ADAPTIVE:
        why = "in fp16 it would divide by squares of small gradients, which are 0"
        raise ConfigError(f"optimizer {config.optimizer} with opt_level O3 needs amp_dtype bf16 or opt_level O2; {why}")
    if level == "O3" and scale is not None:
        why = "PyTorch does not unscale gradients in half precision; use opt_level O2 or loss_scale null"
        raise ConfigError(f"loss_scale {scale} with opt_level O3: {why}")
    half = torch.float16 if fp16 else torch.bfloat16
    return Precision(
        device.type, level, dtype=torch.float32 if level == "O0" else half, loss_scale=scale, remark=remark,
        keep_batchnorm_fp32=level != "O3" if config.keep_batchnorm_fp32 is None else config.keep_batchnorm_fp32,
        tf32=config.enable_tf32 and level == "O0" and device.type == "cuda",
    )  # fmt: skip


def _choose_kernels(config: SpeedConfig, plan: Plan, device: torch.device, missing: str) -> dict[str, bool]:
    """FUSE: CONV: ALLOC: `auto` is for eager steps over NHWC memory on a CPU. `missing`: what a compiler lacks."""
    on_cpu, fuse, precision = device.type == "cpu", config.fuse_norm_relu, plan.precision
    float32_norms = not precision.casts_weights or precision.keep_batchnorm_fp32
    if fuse is True and plan.compiled:
        compiles = f"enable_compile {as_yaml(config.enable_compile)} compiles here, which also fuses"
        raise ConfigError(f"fuse_norm_relu is for eager steps, and {compiles}; use one of them")
    if fuse is True and on_cpu and not float32_norms:
        raise ConfigError("fuse_norm_relu needs BatchNorm in float32 on a CPU; set keep_batchnorm_fp32")
    lacking = missing if find_spec("triton") else "Triton; pip install triton"  # for the kernels on a GPU
    if fuse is True and not on_cpu and lacking:
        raise ConfigError(f"fuse_norm_relu needs {lacking}; else set fuse_norm_relu to false")
    fast = on_cpu and config.enable_nhwc and not plan.compiled
    fuses = fast and float32_norms and not config.enable_sync_bn and config.parallel != "dataparallel"
    convolves = fast and (precision.level == "O0" or has_bf16_kernels())
    kernels = dict[str, bool]()
    for name, asked, fits in (
        ("fuse_norm_relu", fuse, fuses),
        ("winograd", on_cpu and config.cpu_kernel("winograd"), convolves),
        ("weight_products", on_cpu and config.cpu_kernel("weight_products"), convolves),
    ):
        if asked is True or (asked == "auto" and fits):
            kernels[name] = asked is True  # demanded by the configuration
    if on_cpu and config.cpu_kernel("keep_memory") and hasattr(ctypes.CDLL(None), "mallopt"):
        kernels["keep_memory"] = False
    return kernels


def _check_devices(config: TrainingConfig, plan: Plan, world: World) -> None:
    device = world.device.type
    for key, asked, remedy in (
        ("enable_cuda_graphs", config.enable_cuda_graphs is True, "false or auto"),
        ("enable_sync_bn", config.enable_sync_bn, "false"),
        ("parallel dataparallel", config.parallel == "dataparallel", "ddp"),
    ):
        if asked and device != "cuda":
            raise ConfigError(f"{key} needs a CUDA device, this run is on {device}; use {remedy}")
    if config.parallel == "dataparallel" and world.world_size > 1:
        raise ConfigError(f"parallel dataparallel is one process for all GPUs, not {world.world_size}; use python")
    if config.parallel == "no_communication" and world.world_size == 1:
        raise ConfigError("parallel no_communication compares several ranks, but this run has one; use ddp")
    if plan.graphed and plan.precision.loss_scale is not None and config.optimizer not in HAVE_FUSED_KERNEL:
        both = f"enable_cuda_graphs {as_yaml(config.enable_cuda_graphs)} with optimizer {config.optimizer}"
        raise ConfigError(f"{both} cannot scale the loss; use amp_dtype bf16 with loss_scale null, or no graphs")
    if config.verify_every_steps is not None and device == "cuda" and not config.deterministic:
        raise ConfigError("verify_every_steps compares bits, which vary on a GPU; it needs deterministic true")


def _notes(config: TrainingConfig, plan: Plan, *, gpu: bool) -> Iterator[str]:
    if config.parallel in WARNINGS:
        yield WARNINGS[config.parallel]
    if config.deterministic:
        without = ", and without cudnn_benchmark" if config.extra_opt("cudnn_benchmark") else ""
        yield f"deterministic: the same bits in every run on this machine; slower on a GPU{without}"
    if gpu and isinstance(config.cpu_kernels, tuple):
        yield "cpu_kernels: no effect on a GPU"
    if not gpu and config.cpu_kernel("keep_memory") is True and "keep_memory" not in plan.kernels:
        yield "cpu_kernels [keep_memory]: no effect, the C library is not glibc"
    for key in ("enable_tf32", "enable_prefetch"):
        if getattr(config, key) is True and not gpu:
            yield f"{key}: no effect on a CPU"
    if config.extra_opt("fused_optimizer") and not plan.fused_optimizer:
        yield "fused_optimizer: no effect on half-precision weights on a CPU"
    if plan.compiled:
        yield "compiled: the first step takes up to minutes"
    if plan.graphed:
        yield f"captured as a CUDA graph after {GRAPH_WARMUP_STEPS} steps of each image size"
    rise, epochs = config.lr_warmup_epochs, config.max_epochs
    too_long = f"lr_warmup_epochs {rise:g} does not fit into max_epochs {epochs}"
    if config.warmup_epochs < rise:
        yield f"{too_long}: onecycle peaks after {config.warmup_epochs:g} epochs"
    elif rise > epochs:
        yield f"{too_long}: the learning rate rises to {epochs / rise:.2g} of its peak"


def check_ranks_agree(config: TrainingConfig, plan: Plan, world: World) -> None:
    """Collective: raise `ConfigError` for settings, or a number format, that differ between ranks."""
    values = config.model_dump(mode="json", exclude={"data_path", "num_data_workers"})
    everyone = world.all_gather(values | {"number format": str(plan.precision)})
    for rank, values in enumerate(everyone):
        for key in [key for key in values if values[key] != everyone[0][key]]:
            found = f"{as_yaml(everyone[0][key])} on rank 0, but {as_yaml(values[key])} on rank {rank}"
            raise ConfigError(f"{key} is {found}; start every rank with the same settings")
