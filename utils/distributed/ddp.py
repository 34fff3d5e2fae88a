"""DDP: distribute a network over the ranks."""

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.config import DistributedConfig
from utils.distributed.world import World

WARNINGS = {  # about values of `parallel` that are for measurements only
    "no_communication": "WARNING: parallel=no_communication: gradients are NOT averaged, every rank trains a separate "
    "network; this run measures speed, its accuracy means nothing",
    "dataparallel": "WARNING: parallel=dataparallel: one process drives all GPUs and copies the network to them every "
    "step; use it only for comparison with ddp",
}


def synchronise_batch_norm(config: DistributedConfig, model: nn.Module, world: World) -> nn.Module:
    """Return the network, with BatchNorm over all ranks if `enable_sync_bn` is set."""
    several = config.enable_sync_bn and world.world_size > 1
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if several else model


def distribute(config: DistributedConfig, model: nn.Module, world: World) -> nn.Module:
    """Collective: return the module that the training step calls instead of `model`, with the same parameters."""
    if config.parallel == "dataparallel":
        return nn.DataParallel(model)
    return wrap_in_ddp(config, model, world) if world.world_size > 1 else model


def wrap_in_ddp(config: DistributedConfig, model: nn.Module, world: World) -> DistributedDataParallel:
    """Collective: wrap the network in DDP, in a process group of any size."""
    on_gpu = world.device.type == "cuda"
    renamed = "forward_sync_buffers"  # since PyTorch 2.14
    options = inspect.signature(DistributedDataParallel).parameters
    # DDP: averages gradients over the ranks during backward
    distributed = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if on_gpu else None,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=True,  # gradients live inside the buckets: no copies back, and less memory
        **{renamed if renamed in options else "broadcast_buffers": False},  # type: ignore[arg-type]
    )
    if config.deterministic or not on_gpu:
        _settle_buckets(distributed)
    return distributed


def _settle_buckets(distributed: DistributedDataParallel) -> None:
    """Collective: make DDP group the gradients as in all later steps.

    DDP regroups them after its first backward pass, in the order in which they came. With three or more ranks that
    changes the order of the sums, so the first step after a resume would differ in the last bit from the same step of
    an uninterrupted run. A backward pass through the parameters only, the last layers' gradients first as in training,
    prevents that. It does not change weights, buffers or random generators.
    """
    model: nn.Module = distributed.module
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = vars(model).get("forward")  # usually None, as forward is the class's method
    model.forward = lambda unused: sum(parameter.sum() for parameter in trained)
    try:
        distributed(trained[0].detach()).backward()  # on a GPU DDP cannot be called without an argument
    finally:
        del model.forward
        if own is not None:
            model.forward = own
    for parameter in trained:
        parameter.grad = None
