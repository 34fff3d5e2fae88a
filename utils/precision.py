"""AMP: which number format the forward pass runs in, and whether the loss must be scaled."""

from dataclasses import dataclass

import torch

from utils.config import Config
from utils.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """autocast's dtype (None: float32 throughout) and the device it is for."""

    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> torch.autocast:
        """AMP: the context for forward and loss; does nothing in float32."""
        return torch.autocast(self.device_type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """AMP: scales the loss for fp16, whose gradients underflow; passes everything through otherwise."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)

    def __str__(self) -> str:
        names = {None: "float32", torch.float16: "fp16 autocast with loss scaling", torch.bfloat16: "bf16 autocast"}
        return names[self.dtype]


def choose_precision(config: Config, device: torch.device) -> Precision:
    """What `enable_amp` and `amp_dtype` mean on this device."""
    if not config.enable_amp:
        return Precision(device.type, None)
    if config.amp_dtype == "fp16" and device.type != "cuda":
        raise ConfigError(f"amp_dtype fp16 needs a CUDA device, this run is on {device.type}; use bf16 or auto")
    fp16 = config.amp_dtype == "fp16" or (config.amp_dtype == "auto" and device.type == "cuda")
    return Precision(device.type, torch.float16 if fp16 else torch.bfloat16)
