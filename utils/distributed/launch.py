"""What the launcher says of a process: its rank, how many there are, and where they meet. No torch, no side effects.

The same command line runs under `python`, `torchrun`, `srun` and `mpirun`; each leaves its own variables.
"""

import os
import re
import sys
import uuid
import zlib
from collections import namedtuple
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from utils.errors import ConfigError

# What distinguishes one job from another, the same for all its ranks; the first that is set counts. srun: job and step.
SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
JOB_VARIABLES = ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", *SCHEDULER_VARIABLES)
SLURM_FIELDS = {
    "%a": ("SLURM_ARRAY_TASK_ID", "the index in an array of jobs of Slurm (sbatch --array)"),
    "%A": ("SLURM_ARRAY_JOB_ID", "the number of an array of jobs of Slurm (sbatch --array)"),
    "%j": ("SLURM_JOB_ID", "the number of a job of Slurm"),
}
# For torchrun's ranks of one machine, to meet in a file and on the loopback (docs/reliability.md). Each sign of life
# would be appended to the file; with one agent nothing waits for them.
LOOPBACK_OPTIONS = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file,keep_alive_interval=100000")
LOOPBACK_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # rank 0 serves the ranks' store, and not torchrun
FIRST_PORT, NUM_PORTS = 20000, 10000  # below 32768, where Linux begins to hand out ports by itself


# The names of a launcher's variables. The number of ranks on a node is empty for srun, whose variable is a list.
Launcher = namedtuple("Launcher", ("rank", "world_size", "local_rank", "local_world_size"))
TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # also set by hand
OPEN_MPI = Launcher(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
MPICH = Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# not SLURM_NTASKS, which is also set outside of a step, in a batch script or an interactive shell
SRUN = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


@dataclass(frozen=True)
class Launch:
    """This process among the others, and where rank 0's store is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""  # host name or address, empty with one process
    port: int = 0
    job: str = ""  # keeps jobs apart that meet at one port by mistake
    hosts_store: bool = True  # rank 0 serves the store; False: torchrun does

    @property
    def tells_for_its_node(self) -> bool:
        """One rank of each node, where all of them find out the same of rank 0."""
        return self.local_rank == 0 or self.rank == 1


def find_launch(environment: Mapping[str, str]) -> Launch:
    """The launcher's variables, checked; one process when there are none. `ConfigError` where they make no sense."""
    launcher = _find_launcher(environment)
    if launcher is None:
        return Launch()
    rank, world_size = _whole_number(environment, launcher.rank), _whole_number(environment, launcher.world_size)
    local_rank = _whole_number(environment, launcher.local_rank, default=0)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{launcher.rank} is {rank} and {launcher.world_size} is {world_size}; "
            f"ranks count from 0 to {launcher.world_size} - 1, start every process with its own"
        )
    if world_size == 1:
        return Launch(local_rank=local_rank)
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), "")
    if launcher == SRUN:
        job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_local_world_size(environment, launcher),
        address=_address(environment, launcher, world_size),
        port=_port(environment, launcher, job),
        job=job,
        hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def torchrun_here(processes: int, rendezvous: Path) -> tuple[list[str], dict[str, str]]:
    """(the words before the program, what to add to the environment) for ranks on this machine alone.

    `rendezvous` is the file where torchrun lists its agents; no two starts may share it, and torchrun leaves it there.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *LOOPBACK_OPTIONS]
    return [*command, f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={uuid.uuid4().hex}"], LOOPBACK_VARIABLES


def in_batch_job(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler started this process: Slurm, PBS or LSF."""
    return any(environment.get(name) for name in SCHEDULER_VARIABLES)


