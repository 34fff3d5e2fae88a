"""Read rank, world size and rendezvous address from the launcher's variables. No torch, no side effects.

The same command line runs under `python`, `torchrun`, `srun` and `mpirun`; each sets its own variables.
"""

import os
import re
import sys
import uuid
import zlib
from collections import namedtuple
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from utils.errors import ConfigError

SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Names of the job, the same for all its ranks; the first that is set counts. srun: job and step.
JOB_VARIABLES = ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", *SCHEDULER_VARIABLES)
SLURM_FIELDS = {"%a": "SLURM_ARRAY_TASK_ID", "%A": "SLURM_ARRAY_JOB_ID", "%j": "SLURM_JOB_ID"}
# torchrun's rendezvous through a file, for the ranks of one machine (docs/distributed.md). The long interval stops
# torchrun from appending keep-alives to the file, which a single agent does not need.
LOOPBACK_OPTIONS = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file,keep_alive_interval=100000")
LOOPBACK_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # rank 0 serves the ranks' store, not torchrun
FIRST_PORT, NUM_PORTS = 20000, 10000  # below 32768, where Linux's ephemeral ports begin

# The names of a launcher's variables. srun has a list of tasks per node instead of `local_world_size`.
Launcher = namedtuple("Launcher", ("rank", "world_size", "local_rank", "local_world_size"))
TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # also set by hand
OPEN_MPI = Launcher(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
MPICH = Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
PALS = Launcher("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")  # mpiexec of HPE Cray
# not SLURM_NTASKS, which is also set outside of a step, in a batch script or an interactive shell
SRUN = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks, and the address of rank 0's store."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""  # host name or address, empty with one process
    port: int = 0
    job: str = ""  # separates jobs that use the same port by mistake
    hosts_store: bool = True  # rank 0 serves the store; False: torchrun does


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Read and check the launcher's variables; without any, there is one process. Raises `ConfigError`."""
    launcher = _find_launcher(environment)
    if launcher is None:
        return Launch()
    rank, world_size = _whole_number(environment, launcher.rank), _whole_number(environment, launcher.world_size)
    local_rank = _whole_number(environment, launcher.local_rank, default="0")
    if not 0 <= rank < world_size:
        raise ConfigError(f"{launcher.rank} is {rank} and {launcher.world_size} is {world_size}; ranks count from 0")
    if world_size == 1:
        return Launch(local_rank=local_rank)
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), "")
    if launcher == SRUN:
        job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    place = (rank, world_size, local_rank, _local_world_size(environment, launcher))
    address, port = _address(environment, launcher, world_size), _port(environment, launcher, job)
    return Launch(*place, address, port, job, environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def torchrun_here(processes: int, rendezvous: Path) -> tuple[list[str], dict[str, str]]:
    """Return (command before the program, environment variables to add) for ranks on this machine only.
    `rendezvous`: a new file, in which torchrun lists its agents and which it leaves there."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *LOOPBACK_OPTIONS]
    return [*command, f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={uuid.uuid4().hex}"], LOOPBACK_VARIABLES


def fill_in_job(option: str, text: str, environment: Mapping[str, str]) -> str:
    """Replace %a, %A and %j in `text` by numbers of this Slurm job, as sbatch --output does; %% is a percent sign.
    Raises `ConfigError` naming the `option` outside of such a job."""

    def fill_in(match: re.Match[str]) -> str:
        variable = SLURM_FIELDS.get(match[0], "")
        if not variable and match[0] != "%%":
            raise ConfigError(f"{option} {text}: {match[0]} is not known; allowed: {', '.join(SLURM_FIELDS)}, %% for %")
        if variable and not environment.get(variable):
            raise ConfigError(f"{option} {text}: {match[0]} is {variable}, which is not set here; %% means %")
        return environment[variable] if variable else "%"

    # in --set, whose values may have percent signs, only if a field is there
    return text if option == "--set" and not re.search("%[aAj]", text) else re.sub("%.?", fill_in, text)


def was_restarted(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or Slurm has automatically restarted this run."""
    return any(environment.get(f"{name}_RESTART_COUNT", "0") not in ("", "0") for name in ("TORCHELASTIC", "SLURM"))


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of this process's job, which stays the same when it is restarted; empty outside of a job."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if environment.get("SLURM_JOB_ID") or run != "none":
        return environment.get("SLURM_JOB_ID") or run
    # torchrun calls every unnamed run "none"; its process and start time (field 22) stay the same over restarts. In
    # containers every torchrun may have the same process number.
    process, started = os.getppid(), ""
    with suppress(OSError):
        started = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"torchrun {process} {started}"


def first_host(node_list: str) -> str:
    """Return the first host of a list in Slurm's notation: `gpu[03-05,9],cpu1` -> `gpu03`. Needs no scontrol."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]  # split at commas outside of brackets
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks, with consecutive ones as a range: `rank 3`, `ranks 1-3, 7`."""
    parts: list[str] = []
    # consecutive ranks have the same difference from their index
    for _, pairs in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    return f"rank{'s' if parts[1:] or '-' in parts[0] else ''} {', '.join(parts)}"


def _find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the first launcher whose variables are set. srun comes late: its variables are also set for torchrun or
    mpirun inside a Slurm job. `srun --mpi=pmi2` sets some of PALS's."""
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        return TORCHRUN
    for launcher in (OPEN_MPI, MPICH, SRUN, PALS):
        if all(environment.get(name) for name in launcher[:3]):
            return launcher
    for name, absent, alone in (("RANK", "WORLD_SIZE", "0"), ("WORLD_SIZE", "RANK", "1")):
        if (value := environment.get(name, "")) not in ("", alone):
            raise ConfigError(f"{name} is {value} but {absent} is not set; start with torchrun, or unset {name}")
    return None


def _whole_number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name) or default
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"{name} is {text!r}; expected a whole number, as a launcher sets it")
    return int(text)


def _local_world_size(environment: Mapping[str, str], launcher: Launcher) -> int:
    if launcher != SRUN:
        return _whole_number(environment, launcher.local_world_size, default="1")
    # tasks per node, such as 4(x2),3
    tasks: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = part.rstrip(")").partition("(x")
        tasks += [int(number)] * int(times or 1)
    return tasks[_whole_number(environment, "SLURM_NODEID", default="0") % len(tasks)]


def _address(environment: Mapping[str, str], launcher: Launcher, world_size: int) -> str:
    """Return MASTER_ADDR, or this machine if all ranks are on it, or the first node of the Slurm step or job."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if launcher != TORCHRUN:
        if environment.get(launcher.local_world_size) == str(world_size):
            return "127.0.0.1"
        # the step's list is the list of the ranks' nodes only if srun started them
        nodes = environment.get("SLURM_STEP_NODELIST") if launcher == SRUN else None
        if nodes := nodes or environment.get("SLURM_JOB_NODELIST"):
            return first_host(nodes)
    raise ConfigError(f"{launcher.rank} is set but MASTER_ADDR is not; set it to the host of rank 0 (mpirun -x)")


def _port(environment: Mapping[str, str], launcher: Launcher, job: str) -> int:
    """Return MASTER_PORT, or a port derived from the job, so that two jobs on a node do not collide."""
    if environment.get("MASTER_PORT"):
        port = _whole_number(environment, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT is {port}; allowed: 1 to 65535")
        return port
    if not job:
        raise ConfigError(f"{launcher.rank} is set but MASTER_PORT is not; set it to the same port in every process")
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
