"""Check before a job whether this machine, or every node of this allocation, is fit for it.

    python -m tools.doctor                                          # this machine
    torchrun --nproc_per_node=8 -m tools.doctor                     # its ranks too: all-reduce, clocks, the slow one
    srun --ntasks-per-node=8 python -m tools.doctor                 # the same over nodes
    python -m tools.doctor --nodes                                  # in a Slurm allocation: one process on every node

Each line is ok, warn or fail, with the remedy. Exit status: 0 nothing failed, 1 something failed, 2 bad usage,
130 interrupted.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.command_line import add_config_arguments, new_parser
from utils.config import Config, load_config
from utils.errors import ConfigError, ExpectedError, exit_in_a_line
from utils.program import command, module_command
from utils.user_code import is_own

if TYPE_CHECKING:
    import torch

    from utils.distributed.world import World

LEVELS = ("ok", "warn", "fail")
MINIMUM_TORCH = (2, 11)
TRIALS = 3
SLOW_ALL_REDUCE = 3.0  # GB/s: less than one card of 25 Gb/s reaches
SLOW = 1.15  # times the median of the other devices or ranks
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "SLURM_CPU_BIND_TYPE")
GIGABYTE = 1e9


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, what was found, and the remedy."""

    check: str
    level: str
    message: str
    remedy: str = ""
    where: str = ""  # host, and rank where it matters


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print, return the exit status."""
    options = parser().parse_args(argv)
    if options.nodes:  # also in an interactive step of salloc; the processes of this srun are not given --nodes
        return subprocess.run(_on_every_node(sys.argv[1:] if argv is None else list(argv)), check=False).returncode
    config = load_config(options.yaml_config, options.config, options.set)
    from utils.distributed.ranks import run_ranks

    worst = "ok"
    started = time.perf_counter()

    def look(world: "World") -> None:
        nonlocal worst
        findings = examine(config, options.run_dir, world, time.perf_counter() - started)
        worst = max((finding.level for finding in findings), key=LEVELS.index)
        if world.is_main:
            print(render_json(findings, worst) if options.json else "\n".join(render(findings, worst)))

    # auto where cuda is asked for: what keeps it from use is a finding
    device = "auto" if config.device == "cuda" else config.device
    status = run_ranks(look, device, config.start_timeout_seconds, config.collective_timeout_seconds)
    return status or int(worst == "fail")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("doctor", __doc__)
    add_config_arguments(parser, config="default")
    parser.add_argument("--run-dir", type=Path, default=Path("expts"), metavar="DIR", help="where runs will write")
    parser.add_argument("--nodes", action="store_true", help="look at every node of this Slurm allocation, by srun")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    return parser


def _on_every_node(arguments: list[str]) -> list[str]:
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise ConfigError("--nodes: this is no Slurm allocation; get one with salloc, or start the doctor by torchrun")
    rest = [word for word in arguments if word != "--nodes"]
    return ["srun", "--ntasks-per-node=1", *module_command("doctor"), *rest]


def examine(config: Config, run_dir: Path, world: "World", seconds_to_meet: float) -> list[Finding]:
    """Collective: all checks of all ranks."""
    from tools.bench.limits import all_reduce

    findings = machine_checks(config, run_dir, world) if world.local_rank == 0 else []
    host = socket.gethostname()
    findings += device_checks(world.device, alone=world.gather(host).count(host) == 1)
    where = f"{host}, rank {world.rank}" if world.world_size > 1 else host
    mine = [Finding(**asdict(finding) | {"where": where}) for finding in findings]
    everything = [finding for part in world.gather(mine) for finding in part]
    if world.world_size > 1:
        rates = world.gather((f"rank {world.rank} on {host}", arithmetic(world.device)))
        everything += check_rates(rates, "slow rank")
        everything += [check_meeting(seconds_to_meet, world.world_size), check_clocks(clock_offsets(world))]
        everything += [check_all_reduce(all_reduce(world.device, TRIALS).median, world)]
    return everything


# ---- this machine


def machine_checks(config: Config, run_dir: Path, world: "World") -> list[Finding]:
    """Checks of what all ranks of a node share."""
    import torch

    from utils.data.build import batch_bytes
    from utils.data.workers import usable_cores, workers_of_a_rank

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    workers = config.num_data_workers if config.data_loader == "torchvision" else 0
    started = local_ranks * workers_of_a_rank(workers, local_ranks)
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
        check_threads(usable_cores(), local_ranks, torch.get_num_threads(), workers, describe_affinity()),
    ]


def check_installed_torch() -> Finding:
    """`check_torch` of this Python's; recipes of container images call it too."""
    import torch
    import torchvision

    required = importlib.metadata.requires("torchvision") or []
    return check_torch(str(torch.__version__), torchvision.__version__, required)


