"""Ranks find each other under each launcher, and all of them leave when one fails."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import utils.distributed.ranks
import utils.distributed.rendezvous
from tests.processes import (
    PYTHON,
    ROOT,
    Job,
    complaints,
    free_port,
    run_job,
    torchrun_variables,
    wait_until,
    without_launcher,
)
from utils.distributed.launch import (
    LOOPBACK_OPTIONS,
    LOOPBACK_VARIABLES,
    Launch,
    find_launch,
    first_host,
    job_name,
    name_ranks,
    torchrun_here,
    was_restarted,
)
from utils.distributed.ranks import run_ranks
from utils.distributed.rendezvous import Rendezvous
from utils.distributed.world import World, choose_device
from utils.errors import ConfigError, DataError, Stopped
from utils.files import FolderHeldError, lock_folder, sign_lock

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1001", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_JOB_NODELIST": "gpu[03-04,9],login", "SLURM_NTASKS": "6",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "95158273",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "5000"}

PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PBS_JOBID": "7.pbs"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        ({"WORLD_SIZE": "1"}, Launch()),
        (TORCHRUN, Launch(3, 4, 1, 2, "node1", 1234, "abc", hosts_store=False)),
        (SRUN, Launch(5, 6, 1, 2, "gpu03", 27009, "1001.2")),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu9"}, Launch(5, 6, 1, 2, "gpu9", 27009, "1001.2")),  # a part of the job
        (OPEN_MPI, Launch(1, 2, 1, 2, "127.0.0.1", 22358, "95158273")),
        (MPICH, Launch(1, 2, 1, 2, "127.0.0.1", 5000, "")),
        (PALS, Launch(1, 2, 1, 2, "127.0.0.1", find_launch(PALS).port, "7.pbs")),
        (SRUN | PALS, Launch(5, 6, 1, 2, "gpu03", 27009, "1001.2")),
        (SRUN | TORCHRUN, Launch(3, 4, 1, 2, "node1", 1234, "abc", hosts_store=False)),
        # mpirun over two nodes of a Slurm job, which starts the remote ranks with srun
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Launch(1, 2, 1, 1, "gpu03", 22358, "95158273")),
        (SRUN | {"MASTER_ADDR": "fast-gpu03", "MASTER_PORT": "99"}, Launch(5, 6, 1, 2, "fast-gpu03", 99, "1001.2")),
        # a batch script and an interactive shell have SLURM_NTASKS and SLURM_PROCID, but are no step of so many tasks
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Launch()),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, Launch()),
    ],
)
def test_place_under_each_launcher(environment: dict[str, str], expected: Launch) -> None:
    assert find_launch(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"),
        ({"RANK": "1"}, "RANK is 1 but WORLD_SIZE is not set"),
        (TORCHRUN | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; ranks count from 0 to WORLD_SIZE - 1"),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
        (TORCHRUN | {"RANK": "first"}, "RANK is 'first'; expected a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'; expected a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; allowed: 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set it to the host of rank 0"),
        (MPICH | {"MASTER_PORT": ""}, "MASTER_PORT is not"),
    ],
)
def test_invalid_variables_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_launch(environment)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("rack[2-3]n[07-09]", "rack2n07"),
        ("gpu[1-2].cluster.local,x", "gpu1.cluster.local"),
    ],
)
def test_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3)])
def test_tasks_of_each_node_in_slurms_notation(node: int, tasks: int) -> None:
    ranks = {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)}
    assert find_launch(SRUN | ranks).local_world_size == tasks


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="rank 2 of this node has no GPU: 2 here; start one process per GPU"):
        choose_device("auto", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="rank 1 of this node has no GPU: 1 here"):
        choose_device("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_device("cuda", 1) == torch.device("cuda", 0)


def test_names_of_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 1, 2, 3]) == "ranks 1-3, 7"
    assert name_ranks([0, 1]) == "ranks 0, 1"


def test_neighbouring_jobs_and_steps_get_different_ports() -> None:
    places = [
        SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(500, 540) for step in range(7)
    ]
    ports = [find_launch(world).port for world in places]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 30000 for port in ports)


def test_restarts_are_recognised() -> None:
    assert not was_restarted({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert was_restarted({"TORCHELASTIC_RESTART_COUNT": "2"})
    assert was_restarted({"SLURM_RESTART_COUNT": "1"})


def test_a_job_keeps_its_name_when_it_is_restarted() -> None:
    assert job_name({}) == ""
    assert job_name({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}) == "7"
    assert job_name({"TORCHELASTIC_RUN_ID": "abc"}) == "abc"
    # torchrun calls every unnamed run "none": its process is the name
    name = job_name({"TORCHELASTIC_RUN_ID": "none"})
    assert name == job_name({"TORCHELASTIC_RUN_ID": "none"}) and name.startswith(f"torchrun {os.getppid()} ")
    code = "import os; from utils.distributed.launch import job_name; print(job_name(os.environ))"
    environment = without_launcher(os.environ) | {"TORCHELASTIC_RUN_ID": "none"}
    other = subprocess.run(
        ["sh", "-c", f"{PYTHON} -c '{code}'; true"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.startswith("torchrun ") and other.stdout.strip() != name


# ---- programs of the ranks below


def add_up(ranks: int) -> int:
    """Every rank prints the sum over all ranks."""

    def action(world: World) -> None:
        print(world.all_reduce(torch.tensor([1.0 + world.rank])).item(), world.world_size == ranks)

    return run_ranks(action, "cpu", 20)


def fail_on(rank: int, kind: str, others: str) -> int:
    """One rank fails, while the others wait in a collective or do something else that takes long."""
    utils.distributed.rendezvous.GRACE_SECONDS = 0.5

    def action(world: World) -> None:
        world.barrier()
        if world.rank == rank:
            time.sleep(0.3)
            if kind == "expected":
                raise DataError("the disk is gone\nbuy another")
            if kind == "unexpected":
                raise ValueError("what is this")
            os.kill(os.getpid(), signal.SIGKILL)
        if others == "collective":
            world.barrier()
        time.sleep(600)  # longer than Job.wait does

    return run_ranks(action, "cpu", 60)


def fail_on_the_main_process(folder: Path) -> int:
    """Rank 0 finds its folder locked, and raises the error later than the other ranks, which have it from rank 0."""

    def action(world: World) -> None:
        try:
            world.main_only(lambda: lock_folder(folder))
        except FolderHeldError as error:
            assert ", of the job 7; wait" in str(error)
            if world.is_main:
                time.sleep(0.5)
            raise

    return run_ranks(action, "cpu", 60)


def fail_like_nccl(rank: int) -> int:
    """One rank fails like NCCL, while all ranks still answer."""
    utils.distributed.rendezvous.GRACE_SECONDS = 0.5

    def action(world: World) -> None:
        world.barrier()
        if world.rank == rank:
            raise dist.DistBackendError(
                "NCCL error in: x.cpp:3, unhandled system error\n\nLast error:\nno space left\n"
            )
        time.sleep(60)

    return run_ranks(action, "cpu", 60)


def share_a_gpu() -> int:
    def refuse(world: World) -> None:
        raise ConfigError("one GPU for all")

    utils.distributed.ranks._refuse_shared_gpus = refuse
    return run_ranks(lambda world: None, "cpu", 60)


def print_addresses_of_the_store() -> int:
    """Rank 0 prints the local addresses, in hexadecimal, of the sockets that listen at MASTER_PORT."""

    def action(world: World) -> None:
        port, listening = f"{int(os.environ['MASTER_PORT']):04X}", "0A"
        rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()]
        found = [row[1].removesuffix(f":{port}") for row in rows if row[1].endswith(f":{port}") and row[3] == listening]
        if world.is_main:
            print(*found)

    return run_ranks(action, "cpu", 20)


def stop_on_request() -> int:
    def action(world: World) -> None:
        if world.is_main:
            time.sleep(0.5)  # rank 0 still writes the checkpoint
            print("saved", flush=True)
        raise Stopped("stopped with everything saved")

    return run_ranks(action, "cpu", 20)


def split_odd() -> int:
    """Run train.py with a batch that two ranks cannot share."""
    import train
    from utils.config.command_line import parse_arguments

    return train.main(parse_arguments(["--config=quickstart", "--set", "batch_size=33", "--set", "device=cpu"]))


def bad_command_line() -> int:
    from utils.config.command_line import parse_arguments

    try:
        parse_arguments(["--config=quickstart", "--set", "batch_size=none"])
    except SystemExit as leave:
        return int(str(leave.code))
    return 0


# ---- real ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_meet_and_leave(tmp_path: Path, world_size: int) -> None:
    ended = run_job(tmp_path, world_size, add_up, world_size)
    total = float(sum(range(1, world_size + 1)))
    assert [(process.status, process.output) for process in ended] == [(0, f"{total} True\n")] * world_size
    assert [process.errors for process in ended] == [""] * world_size


@pytest.mark.parametrize(("rank", "others"), [(0, "collective"), (1, "collective"), (1, "something else")])
def test_an_expected_failure_ends_all_and_is_printed_once(tmp_path: Path, rank: int, others: str) -> None:
    status = tmp_path / "status"
    ended = run_job(tmp_path, 3, fail_on, rank, "expected", others, TRAIN_EXIT_STATUS_FILE=str(status))
    assert status.read_text() == "3\n"
    assert [process.status for process in ended] == [3, 3, 3]
    assert complaints(ended) == [f"error: rank {rank}: the disk is gone", "buy another"]


def test_a_failure_of_the_main_process_is_not_blamed_on_another(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run") as lock:
        sign_lock(lock, "7")
        ended = run_job(tmp_path, 2, fail_on_the_main_process, tmp_path / "run")
    assert [process.status for process in ended] == [2, 2]
    assert [line.partition(": /")[0] for line in complaints(ended)[:1]] == ["error: rank 0"]
    assert len(complaints(ended)) == 1


def test_an_unexpected_failure_shows_one_traceback(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 3, fail_on, 1, "unexpected", "collective")
    assert [process.status for process in ended] == [1, 1, 1]
    lines = complaints(ended)
    assert lines[-1] == "error: rank 1: ValueError: what is this"
    assert sum(line.startswith("Traceback") for line in lines) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_named(tmp_path: Path, rank: int) -> None:
    ended = run_job(tmp_path, 3, fail_on, rank, "killed", "collective")
    assert ended[rank].status == -signal.SIGKILL
    assert [process.status for process in ended if process is not ended[rank]] == [1, 1]
    first, *rest = complaints(ended)
    assert f"rank {rank}" in first.partition("lost contact")[2]
    # with rank 0 the store is lost, so the others cannot report their collectives
    assert rest == ([] if rank == 0 else ["rank 2 does not answer; ranks 0, 1 wait in barrier number 2"])


def test_a_failing_library_is_reported_with_its_reason(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 2, fail_like_nccl, 1)
    assert [process.status for process in ended] == [1, 1]
    assert complaints(ended) == ["error: rank 1: NCCL error in: x.cpp:3, unhandled system error; no space left"]


def test_ranks_that_share_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneOfThree(World):
        def all_gather(self, value: tuple[str, str]) -> list[tuple[str, str]]:
            return [value, ("another node", value[1]), value]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    with pytest.raises(ConfigError, match="ranks 0, 2 share a GPU"):
        utils.distributed.ranks._refuse_shared_gpus(OneOfThree(0, 0, 3, torch.device("cuda", 0)))
    utils.distributed.ranks._refuse_shared_gpus(OneOfThree(0, 0, 3, torch.device("cpu")))


def test_ranks_that_share_a_gpu_end_before_they_train(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 2, share_a_gpu)
    assert [process.status for process in ended] == [2, 2]
    assert [re.sub(r"rank \d", "rank", line) for line in complaints(ended)] == ["error: rank: one GPU for all"]


def test_a_stop_ends_all_after_rank_0_has_saved(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 3, stop_on_request)
    assert [process.status for process in ended] == [75, 75, 75]
    assert complaints(ended) == ["stopped with everything saved"]
    assert ended[0].output == "saved\n"


def test_the_same_error_on_all_ranks_is_printed_once(tmp_path: Path) -> None:
    for function, words in (
        (split_odd, "batch_size 33 cannot be split evenly over 2 ranks"),
        (bad_command_line, 'batch_size is "none"'),
    ):
        ended = run_job(tmp_path / function.__name__, 2, function)
        assert [process.status for process in ended] == [2, 2]
        assert len(complaints(ended)) == 1
        assert words in complaints(ended)[0]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    port = free_port()
    ranks = [torchrun_variables(rank, 5, port) for rank in (0, 1)]
    ended = Job(tmp_path, wait_for_all, (10,), ranks).wait()
    assert [process.status for process in ended] == [1, 1]
    lines = complaints(ended)
    assert len(lines) == 2
    assert f"ranks 2-4 of 5 did not arrive at 127.0.0.1:{port} within 10 s (rank_timeout_seconds)" in lines[0]


def wait_for_all(seconds: float) -> int:
    return run_ranks(lambda world: None, "cpu", seconds)


def test_a_rank_without_rank_0_names_the_address(tmp_path: Path) -> None:
    port = free_port()
    ended = Job(tmp_path, wait_for_all, (2,), [torchrun_variables(1, 2, port) | {"LOCAL_RANK": "0"}]).wait()
    assert ended[0].status == 1
    assert f"error: rank 1: no answer from 127.0.0.1:{port}, where rank 0 should be, within 2 s" in ended[0].errors


def wait_for_torchruns_store() -> int:
    utils.distributed.rendezvous.STORE_SECONDS = 1.0
    return run_ranks(lambda world: None, "cpu", 600)


def test_ranks_do_not_wait_long_for_a_torchrun_that_is_gone(tmp_path: Path) -> None:
    port = free_port()
    rank = torchrun_variables(1, 2, port, LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="True")
    (ended,) = Job(tmp_path, wait_for_torchruns_store, (), [rank]).wait()
    assert ended.status == 1
    assert f"error: rank 1: no answer from 127.0.0.1:{port}, where torchrun should be, within 1 s" in ended.errors


@pytest.mark.parametrize("store", ["torchrun's", "rank 0's"])
def test_starting_ranks_end_when_torchrun_is_killed(tmp_path: Path, store: str) -> None:
    meeting, variables = torchrun_here(2, tmp_path / "rendezvous")
    options = meeting[3:] if store == "rank 0's" else ["--standalone", "--nproc_per_node=2"]
    agent = subprocess.Popen(
        [PYTHON, "-m", "torch.distributed.run", *options, *SHORT, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=without_launcher(os.environ) | (variables if store == "rank 0's" else {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    try:
        wait_until("two ranks that import torch", 150, lambda: len(have_torch(children.read_text().split())) == 2)
        ranks = children.read_text().split()
    finally:
        agent.kill()
        agent.wait()
    wait_until("end of the ranks", 60, lambda: not have_torch(ranks))


def have_torch(processes: list[str]) -> list[str]:
    """Return the processes that have loaded torch and have not ended."""
    maps = {process: Path(f"/proc/{process}/maps") for process in processes}
    return [process for process, file in maps.items() if file.exists() and "libtorch_cpu" in file.read_text()]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    ended = Job(tmp_path, wait_for_all, (2,), [torchrun_variables(0, 2, store.port)]).wait()
    assert ended[0].status == 2
    assert re.fullmatch(rf"error: rank 0: port {store.port} on \S+ is in use, .*MASTER_PORT.*\n", ended[0].errors)


def wait_one_second_for_the_store() -> int:
    utils.distributed.rendezvous.STORE_SECONDS = 1.0
    return wait_for_all(2)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_a_rank_does_not_wait_forever_for_another_program_at_the_port(tmp_path: Path, answer: bytes) -> None:
    """As PyTorch itself would, whether the program answers or not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        rank = torchrun_variables(1, 2, port) | {"LOCAL_RANK": "0"}
        (ended,) = Job(tmp_path, wait_one_second_for_the_store, (), [rank]).wait()
        server.shutdown(socket.SHUT_RDWR)
    assert ended.status == 1
    first, second = complaints([ended])
    assert f"error: rank 1: 127.0.0.1:{port} is open, but rank 0 of this run does not answer there" in first
    assert second == "set MASTER_PORT to a free one in every process"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize("one_node", [True, False])
