"""Ranks find each other under each launcher."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import utils.distributed.ranks
import utils.distributed.world
from tests.conftest import as_options
from tests.processes import ROOT, wait_until, without_launcher
from utils.distributed import launch as launchers
from utils.distributed.launch import Launch, find_launch, first_host, job_name, torchrun_here, was_restarted
from utils.distributed.world import World, choose_device
from utils.errors import ConfigError
from utils.quotas import cpu_quota, memory_limit, usable_cores

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1001", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]", "SLURM_JOB_NODELIST": "gpu[03-04,9],login", "SLURM_NTASKS": "6"}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "95158273"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "5000"}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PBS_JOBID": "7.pbs"}
STEP = Launch(5, 6, 1, 2, "gpu03", 24343, "1001.2")


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, Launch()), (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, Launch(local_rank=1)),
    (TORCHRUN, Launch(3, 4, 1, 2, "node1", 1234, "abc", hosts_store=False)), (SRUN, STEP),
    (SRUN | {"SLURM_STEP_NODELIST": "gpu9"}, replace(STEP, address="gpu9")),  # a part of the job
    (OPEN_MPI, Launch(1, 2, 1, 2, "127.0.0.1", 22358, "95158273")), (MPICH, Launch(1, 2, 1, 2, "127.0.0.1", 5000, "")),
    (PALS, Launch(1, 2, 1, 2, "127.0.0.1", find_launch(PALS).port, "7.pbs")),
    (MPICH | {"LSB_JOBID": "8"}, Launch(1, 2, 1, 2, "127.0.0.1", 5000, "8")), (SRUN | PALS, STEP),
    (SRUN | TORCHRUN, Launch(3, 4, 1, 2, "node1", 1234, "abc", hosts_store=False)),
    # mpirun over two nodes of a Slurm job, which starts the remote ranks with srun
    (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Launch(1, 2, 1, 1, "gpu03", 22358, "95158273")),
    (SRUN | {"MASTER_ADDR": "fast-gpu03", "MASTER_PORT": "99"}, Launch(5, 6, 1, 2, "fast-gpu03", 99, "1001.2")),
    # a batch script and an interactive shell have SLURM_NTASKS and SLURM_PROCID, but are no step of so many tasks
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Launch())])  # fmt: skip
def test_place_under_each_launcher(environment, expected):
    assert find_launch(environment) == expected


@pytest.mark.parametrize(("environment", "message"), [
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"), ({"RANK": "1"}, "RANK is 1 but WORLD_SIZE is not"),
    (TORCHRUN | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; ranks count from 0"),
    (TORCHRUN | {"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'; expected a whole number"),
    (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; allowed: 1 to 65535"),
    (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0; allowed: 1 to 65535"),
    (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set it to the host of rank 0"),
    (MPICH | {"MASTER_PORT": ""}, "MASTER_PORT is not")])  # fmt: skip
def test_invalid_variables_are_named(environment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_launch(environment)


def test_nodes_and_tasks_in_slurms_notation_and_names_of_ranks():
    hosts = {"node1,node2": "node1", "gpu[9,03-05],cpu1": "gpu9", "rack[2-3]n[07-09]": "rack2n07"}
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts
    for node, tasks in (("0", 4), ("1", 4), ("2", 3)):
        ranks = {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": node}
        assert find_launch(SRUN | ranks).local_world_size == tasks
    assert [*map(launchers.name_ranks, ([3], [7, 1, 2, 3], [0, 1]))] == ["rank 3", "ranks 1-3, 7", "ranks 0, 1"]


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_visible_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (choose_device("auto", 1), choose_device("cpu", 1)) == (torch.device("cuda", 1), torch.device("cpu"))
    with pytest.raises(ConfigError, match="rank 2 of this node has no GPU: 2 here; start one process per GPU"):
        choose_device("auto", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="rank 1 of this node has no GPU: 1 here"):
        choose_device("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_device("cuda", 1) == torch.device("cuda", 0)
    monkeypatch.setattr(os, "environ", TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"})
    monkeypatch.setattr(utils.distributed.ranks, "choose_device", chosen := Mock(side_effect=ConfigError("none")))
    assert utils.distributed.ranks.run_ranks(lambda world: None, "auto", 9) == 2
    chosen.assert_called_once_with("auto", 1)
    assert capsys.readouterr().err == "error: none\n"


def test_a_job_keeps_its_name_when_it_is_restarted():
    assert was_restarted({"TORCHELASTIC_RESTART_COUNT": "2"}) and was_restarted({"SLURM_RESTART_COUNT": "1"})
    assert not was_restarted({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": ""})
    assert job_name({}) == "" and job_name({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}) == "7"
    assert job_name({"TORCHELASTIC_RUN_ID": "abc"}) == "abc"
    # torchrun calls every unnamed run "none": its process is the name
    name = job_name({"TORCHELASTIC_RUN_ID": "none"})
    assert name == job_name({"TORCHELASTIC_RUN_ID": "none"}) and name.startswith(f"torchrun {os.getppid()} ")
    code = "import os; from utils.distributed.launch import job_name; print(job_name(os.environ))"
    other = launch("sh", "-c", f"{sys.executable} -c '{code}'; true", TORCHELASTIC_RUN_ID="none").stdout.strip()
    assert other.startswith("torchrun ") and int(other.split()[2]) > int(name.split()[2]), "it started later"


@pytest.mark.parametrize(("places", "quota", "cores"), [
    ([("here", [0, 1]), ("here", [0, 1]), ("there", [0, 1])], inf, 1),  # two ranks share two cores
    ([("here", [0, 1, 2, 3]), ("here", [4, 5, 6])], inf, 3),  # bound to different cores
    ([("here", [0, 1]), ("here", [4, 5, 6, 7]), ("there", [0])], 6, 3),  # which share their node's quota
    ([("here", [0])], 0.5, 0.5)])  # fmt: skip
def test_ranks_of_a_machine_share_its_cores(monkeypatch, places, quota, cores):
    for module in (utils.distributed.world, utils.quotas):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    monkeypatch.setattr(World, "all_gather", lambda *_: places)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert World(len(places) // 2, 0, len(places), torch.device("cpu")).count_cores() == cores
    assert usable_cores() == max(1, min(quota, 4))


@pytest.mark.parametrize(("ranks", "cores", "variable", "threads"), [
    # its cores; fewer than PyTorch would take; the user or torchrun decides; PyTorch does
    (4, 16, None, [16]), (1, 2.5, None, [2]), (1, 0.5, None, [1]), (4, 1.5, "3", []), (1, 16, None, [])])  # fmt: skip
def test_a_rank_has_as_many_threads_as_cores(monkeypatch, ranks, cores, variable, threads):
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "environ", {} if variable is None else {"OMP_NUM_THREADS": variable})
    utils.distributed.ranks._set_threads(SimpleNamespace(world_size=ranks, count_cores=lambda: cores))
    assert chosen == threads


OWN, V1 = "0::/pod/own\n", "6:cpuset:/set\n5:cpu,cpuacct:/pod/own\n4:memory:/pod/own\n0::/pod/own\n"


@pytest.mark.parametrize(("name", "limits"), {  # content of /proc/self/cgroup, files in /sys/fs/cgroup, cores, bytes
    "v2": (OWN, {"pod/own/cpu.max": "150000 100000", "pod/own/memory.max": "1000"}, 1.5, 1000),
    "v2, parents": (OWN, {"pod/own/cpu.max": "4 1", "pod/cpu.max": "2 1", "cpu.max": "3 1", "memory.max": "7"}, 2, 7),
    "v2, none": (OWN, {"pod/own/cpu.max": "max 100000", "pod/own/memory.max": "max"}, inf, inf),
    "v1": (V1, {"cpu/pod/own/cpu.cfs_quota_us": "50000", "cpu/pod/own/cpu.cfs_period_us": "100000",
                "memory/pod/own/memory.limit_in_bytes": "9", "memory/pod/memory.limit_in_bytes": "99"}, 0.5, 9),
    "v1, in a container": (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000",
                                "cpu/set/cpu.cfs_quota_us": "1", "cpu/set/cpu.cfs_period_us": "1"}, 3, inf),
    "v1, none": (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, inf, inf),
    "malformed": (OWN, {"pod/own/cpu.max": "wide", "pod/cpu.max": "1 0", "pod/own/memory.max": ""}, inf, inf),
    "another program's": ("no line\n", {"pod/own/cpu.max": "1 1"}, inf, inf),
    "missing": (None, {"pod/own/cpu.max": "1 1"}, inf, inf)}.items())  # fmt: skip
def test_the_smallest_limit_of_the_cgroups_counts(name, limits, tmp_path):
    own, files, cores, memory = limits
    files = {f"sys/fs/cgroup/{path}": text for path, text in files.items()} | {"proc/self/cgroup": own}
    for path, text in files.items():
        if text is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (cores, memory)


def test_page_and_script_restrict_torchrun_to_the_loopback_like_the_tools():
    page, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/distributed.md", "submit.slr"))
    options, variables = launchers.LOOPBACK_OPTIONS, launchers.LOOPBACK_VARIABLES
    assert all(word in page for word in [*options, *(f"{name}={value}" for name, value in variables.items())])
    assert "store=" + options[1].partition("store_type=")[2] in script and f"export {next(iter(variables))}=1" in script


SETTINGS = {"device": "cpu", "max_epochs": 3, "limit_train_batches": 4, "limit_valid_batches": 1}
SHORT = ("train.py", "--config=quickstart", *as_options(SETTINGS | {"log_to_tensorboard": False}))
# For torchrun. Trains, and rank 1 is killed in its second epoch. With "listen", rank 0 prints the local addresses, in
# hexadecimal, at which torchrun and the ranks listen, each once; the first start fails.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import train
from utils.distributed.ranks import run_ranks

is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
whole = train.Trainer.train_one_epoch

def epoch(self):
    if (self.run.epoch, self.world.rank, is_first) == (1, 1, True):
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self)

def listen(world):
    if is_first:
        os._exit(1)
    ranks = world.all_gather(os.getpid())
    rows = [row.split() for table in Path("/proc/net").glob("tcp*") for row in table.read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}
    opened = [link for pid in (os.getppid(), *ranks) for link in Path(f"/proc/{pid}/fd").iterdir()]
    if world.is_main:
        targets = {os.readlink(link) for link in opened if os.path.lexists(link)}
        print(*sorted({listening[target] for target in targets & listening.keys()}))
    world.barrier()

train.Trainer.train_one_epoch = epoch
sys.exit(run_ranks(listen, "cpu", 60) if sys.argv[1:] == ["listen"] else train.main(train.parse_arguments()))
"""