def check_torch(torch_version: str, torchvision_version: str, required: Sequence[str]) -> Finding:
    """Whether torch is new enough, and what torchvision was built for (`required`: its requirements)."""
    base = torch_version.split("+", maxsplit=1)[0]
    number = tuple(int(part) for part in base.split(".")[:2])
    if number < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        remedy = f"at least {wanted}: pip install -c constraints.txt ."
        return Finding("torch", "fail", f"torch {torch_version}", remedy)
    pinned = [word.split("==")[1].strip() for word in required if word.replace(" ", "").startswith("torch==")]
    seen = f"torch {torch_version}, torchvision {torchvision_version}"
    if pinned and pinned[0].split("+")[0] != base:
        remedy = f'this torchvision needs torch {pinned[0]}: pip install "torch=={pinned[0]}", or let pip choose both'
        return Finding("torch", "fail", f"{seen} do not fit", remedy)
    return Finding("torch", "ok", seen)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Of NVIDIA's driver, from its kernel module; None where its tools are missing."""
    if shutil.which("nvidia-smi") is None:
        return None
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", _read_text(file))
    return found[1] if found else "of unknown version"


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def check_gpu_stack(
    built_for: str | None, usable: bool, driver: str | None, installed: Mapping[str, str], *, wanted: bool = False
) -> Finding:
    """Whether PyTorch, driver, NCCL and DALI fit. `built_for`: torch's CUDA; `driver`: its version, None without;
    `wanted`: the configuration needs a GPU."""
    dali = {name: version for name, version in installed.items() if name.startswith("nvidia-dali-cuda")}
    seen = f"driver {driver}, " if driver else ""
    seen += f"CUDA {built_for}" if built_for else "torch without CUDA"
    seen += "".join(f", NCCL {version}" for name, version in installed.items() if name.startswith("nvidia-nccl"))
    seen += "".join(f", {name} {version}" for name, version in dali.items())
    if driver and not built_for:
        return Finding("gpu software", "fail", f"{seen}, but there is an NVIDIA driver", "install a torch with CUDA")
    if driver and not usable:
        remedy = "a newer driver, or a torch built for an older CUDA; in a container: docker run --gpus all"
        return Finding("gpu software", "fail", f"{seen}: torch cannot use the GPU of this machine", remedy)
    if wanted and not usable:
        remedy = "install NVIDIA's driver, until nvidia-smi lists the GPU; or train on the CPU: --set device=cpu"
        return Finding("gpu software", "fail", f"{seen}; no NVIDIA driver, but device is cuda", remedy)
    fitting = f"nvidia-dali-cuda{(built_for or '').partition('.')[0]}"
    if built_for and dali and not any(name.startswith(fitting) for name in dali):
        remedy = f"pip install {fitting}0"
        return Finding("gpu software", "warn", f"{seen}: DALI is for another CUDA than torch", remedy)
    return Finding("gpu software", "ok", seen if driver or usable else f"{seen}; no NVIDIA driver: runs use the CPU")


def check_memory(meminfo: Path, local_ranks: int) -> Finding:
    """Available memory of the host, for this many ranks."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(meminfo), re.MULTILINE)
    if found is None:
        return Finding("memory", "warn", "how much is available is not known", f"look at {meminfo}")
    available = int(found[1]) * 1024
    seen = f"{available / GIGABYTE:.1f} GB available for {local_ranks} rank(s)"
    if available < 2 * GIGABYTE * local_ranks:
        remedy = "2 GB a rank: fewer ranks, fewer num_data_workers, or more memory from the scheduler (--mem)"
        return Finding("memory", "warn", seen, remedy)
    return Finding("memory", "ok", seen)


def check_shared_memory(batch_bytes: int, workers: int) -> Finding:
    """Whether this many workers of this machine can hand over batches, as training asks before it starts them."""
    from utils.data import workers as loader_workers

    folder = loader_workers.SHARED_MEMORY
    try:
        loader_workers.check_shared_memory(batch_bytes, workers)
        seen = f"{folder} has {shutil.disk_usage(folder).free / 1e6:,.0f} MB free for {workers} loader worker(s)"
        return Finding("shared memory", "ok", seen)
    except ConfigError as error:
        message, _, remedy = str(error).partition("\n")
        return Finding("shared memory", "fail", message, remedy)
    except OSError as error:
        return Finding("shared memory", "warn", f"{folder}: {error.strerror}", "loader workers need it")


def check_disk(folder: Path, needed: int = 2**30) -> Finding:
    """Room and speed where runs will be written. `needed`: bytes, of checkpoints and logs."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    remedy = "free some, or choose another disk with --run-dir"
    try:
        free = shutil.disk_usage(there).free
        if free < needed:
            return Finding("disk", "fail", f"{there}: {free / GIGABYTE:.2f} GB free", remedy)
        rate = write_rate(there)
    except OSError as error:
        return Finding("disk", "fail", f"{there}: cannot be written: {error.strerror}", remedy)
    seen = f"{there}: {free / GIGABYTE:,.0f} GB free, writes {rate / 1e6:,.0f} MB/s"
    if rate < 50e6:
        return Finding("disk", "warn", seen, "checkpoints will take seconds: a faster disk, or checkpoint_async")
    return Finding("disk", "ok", seen)