def fill_in_job(option: str, text: str, environment: Mapping[str, str]) -> str:
    """`text` with what Slurm says of this job in the place of %a, %A and %j, as in the names of sbatch --output; %% is
    a percent sign. `ConfigError`, which names the `option`, outside of such a job."""

    def fill_in(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match[0] not in SLURM_FIELDS:
            raise ConfigError(f"{option} {text}: {match[0]} is not known; allowed: {', '.join(SLURM_FIELDS)}, %% for %")
        variable, meaning = SLURM_FIELDS[match[0]]
        if not environment.get(variable):
            raise ConfigError(f"{option} {text}: {match[0]} is {meaning}, but {variable} is not set here; %% means %")
        return environment[variable]

    return re.sub("%.?", fill_in, text)


def was_restarted(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started this run before and starts it again by itself."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(environment.get(name, "0") not in ("", "0") for name in counts)


def job_name(environment: Mapping[str, str]) -> str:
    """The job that this process belongs to, which keeps its name when it is started again; empty outside of one."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    return environment.get("SLURM_JOB_ID") or (_name_torchrun() if run == "none" else run)


def _name_torchrun() -> str:
    """torchrun's process, for runs that nobody named: it stays the same when it starts its ranks again."""
    process = os.getppid()
    try:  # the 22nd field, when it began: in containers every torchrun may have the same number
        began = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        began = ""
    return f"torchrun {process} {began}"


def first_host(node_list: str) -> str:
    """The first name in Slurm's notation: `gpu[03-05,9],cpu1` -> `gpu03`. Needs no scontrol."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]  # at commas outside of brackets
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them shortened: `rank 3`, `ranks 1-3, 7`."""
    ordered = sorted(ranks)
    parts: list[str] = []
    # within a run, a rank and its index grow together
    for _, pairs in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def _find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The first launcher whose variables are there. torchrun inside srun sets both its own and srun's, and so does
    mpirun inside a Slurm job: srun comes last."""
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        return TORCHRUN
    for launcher in (OPEN_MPI, MPICH, SRUN):
        if all(environment.get(name) for name in launcher[:3]):
            return launcher
    for name, absent, alone in (("RANK", "WORLD_SIZE", "0"), ("WORLD_SIZE", "RANK", "1")):
        value = environment.get(name)
        if value and value != alone:
            raise ConfigError(f"{name} is {value} but {absent} is not set; start with torchrun, or unset {name}")
    return None


def _whole_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"{name} is {text!r}; expected a whole number, as a launcher sets it")
    return int(text)


def _local_world_size(environment: Mapping[str, str], launcher: Launcher) -> int:
    if launcher != SRUN:
        return _whole_number(environment, launcher.local_world_size, default=1)
    # tasks of each node in turn, such as 4(x2),3
    tasks: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = part.rstrip(")").partition("(x")
        tasks += [int(number)] * int(times or 1)
    return tasks[_whole_number(environment, "SLURM_NODEID", default=0) % len(tasks)]


def _address(environment: Mapping[str, str], launcher: Launcher, world_size: int) -> str:
    """MASTER_ADDR, or this machine where all ranks are on it, or the first node of the Slurm step or job."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if launcher != TORCHRUN:
        if environment.get(launcher.local_world_size) == str(world_size):
            return "127.0.0.1"
        # a step's list is that of the ranks only where srun started them
        nodes = environment.get("SLURM_STEP_NODELIST") if launcher == SRUN else None
        nodes = nodes or environment.get("SLURM_JOB_NODELIST")
        if nodes:
            return first_host(nodes)
    raise ConfigError(
        f"{launcher.rank} is set but MASTER_ADDR is not; set it to the host of rank 0 in every process "
        "(mpirun -x MASTER_ADDR=HOST), or start with torchrun"
    )


def _port(environment: Mapping[str, str], launcher: Launcher, job: str) -> int:
    """MASTER_PORT, or one that follows from the job, so that two jobs on a node do not meet."""
    if environment.get("MASTER_PORT"):
        port = _whole_number(environment, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT is {port}; allowed: 1 to 65535")
        return port
    if launcher == SRUN:
        # neighbouring jobs, and seven steps of one, keep apart; then the numbers start again
        number, step = (_whole_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return FIRST_PORT + (7 * number + step) % NUM_PORTS
    if not job:
        raise ConfigError(
            f"{launcher.rank} is set but MASTER_PORT is not, and no variable names the job; "
            "set MASTER_PORT to the same free port in every process"
        )
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
