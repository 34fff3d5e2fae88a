"""Describe versions, device and commit, so that results can be compared."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torchvision

from utils.program import CODE, VERSION

# Only these environment variables are recorded: others may hold secrets.
RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "TORCH_LOGS",
)  # fmt: skip


def describe_environment(device: torch.device, world_size: int) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "command": sys.argv, "version": VERSION, "commit": git_commit(), "python": platform.python_version(),
        "torchvision": torchvision.__version__, "dali": dali_version(), "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None, **describe_arithmetic(device),
        "world_size": world_size, "host": platform.node(),
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }  # fmt: skip


def describe_arithmetic(device: torch.device) -> dict[str, Any]:
    """Return what the bits of a run depend on, apart from its configuration and code."""
    return {
        "torch": str(torch.__version__), "device": device_name(device), "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processors = read_processors()
    return f"{processors[0]['model name']} x {len(processors)}" if "model name" in processors[0] else platform.machine()


def dali_version() -> str | None:
    """Return package and version of the installed NVIDIA DALI, for any of its packages."""
    for package in ("nvidia-dali-cuda130", "nvidia-dali-cuda110"):
        with suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    return None


def read_processors() -> list[dict[str, str]]:
    """Return /proc/cpuinfo's {name: value} of each processor."""
    blocks = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")
    facts = [dict(re.findall(r"^(.*?)\s*: ?(.*)$", block, re.MULTILINE)) for block in blocks]
    return [one for one in facts if "processor" in one]


def git_commit(root: Path = CODE) -> str | None:
    """Return the newest commit that changed anything outside results/, so that committing the results of a run does
    not change the commit of the next run; None without git."""
    found = []
    for words in ("log -1 --format=%H", "status --porcelain --untracked-files=no"):
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", *words.split(), "--", ".", ":(exclude)results"]
            found += [subprocess.check_output(command, cwd=root, text=True, stderr=subprocess.DEVNULL, timeout=10)]
    commit, changes = (found[0].strip(), found[1]) if len(found) == 2 else ("", "")
    return f"{commit} with changes" if commit and changes else commit or None
