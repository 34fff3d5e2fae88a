"""Real ranks meet, and end together with one message and one status, whatever happens to one of them."""

import ctypes
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import utils.distributed.ranks as ranks_module
from tests.processes import Job, complaints, free_port, run_job, torchrun_variables
from utils.config.command_line import parse_arguments
from utils.distributed.launch import Launch
from utils.distributed.ranks import open_store, run_ranks
from utils.errors import ConfigError, DataError, Stopped
from utils.files import lock_folder, sign_lock

LONG = 200  # seconds for which a main thread waits, longer than a test
LIMIT = 5.0  # seconds, the timeout of the tests that wait for it


def add_up(world):
    print(world.all_reduce(torch.tensor([1.0 + world.rank])).item())


def wait_in_c():
    """Wait like a read from a GPU; in a loop, as signals interrupt usleep."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        ctypes.CDLL(None).usleep(LONG * 1_000_000)


def fail(world, rank, error, others_hang=False):
    if world.rank == rank:
        time.sleep(0.3)
        raise error
    if others_hang:
        wait_in_c()
    world.barrier()


def raise_on_main(world, folder):
    """Rank 0 finds its folder locked, and raises the error later than the other ranks, which have it from rank 0."""
    try:
        world.main_only(lambda: lock_folder(folder))
    except ConfigError as error:
        assert ", of the job 7; wait" in str(error)
        time.sleep(0.5 * world.is_main)
        raise


def stop_on_request(world):
    if world.is_main:
        time.sleep(0.5)  # rank 0 still writes the checkpoint
        print("saved", flush=True)
    raise Stopped("stopped with everything saved")


def lose(world, rank, number, in_c):
    """A rank is killed or stopped while the main threads of the others wait in a collective or in a C function."""
    if world.rank == rank:
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), number)
    if in_c:
        wait_in_c()
    world.all_reduce(torch.ones(55))


def slow_down(world):
    """Rank 1 is stopped for a while, then both are slow for longer than the timeout: busy, and in one long call."""
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(LIMIT / 10)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + LIMIT / 2
    while time.monotonic() < until:
        sum(range(10_000))
    ctypes.CDLL(None).usleep(int(1e6 * LIMIT))
    world.barrier()


def skip_a_sum(world):
    time.sleep(LONG if world.rank == 1 else 0)
    world.all_reduce(torch.ones(55))


def swap_two(world):
    """Rank 2 calls two collectives in the other order."""
    actions = [lambda: world.all_reduce(torch.ones(3)), lambda: world.all_gather("a long text")]
    for action in actions[:: -1 if world.rank == 2 else 1]:
        action()


def print_addresses_of_the_store(world):
    """Rank 0 prints the local addresses, in hexadecimal, of the sockets that listen at MASTER_PORT."""
    port, listening = f"{int(os.environ['MASTER_PORT']):04X}", "0A"
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()]
    if world.is_main:
        print(*(row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port}") and row[3] == listening))


def end_soon():
    ranks_module.GRACE_SECONDS, ranks_module.SHORTEST_SECONDS = 0.5, 1.0
    ranks_module.ANSWER_SECONDS, ranks_module.STORE_SECONDS = 2.0, 6.0


def play_within(seconds, name, *arguments):
    """Be one rank that calls the function of this name, after a barrier."""
    end_soon()

    def action(world):
        world.barrier()
        globals()[name](world, *arguments)

    return run_ranks(action, "cpu", seconds)


def play(name, *arguments):
    return play_within(60, name, *arguments)


def play_with_long_collectives(name):
    """Only the barrier times out soon."""
    really = dist.init_process_group
    dist.init_process_group = lambda *args, timeout, **options: really(*args, timeout=10 * timeout, **options)
    return play_within(LIMIT, name)


def die_while_ranks_connect(rank):
    """The others are slow to connect to the store again, which they must have done before they meet this rank."""
    dies, really, clone = os.environ["RANK"] == str(rank), dist.init_process_group, dist.PrefixStore.clone

    def connect(*arguments, **options):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        really(*arguments, **options)

    def clone_late(store):
        time.sleep(0 if dies else 0.5)
        return clone(store)

    dist.init_process_group, dist.PrefixStore.clone = connect, clone_late
    return play_within(10, "add_up")


def wait_for_all(seconds):
    end_soon()
    ranks_module.STORE_SECONDS = 1.0
    return run_ranks(lambda world: None, "cpu", seconds)


def choose_cuda_on(rank):
    end_soon()
    return run_ranks(lambda world: None, "cuda" if int(os.environ["RANK"]) == rank else "cpu", 60)


def parse_a_bad_setting():
    end_soon()
    parse_arguments(["--config=quickstart", "--set=batch_size=none"])


def serve_store():
    """Serve a store as torchrun does."""
    return dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


ALONE, AGENT = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}

NO_ANSWER = r"error: rank 0: no answer from rank {} \(process \d+ on \S+\): killed or stopped, or its node or .*"
LOST_0 = r"error: rank [12]: lost contact with rank 0( \(process \d+ on \S+\))?, or the store at 127.0.0.1:\d+: .*"
COLLECTIVE = r"error: rank \d: a collective has not ended within {} s \(rank_timeout_seconds\): {}, or the netw.*"
SKIPPED = r"rank 1 \(process \d+ on \S+\) did not call it"
DISK, NCCL = DataError("the disk is gone\nbuy another"), "x.cpp:3, unhandled system error"
FULL = dist.DistBackendError(f"NCCL error in: {NCCL}\n\nLast error:\nno space left\n")
TRACE = r"Traceback .*\n(?: .*\n)+ValueError: what is this\nerror: rank 1: ValueError: what is this"
GONE = r"error: rank {}: the disk is gone\nbuy another"


def check_ends(ended, statuses, lines):
    """Check the ranks' exit statuses, and all lines that they print."""
    assert [one.status for one in ended] == statuses, ended
    found = "\n".join(complaints(ended))
    assert re.fullmatch(lines, found), found


