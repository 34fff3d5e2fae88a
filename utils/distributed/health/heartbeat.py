"""Heartbeat between the ranks: a lost rank ends the others, wherever their main threads wait.

gloo notices when a connection breaks, NCCL's watchdog when a collective takes too long. Neither watches work captured
in a CUDA graph, nor the read of its results, which would wait forever. So a thread of every rank increments a counter
in the store, over a separate connection. Rank 0 checks the counters of all ranks, and they check rank 0's. A rank that
is only slow (a validation, a checkpoint, a compilation) keeps counting.

Silence is measured in checks by this process, not in seconds: a process that continues after it, or
its node, was suspended for an hour sees the others silent for only one check.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from utils.distributed.launch import Launch, name_ranks

CHECKS = 20  # per `rank_timeout_seconds`
LOST_AFTER = 15  # checks in a row without a heartbeat; before collectives time out
# the shortest timeout: on a busy machine a thread may wait for seconds, and a rank that leaves because another one has
# failed is silent for eight
SHORTEST_SECONDS = 10.0


class Heartbeat:
    """The threads of one rank; they run until `stop`, or until one calls `leave` because another rank is lost.

    `leave` gets the message, the lost ranks, and a connection to the store, or None if the store does not answer. All
    ranks call `stop` after a barrier, so that none takes the end of another for a loss.
    """

    def __init__(
        self,
        store: dist.Store,
        launch: Launch,
        limit: float,
        leave: Callable[[str, Sequence[int], dist.Store | None], None],
    ) -> None:
        self._launch, self._leave = launch, leave
        self._limit = max(limit, SHORTEST_SECONDS)
        self._store = store.clone()
        self._rounds = 0  # of the first thread, which the store has answered
        self._stop = threading.Event()
        for task in (self._beat, self._watch_the_store):
            threading.Thread(target=task, name=f"heartbeat: {task.__name__}", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _beat(self) -> None:
        rank = self._launch.rank
        others = range(1, self._launch.world_size) if rank == 0 else (0,)
        silences = {other: Silence() for other in others}
        try:
            self._store.set(f"beat/place/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
            while True:
                self._store.add(f"beat/{rank}", 1)
                lost = [other for other, silence in silences.items() if silence.lasts(self._count(other))]
                self._rounds += 1
                if self._stop.wait(self._limit / CHECKS):
                    return
                if lost:
                    self._stop.set()  # for one message only: the other thread would report a silent store
                    since = min(silences[other].since for other in lost)
                    self._leave(f"no sign of life from {self._describe(lost)} {self._since(since)}", lost, self._store)
                    return
        except dist.DistError:
            pass  # the store is gone, as the other thread will notice

    def _count(self, rank: int) -> int:
        return self._store.add(f"beat/{rank}", 0)  # get would wait for a rank that has not begun yet

    def _describe(self, ranks: Sequence[int]) -> str:
        places = [self._place(rank) for rank in ranks]
        if len(ranks) == 1:
            return f"{name_ranks(ranks)} (process {places[0][1]} on {places[0][0]})"
        return f"{name_ranks(ranks)} (on {', '.join(sorted({host for host, _ in places}))})"

    def _place(self, rank: int) -> tuple[str, str]:
        """Return host and process of a rank, if it has written them."""
        key = f"beat/place/{rank}"
        if not self._store.check([key]):
            return "an unknown host", "?"
        host, process = json.loads(self._store.get(key))
        return host, process

    def _since(self, moment: float) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        return (
            f"since {when}, for nearly {self._limit:g} s (rank_timeout_seconds): "
            "killed or stopped, or its node or the network is gone"
        )

    def _watch_the_store(self) -> None:
        """Notice if the other thread hangs because the process that serves the store is stopped or cut off."""
        silence = Silence()
        while not self._stop.wait(self._limit / CHECKS):
            if silence.lasts(self._rounds):
                self._stop.set()
                server = "rank 0, which serves the ranks' store," if self._launch.hosts_store else "torchrun's store"
                where = f"{self._launch.address}:{self._launch.port}"
                self._leave(f"no answer from {server} at {where} {self._since(silence.since)}", [], None)
                return


class Silence:
    """Counts the checks in a row that found the same number."""

    def __init__(self, limit: int = LOST_AFTER) -> None:
        self.limit = limit
        self.number, self.checks = -1, 0
        self.since = time.time()  # when a check first found this number

    def lasts(self, number: int) -> bool:
        """Check the number once more; return whether it has been the same for too long."""
        if number != self.number:
            self.number, self.checks, self.since = number, 0, time.time()
        self.checks += 1
        return self.checks > self.limit
