"""Process-wide switches of PyTorch and of the C library."""

import ctypes
import os

import torch

from utils.training.config import SpeedConfig

# parameters of glibc's mallopt (malloc.h)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def prepare_backends(config: SpeedConfig, device: torch.device) -> list[str]:
    """Set PyTorch's process-wide switches; return notes for the log."""
    notes = []
    benchmark = config.extra_opt("cudnn_benchmark")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        notes.append(
            "deterministic: every run on this machine gives the same bits; on a GPU steps take longer, without cuDNN's "
            f"fastest algorithms{' and without cudnn_benchmark' if benchmark else ''}"
        )
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    # EXTRA: cuDNN times its algorithms on the first batch and keeps the fastest
    torch.backends.cudnn.benchmark = benchmark and not config.deterministic
    # AMP: TF32; PyTorch's default is on for convolutions and off for matrix products
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.enable_tf32
    if device.type == "cuda":
        return notes + ["cpu_kernels: no effect on a GPU"] * isinstance(config.cpu_kernels, tuple)
    keep_memory = config.cpu_kernel("keep_memory")
    if keep_memory and not _keep_freed_memory() and keep_memory is True:
        notes.append("cpu_kernels [keep_memory]: no effect, the C library is not glibc")
    return notes + [
        f"{key}: no effect on a CPU" for key in ("enable_tf32", "enable_prefetch") if getattr(config, key) is True
    ]


def _keep_freed_memory() -> bool:
    """ALLOC: keep freed memory in the process; return whether the C library can.

    By default glibc returns every large block to the kernel, which clears and maps the same pages again in the next
    step: 600,000 page faults per step of ResNet50 with 128 images, an eighth of the step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))
    return mallopt is not None and all([mallopt(setting, value) for setting, value in settings])
