"""The settings of a run's output."""

from typing import Annotated

from pydantic import Field

from utils.base_config import KeyFlag, OneOf, PositiveInt, SharedConfig
from utils.run.logging.trackers import TRACKERS


class OutputConfig(SharedConfig):
    """output"""

    log_to_screen: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Progress and log lines on the terminal."""
    log_to_tensorboard: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Write TensorBoard event files."""
    log_to: Annotated[tuple[Annotated[str, OneOf(TRACKERS)], ...], Field(strict=False), KeyFlag.FREE_ON_RESUME] = ()
    """Give the metrics to these, too: csv, wandb, mlflow. What goes wrong there never ends a run."""
    limits_report: Annotated[str | None, KeyFlag.FREE_ON_RESUME] = None
    """MFU is a share of the peak in this report of `tools.bench limits`. It must be of this kind of device; null: of
    the peak in NVIDIA's data sheets, where utils/training/metrics/flops.py has the device."""
    log_freq: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 20
    """Steps between two log points. Only there the host waits for the device, unless fp16's loss is scaled without
    fused_optimizer: then PyTorch's scaler waits in every step."""
    save_checkpoint: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Write the last and the best checkpoint, every epoch and when asked to stop."""
    checkpoint_every_steps: Annotated[PositiveInt | None, KeyFlag.FREE_ON_RESUME] = None
    """Write a checkpoint every so many optimizer steps too; null: no."""
    checkpoint_async: Annotated[bool, KeyFlag.FREE_ON_RESUME] = False
    """Write checkpoints from a copy in host memory while training goes on."""
    keep_checkpoints: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 2
    """How many of the last checkpoints are kept, beside the best."""
