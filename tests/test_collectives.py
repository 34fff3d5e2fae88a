"""Ranks that hang in collectives end with one message that names the rank and the collective it did not call."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import utils.distributed.health.hangs
import utils.distributed.health.heartbeat
import utils.distributed.ranks
import utils.distributed.rendezvous
from tests.processes import Job, complaints, free_port, run_job, shorten_heartbeat, torchrun_variables
from utils.distributed.health.hangs import Collective, Record, explain_hang, watch_collectives
from utils.distributed.health.ras import LINES, WIDTH, ask_nccl
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World

LIMIT = 4.0  # seconds, instead of `rank_timeout_seconds`, which stays long
# of NCCL's documentation (troubleshooting/ras.rst), shortened
STATUS = """NCCL version 2.28.3 compiled with CUDA 13.0

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          3            1          3        3

Communicators... (0.00s)
=============

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 15
  Rank 1 has launched up to operation 14 -- GPU 1 managed by process 483074 on node 172.16.64.210
"""
REPORT = [f"  {line}" for line in STATUS.splitlines() if line.strip(" =")]


@contextmanager
def ras_service(answer: str) -> Iterator[str]:
    """Serve on the yielded address as NCCL does: answer the commands and close the connection."""

    def serve() -> None:
        with suppress(OSError):  # the server has been closed
            while True:
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as commands:
                    assert [next(commands) for _ in range(3)] == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"STATUS\n"]
                    connection.sendall(answer.encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends accept


def skip_a_sum(world: World) -> None:
    """Rank 1 does something else forever."""
    if world.rank == 1:
        time.sleep(100)
    world.all_reduce(torch.ones(55))


never_begin = skip_a_sum  # as the first collective


def swap_two(world: World) -> None:
    """Rank 2 calls two collectives in the other order."""
    actions = [lambda: world.all_reduce(torch.ones(3)), world.barrier]
    for action in reversed(actions) if world.rank == 2 else actions:
        action()


def stop_a_rank(world: World) -> None:
    if world.rank == 1:
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    world.all_reduce(torch.ones(55))


def run(name: str, folder: Path, on_gpus: bool = False) -> int:
    """Run one rank; `on_gpus`: as far as the report of a hang can tell."""
    if on_gpus:
        pytest.MonkeyPatch().setattr(torch.cuda, "is_initialized", lambda: True)
    utils.distributed.rendezvous.GRACE_SECONDS = 0.5
    shorten_heartbeat(LIMIT)
    utils.distributed.health.hangs.SHORTEST_SECONDS = LIMIT
    utils.distributed.ranks.watch_collectives = lambda store, limit, leave: watch_collectives(store, LIMIT, leave)  # type: ignore[assignment]

    def action(world: World) -> None:
        if name != "never_begin":
            for _ in range(12):
                world.all_reduce(torch.ones(1000))
            world.all_gather(world.rank)
        globals()[name](world)

    return run_ranks(action, "cpu", 600, folder)


WAITS = "the ranks wait for each other since .*, for nearly 4 s (rank_timeout_seconds)"
CASES = {
    "never_begin": (WAITS, "rank 1 did not come to all_reduce number 1 (55 values), in which ranks 0, 2 wait"),
    "skip_a_sum": (
        WAITS,
        "rank 1 did not come to all_reduce number 15 (55 values), in which ranks 0, 2 wait; its last was "
        "all_gather number 14 (5 values)",
    ),
    "swap_two": (
        WAITS,
        "the ranks' order differs: rank 0 called all_reduce number 15 (3 values), rank 2 barrier number 15",
    ),
    "stop_a_rank": (
        "no sign of life from rank 1 .*",
        "rank 1 does not answer; ranks 0, 2 wait in all_reduce number 15 (55 values)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_rank_and_the_collective_are_named(tmp_path: Path, name: str) -> None:
    """In one message; every rank's last collectives are written to a file. On CPUs NCCL is not asked."""
    port, folder = free_port(), tmp_path / "run"
    folder.mkdir()
    with ras_service(f"SERVER PROTOCOL 2\nOK\n{STATUS}") as address:
        variables = [torchrun_variables(rank, 3, port, NCCL_RAS_ADDR=address) for rank in range(3)]
        job = Job(tmp_path, run, (name, folder), variables)
        for rank in (0, 2):
            job.processes[rank].wait(100)
        job.processes[1].kill()  # it may be stopped
        ended = job.wait(100)
    assert [ended[0].status, ended[2].status] == [1, 1], ended
    first, second = complaints(ended)
    before, reason = CASES[name]
    pattern = re.escape(before).replace(r"\.\*", ".*")
    assert re.fullmatch(rf"error: rank \d: {pattern}", first), first
    assert second == f"{reason}; all ranks' last collectives: {folder}/collectives.json"
    written = json.loads((folder / "collectives.json").read_text())
    assert set(written["ranks"]) == ({"0", "2"} if name == "stop_a_rank" else {"0", "1", "2"})
    assert all(len(record["collectives"]) <= 8 for record in written["ranks"].values())


