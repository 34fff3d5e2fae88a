"""Explain why a run hangs from each rank's last collectives, which torch.distributed's flight recorder keeps.

Ranks must call the same collectives in the same order. If one rank does not, the others wait silently. The recorder
numbers the collectives of every rank; the rank with the lowest number is the one that did not come. Collectives
replayed in a CUDA graph are not recorded.
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

from utils.distributed.health.heartbeat import CHECKS, SHORTEST_SECONDS, Silence
from utils.distributed.launch import name_ranks
from utils.files import write_atomically

RECORDED = 256  # collectives that the recorder keeps per rank
NO_UNFINISHED = -2  # below -1, which PyTorch reports as the last finished collective before the first one
HANGS_AFTER = 19  # checks without progress; the heartbeat reports a lost rank earlier
REPORTED = 8  # collectives that each rank reports: around the first unfinished one
# PyTorch's recorders: gloo's, and NCCL's if PyTorch has it.
RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


@dataclass(frozen=True)
class Collective:
    """One call on one rank. `number` counts the calls of its backend from 1; `shapes` are of its inputs."""

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
    """Host, process and last collectives of one rank."""

    host: str
    process: int
    collectives: list[Collective] = field(default_factory=list)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Record":
        content = json.loads(text)
        return cls(content["host"], content["process"], [Collective(**one) for one in content["collectives"]])


def take_record() -> Record:
    """Return this rank's last collectives, from any thread, also while another thread waits in a collective."""
    collectives = []
    for backend in RECORDERS:
        entries = _read(backend, with_collectives=True).get("entries", [])
        entries = [entry for entry in entries if not entry["is_p2p"]]
        # a host may be far ahead of the collective in which its GPU waits
        unfinished = next((place for place, entry in enumerate(entries) if not entry["retired"]), len(entries))
        for entry in entries[max(0, unfinished - REPORTED // 2) :][:REPORTED]:
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

    It does so shortly before `limit` seconds, after which gloo raises an exception and NCCL ends the process. The
    returned event stops the thread.
    """
    own, pause, stop = store.clone(), max(limit, SHORTEST_SECONDS) / CHECKS, threading.Event()

    def watch() -> None:
        silences = {backend: Silence(HANGS_AFTER) for backend in RECORDERS}
        while not stop.wait(pause):
            for backend, silence in silences.items():
                finished = _last_before_unfinished(backend)
                if silence.lasts(finished) and finished != NO_UNFINISHED:
                    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(silence.since))
                    since = f"since {when}, for nearly {pause * CHECKS:g} s (rank_timeout_seconds)"
                    leave(f"the ranks wait for each other {since}", [], own)
                    return

    threading.Thread(target=watch, name="watch over collectives", daemon=True).start()
    return stop


def _last_before_unfinished(backend: str) -> int:
    """Return the number of the last finished collective if a later one has begun, otherwise `NO_UNFINISHED`."""
    for state in _read(backend, with_collectives=False).get("pg_status", {}).values():
        if int(state["last_enqueued_collective"]) > int(state["last_completed_collective"]):
            return int(state["last_completed_collective"])
    return NO_UNFINISHED


def explain_hang(records: Mapping[int, Record], world_size: int, broken: bool) -> str:
    """Name, in one line, the rank that did not come and the collective in which the others wait; empty if none waits.

    `records`: of the ranks that answered; `broken`: an error has ended their last collective.
    """
    silent = [rank for rank in range(world_size) if rank not in records]
    for backend in RECORDERS:
        calls = {
            rank: [one for one in record.collectives if one.backend == backend] for rank, record in records.items()
        }
        reason = _explain_silence(silent, calls, broken) if silent else _explain_order(calls) or _explain_absence(calls)
        if reason:
            return reason
    return ""


def _explain_silence(silent: Sequence[int], calls: Mapping[int, Sequence[Collective]], broken: bool) -> str:
    waiting = {rank: unfinished for rank, own in calls.items() if (unfinished := _first_unfinished(own)) is not None}
    if broken:
        waiting |= {rank: own[-1] for rank, own in calls.items() if own and rank not in waiting}
    if not waiting:
        return ""
    answers = "does not answer" if len(silent) == 1 else "do not answer"
    # some ranks may have got one collective further than others before the loss was noticed
    where = min(waiting.values(), key=lambda one: one.number)
    return f"{name_ranks(silent)} {answers}; {name_ranks(waiting)} {_wait(waiting)} in {where}"


def _explain_order(calls: Mapping[int, Sequence[Collective]]) -> str:
    """Describe the first number with different collectives on two ranks, or different sizes if these must be equal."""
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
        unfinished = [one for own in calls.values() if (one := _first_unfinished(own)) is not None]
        everyone_waits = len(unfinished) == len(calls)
        return f"all ranks wait in {unfinished[0]}: check the network between them" if everyone_waits else ""
    absent = [rank for rank, number in reached.items() if number < missing]
    own = calls[absent[0]]
    after = f"; its last was {own[-1]}" if len(absent) == 1 and own else ""
    wait = f"in which {name_ranks(waiting)} {_wait(waiting)}"
    return f"{name_ranks(absent)} did not come to {waiting[min(waiting)]}, {wait}{after}"


def _first_unfinished(own: Sequence[Collective]) -> Collective | None:
    """Return the collective in which a rank waits: its device runs them one after the other."""
    return next((one for one in own if not one.ended), None)


def _wait(ranks: Mapping[int, object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def write_records(path: Path, message: str, records: Mapping[int, Record]) -> None:
    """Write every rank's last collectives to a file."""
    content = {"message": message, "ranks": {str(rank): asdict(record) for rank, record in sorted(records.items())}}
    write_atomically(path, json.dumps(content, indent=1).encode())
