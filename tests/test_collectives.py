"""Ranks that hang in collectives end with one message that names the rank and the collective it did not call."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Job, complaints, free_port, torchrun_variables

import utils.distributed.health.hangs
import utils.distributed.health.heartbeat
import utils.distributed.ranks
import utils.distributed.rendezvous
from utils.distributed.health.hangs import Collective, Record, explain_hang, watch_collectives
from utils.distributed.health.heartbeat import Heartbeat
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World

LIMIT = 4.0  # seconds, instead of `collective_timeout_seconds`, which stays long


def never_begin(world: World) -> None:
    """Rank 1 misses the first collective."""
    skip_a_sum(world)


def skip_a_sum(world: World) -> None:
    """Rank 1 does something else forever."""
    if world.rank == 1:
        time.sleep(100)
    world.all_reduce(torch.ones(55))


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


def run(name: str, folder: Path) -> int:
    """Run one rank."""
    utils.distributed.rendezvous.GRACE_SECONDS = 0.5
    for module in utils.distributed.health.heartbeat, utils.distributed.health.hangs:
        module.SHORTEST_SECONDS = LIMIT  # type: ignore[attr-defined]
    utils.distributed.ranks.Heartbeat = lambda store, launch, limit, leave: Heartbeat(store, launch, LIMIT, leave)  # type: ignore[assignment, misc]
    utils.distributed.ranks.watch_collectives = lambda store, limit, leave: watch_collectives(store, LIMIT, leave)  # type: ignore[assignment]

    def action(world: World) -> None:
        if name != "never_begin":
            for _ in range(12):
                world.all_reduce(torch.ones(1000))
            world.all_gather(world.rank)
        globals()[name](world)

    return run_ranks(action, "cpu", 60, 600, folder)


WAITS = "the ranks wait for each other since .*, for nearly 4 s (collective_timeout_seconds)"
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
    """In one message; every rank's last collectives are written to a file."""
    port, folder = free_port(), tmp_path / "run"
    folder.mkdir()
    job = Job(tmp_path, run, (name, folder), [torchrun_variables(rank, 3, port) for rank in range(3)])
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