def test_the_store_of_one_node_answers_that_node_only(tmp_path: Path, one_node: bool) -> None:
    port = free_port()
    ranks = [torchrun_variables(rank, 2, port) for rank in range(2)]
    if not one_node:
        elsewhere = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        ranks = [variables | elsewhere for variables in ranks]
    ended = Job(tmp_path, print_addresses_of_the_store, (), ranks).wait()
    assert [process.status for process in ended] == [0, 0], ended[0].errors
    (address,) = ended[0].output.split()
    assert (address == "0100007F") is one_node  # 127.0.0.1
    assert (set(address) == {"0"}) is not one_node


# Rank 0 prints the local addresses, in hexadecimal, at which torchrun and the ranks listen, each once.
LISTENERS = """
import os
from pathlib import Path
from utils.distributed.ranks import run_ranks

def action(world):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    ranks = world.all_gather(os.getpid())
    tables = [table.read_text().splitlines()[1:] for table in Path("/proc/net").glob("tcp*")]
    rows = [row.split() for table in tables for row in table]
    listening = {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}
    opened = {link for pid in (os.getppid(), *ranks) for link in Path(f"/proc/{pid}/fd").iterdir()}
    if world.is_main:
        targets = {os.readlink(link) for link in opened if os.path.lexists(link)}
        print(*sorted({listening[target] for target in targets & listening.keys()}))
    world.barrier()

raise SystemExit(run_ranks(action, "cpu", 60))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_can_be_restricted_to_the_loopback(tmp_path: Path) -> None:
    """Also after a restart of its ranks. A plain torchrun listens on all interfaces. GLOO_SOCKET_IFNAME restricts
    gloo's sockets."""
    script = tmp_path / "listeners.py"
    script.write_text(LISTENERS)
    environment = without_launcher(os.environ) | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    start, variables = torchrun_here(2, tmp_path / "rendezvous")
    plain = [word for word in start if not word.startswith("--rdzv")]
    addresses = []
    for command, added in ((plain, {}), (start, variables)):
        finished = subprocess.run(
            [*command, "--max-restarts=1", str(script)],
            capture_output=True,
            text=True,
            env=environment | added,
            timeout=200,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        addresses.append(finished.stdout.split())
    assert {"0" * 8, "0" * 32} & set(addresses[0])
    assert addresses[1] == ["0100007F"]  # 127.0.0.1


def test_page_and_script_restrict_torchrun_to_the_loopback_like_the_tools() -> None:
    page, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/distributed.md", "submit.slr"))
    for word in [*LOOPBACK_OPTIONS, *(f"{name}={value}" for name, value in LOOPBACK_VARIABLES.items())]:
        assert word in page
    assert "store=" + LOOPBACK_OPTIONS[1].partition("store_type=")[2] in script
    assert f"export {next(iter(LOOPBACK_VARIABLES))}=1" in script


def test_a_host_name_that_does_not_resolve_is_named(tmp_path: Path) -> None:
    port, elsewhere = free_port(), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "nowhere.invalid"}
    ranks = [torchrun_variables(rank, 2, port, **elsewhere) for rank in range(2)]
    ended = Job(tmp_path, wait_for_all, (2,), ranks).wait()
    assert [process.status for process in ended] == [2, 2]
    assert len(complaints(ended)) == 2  # one per node, as nodes may know different names
    assert all("MASTER_ADDR 'nowhere.invalid' does not resolve" in line for line in complaints(ended))


