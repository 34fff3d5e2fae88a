"""Checks of what all ranks of a node share: software, memory, disk, data, host names, threads."""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.doctor.findings import GIGABYTE, Finding, judge, read_text
from utils.config import Config
from utils.errors import ConfigError, ExpectedError
from utils.user_code import is_user_code

if TYPE_CHECKING:
    from utils.distributed.world import World

MINIMUM_TORCH = (2, 11)


def machine_checks(config: Config, run_dir: Path, world: "World", local_ranks: int, sharing: int) -> list[Finding]:
    """Run all checks of this module. `sharing`: of the `local_ranks` of this node, those on the same cores as this."""
    import torch

    from utils.data.build import batch_bytes
    from utils.data.workers import cap_workers, usable_cores

    workers = config.num_data_workers if config.data_loader == "torchvision" else 0
    started = local_ranks * cap_workers(workers, sharing)
    data, image_shape = check_data(config)
    rank_batch_size = -(-config.batch_size // world.world_size)
    packages = ((package.metadata["Name"], package.version) for package in importlib.metadata.distributions())
    installed = {name.lower(): version for name, version in packages if name}
    return [
        check_installed_torch(),
        check_gpu_stack(
            torch.version.cuda, torch.cuda.is_available(), driver_version(), installed, wanted=config.device == "cuda"
        ),
        check_memory(Path("/proc/meminfo"), local_ranks),
        check_shared_memory(batch_bytes(config, rank_batch_size, image_shape), started),
        check_disk(run_dir),
        data,
        check_names(names_to_resolve(os.environ)),
        check_threads(usable_cores(), sharing, torch.get_num_threads(), workers),
    ]


def software_versions() -> dict[str, str]:
    """Return {name: version} of the software that must be equal on all nodes; "none" if absent."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "NCCL": nccl,
        "driver": driver_version() or "none",
    }


def check_installed_torch() -> Finding:
    """Check the installed torch and torchvision; the container recipes call this too."""
    import torch
    import torchvision

    required = importlib.metadata.requires("torchvision") or []
    return check_torch(str(torch.__version__), torchvision.__version__, required)


def check_torch(torch_version: str, torchvision_version: str, required: Sequence[str]) -> Finding:
    """Check that torch is new enough and the one that torchvision was built for (`required`: its requirements)."""
    base = torch_version.split("+", maxsplit=1)[0]
    number = tuple(int(part) for part in base.split(".")[:2])
    if number < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        remedy = f"at least {wanted}: pip install -c constraints.txt ."
        return Finding("torch", "fail", f"torch {torch_version}", remedy)
    pinned = [word.split("==")[1].strip() for word in required if word.replace(" ", "").startswith("torch==")]
    message = f"torch {torch_version}, torchvision {torchvision_version}"
    if pinned and pinned[0].split("+")[0] != base:
        remedy = f'this torchvision needs torch {pinned[0]}: pip install "torch=={pinned[0]}", or let pip choose both'
        return Finding("torch", "fail", f"{message} do not match", remedy)
    return Finding("torch", "ok", message)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", read_text(file) or "")
    return found[1] if found else "of unknown version"


def check_gpu_stack(
    built_for: str | None, usable: bool, driver: str | None, installed: Mapping[str, str], *, wanted: bool = False
) -> Finding:
    """Check that PyTorch, driver, NCCL and DALI match.

    `built_for`: torch's CUDA version; `driver`: the driver's version; `wanted`: the configuration needs a GPU.
    """
    dali = {name: version for name, version in installed.items() if name.startswith("nvidia-dali-cuda")}
    message = f"driver {driver}, " if driver else ""
    message += f"CUDA {built_for}" if built_for else "torch without CUDA"
    message += "".join(f", NCCL {version}" for name, version in installed.items() if name.startswith("nvidia-nccl"))
    message += "".join(f", {name} {version}" for name, version in dali.items())
    if driver and not built_for:
        return Finding("gpu software", "fail", f"{message}, but there is an NVIDIA driver", "install PyTorch with CUDA")
    if driver and not usable:
        remedy = "install a newer driver, or PyTorch for an older CUDA; in a container: docker run --gpus all"
        return Finding("gpu software", "fail", f"{message}: torch cannot use the GPU of this machine", remedy)
    if wanted and not usable:
        remedy = "install NVIDIA's driver (nvidia-smi must list the GPU), or train on the CPU: --set device=cpu"
        return Finding("gpu software", "fail", f"{message}; no NVIDIA driver, but device is cuda", remedy)
    fitting = f"nvidia-dali-cuda{(built_for or '').partition('.')[0]}"
    if built_for and dali and not any(name.startswith(fitting) for name in dali):
        remedy = f"pip install {fitting}0"
        return Finding("gpu software", "warn", f"{message}: DALI and torch are for different CUDA versions", remedy)
    message += "" if driver or usable else "; no NVIDIA driver: runs use the CPU"
    return Finding("gpu software", "ok", message)


def check_memory(meminfo: Path, local_ranks: int) -> Finding:
    """Check the host's available memory for this many ranks."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(meminfo) or "", re.MULTILINE)
    if found is None:
        return Finding("memory", "warn", "the available memory is unknown", f"look at {meminfo}")
    available = int(found[1]) * 1024
    message = f"{available / GIGABYTE:.1f} GB available for {local_ranks} rank(s)"
    remedy = "2 GB per rank needed: fewer ranks, fewer num_data_workers, or more memory from the scheduler (--mem)"
    return judge("memory", message, remedy, warn=available < 2 * GIGABYTE * local_ranks)


def check_shared_memory(batch_bytes: int, workers: int) -> Finding:
    """Check that shared memory suffices for the loader workers, with the check that training makes."""
    from utils.data import workers as loader_workers

    folder = loader_workers.SHARED_MEMORY
    try:
        loader_workers.check_shared_memory(batch_bytes, workers)
        loader_workers.check_sockets(workers)
        message = f"{folder} has {shutil.disk_usage(folder).free / 1e6:,.0f} MB free for {workers} loader worker(s)"
        return Finding("shared memory", "ok", message)
    except ConfigError as error:
        message, _, remedy = str(error).partition("\n")
        return Finding("shared memory", "fail", message, remedy)
    except OSError as error:
        return Finding("shared memory", "warn", f"{folder}: {error.strerror}", "loader workers need it")


def check_disk(folder: Path, needed: int = 2**30) -> Finding:
    """Check free space and write rate where runs will be written. `needed`: bytes of checkpoints and logs."""
    there, remedy = folder, "free some space, or choose another disk with --run-dir"
    try:
        there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if free < needed:
            return Finding("disk", "fail", f"{there}: {free / GIGABYTE:.2f} GB free", remedy)
        rate = write_rate(there)
    except OSError as error:
        return Finding("disk", "fail", f"{there}: cannot be written: {error.strerror}", remedy)
    message = f"{there}: {free / GIGABYTE:,.0f} GB free, writes {rate / 1e6:,.0f} MB/s"
    remedy = "checkpoints will take seconds: use a faster disk"
    return judge("disk", message, remedy, warn=rate < 50e6)


def write_rate(folder: Path) -> float:
    """Measure bytes per second of writing and syncing a file of 64 MiB in `folder`."""
    size = 2**26
    content = os.urandom(size)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - started)


