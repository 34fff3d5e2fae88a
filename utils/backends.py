"""Process-wide switches of PyTorch."""

import os

import torch

from utils.config import Config


def prepare_backends(config: Config, device: torch.device) -> list[str]:
    """Process-wide switches of PyTorch; returns what has to be said about them."""
    notes = []
    benchmark = config.extra_opt("cudnn_benchmark")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        if benchmark:
            notes.append("deterministic: cudnn_benchmark is left off, its choices differ from run to run")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    # EXTRA: cuDNN times its algorithms on the first batch and keeps the fastest
    torch.backends.cudnn.benchmark = benchmark and not config.deterministic
    # AMP: TF32; PyTorch's own default has it on for convolutions and off for products
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.enable_tf32
    if device.type != "cuda":
        left_out = [key for key in ("enable_tf32", "enable_prefetch") if getattr(config, key) is True]
        notes += [f"{key}: a CPU has nothing for it to act on" for key in left_out]
    return notes
