"""Why a run hangs: what each rank's last collectives were, from the flight recorder of torch.distributed.

Ranks must call the same collectives in the same order. Where one does not come, or comes to another one, the rest wait
in silence. The recorder numbers the collectives of every rank; whoever came least far is the rank that did not come.
Collectives that are replayed in a CUDA graph are not recorded.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed.health.heartbeat import LOOKS, SHORTEST_SECONDS, Silence
from utils.distributed.launch import name_ranks
from utils.files import write_atomically

KEPT = 256  # collectives in each rank's memory
NOTHING = -2  # PyTorch's number of the last collective that has ended is -1 before the first
HANGS_AFTER = 19  # of the heartbeat's looks without an end; a rank that is lost is told before
TOLD = 8  # of each rank, to the others: those around the first that has not ended
# The recorders of PyTorch: gloo's, and NCCL's where there is one.
RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


@dataclass(frozen=True)
class Collective:
    """One call on one rank: its number among those of its backend, from 1, and the shapes of its inputs."""

    backend: str
    number: int
    kind: str  # all_reduce, broadcast, ...
    shapes: list[list[int]]
    ended: bool

    def __str__(self) -> str:
        values = sum(prod(shape) for shape in self.shapes)
        return f"{self.kind} number {self.number}" + (f" ({values:,} values)" if self.shapes else "")


@dataclass(frozen=True)
class Record:
    """What one rank tells of itself."""

    host: str
    process: int
    collectives: list[Collective] = field(default_factory=list)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Record":
        content = json.loads(text)
        return cls(content["host"], content["process"], [Collective(**one) for one in content["collectives"]])


def switch_on_recorder() -> None:
    """Before the first process group; the user's own size is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def take_record() -> Record:
    """The last collectives of this rank, from any thread, also while another one waits in a collective."""
    collectives = []
    for backend in RECORDERS:
        entries = _read(backend, with_collectives=True).get("entries", [])
        entries = [entry for entry in entries if not entry["is_p2p"]]
        # a host may be far ahead of the collective that its GPU waits in
        waits = next((place for place, entry in enumerate(entries) if not entry["retired"]), len(entries))
        for entry in entries[max(0, waits - TOLD // 2) :][:TOLD]:
            collectives.append(
                Collective(
                    backend,
                    entry["collective_seq_id"],
                    entry["profiling_name"].rpartition(":")[2],
                    entry["input_sizes"],
                    entry["retired"],
                )
            )
    return Record(socket.gethostname(), os.getpid(), collectives)


def _read(backend: str, with_collectives: bool) -> dict[str, Any]:
    read = getattr(torch._C._distributed_c10d, RECORDERS[backend], None)
    return json.loads(read(with_collectives, False)) if read is not None else {}


def watch_collectives(
    store: dist.Store, limit: float, leave: Callable[[str, Sequence[int], dist.Store | None], None]
) -> threading.Event:
    """Start a thread that calls `leave`, as a `Heartbeat` does, when a collective of this rank does not end.

    It does so shortly before the backend itself gives up after `limit` seconds, by an exception in gloo, by the end of
    the process in NCCL. The event that is returned stops it.
    """
    own, pause, stop = store.clone(), max(limit, SHORTEST_SECONDS) / LOOKS, threading.Event()

    def watch() -> None:
        silences = {backend: Silence(HANGS_AFTER) for backend in RECORDERS}
        while not stop.wait(pause):
            for backend, silence in silences.items():
                ended = _find_unfinished(backend)
                if silence.lasts(ended) and ended != NOTHING:
                    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(silence.since))
                    since = f"since {when}, for nearly {pause * LOOKS:g} s (collective_timeout_seconds)"
                    leave(f"the ranks wait for each other {since}", [], own)
                    return

    threading.Thread(target=watch, name="watch over collectives", daemon=True).start()
    return stop


def _find_unfinished(backend: str) -> int:
    """The number of the last collective that has ended, where a later one has begun; else `NOTHING`."""
    for state in _read(backend, with_collectives=False).get("pg_status", {}).values():
        if int(state["last_enqueued_collective"]) > int(state["last_completed_collective"]):
            return int(state["last_completed_collective"])
    return NOTHING


def explain_hang(records: Mapping[int, Record], world_size: int, broken: bool) -> str:
    """Which rank did not come to which collective that the others wait in, in one line; empty if nobody waits.

    `records` are of the ranks that answered; `broken` says that their last collective was ended by an error.
    """
    silent = [rank for rank in range(world_size) if rank not in records]
    for backend in RECORDERS:
        calls = {
            rank: [one for one in record.collectives if one.backend == backend] for rank, record in records.items()
        }
        told = _explain_silence(silent, calls, broken) if silent else _explain_order(calls) or _explain_absence(calls)
        if told:
            return told
    return ""


def _explain_silence(silent: Sequence[int], calls: Mapping[int, Sequence[Collective]], broken: bool) -> str:
    """Some of those who answer may have got one collective further than others before the loss was noticed."""
    waiting = {rank: open_one for rank, own in calls.items() if (open_one := _first_open(own)) is not None}
    if broken:
        waiting |= {rank: own[-1] for rank, own in calls.items() if own and rank not in waiting}
    if not waiting:
        return ""
    answers = "does not answer" if len(silent) == 1 else "do not answer"
    where = min(waiting.values(), key=lambda one: one.number)
    return f"{name_ranks(silent)} {answers}; {name_ranks(waiting)} {_wait(waiting)} in {where}"


def _explain_order(calls: Mapping[int, Sequence[Collective]]) -> str:
    """The first number under which two ranks called different things; where all give and get equally much, sizes
    count too."""
    for number in sorted({one.number for own in calls.values() for one in own}):
        same = {rank: one for rank, own in calls.items() for one in own if one.number == number}
        first = min(same)
        for rank, one in same.items():
            sized = one.kind in ("all_reduce", "broadcast")
            if one.kind != same[first].kind or (sized and one.shapes != same[first].shapes):
                return f"the ranks' order differs: rank {first} called {same[first]}, rank {rank} {one}"
    return ""


def _explain_absence(calls: Mapping[int, Sequence[Collective]]) -> str:
    reached = {rank: own[-1].number if own else 0 for rank, own in calls.items()}
    missing = min(reached.values()) + 1
    waiting = {rank: one for rank, own in calls.items() for one in own if one.number == missing}
    if not waiting:
        opened = [open_one for own in calls.values() if (open_one := _first_open(own)) is not None]
        return f"all ranks wait in {opened[0]}: see the network between them" if len(opened) == len(calls) else ""
    absent = [rank for rank, number in reached.items() if number < missing]
    own = calls[absent[0]]
    after = f"; its last was {own[-1]}" if len(absent) == 1 and own else ""
    wait = f"in which {name_ranks(waiting)} {_wait(waiting)}"
    return f"{name_ranks(absent)} did not come to {waiting[min(waiting)]}, {wait}{after}"


def _first_open(own: Sequence[Collective]) -> Collective | None:
    """What a rank waits in: its device works off one after the other."""
    return next((one for one in own if not one.ended), None)


def _wait(ranks: Mapping[int, object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def write_records(path: Path, message: str, records: Mapping[int, Record]) -> None:
    """For whoever looks into it later: every rank's last collectives."""
    content = {"message": message, "ranks": {str(rank): asdict(record) for rank, record in sorted(records.items())}}
    write_atomically(path, json.dumps(content, indent=1).encode())
