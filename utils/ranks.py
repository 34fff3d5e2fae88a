"""Brings the ranks of a run together, and lets all of them leave when one fails.

Start: every rank writes that it has arrived into rank 0's store, so that after `start_timeout_seconds` the missing
ones have names. Failure: the rank that claims the store's key `failure` first prints its error, and all the others
leave with its exit status, those that wait in a collective for the one that failed included.
"""

import errno
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
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils.checkpoint import write_atomically
from utils.distributed import Distributed, choose_device
from utils.errors import LOST_RANK, ConfigError, ExpectedError, Stopped, explain
from utils.launch import Launch, find_launch, name_ranks

POLL_SECONDS = 0.2  # how often a rank looks whether another has failed
ROLL_CALL_SECONDS = 3.0  # to answer, once contact with some rank is lost
GRACE_SECONDS = 5.0  # after another rank's failure, to leave before being ended in mid-collective
STORE_SECONDS = 30.0  # for one answer of the store
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Failure:
    """How a run ended: its exit status and what the reader is told."""

    status: int
    message: str


def run_ranks(
    action: Callable[[Distributed], None], device: str, start_timeout: float, collective_timeout: float
) -> int:
    """Run `action` as this process's rank and return the exit status, which is the same for all ranks.

    Whatever it raises is printed in one place only, an `ExpectedError` without traceback. With several ranks a failure
    does not return but ends the process, since other threads may hang in a collective.
    """
    try:
        launch = find_launch(os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    failure = _run_alone(action, device, launch)
    if failure is None:
        failure = _run_among_others(action, device, launch, start_timeout, collective_timeout)
    if failure.message:
        print(failure.message, file=sys.stderr, flush=True)
    _tell_launcher(launch, failure.status)
    return failure.status


def _run_alone(action: Callable[[Distributed], None], device: str, launch: Launch) -> Failure | None:
    if launch.world_size > 1:
        return None
    try:
        action(_take_place(device, launch))
    except BaseException as error:
        return _describe(error, launch)
    return Failure(0, "")


def _run_among_others(
    action: Callable[[Distributed], None], device: str, launch: Launch, start_timeout: float, collective_timeout: float
) -> Failure:
    """Returns an orderly end's outcome; after a failure, ends the process."""
    _share_cores(launch.local_world_size)
    meeting = None
    try:
        deadline = time.monotonic() + start_timeout
        meeting = Meeting(launch, _open_store(launch, deadline, start_timeout))
        meeting.assemble(deadline, start_timeout)
        meeting.watch()
        place = _take_place(device, launch)
        backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=collective_timeout),
        )
        _refuse_shared_gpus(place)
        outcome = Failure(0, "")
        try:
            action(place)
        except Stopped as stopped:  # by agreement of all ranks, so that none has to be told
            outcome = Failure(stopped.exit_status, str(stopped) if place.is_main else "")
        place.barrier()  # rank 0 may still be writing what the others need not wait for
        meeting.stop_watching()
        gc.collect()  # DistributedDataParallel keeps threads that must not outlive the group
        dist.destroy_process_group()
        meeting.leave_last()
    except BaseException as error:
        _end(_settle(error, meeting, launch), meeting, launch)
    return outcome


def _take_place(device: str, launch: Launch) -> Distributed:
    place = Distributed(launch.rank, launch.local_rank, launch.world_size, choose_device(device, launch.local_rank))
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    return place


def _refuse_shared_gpus(place: Distributed) -> None:
    """Collective: NCCL knows one rank per GPU, and says of two only that a system call failed."""
    if place.device.type != "cuda":
        return
    gpus = place.gather((socket.gethostname(), str(torch.cuda.get_device_properties(place.device).uuid)))
    sharing = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if sharing:
        raise ConfigError(
            f"{name_ranks(sharing)} share a GPU with another rank; start one process per GPU, and show the processes "
            "of a node all of its GPUs, or each its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
        )


