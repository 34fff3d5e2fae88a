"""The settings of runs with several processes."""

from typing import Annotated, Literal

from utils.base_config import KeyFlag, PositiveFloat, SharedConfig


class DistributedConfig(SharedConfig):
    """several processes"""

    parallel: Literal["ddp", "dataparallel", "no_communication"] = "ddp"
    """DDP: one process per device; for comparison: dataparallel, no_communication. dataparallel is one process for all
    GPUs (torch.nn.DataParallel); no_communication never averages gradients, so its accuracy means nothing."""
    bucket_cap_mb: PositiveFloat = 25
    """DDP: MiB of gradients per all-reduce. Buckets are reduced while backward still computes the others."""
    enable_sync_bn: bool = False
    """DDP: BatchNorm over the micro-batches of all ranks; CUDA only. Without it each rank sees its own micro-batch."""
    rank_timeout_seconds: Annotated[PositiveFloat, KeyFlag.FREE_ON_RESUME] = 600
    """Seconds that a rank waits for the others, at the start and in a collective. Then the run ends and names the
    missing ranks. Rank 0's download of a dataset is such a wait."""
