"""DDP: how a network is spread over the ranks, and which processor cores each rank keeps to."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.config import Config
from utils.distributed import Distributed
from utils.errors import ConfigError


def synchronise_batch_norm(config: Config, model: nn.Module, place: Distributed) -> nn.Module:
    """The network, with BatchNorm over all ranks where `enable_sync_bn` asks for it; nothing to do for one rank."""
    if not config.enable_sync_bn:
        return model
    if place.device.type != "cuda":
        raise ConfigError(
            f"enable_sync_bn needs CUDA devices, this run is on {place.device.type}; use enable_sync_bn=false"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if place.world_size > 1 else model


def distribute(config: Config, model: nn.Module, place: Distributed) -> nn.Module:
    """Collective: what the training step calls instead of `model`, with the same parameters."""
    if config.parallel == "dataparallel":
        return _one_process_for_all_gpus(model, place)
    if place.world_size == 1:
        if config.parallel == "no_communication":
            raise ConfigError("parallel: no_communication compares several ranks, but this run has one; use ddp")
        return model
    return wrap_in_ddp(config, model, place)


def wrap_in_ddp(config: Config, model: nn.Module, place: Distributed) -> DistributedDataParallel:
    """Collective: DDP as the configuration asks for it, in a process group of any size."""
    on_gpu = place.device.type == "cuda"
    # DDP: averages gradients over the ranks during backward
    distributed = DistributedDataParallel(
        model,
        device_ids=[place.device.index] if on_gpu else None,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        # After its first step DDP regroups the gradients, which with three or more ranks changes the order of their
        # sums: a resumed run would differ in the last bit from one that never stopped. This keeps the first groups.
        find_unused_parameters=(config.deterministic or not on_gpu) and not config.static_graph,
        **{_broadcast_option(): config.broadcast_buffers},  # type: ignore[arg-type]
    )
    if config.gradient_compression != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        distributed.register_comm_hook(None, hooks[config.gradient_compression])
    return distributed


def describe_parallel(config: Config) -> list[str]:
    """What has to be said of a way of running that is not for training."""
    if config.parallel == "no_communication":
        return [
            "WARNING: parallel=no_communication: gradients are NOT averaged, every rank trains a network of its own; "
            "this run measures speed, its accuracy means nothing"
        ]
    if config.parallel == "dataparallel":
        return [
            "WARNING: parallel=dataparallel: one process drives all GPUs and copies the network to them every step; "
            "it is here to be compared with ddp"
        ]
    return []


def _one_process_for_all_gpus(model: nn.Module, place: Distributed) -> nn.Module:
    if place.device.type != "cuda":
        raise ConfigError(f"parallel: dataparallel needs CUDA devices, this run is on {place.device.type}; use ddp")
    if place.world_size > 1:
        raise ConfigError(
            f"parallel: dataparallel is one process for all GPUs, but there are {place.world_size}; start with python"
        )
    return nn.DataParallel(model)


def _broadcast_option() -> str:
    """DDP's name for `broadcast_buffers`, which PyTorch 2.14 renamed."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"


def pin_near_gpu(config: Config, place: Distributed) -> list[str]:
    """Keep this process and its loader workers on the cores nearest its GPU; returns what to say about it."""
    if not config.enable_cpu_affinity or place.world_size == 1 or place.device.type != "cuda":
        return []
    gpu: Any = torch.cuda.get_device_properties(place.device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cores = cores_near(address) & os.sched_getaffinity(0)
    if not cores:
        return [f"enable_cpu_affinity: the machine does not tell which usable cores are near GPU {address}; left as is"]
    os.sched_setaffinity(0, cores)
    return [f"enable_cpu_affinity: rank {place.rank} keeps to the {len(cores)} cores nearest GPU {address}"]


def cores_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Processor cores on the socket of a PCI device, from the kernel; empty where it does not say."""
    try:
        text = (devices / pci_address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