@pytest.mark.parametrize(("name", "ends"), {  # what every rank calls; its arguments; exit statuses; all lines printed
    "failed 0": (play, ("fail", 0, DISK), [3, 3, 3], GONE.format(0)),
    "failed 1, the others wait in C": (play, ("fail", 1, DISK, True), [3, 3, 3], GONE.format(1)),
    "unforeseen": (play, ("fail", 1, ValueError("what is this")), [1, 1, 1], TRACE),
    "NCCL": (play, ("fail", 1, FULL, True), [1, 1, 1], f"error: rank 1: NCCL error in: {NCCL} Last .*no space left"),
    "stopped": (play, ("stop_on_request",), [75, 75, 75], "stopped with everything saved"),
    **{f"killed 2, {in_c}": (play, ("lose", 2, signal.SIGKILL, in_c), [1, 1, -9], NO_ANSWER.format(2))
       for in_c in (False, True)},
    "killed 0": (play, ("lose", 0, signal.SIGKILL, False), [-9, 1, 1], LOST_0),
    "killed while the ranks connect": (die_while_ranks_connect, (1,), [1, -9, 1], COLLECTIVE.format(10, SKIPPED)),
    "rank 0 killed while the ranks connect": (die_while_ranks_connect, (0,), [-9, 1, 1], LOST_0),
    "slow or stopped for a while": (play_with_long_collectives, ("slow_down",), [0, 0], ""),
    "bad setting": (parse_a_bad_setting, (), [2, 2], '.*batch_size is "none".*'),
    # the other rank waits for it
    "one without GPU": (choose_cuda_on, (1,), [2, 2], ".*error: rank 1: device: cuda was asked for.*"),
}.items())  # fmt: skip
def test_all_ranks_end_with_one_message_printed_once(tmp_path, name, ends):
    function, arguments, statuses, lines = ends
    variables = {"CUDA_VISIBLE_DEVICES": "", "TRAIN_EXIT_STATUS_FILE": str(tmp_path / "status")}
    check_ends(run_job(tmp_path, len(statuses), function, *arguments, **variables), statuses, lines)
    report = tmp_path / "status"
    assert (report.read_text() if report.exists() else "") == (f"{statuses[0]}\n" if statuses[0] >= 0 else "")


@pytest.mark.parametrize(("rank", "agent_store", "line"), [(1, False, NO_ANSWER.format(1)), (0, False, LOST_0),
    (0, True, r"error: rank \d: no answer from rank 0 .*")])  # fmt: skip
def test_a_stopped_rank_ends_the_others(tmp_path, rank, agent_store, line):
    """The store is lost with rank 0, unless torchrun serves it. The main threads wait in a call that never returns."""
    store = serve_store()
    port, others = (store.port, AGENT) if agent_store else (free_port(), {})
    variables = [torchrun_variables(number, 3, port, **others) for number in range(3)]
    job = Job(tmp_path, play_within, (LIMIT, "lose", rank, signal.SIGSTOP, True), variables)
    for number in {0, 1, 2} - {rank}:
        job.processes[number].join(LONG / 2)
    job.processes[rank].kill()
    check_ends(job.wait(LONG), [-9 if number == rank else 1 for number in range(3)], line)


@pytest.mark.parametrize(("name", "reason"), [("swap_two", "the ranks called different ones"), ("skip_a_sum", SKIPPED)])
def test_ranks_that_wait_for_each_other_end_with_one_message(tmp_path, name, reason):
    ended = run_job(tmp_path, 3, play_within, LIMIT, name)
    check_ends(ended, [1, 1, 1], COLLECTIVE.format(f"{LIMIT:g}", reason))


def test_a_failure_of_the_main_process_is_not_blamed_on_another(tmp_path):
    with lock_folder(tmp_path / "run") as lock:
        sign_lock(lock, "7")
        ended = run_job(tmp_path, 2, play, "raise_on_main", tmp_path / "run")
    check_ends(ended, [2, 2], r"error: rank 0: /.*")


