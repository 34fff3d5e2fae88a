"""Checks of what all ranks of a node share: software, memory, disk, data, host names."""

import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tools.doctor.findings import Finding, judge, read_text
from utils.config import Config
from utils.distributed.launch import first_host
from utils.errors import ExpectedError
from utils.quotas import memory_limit

MINIMUM_TORCH = (2, 11)


def machine_checks(config: Config, run_dir: Path, local_ranks: int) -> list[Finding]:
    gpu = check_gpu_software(torch.version.cuda, torch.cuda.is_available(), driver_version(), config.device == "cuda")
    shared = check_memory(Path("/"), local_ranks), check_disk(run_dir), check_data(config), check_names(os.environ)
    return [check_installed_torch(), gpu, *shared]


def software_versions() -> dict[str, str]:
    """Return {name: version} of the software that must be equal on all nodes; "none" if absent."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    return versions | {"NCCL": nccl, "driver": driver_version() or "none"}


def check_installed_torch() -> Finding:
    """Check that the installed torch is new enough; the container recipes call this too."""
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH
    remedy = f"at least {'.'.join(map(str, MINIMUM_TORCH))}: pip install -c constraints.txt ."
    return judge("torch", f"torch {torch.__version__}", remedy, fail=old)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", read_text(file) or "")
    return found[1] if found else "of unknown version"


def check_gpu_software(built_for: str | None, usable: bool, driver: str | None, wanted: bool) -> Finding:
    """Check that PyTorch can use the GPU if there is a driver or the configuration needs a GPU (`wanted`)."""
    cuda = f"CUDA {built_for}" if built_for else "torch without CUDA"
    message = f"{f'driver {driver}' if driver else 'no NVIDIA driver'}, {cuda}"
    if (driver or wanted) and not usable:
        remedy = "install a driver for this CUDA; in a container: docker run --gpus all; else --set device=cpu"
        return Finding("gpu software", "fail", f"{message}: torch cannot use a GPU here", remedy)
    return Finding("gpu software", "ok", message if usable else f"{message}: runs use the CPU")


def check_memory(root: Path, local_ranks: int) -> Finding:
    """Check the available memory, of the host or of this process's container or job, for this many ranks."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    available = min(int(found[1]) * 1024 if found else 0, memory_limit(root))
    message = f"{available / 1e9:.1f} GB available for {local_ranks} rank(s)"
    remedy = "2 GB per rank needed: fewer ranks, fewer num_data_workers, or more memory from the scheduler (--mem)"
    return judge("memory", message, remedy, warn=available < 2e9 * local_ranks)


def check_disk(folder: Path, needed: int = 2**30) -> Finding:
    """Check free space and write rate where runs will be written. `needed`: bytes of checkpoints and logs."""
    there, remedy = folder, "free some space, or choose another disk with --run-dir"
    try:
        there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        content = os.urandom(2**26)
        with tempfile.TemporaryFile(dir=there) as file:
            started = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            rate = len(content) / (time.perf_counter() - started)
    except OSError as error:
        return Finding("disk", "fail", f"{there}: cannot be written: {error.strerror}", remedy)
    message = f"{there}: {free / 1e9:,.0f} GB free, writes {rate / 1e6:,.0f} MB/s"
    return judge("disk", message, remedy, warn=rate < 50e6, fail=free < needed)


def check_data(config: Config) -> Finding:
    """Check that training would find the dataset, complete and unaltered."""
    from utils.data.build import find_dataset

    try:
        dataset = find_dataset(config, download=False)
    except ExpectedError as error:
        message, _, remedy = str(error).partition("\n")
        remedy = remedy or "put the data there, or give another folder: --set data_path=DIR"
        return Finding("data", "fail", message.removesuffix("; to get good data:"), remedy)
    count = f"{len(dataset.train.labels):,} + {len(dataset.valid.labels):,} images"
    return Finding("data", "ok", f"{dataset.name}: {count}")


def check_names(environment: Mapping[str, str], resolve: Callable[[str], Any] = socket.gethostbyname) -> Finding:
    """Check that the names of this host and of rank 0's host resolve: ranks find each other by them."""
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    names = [socket.gethostname(), environment.get("MASTER_ADDR"), first_host(nodes) if nodes else None]
    found = list(dict.fromkeys(filter(None, names)))
    for name in found:
        try:
            resolve(name)
        except OSError as error:
            remedy = "add it to /etc/hosts or DNS, or set MASTER_ADDR to an address that all nodes can reach"
            return Finding("host names", "fail", f"{name} does not resolve: {error}", remedy)
    return Finding("host names", "ok", f"{', '.join(found)} resolve")