def test_a_name_that_kubernetes_does_not_know_yet_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(utils.distributed.rendezvous, "RESOLVE_SECONDS", 0.01)
    answers = iter([OSError(-2, "Name or service not known"), OSError(-2, "Name or service not known"), None])

    def resolve(*_: object, **__: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    utils.distributed.rendezvous.resolve("pod-0.service", 1234, 60, say=True)
    assert next(answers, "none is left") == "none is left"
    assert capsys.readouterr().out == "pod-0.service does not resolve yet; waiting up to 60 s for its pod\n"


def test_restarts_in_torchruns_store_do_not_join_an_old_meeting(tmp_path: Path) -> None:
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    ranks = [torchrun_variables(rank, 2, store.port, TORCHELASTIC_USE_AGENT_STORE="True") for rank in range(2)]
    failed = Job(tmp_path / "first", fail_on, (1, "expected", "collective"), ranks).wait()
    assert [process.status for process in failed] == [3, 3]
    for attempt in ("second", "third"):
        ended = Job(tmp_path / attempt, add_up, (2,), ranks).wait()
        assert [(process.status, process.output, process.errors) for process in ended] == [(0, "3.0 True\n", "")] * 2


@pytest.mark.parametrize(
    ("own_cores", "all_cores", "variable", "threads"),
    [
        (4, 16, None, 4),  # the launcher bound each of four ranks to a quarter of the cores
        (16, 16, None, 4),
        (2, 2, None, 1),
        (16, 16, "3", None),  # the user or torchrun decides
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, own_cores: int, all_cores: int, variable: str | None, threads: int | None
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own_cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: all_cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    utils.distributed.ranks._set_threads(4)
    assert chosen == ([] if threads is None else [threads])


def test_ranks_without_a_gpu_among_ranks_with_one_are_refused() -> None:
    store, first = dist.HashStore(), World(0, 0, 2, torch.device("cuda", 0))
    store.set("device/1", "cuda")
    utils.distributed.ranks._refuse_mixed_devices(first, store)
    store.set("device/1", "cpu")
    with pytest.raises(ConfigError, match="rank 1 of 2 find no usable GPU, the others do"):
        utils.distributed.ranks._refuse_mixed_devices(first, store)


def test_torchruns_summary_shows_the_message_of_the_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    utils.distributed.ranks._report_to_torchrun("error: rank 1: no data")
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["message"]["message"] == "error: rank 1: no data"


def test_two_jobs_at_the_same_port_do_not_meet(tmp_path: Path) -> None:
    """Rank 1 of the second job does not join the first job, but fails."""
    port = free_port()
    first = [torchrun_variables(rank, 2, port, TORCHELASTIC_RUN_ID="one") for rank in range(2)]
    second = [torchrun_variables(1, 2, port, TORCHELASTIC_RUN_ID="two", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")]
    stranger = Job(tmp_path / "two", wait_for_all, (2,), second)
    ended = Job(tmp_path / "one", add_up, (2,), first).wait()
    assert [(process.status, process.output) for process in ended] == [(0, "3.0 True\n")] * 2
    (refused,) = stranger.wait()
    assert refused.status == 1 and complaints([refused])[0].startswith("error: rank 1: "), refused.errors


def test_a_second_process_of_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has arrived, and the meeting is complete without the second one."""
    monkeypatch.setattr(utils.distributed.rendezvous, "ANSWER_SECONDS", 0.1)
    rendezvous = Rendezvous.__new__(Rendezvous)
    rendezvous.launch, rendezvous.start_timeout = Launch(rank=1, world_size=2), 0.0
    rendezvous._deadline, rendezvous._where, rendezvous._lobby = time.monotonic(), "host:1", dist.HashStore()
    rendezvous._set_name("nobody")
    rendezvous._lobby.set("meeting", "now")
    for key in ("arrived/1", "complete"):
        dist.PrefixStore("now", rendezvous._lobby).set(key, "the first")
    with pytest.raises(ConfigError, match="another process is already rank 1 at host:1"):
        rendezvous.wait_for_ranks()


# ---- real launchers

SHORT = (
    "train.py", "--config=quickstart", "--set", "device=cpu", "--set", "max_epochs=3", "--set", "limit_train_batches=4",
    "--set", "limit_valid_batches=1", "--set", "log_to_tensorboard=false",
)  # fmt: skip


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_mpirun_of_open_mpi(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    version = launch(mpirun, "--version").stdout if mpirun else ""
    if mpirun is None or not re.search("OpenRTE|Open MPI", version):
        pytest.skip("no mpirun of Open MPI here (Debian: openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ended = launch(
        mpirun, *root, "--oversubscribe", "-n", "2", sys.executable, *SHORT, "--run-dir", str(tmp_path / "run")
    )
    assert ended.returncode == 0, ended.stderr
    assert "128 = 2 rank(s) x 1 accumulated x 64 images" in ended.stdout


@pytest.mark.slow
def test_torchrun_resumes_after_a_killed_worker(tmp_path: Path) -> None:
    """Rank 1 is killed in its second epoch; torchrun restarts both, and they resume from the first epoch's end."""
    run = tmp_path / "run"
    script = tmp_path / "killed_once.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "from utils.config.command_line import parse_arguments\n"
        "whole = train.Trainer.train_one_epoch\n"
        "def epoch(self, *arguments):\n"
        "    if (self.progress.epoch, self.world.rank, os.environ['TORCHELASTIC_RESTART_COUNT']) == (1, 1, '0'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    whole(self, *arguments)\n"
        "train.Trainer.train_one_epoch = epoch\n"
        "sys.exit(train.main(parse_arguments()))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    ended = launch(*torchrun, str(script), *SHORT[1:], "--resume", "never", "--run-dir", str(run))
    assert ended.returncode == 0, ended.stderr
    assert "error: rank 0: lost contact: no answer from rank 1" in ended.stderr
    assert "epoch 2, batch 0, step 4" in ended.stdout
    assert "Finished" in ended.stdout
    assert not (tmp_path / "run.1").exists()
    # the finished run resumes for one more epoch at another world size
    more = launch(sys.executable, *SHORT, "--set", "max_epochs=4", "--run-dir", str(run), "--resume", str(run))
    assert more.returncode == 0, more.stderr
    assert "epoch 4, batch 0, step 12" in more.stdout