@pytest.mark.parametrize(("name", "starts"), {  # ranks, their number, variables, timeout; status; lines
    "missing": ((0, 1), 5, {}, 5, 1, "error: rank [01]: ranks 2-4 of 5 did not arrive at 127.0.0.1:PORT within 5 .*"),
    "twice": ((0, 1, 1), 3, {}, 60, 2, "error: rank 1: process [0-9]+ on .* is already rank 1; start each rank once"),
    "no rank 0": ((1,), 2, ALONE, 3, 1, "error: rank 1: no answer from rank 0 at 127.0.0.1:PORT within 3 s .*\n.*"),
    # not awaited for long
    "no torchrun": ((1,), 2, ALONE | AGENT, 3, 1,
                    "error: rank 1: no answer from torchrun at 127.0.0.1:PORT within 1 s .*\n.*"),
    # one message per node, as nodes may know different names
    "no such host": ((0, 1), 2, ALONE | {"MASTER_ADDR": "nowhere.invalid"}, 2, 2, "\n".join(
        f"error: rank {rank}: MASTER_ADDR 'nowhere.invalid' does not resolve .*" for rank in (0, 1))),
    "port in use": ((0,), 2, {"MASTER_PORT": "TAKEN"}, 2, 2,
                    r"error: rank 0: port \d+ on \S+ cannot be opened \(Address already in use\), .*MASTER_PORT.*"),
}.items())  # fmt: skip
def test_what_is_missing_at_the_start_is_named(tmp_path, name, starts):
    ranks, world_size, variables, seconds, status, lines = starts
    port, taken = free_port(), serve_store()
    variables = {key: value.replace("TAKEN", str(taken.port)) for key, value in variables.items()}
    places = [torchrun_variables(rank, world_size, port) | variables for rank in ranks]
    ended = Job(tmp_path, wait_for_all, (seconds,), places).wait()
    check_ends(ended, [status] * len(ranks), lines.replace(":PORT", f":{port}"))


def test_a_name_that_kubernetes_does_not_know_yet_is_awaited(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    unknown = OSError(-2, "Name or service not known")
    resolve, port = Mock(side_effect=[unknown, unknown, ["pod-0"]]), free_port()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert open_store(Launch(0, 2, 0, 2, address="pod-0.service", port=port), 60) is not None
    assert resolve.call_count == 3


def test_ranks_meet_in_rank_0s_store_whatever_torchrun_has_counted(tmp_path):
    """After a lost node, agents restart their ranks with different counts."""
    port = free_port()
    variables = [torchrun_variables(rank, 2, port, TORCHELASTIC_RESTART_COUNT=str(rank)) for rank in range(2)]
    ended = Job(tmp_path, play, ("add_up",), variables).wait()
    assert [(one.status, one.output) for one in ended] == [(0, "3.0\n")] * 2


def test_restarts_in_torchruns_store_do_not_join_an_old_start(tmp_path):
    store = serve_store()
    for restart, (name, *arguments) in enumerate([("fail", 1, DISK), ("add_up",), ("add_up",)]):
        count = AGENT | {"TORCHELASTIC_RESTART_COUNT": str(restart)}
        variables = [torchrun_variables(rank, 2, store.port, **count) for rank in range(2)]
        ended = Job(tmp_path / str(restart), play, (name, *arguments), variables).wait()
        expected = (3, "") if restart == 0 else (0, "3.0\n")
        assert [(one.status, one.output) for one in ended] == [expected] * 2, ended


def test_two_jobs_at_the_same_port_do_not_meet(tmp_path):
    """Rank 1 of the second job does not join the first job, but fails."""
    port = free_port()
    first = [torchrun_variables(rank, 2, port, TORCHELASTIC_RUN_ID="one") for rank in range(2)]
    second = [torchrun_variables(1, 2, port, TORCHELASTIC_RUN_ID="two") | ALONE]
    stranger = Job(tmp_path / "two", wait_for_all, (4,), second)
    ended = Job(tmp_path / "one", play, ("add_up",), first).wait()
    assert [(one.status, one.output) for one in ended] == [(0, "3.0\n")] * 2
    (refused,) = stranger.wait()
    assert refused.status == 1 and complaints([refused])[0].startswith("error: rank 1: "), refused.errors


def test_ranks_with_other_devices_are_refused():
    for kinds in (["cpu", "cpu"], ["cuda", "cuda"]):
        ranks_module.check_devices(kinds)
    with pytest.raises(ConfigError, match="rank 1 of 2 find no usable GPU, the others do"):
        ranks_module.check_devices(["cuda", "cpu"])


@pytest.mark.parametrize("one_node", [True, False])
def test_the_store_of_one_node_answers_that_node_only(tmp_path, one_node):
    port = free_port()
    elsewhere = {} if one_node else ALONE | {"MASTER_ADDR": "localhost"}
    variables = [torchrun_variables(rank, 2, port, **elsewhere) for rank in range(2)]
    ended = Job(tmp_path, play, ("print_addresses_of_the_store",), variables).wait()
    assert [one.status for one in ended] == [0, 0], ended[0].errors
    (address,) = ended[0].output.split()
    assert (address == "0100007F") is one_node  # 127.0.0.1
    assert (set(address) == {"0"}) is not one_node
