"""DDP: how a network is spread over the ranks, and which processor cores each rank keeps to."""

import inspect

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.keys import DistributedKeys
from utils.distributed.world import World
from utils.errors import ConfigError


def synchronise_batch_norm(keys: DistributedKeys, model: nn.Module, world: World) -> nn.Module:
    """The network, with BatchNorm over all ranks where `enable_sync_bn` asks for it; nothing to do for one rank."""
    if not keys.enable_sync_bn:
        return model
    if world.device.type != "cuda":
        raise ConfigError(
            f"enable_sync_bn needs CUDA devices, this run is on {world.device.type}; use enable_sync_bn=false"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.world_size > 1 else model


def distribute(keys: DistributedKeys, model: nn.Module, world: World) -> nn.Module:
    """Collective: what the training step calls instead of `model`, with the same parameters."""
    if keys.parallel == "dataparallel":
        return _one_process_for_all_gpus(model, world)
    if world.world_size == 1:
        if keys.parallel == "no_communication":
            raise ConfigError("parallel: no_communication compares several ranks, but this run has one; use ddp")
        return model
    return wrap_in_ddp(keys, model, world)


def wrap_in_ddp(keys: DistributedKeys, model: nn.Module, world: World) -> DistributedDataParallel:
    """Collective: DDP as the configuration asks for it, in a process group of any size."""
    on_gpu = world.device.type == "cuda"
    # DDP: averages gradients over the ranks during backward
    distributed = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if on_gpu else None,
        bucket_cap_mb=keys.bucket_cap_mb,
        gradient_as_bucket_view=True,  # gradients live inside the buckets: no copy, and less memory
        # After its first step DDP regroups the gradients, which with three or more ranks changes the order of their
        # sums: a resumed run would differ in the last bit from one that never stopped. This keeps the first groups.
        find_unused_parameters=keys.deterministic or not on_gpu,
        **{_broadcast_option(): keys.broadcast_buffers},  # type: ignore[arg-type]
    )
    if keys.gradient_compression != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        distributed.register_comm_hook(None, hooks[keys.gradient_compression])
    return distributed


def describe_parallel(keys: DistributedKeys) -> list[str]:
    """Warnings for ways of running that are only for measuring."""
    if keys.parallel == "no_communication":
        return [
            "WARNING: parallel=no_communication: gradients are NOT averaged, every rank trains a network of its own; "
            "this run measures speed, its accuracy means nothing"
        ]
    if keys.parallel == "dataparallel":
        return [
            "WARNING: parallel=dataparallel: one process drives all GPUs and copies the network to them every step; "
            "it is here to be compared with ddp"
        ]
    return []


def _one_process_for_all_gpus(model: nn.Module, world: World) -> nn.Module:
    if world.device.type != "cuda":
        raise ConfigError(f"parallel: dataparallel needs CUDA devices, this run is on {world.device.type}; use ddp")
    if world.world_size > 1:
        raise ConfigError(
            f"parallel: dataparallel is one process for all GPUs, but there are {world.world_size}; start with python"
        )
    return nn.DataParallel(model)


def _broadcast_option() -> str:
    """DDP's name for `broadcast_buffers`, which PyTorch 2.14 renamed."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
