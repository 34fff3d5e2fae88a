"""Run a function on all ranks, and end all of them when one fails.

The rank that fails first prints its error, and all others leave with its exit status, also ranks that wait in a
collective. rendezvous.py holds the protocol.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from utils.distributed.health.hangs import RECORDED, Record, explain_hang, watch_collectives, write_records
from utils.distributed.health.heartbeat import Heartbeat
from utils.distributed.health.ras import ask_nccl
from utils.distributed.launch import Launch, find_launch, name_ranks
from utils.distributed.rendezvous import (
    ANSWER_SECONDS,
    GRACE_SECONDS,
    Failure,
    Rendezvous,
    answer_alarm,
    claim_failure,
    gather_answers,
)
from utils.distributed.world import World, choose_device
from utils.errors import LOST_RANK, ConfigError, ExpectedError, Stopped, explain, print_error
from utils.files import write_atomically
from utils.program import command

LEAVE_SECONDS = 2 * (GRACE_SECONDS + ANSWER_SECONDS)  # from a failure's message to the end of the process, at most


def run_ranks(
    action: Callable[[World], None],
    device: str,
    timeout: float,
    folder: Path | None = None,
) -> int:
    """Run `action` as this process's rank and return the exit status, which is the same for all ranks.

    A rank waits `timeout` seconds for the others, at the start and in a collective. An exception is printed by one rank
    only, an `ExpectedError` without traceback. With several ranks a failure ends
    the process instead of returning, since other threads may hang in a collective. If the ranks hang, their last
    collectives are written to `folder`, if it exists.
    """
    try:
        launch = find_launch(os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    failure = Failure(0, "")
    if launch.world_size > 1:
        failure = _run_among_others(action, device, launch, timedelta(seconds=timeout), folder)
    else:
        try:
            action(_join_world(device, launch))
        except BaseException as error:
            failure = _describe(error, launch)
    if failure.message:
        print_error(failure.message)
    _report_status(launch, failure.status)
    return failure.status


def _run_among_others(
    action: Callable[[World], None],
    device: str,
    launch: Launch,
    timeout: timedelta,
    folder: Path | None,
) -> Failure:
    """Return how the run ended; after a failure, end the process."""
    _set_threads(launch.local_world_size)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))  # enables the flight recorder of process groups
    rendezvous, outcome = None, Failure(0, "")
    try:
        rendezvous = Rendezvous(launch, timeout.total_seconds())
        rendezvous.wait_for_ranks()
        rendezvous.watch(partial(_end, rendezvous=rendezvous, launch=launch))
        leave = partial(_end_after_loss, rendezvous=rendezvous, folder=folder)
        heartbeat = Heartbeat(rendezvous.store, launch, timeout.total_seconds(), leave)
        hangs = watch_collectives(rendezvous.store, timeout.total_seconds(), leave)
        world = _join_world(device, launch)
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        store = dist.PrefixStore("group", rendezvous.store)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
        _refuse_mixed_devices(world, store)
        _refuse_shared_gpus(world)
        try:
            action(world)
        except Stopped as stopped:  # all ranks have agreed to stop, so it is no failure
            outcome = Failure(stopped.exit_status, str(stopped) if world.is_main else "")
        world.barrier()  # rank 0 may still be writing
        heartbeat.stop()
        hangs.set()
        rendezvous.stop_watching()
        gc.collect()  # DistributedDataParallel has threads that must not outlive the group
        dist.destroy_process_group()
        rendezvous.leave_last()
    except BaseException as error:
        _end(_agree_on_failure(error, rendezvous, launch, folder), rendezvous, launch)
    return outcome


def _join_world(device: str, launch: Launch) -> World:
    world = World(launch.rank, launch.local_rank, launch.world_size, choose_device(device, launch.local_rank))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    return world


def _refuse_mixed_devices(world: World, store: dist.Store) -> None:
    """Refuse ranks on CPUs among ranks on GPUs, as on a node with a broken driver: they would hang."""
    store.set(f"device/{world.rank}", world.device.type)
    if not world.is_main:
        return
    types = [store.get(f"device/{rank}").decode() for rank in range(world.world_size)]
    if without := [rank for rank, kind in enumerate(types) if kind == "cpu"] if "cuda" in types else []:
        raise ConfigError(
            f"{name_ranks(without)} of {world.world_size} find no usable GPU, the others do; check driver and "
            f"CUDA_VISIBLE_DEVICES on their nodes with {command('doctor')}, or use device: cpu"
        )


def _refuse_shared_gpus(world: World) -> None:
    """Collective: refuse two ranks on one GPU, for which NCCL would only report a failed system call."""
    if world.device.type != "cuda":
        return
    gpus = world.all_gather((socket.gethostname(), str(torch.cuda.get_device_properties(world.device).uuid)))
    sharing = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if sharing:
        raise ConfigError(
            f"{name_ranks(sharing)} share a GPU with another rank; start one process per GPU, and let each process of "
            "a node see all GPUs, or only its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
        )


def _set_threads(local_world_size: int) -> None:
    """Without OMP_NUM_THREADS, give this process its share of the cores that it may run on.

    torchrun sets OMP_NUM_THREADS, srun and mpirun do not, and more threads than cores are slow.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0))
    bound = cores * local_world_size <= (os.cpu_count() or 1)  # the launcher bound each process to separate cores
    torch.set_num_threads(max(1, cores if bound else cores // local_world_size))


def _describe(error: BaseException, launch: Launch) -> Failure:
    who = f"rank {launch.rank}: " if launch.world_size > 1 else ""
    if isinstance(error, Stopped):
        return Failure(error.exit_status, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(130, f"{who}interrupted; earlier checkpoints are kept")
    expected = explain(error) if isinstance(error, Exception) else None
    if expected is not None:
        if who and expected.rank is not None:  # raised on another rank, which may report it later than this one
            who = f"rank {expected.rank}: "
        return Failure(expected.exit_status, f"error: {who}{expected}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(1, f"{trace}\nerror: {who}{type(error).__name__}: {error}" if who else trace)


def _agree_on_failure(
    error: BaseException, rendezvous: Rendezvous | None, launch: Launch, folder: Path | None
) -> Failure:
    """Agree with the other ranks which failure was first, and return what this rank prints and leaves with."""
    if threading.current_thread() is threading.main_thread():
        # torchrun and Slurm terminate the others as soon as one has failed: let this one finish its report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # PyTorch's handler would raise here when a loader worker dies
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failure = _describe(error, launch)
    if rendezvous is None:
        # the ranks cannot agree; one of each node prints, as the reason is often the same for all
        return failure if launch.local_rank == 0 else Failure(failure.status, "")
    rendezvous.ending.acquire(timeout=LEAVE_SECONDS)
    rendezvous.stop_watching()
    lost_rank = LOST_RANK.search(str(error)) is not None
    try:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and lost_rank):
            first, records = rendezvous.collect_answers()
            if first is not None:
                return first
            absent = [rank for rank in range(launch.world_size) if rank not in records]
            failure = claim_failure(
                rendezvous.store, Failure(1, f"error: rank {launch.rank}: {_explain_loss(error, absent)}")
            )
            return _add_collectives(failure, records, True, launch, folder)
        return claim_failure(rendezvous.store, failure)
    except dist.DistError:
        return Failure(1, rendezvous.lost_store()) if lost_rank else failure


def _explain_loss(error: BaseException, absent: list[int]) -> str:
    if absent:
        return f"lost contact: no answer from {name_ranks(absent)}, perhaps killed, or its node is gone"
    # NCCL's first line says what failed, its last line why
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "; ".join(dict.fromkeys((lines[0], lines[-1])))
    return f"lost contact: {reason}" if LOST_RANK.search(reason) else reason


def _end_after_loss(
    message: str, lost: Sequence[int], store: dist.Store | None, rendezvous: Rendezvous, folder: Path | None
) -> NoReturn:
    """End the process from a watching thread, with its own connection to the store: the main thread may hang."""
    launch = rendezvous.launch
    failure = Failure(1, f"error: rank {launch.rank}: {message}")
    if store is None:
        _end(failure if launch.reports_for_its_node else Failure(1, ""), None, launch)
    rendezvous.ending.acquire(timeout=LEAVE_SECONDS)
    rendezvous.stop_watching()
    _limit_exit_time(failure.status)
    with suppress(Exception):  # whatever fails here, this thread has to end the process
        answer_alarm(store, launch.rank)
        failure = claim_failure(store, failure)
        store.set("alarm", "")
        if failure.message:
            here = [rank for rank in range(launch.world_size) if rank not in lost]
            records = gather_answers(store, here, ANSWER_SECONDS)
            failure = _add_collectives(failure, records, False, launch, folder)
            report = ask_nccl() if torch.cuda.is_initialized() else ""  # a run on CPUs has no NCCL
            failure = Failure(failure.status, "\n".join(filter(None, (failure.message, report))))
    _end(failure, rendezvous, launch)


def _add_collectives(
    failure: Failure, records: Mapping[int, Record], broken: bool, launch: Launch, folder: Path | None
) -> Failure:
    """Add the collectives that the ranks wait in to the failure; the one rank with a message also writes the file."""
    reason = explain_hang(records, launch.world_size, broken)
    if not failure.message or not reason:
        return failure
    message = f"{failure.message}\n{reason}"
    written: list[str] = []

    def write() -> None:
        with suppress(ExpectedError, OSError):
            if folder is not None and folder.is_dir():
                path = folder / "collectives.json"
                write_records(path, message, records)
                written.append(f"; all ranks' last collectives: {path}")

    # in a thread, as a full or hanging disk must not hold back the message
    writer = threading.Thread(target=write, name="write collectives", daemon=True)
    writer.start()
    writer.join(ANSWER_SECONDS)
    return Failure(failure.status, message + "".join(written))


def _end(failure: Failure, rendezvous: Rendezvous | None, launch: Launch) -> NoReturn:
    """Print the failure, report it to the other ranks and the launcher, and end this process at once."""
    _limit_exit_time(failure.status)
    if failure.message:
        print_error(failure.message)
        _report_to_torchrun(failure.message[max(0, failure.message.rfind("error: rank")) :])
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(dist.DistError):  # the store's process may be gone already
        if rendezvous is not None:
            rendezvous.stop_watching()
            rendezvous.raise_alarm()
            rendezvous.leave_last()
    _report_status(launch, failure.status)
    for child in multiprocessing.active_children():  # loader workers, which os._exit would leave behind
        child.terminate()
    os._exit(failure.status)


def _limit_exit_time(status: int) -> None:
    """End this process within LEAVE_SECONDS, even if the store hangs."""
    leave = threading.Timer(LEAVE_SECONDS, os._exit, [status])
    leave.daemon = True
    leave.start()


def _report_to_torchrun(message: str) -> None:
    """Write the message, in torchrun's format, for the summary that torchrun prints of a failed run."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # the message has been printed already
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def _report_status(launch: Launch, status: int) -> None:
    """Write the exit status to the file TRAIN_EXIT_STATUS_FILE: torchrun exits with 1 for every failure."""
    path = os.environ.get("TRAIN_EXIT_STATUS_FILE")
    if path and launch.rank == 0:
        try:
            write_atomically(Path(path), f"{status}\n".encode())
        except ExpectedError as error:
            print(f"TRAIN_EXIT_STATUS_FILE: {error}", file=sys.stderr)