def launch(*command, **variables):
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def test_starting_ranks_end_when_torchrun_is_killed(tmp_path):
    command, variables = torchrun_here(2, tmp_path / "rendezvous")
    command, quiet = [*command, *SHORT, f"--run-dir={tmp_path}/run"], subprocess.DEVNULL
    environment = without_launcher(os.environ) | variables
    agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    try:
        wait_until("two ranks that import torch", 150, lambda: len(have_torch(children.read_text().split())) == 2)
        ranks = children.read_text().split()
    finally:
        agent.kill()
        agent.wait()
    wait_until("end of the ranks", 60, lambda: not have_torch(ranks))


def have_torch(processes):
    """Return the memory maps of the processes that have loaded torch and have not ended."""
    command = ["grep", "-ls", "libtorch_cpu", "/dev/null", *(f"/proc/{process}/maps" for process in processes)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.split()


@pytest.mark.slow
def test_torchrun_can_be_restricted_to_the_loopback(tmp_path, program):
    """Also after a restart of its ranks. GLOO_SOCKET_IFNAME restricts gloo's sockets."""
    command, variables = torchrun_here(2, tmp_path / "rendezvous")
    finished = launch(*command, "--max-restarts=1", program, "listen", GLOO_SOCKET_IFNAME="lo", **variables)
    assert (finished.returncode, finished.stdout.split()) == (0, ["0100007F"]), finished.stderr  # 127.0.0.1


@pytest.mark.slow
def test_mpirun_of_open_mpi(tmp_path):
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if mpirun is None or not re.search("OpenRTE|Open MPI", launch(mpirun, "--version").stdout):
        pytest.skip("no mpirun of Open MPI here (Debian: openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    program = [sys.executable, *SHORT, "--run-dir", str(tmp_path / "run")]
    ended = launch(mpirun, *root, "--oversubscribe", "-n", "2", *program)
    assert ended.returncode == 0 and "128 = 2 rank(s) x 1 accumulated x 64 images" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_torchrun_resumes_after_a_killed_worker(tmp_path, program):
    """torchrun restarts both ranks, and they resume from the first epoch's end."""
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    ended = launch(*torchrun, program, *SHORT[1:], "--resume", "never", "--run-dir", str(run))
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"error: rank 0: no answer from rank 1 \(process \d+ on ", ended.stderr)
    assert "epoch 2, batch 0, step 4" in ended.stdout and "Finished" in ended.stdout
    assert not (tmp_path / "run.1").exists()