def write_rate(folder: Path, size: int = 2**26) -> float:
    """Bytes per second of writing a file of `size` bytes in `folder` to the disk; OSError where it cannot be."""
    content = os.urandom(size)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - started)


def check_data(config: Config) -> tuple[Finding, tuple[int, int, int]]:
    """Whether training would find the dataset, complete and unaltered; and channels, height and width of its images."""
    from utils.data.build import find_dataset, image_side
    from utils.data.cifar import VERSIONS

    try:
        dataset = find_dataset(config, download=False)
    except ExpectedError as error:
        remedy = "bring the class folders there, or name theirs: --set data_path=DIR"
        if config.dataset in VERSIONS:
            path = shlex.quote(config.data_path)
            remedy = f"{' '.join(command('prepare_data'))} --dataset {config.dataset} --data_path {path}"
        elif is_own(config.dataset):
            remedy = str(error).partition("\n")[2] or "docs/own_model.md says what the function returns"
        return Finding("data", "fail", str(error).splitlines()[0], remedy), (3, image_side(config), image_side(config))
    count = f"{len(dataset.train.labels):,} + {len(dataset.valid.labels):,} images"
    return Finding("data", "ok", f"{dataset.name}: {count}"), dataset.train.image_shape


def names_to_resolve(environment: Mapping[str, str]) -> list[str]:
    """This host's name, and that of rank 0's host where a launcher names it."""
    from utils.distributed.launch import first_host

    nodes = environment.get("SLURM_JOB_NODELIST", "")
    names = [socket.gethostname(), environment.get("MASTER_ADDR"), first_host(nodes) if nodes else None]
    return list(dict.fromkeys(filter(None, names)))


def check_names(names: Sequence[str], resolve: Callable[[str], Any] | None = None) -> Finding:
    """Whether the names resolve: ranks find each other by them."""
    for name in names:
        try:
            (resolve or socket.gethostbyname)(name)
        except OSError as error:
            remedy = "add it to /etc/hosts or the DNS, or set MASTER_ADDR to an address that all nodes reach"
            return Finding("host names", "fail", f"{name} does not resolve: {error}", remedy)
    return Finding("host names", "ok", f"{', '.join(names)} resolve")


def describe_affinity() -> str:
    """The cores that this process may use, and what in its environment binds threads to some of them."""
    allowed = os.sched_getaffinity(0)
    starts = sorted(core for core in allowed if core - 1 not in allowed)
    ends = sorted(core for core in allowed if core + 1 not in allowed)
    spans = zip(starts, ends, strict=True)
    cores = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return ", ".join([f"cores {cores}", *(f"{name}={os.environ[name]}" for name in BINDING if name in os.environ)])


def check_threads(cores: int, local_ranks: int, threads: int, workers: int, affinity: str) -> Finding:
    """Whether threads and loader workers of all ranks fit the cores that this process may use."""
    seen = f"{cores} cores for {local_ranks} rank(s) of {threads} thread(s) and {workers} loader worker(s); {affinity}"
    if local_ranks * threads > cores:
        remedy = f"OMP_NUM_THREADS={max(1, cores // local_ranks)}: more threads than cores are slower than one"
        return Finding("threads", "warn", seen, remedy)
    if local_ranks * (workers + 1) > 2 * cores:
        remedy = "more cores from the scheduler (--cpus-per-task), fewer num_data_workers, or data_loader=device"
        return Finding("threads", "warn", seen, remedy)
    return Finding("threads", "ok", seen)


# ---- devices


