"""The settings of a run's output."""

from typing import Annotated, Literal

from pydantic import Field

from utils.base_config import KeyFlag, PathText, PositiveInt, SharedConfig

# values in metrics.jsonl that differ between two equal runs
MEASURED = frozenset({
    "seconds", "epoch_seconds", "clock_seconds", "images_per_sec", "data_wait", "memory_gb", "model_tflops", "mfu",
    "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz", "gpu_memory_gb", "joules", "joules_per_image",
})  # fmt: skip


class OutputConfig(SharedConfig):
    """output"""

    log_to_screen: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Progress and log lines on the terminal."""
    log_to_tensorboard: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Write TensorBoard event files."""
    log_to: Annotated[tuple[Literal["wandb", "mlflow"], ...], Field(strict=False), KeyFlag.FREE_ON_RESUME] = ()
    """Also send the metrics to wandb or mlflow. Errors there never end a run."""
    limits_report: Annotated[PathText | None, KeyFlag.FREE_ON_RESUME] = None
    """Report of `tools.bench limits` with the peak for MFU. It must be of this kind of device; null: the peak of
    NVIDIA's data sheets, for the devices in utils/training/metrics/flops.py."""
    log_freq: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 20
    """Steps between two log points. The host waits for the device only there, except with fp16 loss scaling without
    the fused optimizer, where PyTorch's scaler waits in every step."""
    save_checkpoint: Annotated[bool, KeyFlag.FREE_ON_RESUME] = True
    """Write the last and the best checkpoint, every epoch and when asked to stop."""
    checkpoint_every_steps: Annotated[PositiveInt | None, KeyFlag.FREE_ON_RESUME] = None
    """Also write a checkpoint every N optimizer steps; null: only after each epoch."""
    keep_checkpoints: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 2
    """Number of last checkpoints to keep, in addition to the best."""