def test_on_gpus_the_message_ends_with_nccls_own_report(tmp_path: Path) -> None:
    with ras_service(f"SERVER PROTOCOL 2\nOK\n{STATUS}") as address:
        ended = run_job(tmp_path, 2, run, "never_begin", tmp_path, True, NCCL_RAS_ADDR=address)
    lines = [line for process in ended for line in process.errors.splitlines()]
    start = lines.index(f"NCCL's RAS service at {address} reports:")
    assert lines[start - 1].startswith("rank 1 did not come to all_reduce number 1")
    assert lines[start + 1 :] == REPORT


@pytest.mark.parametrize("service", ["absent", "silent", "another"])
def test_without_nccls_service_the_message_is_the_same_and_soon_there(monkeypatch, service: str) -> None:
    with ras_service("220 mail.example.org\n") as another, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if service == "silent" else free_port()
        monkeypatch.setenv("NCCL_RAS_ADDR", another if service == "another" else f"[127.0.0.1]:{port}")
        began = time.monotonic()
        assert ask_nccl() == ""
        assert time.monotonic() - began < 10


def test_nccls_report_is_bounded(monkeypatch) -> None:
    with ras_service("SERVER PROTOCOL 2\nOK\n" + LINES * f"\x1b[2J{WIDTH * 'x'}\n" + "one\ntwo\n") as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        _, *lines, more = ask_nccl().splitlines()
    assert lines == LINES * [f"  [2J{(WIDTH - 3) * 'x'}"]
    assert more == "  ... 2 more lines: run ncclras"


def record(*calls: Collective) -> Record:
    return Record("node", 1, list(calls))


def call(number: int, size: int = 4, kind: str = "all_reduce", ended: bool = False, backend: str = "nccl"):
    return Collective(backend, number, kind, [[size]], ended)


def test_explanations() -> None:
    done = [call(1, ended=True), call(2, ended=True)]
    assert explain_hang({0: record(*done), 1: record(*done)}, 2, False) == ""
    assert explain_hang({0: record(), 1: record()}, 2, True) == ""
    # two ranks have not come; another one has begun a later collective, asynchronously
    late = {0: record(*done, call(3), call(4)), 1: record(*done), 2: record(*done), 3: record(*done, call(3))}
    assert explain_hang(late, 4, False) == (
        "ranks 1, 2 did not come to all_reduce number 3 (4 values), in which ranks 0, 3 wait"
    )
    # all ranks have come, and nothing gets through
    same = {0: record(*done, call(3)), 1: record(*done, call(3))}
    assert explain_hang(same, 2, False) == (
        "all ranks wait in all_reduce number 3 (4 values): check the network between them"
    )
    # gathered values may differ in size
    gathers = {rank: record(call(1, 5 + rank, "all_gather", ended=True)) for rank in range(2)}
    assert explain_hang(gathers, 2, False) == ""
    # two backends, of which one hangs
    gloo = call(9, ended=True, backend="gloo")
    both = {0: record(gloo, *done, call(3)), 1: record(gloo, *done)}
    assert explain_hang(both, 2, False).startswith("rank 1 did not come to all_reduce number 3")
    # one rank never called anything
    assert explain_hang({0: record(call(1)), 1: record()}, 2, False) == (
        "rank 1 did not come to all_reduce number 1 (4 values), in which rank 0 waits"
    )