def device_checks(own: "torch.device", *, alone: bool) -> list[Finding]:
    """Ceilings of this rank's own device, or of all that it sees where it is alone on its node."""
    import torch

    from tools.bench.limits import host_to_device, memory

    if own.type != "cuda":
        seen = f"CPU: {1e3 * arithmetic(own):,.0f} GFLOP/s in float32, memory {memory(own, TRIALS).median:.1f} GB/s"
        return [Finding("ceilings", "ok", seen)]
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] if alone else [own]
    findings, rates = [], []
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        rate = arithmetic(device)
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        rates.append((name, rate))
        seen = (
            f"{name}: {rate:,.0f} TFLOP/s in bf16, memory {memory(device, TRIALS).median:,.0f} GB/s, "
            f"from the host {host_to_device(device, TRIALS).median:.1f} GB/s, {free / GIGABYTE:.0f} of "
            f"{total / GIGABYTE:.0f} GB free"
        )
        busy = free < 0.8 * total
        remedy = "another process holds its memory: nvidia-smi shows which" if busy else ""
        findings.append(Finding("ceilings", "warn" if busy else "ok", seen, remedy))
    return findings + [finding for finding in check_rates(rates, "slow device") if finding.level != "ok"]


def arithmetic(device: "torch.device") -> float:
    """TFLOP/s in the number format that training on this device uses; the best of the trials, since others may use the
    machine for a moment."""
    import torch

    from tools.bench.limits import product

    return max(product(device, torch.bfloat16 if device.type == "cuda" else torch.float32, TRIALS).values)


def check_rates(rates: Sequence[tuple[str, float]], check: str) -> list[Finding]:
    """Names every one that is slower than the median of the others by 15 %: all wait for it. `rates`: (name, per
    second)."""
    from utils.training.watch import medians_of_the_others

    others = medians_of_the_others([rate for _, rate in rates]) if len(rates) > 1 else []
    remedy = "look for another process, heat or a power limit there (nvidia-smi -q -d PERFORMANCE); leave the node out"
    slow = [
        Finding(check, "fail", f"{name} takes {other / rate:.2f} times the median of the others", remedy)
        for (name, rate), other in zip(rates, others, strict=False)
        if rate * SLOW < other
    ]
    return slow or [Finding(check, "ok", f"none of {len(rates)} is 15 % slower than the others")]


# ---- ranks together


def check_meeting(seconds: float, world_size: int) -> Finding:
    """How long the ranks took to find each other, the import of PyTorch included."""
    seen = f"{world_size} ranks met after {seconds:.1f} s"
    if seconds > 60:
        return Finding("rendezvous", "warn", seen, "a slow file system under Python?")
    return Finding("rendezvous", "ok", seen)


def clock_offsets(world: "World", rounds: int = 5) -> list[float]:
    """Collective: seconds by which each rank's clock is ahead of rank 0's; the rounds' median, since leaving a barrier
    takes a moment that differs."""
    seen = []
    for _ in range(rounds):
        world.barrier()
        times = world.gather(time.time())
        seen.append([moment - times[0] for moment in times])
    return [statistics.median(column) for column in zip(*seen, strict=True)]


def check_clocks(offsets: Sequence[float], allowed: float = 1.0) -> Finding:
    """Whether the clocks agree: logs of several nodes are read together."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    seen = f"clocks differ by at most {abs(offsets[worst]):.3f} s (rank {worst})"
    if abs(offsets[worst]) > allowed:
        return Finding("clocks", "warn", seen, "is chrony or ntpd running on its node?")
    return Finding("clocks", "ok", seen)


def check_all_reduce(rate: float, world: "World") -> Finding:
    """The bandwidth that gradients get, GB/s."""
    seen = f"100 MB over {world.world_size} ranks: {rate:.2f} GB/s"
    if world.device.type == "cuda" and rate < SLOW_ALL_REDUCE:
        remedy = "NCCL_DEBUG=INFO prints which network it took; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another"
        return Finding("all-reduce", "warn", seen, remedy)
    return Finding("all-reduce", "ok", seen)


# ---- printing


def render(findings: Sequence[Finding], worst: str) -> list[str]:
    """A line for each finding, its remedy below; what is the same on several nodes is printed once."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        merged.setdefault((finding.check, finding.level, finding.message, finding.remedy), []).append(finding.where)
    several = len({finding.where for finding in findings if finding.where}) > 1
    lines = []
    for (check, level, message, remedy), origins in merged.items():
        named = [where for where in origins if where] if several else []
        suffix = f"  [{named[0] if len(named) == 1 else f'{len(named)} alike'}]" if named else ""
        lines.append(f"{level:4}  {check:14} {message}{suffix}")
        if remedy and level != "ok":
            lines.append(f"      {'':14} -> {remedy}")
    counts = {level: sum(key[1] == level for key in merged) for level in LEVELS}
    lines.append(f"{worst}: " + ", ".join(f"{count} {level}" for level, count in counts.items()))
    return lines


def render_json(findings: Sequence[Finding], worst: str) -> str:
    """The same for a program."""
    return json.dumps({"worst": worst, "findings": [asdict(finding) for finding in findings]}, indent=1)


if __name__ == "__main__":
    sys.exit(main())