def check_data(config: Config) -> tuple[Finding, tuple[int, int, int]]:
    """Check that training would find the dataset, complete and unaltered; also return its image shape (C, H, W)."""
    from utils.data.build import find_dataset
    from utils.data.datasets.cifar import IMAGE_SHAPE, VERSIONS, remedy
    from utils.data.datasets.folders import IMAGENET_SIZE

    try:
        dataset = find_dataset(config, download=False)
    except ExpectedError as error:
        message, _, fix = str(error).partition("\n")
        if config.dataset in VERSIONS:
            message = message.partition("; to get good data:")[0]
            fix = remedy(VERSIONS[config.dataset], Path(config.data_path))
        elif is_user_code(config.dataset):
            fix = fix or "docs/own_code.md describes what the function must return"
        else:
            fix = "put the class folders there, or give another folder: --set data_path=DIR"
        side = config.image_size or (IMAGE_SHAPE[-1] if config.dataset in VERSIONS else IMAGENET_SIZE)
        return Finding("data", "fail", message, fix), (3, side, side)
    count = f"{len(dataset.train.labels):,} + {len(dataset.valid.labels):,} images"
    return Finding("data", "ok", f"{dataset.name}: {count}"), dataset.train.image_shape


def names_to_resolve(environment: Mapping[str, str]) -> list[str]:
    """Return this host's name and, if a launcher gives it, the name of rank 0's host."""
    from utils.distributed.launch import first_host

    nodes = environment.get("SLURM_JOB_NODELIST", "")
    names = [socket.gethostname(), environment.get("MASTER_ADDR"), first_host(nodes) if nodes else None]
    return list(dict.fromkeys(filter(None, names)))


def check_names(names: Sequence[str], resolve: Callable[[str], Any] = socket.gethostbyname) -> Finding:
    """Check that the names resolve: ranks find each other by them."""
    for name in names:
        try:
            resolve(name)
        except OSError as error:
            remedy = "add it to /etc/hosts or DNS, or set MASTER_ADDR to an address that all nodes can reach"
            return Finding("host names", "fail", f"{name} does not resolve: {error}", remedy)
    return Finding("host names", "ok", f"{', '.join(names)} resolve")


def check_threads(cores: int, ranks: int, threads: int, workers: int) -> Finding:
    """Check that the threads and loader workers of the ranks that share these cores fit them."""
    message = f"{cores} cores for {ranks} rank(s) of {threads} thread(s) and {workers} loader worker(s)"
    if ranks * threads > cores:
        remedy = f"set OMP_NUM_THREADS={max(1, cores // ranks)}: more threads than cores are slower than one"
        return Finding("threads", "warn", message, remedy)
    remedy = "more cores from the scheduler (--cpus-per-task), fewer num_data_workers, or data_loader=device"
    return judge("threads", message, remedy, warn=ranks * (workers + 1) > 2 * cores)
