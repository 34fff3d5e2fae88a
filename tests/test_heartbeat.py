"""A killed, stopped or isolated rank ends the others, even in a call that never returns; a slow rank does not."""

import ctypes
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import utils.distributed.health.heartbeat
import utils.distributed.ranks
import utils.distributed.rendezvous
from tests.processes import Job, complaints, free_port, run_job, shorten_heartbeat, torchrun_variables
from utils.distributed.health.heartbeat import LOST_AFTER, Heartbeat, Silence
from utils.distributed.launch import Launch
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World

LIMIT = 4.0  # seconds of silence, instead of `rank_timeout_seconds`, which stays long
RUN_SECONDS = 200  # for which the main threads would wait


def shorten_timeouts() -> None:
    utils.distributed.rendezvous.GRACE_SECONDS = 0.5
    shorten_heartbeat(LIMIT)


def lose_rank_0(number: int) -> int:
    """Rank 0 is killed or stopped while the main threads of all others wait in a C function."""
    shorten_timeouts()

    def action(world: World) -> None:
        world.barrier()
        if world.is_main:
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), number)
        # like a read from a GPU; in a loop, as signals interrupt usleep
        library, until = ctypes.CDLL(None), time.monotonic() + RUN_SECONDS
        while time.monotonic() < until:
            library.usleep(100_000_000)

    return run_ranks(action, "cpu", 600)


def stop_and_continue() -> int:
    """Rank 1 is stopped for half of the limit, then both are slow for twice the limit: busy, and in one long call."""
    shorten_timeouts()

    def action(world: World) -> None:
        world.barrier()
        if world.rank == 1:
            if os.fork() == 0:
                time.sleep(LIMIT / 2)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            sum(range(10_000))
        ctypes.CDLL(None).usleep(int(1e6 * LIMIT))
        world.barrier()

    return run_ranks(action, "cpu", 600)


@pytest.mark.parametrize(
    ("number", "agent_store"), [(signal.SIGKILL, False), (signal.SIGSTOP, False), (signal.SIGKILL, True)]
)
def test_a_lost_rank_ends_all_others(tmp_path: Path, number: int, agent_store: bool) -> None:
    """The store is lost with rank 0, unless torchrun serves it."""
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    port = store.port if agent_store else free_port()
    others = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent_store else {}
    ranks = [torchrun_variables(rank, 3, port, **others) for rank in range(3)]
    job = Job(tmp_path, lose_rank_0, (number,), ranks)
    for waiting in job.processes[1:]:
        waiting.wait(RUN_SECONDS / 2)
    job.processes[0].kill()  # it may be stopped
    ended = job.wait(RUN_SECONDS)[1:]
    assert [process.status for process in ended] == [1, 1], ended
    (line,) = complaints(ended)
    process = (tmp_path / "process-0/stdout").read_text().strip()
    since = r"since \d{4}-\d\d-\d\d [\d:]{8}, for nearly 4 s \(rank_timeout_seconds\): killed or stopped"
    silent = rf"no sign of life from rank 0 \(process {process} on \S+\) {since}"
    if not agent_store:
        answer = rf"no answer from rank 0, which serves the ranks' store, at 127.0.0.1:{port} {since}"
        silent = "lost contact with rank 0 at" if number == signal.SIGKILL else answer
    assert re.search(silent, line), line


def test_a_slow_rank_is_not_lost_nor_one_that_continues(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 2, stop_and_continue)
    assert [(process.status, process.errors) for process in ended] == [(0, "")] * 2


def test_a_limit_below_ten_seconds_counts_as_ten() -> None:
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    heartbeat = Heartbeat(store, Launch(0, 1), 3.0, lambda *_: None)
    heartbeat.stop()
    assert heartbeat._limit == 10


def test_silence_is_counted_in_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the clock, which continues while a process is stopped."""
    clock = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    silence = Silence()
    assert not any(silence.lasts(number) for number in range(100))
    since = silence.since
    assert [silence.lasts(99) for _ in range(LOST_AFTER)] == [False] * (LOST_AFTER - 1) + [True]
    assert silence.since == since
    assert not silence.lasts(100)


def test_several_lost_ranks_are_named_in_one_message() -> None:
    """Also one that has not written its host."""
    store = dist.HashStore()
    store.set("beat/place/1", '["gpu07", 11]')
    store.set("beat/place/2", '["gpu07", 12]')
    heartbeat = Heartbeat.__new__(Heartbeat)
    heartbeat._store, heartbeat._limit, heartbeat._launch = store, 600, Launch(0, 4)
    assert [heartbeat._describe(ranks) for ranks in ([1], [1, 2], [1, 2, 3])] == [
        "rank 1 (process 11 on gpu07)",
        "ranks 1, 2 (on gpu07)",
        "ranks 1-3 (on an unknown host, gpu07)",
    ]
