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
    start_timeout_seconds: Annotated[PositiveFloat, KeyFlag.FREE_ON_RESUME] = 600
    """Seconds to wait at the start for all ranks; then the run ends and names the missing ones."""
    collective_timeout_seconds: Annotated[PositiveFloat, KeyFlag.FREE_ON_RESUME] = 600
    """Seconds that a rank waits in a collective for the others. Rank 0's download of a dataset is such a wait. A rank
    without a heartbeat for that long, because it is killed, stopped or isolated, ends the others."""
