"""Signs of life between the ranks: a rank that is lost ends the others, wherever their main threads wait.

gloo notices when a connection breaks, NCCL's watchdog when a collective takes too long. Neither watches work that was
captured in a CUDA graph, nor the read of its results, which would wait for good. So a thread of every rank counts up a
number in the store, over a connection of its own. Rank 0 looks at the numbers of all ranks, and they at that of rank 0.
A rank that is only slow (a validation, a checkpoint, a compilation) goes on counting.

Silence is measured in looks of this process, not in seconds of the clock: a process that was itself stopped for an
hour, alone or with its node, finds the others silent for one look when it goes on.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from utils.distributed.launch import Launch, name_ranks

LOOKS = 20  # in `collective_timeout_seconds`
LOST_AFTER = 15  # looks in a row without a sign of life; what waits for the lost rank is given up after it
# of silence: on a busy machine a thread may wait some seconds for its turn, and a rank that leaves since another has
# failed stays silent for eight
SHORTEST_SECONDS = 10.0


class Heartbeat:
    """The threads of one rank; they run until `stop`, or until they call `leave` with what was lost.

    `leave` gets the message, the lost ranks, and a connection to the store, or None where the store does not answer.
    The ranks stop together, after a barrier, so that none takes the end of another for a loss.
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
        self._rounds = 0  # of the first thread: each ends with an answer of the store
        self._stop = threading.Event()
        for task in (self._beat, self._watch_the_store):
            threading.Thread(target=task, name=f"heartbeat: {task.__name__}", daemon=True).start()

    def stop(self) -> None:
        """This rank and all others leave by themselves."""
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
                if self._stop.wait(self._limit / LOOKS):
                    return
                if lost:
                    self._stop.set()  # one message: the other thread would take what follows for the store's silence
                    since = min(silences[other].since for other in lost)
                    self._leave(f"no sign of life from {self._describe(lost)} {self._since(since)}", lost, self._store)
                    return
        except dist.DistError:
            pass  # the store is gone, which the other thread notices

    def _count(self, rank: int) -> int:
        return self._store.add(f"beat/{rank}", 0)  # where a rank has not begun yet, get would wait for it

    def _describe(self, ranks: Sequence[int]) -> str:
        places = [self._place(rank) for rank in ranks]
        if len(ranks) == 1:
            return f"{name_ranks(ranks)} (process {places[0][1]} on {places[0][0]})"
        return f"{name_ranks(ranks)} (on {', '.join(sorted({host for host, _ in places}))})"

    def _place(self, rank: int) -> tuple[str, str]:
        """Host and process of a rank, as far as it has said."""
        key = f"beat/place/{rank}"
        if not self._store.check([key]):
            return "an unknown host", "?"
        host, process = json.loads(self._store.get(key))
        return host, process

    def _since(self, moment: float) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        return (
            f"since {when}, for nearly {self._limit:g} s (collective_timeout_seconds): "
            "killed or stopped, or its node or the network is gone"
        )

    def _watch_the_store(self) -> None:
        """The other thread may wait for good, where the process that serves the store is stopped or cut off."""
        silence = Silence()
        while not self._stop.wait(self._limit / LOOKS):
            if silence.lasts(self._rounds):
                self._stop.set()
                server = "rank 0, which serves the ranks' store," if self._launch.hosts_store else "torchrun's store"
                where = f"{self._launch.address}:{self._launch.port}"
                self._leave(f"no answer from {server} at {where} {self._since(silence.since)}", [], None)
                return


class Silence:
    """For how many looks a number has stayed the same."""

    def __init__(self, limit: int = LOST_AFTER) -> None:
        self.limit = limit
        self.number, self.looks = -1, 0
        self.since = time.time()  # the first look that found the present number

    def lasts(self, number: int) -> bool:
        """One more look at the number: whether it has been the same for too long."""
        if number != self.number:
            self.number, self.looks, self.since = number, 0, time.time()
        self.looks += 1
        return self.looks > self.limit