def _share_cores(local_world_size: int) -> None:
    """Threads of this process where nothing else says how many: its share of the cores that it may run on.

    torchrun sets OMP_NUM_THREADS, srun and mpirun do not, and more threads than cores are slower by far than one each.
    """
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    cores = len(os.sched_getaffinity(0))
    bound = cores * local_world_size <= (os.cpu_count() or 1)  # the launcher gave each process cores of its own
    torch.set_num_threads(max(1, cores if bound else cores // local_world_size))


# ---- start


def _open_store(launch: Launch, deadline: float, start_timeout: float) -> dist.TCPStore:
    """A connection to rank 0's store, which rank 0 opens; errors name the address."""
    address = _store_address(launch)
    where = f"{address}:{launch.port}"
    try:
        socket.getaddrinfo(address, launch.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR {launch.address!r} does not resolve on {socket.gethostname()}: {error.strerror}; "
            "set it to a name or address of the host of rank 0"
        ) from None
    hosts = launch.hosts_store and launch.rank == 0
    if not hosts and not _is_listening(launch, deadline):
        raise ExpectedError(
            f"no answer from {where}, where {'rank 0' if launch.hosts_store else 'torchrun'} should be, within "
            f"{start_timeout:g} s (start_timeout_seconds); tried from {socket.gethostname()}\n"
            "see whether rank 0 has started, and whether MASTER_ADDR and MASTER_PORT are right and pass the firewall"
        )
    try:
        return dist.TCPStore(
            "localhost" if hosts else address,
            launch.port,
            is_master=hosts,
            timeout=timedelta(seconds=STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=_listen_on_loopback(launch.port) if hosts and address == LOOPBACK else None,
        )
    except (dist.DistNetworkError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            remedy = "set MASTER_PORT to a free one in every process, or start with torchrun --standalone"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                remedy = "torchrun chose it when it was free: start again"
            where = f"port {launch.port} on {socket.gethostname()}"
            raise ConfigError(f"{where} is in use, by another job perhaps; {remedy}") from None
        raise


def _store_address(launch: Launch) -> str:
    """Where the ranks find the store: with all of them on one node, rank 0 serves it to that node alone."""
    local = launch.hosts_store and launch.local_world_size == launch.world_size
    return LOOPBACK if local else launch.address


def _listen_on_loopback(port: int) -> int:
    """A socket for the store to serve and to close, where PyTorch's own would listen on every interface."""
    with socket.create_server((LOOPBACK, port)) as server:
        return server.detach()


def _is_listening(launch: Launch, deadline: float) -> bool:
    """Wait until somebody listens there. PyTorch's own attempts print a stack trace for each that fails."""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((_store_address(launch), launch.port), timeout=5):
                return True
        except OSError:
            time.sleep(POLL_SECONDS)
    return False


class Meeting:
    """The ranks of one start, in the store.

    Under torchrun the store outlives a start, and keys of the one before are still in it: rank 0 names each meeting
    anew, and lists those who came, so that no rank mistakes an old one for its own.
    """

    def __init__(self, launch: Launch, connection: dist.TCPStore) -> None:
        self.launch, self.connection = launch, connection
        self._lobby = dist.PrefixStore(f"train/{launch.job}/{launch.world_size}", connection)
        self._name("nobody")
        self.num_here = launch.world_size  # ranks that can still answer, as far as this one knows
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def assemble(self, deadline: float, start_timeout: float) -> None:
        """Wait until every rank is here; `ExpectedError` that names the missing ones."""
        if self.launch.rank == 0:
            self._receive(deadline, start_timeout)
        else:
            self._arrive(deadline, start_timeout)

    def _receive(self, deadline: float, start_timeout: float) -> None:
        """Rank 0: wait for all the others."""
        self._name(uuid.uuid4().hex)
        self._lobby.set("meeting", self.name)
        absent = set(range(1, self.launch.world_size))
        while absent and time.monotonic() < deadline:
            absent = {rank for rank in absent if not self.store.check([f"arrived/{rank}"])}
            time.sleep(0.02)
        if absent:
            self.num_here -= len(absent)
            self.store.set("absent", name_ranks(absent))
            raise self._absence(name_ranks(absent), start_timeout)
        tokens = [self.store.get(f"arrived/{rank}").decode() for rank in range(1, self.launch.world_size)]
        self.store.set("complete", " ".join(tokens))

    def _arrive(self, deadline: float, start_timeout: float) -> None:
        """Another rank: say that it is here, and wait until all are."""
        token, key = uuid.uuid4().hex, f"arrived/{self.launch.rank}"
        seen, pause = b"", 0.02
        # longer than rank 0, whose message names the missing ranks
        while time.monotonic() < deadline + ROLL_CALL_SECONDS:
            if self._lobby.check(["meeting"]):
                name = self._lobby.get("meeting").decode()
                if name != self.name:
                    self._name(name)
                    seen = self.store.compare_set(key, "", token)
                if self.store.check(["complete"]) and token in self.store.get("complete").decode().split():
                    return
                if seen == token.encode() and self.store.check(["absent"]):
                    raise self._absence(self.store.get("absent").decode(), start_timeout)
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        if seen and seen != token.encode():
            raise ConfigError(f"another process is already rank {self.launch.rank} at {self._where()}")
        raise ExpectedError(f"rank 0 did not arrive at {self._where()} within {start_timeout:g} s")

    def _name(self, name: str) -> None:
        self.name, self.store = name, dist.PrefixStore(name, self._lobby)

    def _where(self) -> str:
        return f"{_store_address(self.launch)}:{self.launch.port}"

    def _absence(self, ranks: str, start_timeout: float) -> ExpectedError:
        return ExpectedError(
            f"{ranks} of {self.launch.world_size} did not arrive at {self._where()} within {start_timeout:g} s "
            "(start_timeout_seconds)\nsee what became of these processes and their nodes, or allow more time"
        )

    # ---- failure

    def watch(self) -> None:
        """Look for other ranks' failures from now on, in a thread with a connection of its own."""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop_watching(self) -> None:
        """This rank leaves by itself, whatever becomes of the others."""
        self._stop.set()

    def _watch(self) -> None:
        failure = None
        try:
            own = dist.TCPStore(
                self.connection.host,
                self.connection.port,
                is_master=False,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
            )
            lobby = dist.PrefixStore(f"train/{self.launch.job}/{self.launch.world_size}", own)
            store = dist.PrefixStore(self.name, lobby)
            while not store.check(["alarm"]):
                if self._stop.wait(POLL_SECONDS):
                    return
            store.set(f"present/{self.launch.rank}", "")
            failure = wait_for_failure(store, 2 * ROLL_CALL_SECONDS)
        except dist.DistError:
            pass  # the store is gone, and with it whoever served it: the main thread says so, if it can
        if not self._stop.wait(GRACE_SECONDS):
            _end(failure or Failure(1, self.lost_store()), self, self.launch)

    def lost_store(self) -> str:
        """The message for a store that does not answer, on one rank of each node; empty on the others."""
        speaks = self.launch.local_rank == 0 or self.launch.rank == 1
        owner = "rank 0" if self.launch.hosts_store else "torchrun"
        return f"error: rank {self.launch.rank}: lost contact with {owner} at {self._where()}" if speaks else ""

    def claim(self, failure: Failure) -> Failure:
        """Make this the failure of the run, or return the one that was first, without its message."""
        mine = json.dumps(asdict(failure))
        first = self.store.compare_set("failure", "", mine).decode()
        return failure if first == mine else Failure(json.loads(first)["status"], "")

    def call_the_roll(self) -> tuple[Failure | None, list[int]]:
        """What failed first, where a rank has said so; else the ranks that no longer answer."""
        self.store.set("alarm", "")
        everyone = range(self.launch.world_size)
        until = time.monotonic() + ROLL_CALL_SECONDS
        absent = list(everyone)
        while time.monotonic() < until:
            failure = wait_for_failure(self.store, POLL_SECONDS)
            if failure is not None:
                return failure, []
            absent = [rank for rank in everyone if not self.store.check([f"present/{rank}"])]
        self.num_here -= len(absent)
        return None, absent

    def leave_last(self) -> None:
        """Rank 0 serves the store, perhaps, and goes when the others have gone or are given up."""
        left = self.store.add("left", 1)
        if self.launch.rank != 0 or not self.launch.hosts_store:
            return
        until = time.monotonic() + GRACE_SECONDS + ROLL_CALL_SECONDS
        while left < self.num_here and time.monotonic() < until:
            time.sleep(0.02)
            left = self.store.add("left", 0)


def wait_for_failure(store: dist.Store, seconds: float) -> Failure | None:
    """The run's failure without its message, which has been printed; None if there is none within that time."""
    until = time.monotonic() + seconds
    while True:
        if store.check(["failure"]):
            return Failure(json.loads(store.get("failure"))["status"], "")
        if time.monotonic() > until:
            return None
        time.sleep(0.05)


def _describe(error: BaseException, launch: Launch) -> Failure:
    who = f"rank {launch.rank}: " if launch.world_size > 1 else ""
    if isinstance(error, Stopped):
        return Failure(error.exit_status, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(130, f"{who}interrupted; what was saved before is there")
    expected = explain(error) if isinstance(error, Exception) else None
    if expected is not None:
        return Failure(expected.exit_status, f"error: {who}{expected}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(1, f"{trace}\nerror: {who}{type(error).__name__}: {error}" if who else trace)


def _settle(error: BaseException, meeting: Meeting | None, launch: Launch) -> Failure:
    """What this rank prints and leaves with, after agreeing with the others which failure was the first."""
    if threading.current_thread() is threading.main_thread():
        # torchrun and Slurm end the others as soon as one has failed: the seconds until this one has left are theirs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # PyTorch's handler raises, wherever this thread may be, when a loader worker has died
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failure = _describe(error, launch)
    if meeting is None:
        # nobody can be asked; one rank of each node speaks, since the reason is often the same for all of them
        return failure if launch.local_rank == 0 else Failure(failure.status, "")
    try:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST_RANK.search(str(error))):
            first, absent = meeting.call_the_roll()
            if first is not None:
                return first
            # NCCL tells in its first line what failed, and in its last one why
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = "; ".join(dict.fromkeys((lines[0], lines[-1])))
            if absent:
                reason = f"lost contact: no answer from {name_ranks(absent)}, killed perhaps, or its node is gone"
            elif LOST_RANK.search(reason):
                reason = f"lost contact: {reason}"
            failure = Failure(1, f"error: rank {launch.rank}: {reason}")
        return meeting.claim(failure)
    except dist.DistError:
        return failure if not LOST_RANK.search(str(error)) else Failure(1, meeting.lost_store())


def _end(failure: Failure, meeting: Meeting | None, launch: Launch) -> None:
    """Print, tell the others and the launcher, and leave at once."""
    if failure.message:
        print(failure.message, file=sys.stderr, flush=True)
        _tell_torchrun(failure.message[max(0, failure.message.rfind("error: rank")) :])
    sys.stdout.flush()
    try:
        if meeting is not None:
            meeting.stop_watching()
            meeting.store.set("alarm", "")
            meeting.leave_last()
    except dist.DistError:
        pass  # the store's process is gone already
    _tell_launcher(launch, failure.status)
    for child in multiprocessing.active_children():  # loader workers, which only an orderly exit would end
        child.terminate()
    os._exit(failure.status)


def _tell_torchrun(message: str) -> None:
    """The message for the summary that torchrun prints of a failed run, in torchrun's own format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # nothing may keep this rank from leaving: the message has been printed
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def _tell_launcher(launch: Launch, status: int) -> None:
    """torchrun turns every failure into 1; a batch script that must tell 75 from it names a file in this variable."""
    path = os.environ.get("TRAIN_EXIT_STATUS_FILE")
    if path and launch.rank == 0:
        try:
            write_atomically(Path(path), f"{status}\n".encode())
        except ExpectedError as error:
            print(f"TRAIN_EXIT_STATUS_FILE: {error}", file=sys.stderr)
