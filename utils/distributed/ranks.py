"""Run a function on all ranks, and end all of them when one fails.

Launchers start the processes and torch.distributed connects them. Three questions are left: which rank is missing,
which failure was the first, and who ends a rank that waits in a call that never returns.

Start: every rank opens the store, which rank 0 or torchrun serves, and writes its host, process and device there.
Run: a thread of every rank calls gloo's monitored_barrier twice a second. A killed rank breaks its connections, a
stopped or isolated one lets the barrier time out, and rank 0 learns which one it was, wherever the main threads wait:
NCCL's watchdog does not see replayed CUDA graphs. A rank that is only slow (a validation) has no slow thread.
End: the first rank that fails, or finds another one lost, writes its status to the store and prints the message. The
others find the status after their next barrier and leave with it; the process that serves the store leaves last.
A collective that does not end is reported by gloo's timeout, or by NCCL's watchdog, which ends the process.
"""

import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from utils.distributed.launch import Launch, find_launch, name_ranks
from utils.distributed.world import World, choose_device
from utils.errors import LOST_RANK, ConfigError, ExpectedError, Stopped, complete_output, explain, print_error
from utils.program import command

POLL_SECONDS = 0.05  # between two looks for a name, a port or a rank
STORE_SECONDS = 30.0  # for torchrun's store to open, and for one answer of a store
BARRIER_SECONDS = 0.5  # between two barriers
ANSWER_SECONDS = 3.0  # for another rank to report what this one has noticed
GRACE_SECONDS = 5.0  # for the main thread to leave, perhaps after a checkpoint; then the process is ended
SHORTEST_SECONDS = 10.0  # shortest timeout of a barrier: on a busy machine a thread may wait for seconds
LOST, UNREACHABLE = 0.8, 0.9  # of the timeout, for a rank and for rank 0: before collectives time out
LOOPBACK = "127.0.0.1"
GONE = "killed or stopped, or its node or the network is gone"


@dataclass(frozen=True)
class Failure:
    """How a run ended. `message` is empty if it has been printed."""

    status: int
    message: str = ""


def run_ranks(action: Callable[[World], None], device: str, timeout: float) -> int:
    """Run `action` as this process's rank and return the exit status, which is the same for all ranks.

    A rank waits `timeout` seconds for the others, at the start and in a collective. One rank prints an exception, an
    `ExpectedError` without traceback. With several ranks a failure ends the process: other threads may hang.
    """
    launch, peers, outcome = Launch(), None, Failure(0)

    @complete_output()  # flushed before the ranks agree on the status
    def act(world: World) -> None:
        _set_threads(world)
        action(world)

    try:
        launch = find_launch(os.environ)
        if launch.world_size > 1:
            peers = Peers(launch, open_store(launch, timeout), timeout)
        world = World(launch.rank, launch.local_rank, launch.world_size, choose_device(device, launch.local_rank))
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        if peers is None:
            act(world)
        else:
            outcome = peers.run(act, world)
    except BaseException as error:
        if peers is not None:
            peers.fail(error)
        outcome = _describe(error, launch)
    # one rank of a node prints why it has no store: the reason is usually the same for all
    if outcome.message and (launch.local_rank == 0 or launch.world_size == 1):
        print_error(outcome.message)
    _report_status(launch, outcome.status)
    return outcome.status


def _set_threads(world: World) -> None:
    """Collective: without OMP_NUM_THREADS, which srun and mpirun do not set, use this rank's cores. A single process
    without a quota keeps PyTorch's number."""
    cores = world.count_cores()
    shared = world.world_size > 1 or cores < len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ and shared:
        torch.set_num_threads(max(1, int(cores)))


# ---- start


def open_store(launch: Launch, timeout: float) -> dist.Store:
    """Open the store through which the ranks meet: serve it on rank 0, unless torchrun does, and connect to it."""
    host, port = socket.gethostname(), launch.port
    # Kubernetes adds a pod's name only when the pod has an address
    patience = timeout if "KUBERNETES_SERVICE_HOST" in os.environ else 0
    if not wait_for(lambda: socket.getaddrinfo(launch.address, port), patience):
        raise ConfigError(f"MASTER_ADDR {launch.address!r} does not resolve on {host}; set it to the host of rank 0")
    # with all ranks on one node, rank 0 serves the store on the loopback only
    one_node = launch.hosts_store and launch.local_world_size == launch.world_size
    if launch.hosts_store and launch.rank == 0:
        both = not one_node and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        where = (LOOPBACK if one_node else "", port)
        try:
            listener = socket.create_server(where, family=family, dualstack_ipv6=both).detach()
        except OSError as error:
            problem = f"cannot be opened ({os.strerror(error.errno or 0)}), perhaps another job uses it"
            remedy = "set MASTER_PORT to a free one in every process, or start with torchrun --standalone"
            raise ConfigError(f"port {port} on {host} {problem}; {remedy}") from None
        seconds = timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore("localhost", port, None, True, seconds, False, master_listen_fd=listener)
    else:
        store = _connect(LOOPBACK if one_node else launch.address, launch, timeout)
    # torchrun's store outlives a start, so it still has the keys of the previous one
    restart = "0" if launch.hosts_store else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"train/{launch.job}/{launch.world_size}/{restart}", store)


def _connect(address: str, launch: Launch, timeout: float) -> dist.TCPStore:
    owner = "rank 0" if launch.hosts_store else "torchrun"
    # torchrun's store is open before the ranks start, so a closed one means that torchrun is gone
    limit = timeout if launch.hosts_store else min(timeout, STORE_SECONDS)
    if wait_for(lambda: _is_open(address, launch.port), limit):  # PyTorch's own attempts would print stack traces
        with suppress(dist.DistError):
            seconds = timedelta(seconds=STORE_SECONDS)
            return dist.TCPStore(address, launch.port, timeout=seconds, wait_for_workers=False)
    raise ExpectedError(
        f"no answer from {owner} at {address}:{launch.port} within {limit:g} s (rank_timeout_seconds); tried from "
        f"{socket.gethostname()}\ncheck that {owner} has started, and that MASTER_ADDR and MASTER_PORT are right, "
        "pass the firewall, and belong to no other job or program"
    )


def _is_open(address: str, port: int) -> bool:
    with socket.create_connection((address, port), timeout=5):
        return True


def wait_for(test: Callable[[], object], seconds: float) -> bool:
    """Call `test` at least once; return whether it returned a true value, without an `OSError`, within `seconds`."""
    until = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if test():
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)


@contextmanager
def deadline(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` in a thread if the block has not ended after `seconds`."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_devices(kinds: Sequence[str]) -> None:
    """Refuse ranks on CPUs among ranks on GPUs: they would hang. NCCL reports two ranks on one GPU."""
    if "cuda" in kinds and (without := [rank for rank, kind in enumerate(kinds) if kind == "cpu"]):
        remedy = f"check driver and CUDA_VISIBLE_DEVICES on their nodes with {command('doctor')}, or use device: cpu"
        raise ConfigError(f"{name_ranks(without)} of {len(kinds)} find no usable GPU, the others do; {remedy}")


# ---- run and end


class Peers:
    """All ranks of this run: who they are, whether they live, and which failure was the first."""

    def __init__(self, launch: Launch, store: dist.Store, timeout: float) -> None:
        self.launch, self._store, self._timeout = launch, store, timeout
        self._places: list[tuple[str, int, str]] = []  # of each rank: host, process, kind of device
        self._num_lost = 0
        self._found: Future[Failure] = Future()  # by the thread
        self._left = threading.Event()  # the main thread needs no watch any more
        self._ending = threading.Lock()  # held by the thread that ends the process
        self._thread = threading.Thread(target=self._watch, name="watch over the ranks", daemon=True)

    def run(self, action: Callable[[World], None], world: World) -> Failure:
        """Run `action` on every rank; return how the run ended, on the main rank with the message of a stop."""
        self._store_of_thread = self._store.clone()  # opened now: a rank 0 that is lost after `_meet` never answers
        self._meet(world.device)
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        store, timeout = dist.PrefixStore("group", self._store), timedelta(seconds=self._timeout)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
        self._limit = max(self._timeout, SHORTEST_SECONDS)
        patience = timedelta(seconds=UNREACHABLE * self._limit)
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=patience)  # type: ignore[assignment]
        self._thread.start()
        outcome = Failure(0)
        try:
            action(world)
        except Stopped as stopped:  # all ranks have agreed to stop, so it is no failure
            outcome = Failure(stopped.exit_status, str(stopped) if world.is_main else "")
        world.barrier()  # rank 0 may still be writing
        self._left.set()
        self._thread.join()
        gc.collect()  # DistributedDataParallel has threads that must not outlive the group
        dist.destroy_process_group()
        self._leave()
        return outcome

    def _meet(self, device: torch.device) -> None:
        """Wait until every rank has arrived; raise `ExpectedError` naming the missing ones."""
        launch, store = self.launch, self._store
        keys = [f"arrived/{rank}" for rank in range(launch.world_size)]
        mine = json.dumps((socket.gethostname(), os.getpid(), device.type))
        found = store.compare_set(keys[launch.rank], "", mine).decode()
        if found not in (mine, "[]"):
            host, process, _ = json.loads(found)
            raise ConfigError(f"process {process} on {host} is already rank {launch.rank}; start each rank once")
        if not wait_for(lambda: store.check(keys), self._timeout):
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            who, where = f"{name_ranks(absent)} of {launch.world_size}", f"{launch.address}:{launch.port}"
            problem = f"did not arrive at {where} within {self._timeout:g} s (rank_timeout_seconds)"
            raise ExpectedError(f"{who} {problem}; check these processes and their nodes")
        places = [tuple(json.loads(store.get(key))) for key in keys]
        if () in places:
            raise ExpectedError("another rank has failed")  # and has printed its message
        self._places = places
        check_devices([kind for _, _, kind in places])

    def _watch(self) -> None:
        store = self._store_of_thread
        try:
            failure = self._follow(store)
        except Exception as error:  # of gloo or of the store
            failure = self._find_lost(store, str(error))
        if failure is not None:
            self._found.set_result(failure)
            dist.destroy_process_group(self._group)
            del self._group  # closes its connections: other ranks may wait in the barrier for this one
            if not self._left.wait(GRACE_SECONDS):
                self._end(failure)

    def _follow(self, store: dist.Store) -> Failure | None:
        """Meet the other ranks until one has reported a failure, or all have finished: then return None."""
        for number in itertools.count():
            if self.launch.rank == 0 and self._left.is_set():
                store.set("last barrier", str(number))
            patience = timedelta(seconds=(UNREACHABLE if self.launch.rank else LOST) * self._limit)
            dist.monitored_barrier(self._group, patience, wait_all_ranks=True)
            # a rank 0 that is stopped right after the barrier never answers
            with deadline(STORE_SECONDS, lambda: self._end(self._unreachable())):
                if store.check(["failure"]):
                    return self._read_failure(store)
                if store.check(["last barrier"]) and int(store.get("last barrier")) == number:
                    break
            self._left.wait(BARRIER_SECONDS)
        return None

    def _find_lost(self, store: dist.Store, error: str) -> Failure:
        """Return the failure after which the barrier or the store has failed."""
        rank = self.launch.rank
        # a store whose process is stopped or isolated never answers
        with suppress(dist.DistError), deadline(2 * ANSWER_SECONDS, lambda: self._end(self._unreachable())):
            # rank 0 knows which rank is lost
            if wait_for(lambda: store.check(["failure"]), ANSWER_SECONDS if rank else 0):
                return self._read_failure(store)
            named = re.search(r"Ranks ([\d, ]+) failed to pass monitoredBarrier", error)
            lost = [int(number) for number in named[1].split(",")] if named else self._find_closed() or [0]
            self._num_lost = len(lost)
            return self._claim(store, Failure(1, f"error: rank {rank}: no answer from {self._name(lost)}: {GONE}"))
        return self._unreachable()

    def _unreachable(self) -> Failure:
        """Return the failure of a rank that has lost the store; one of a node prints it, as they cannot agree."""
        rank, store = self.launch.rank, f"the store at {self.launch.address}:{self.launch.port}"
        name = self._name([0]) if self._places else "rank 0"  # perhaps lost before they met
        place = f"{name}, or {store}" if rank else store
        silent = self.launch.local_rank != 0 and rank != 1
        return Failure(1, "" if silent else f"error: rank {rank}: lost contact with {place}: {GONE}")

    def _find_closed(self) -> list[int]:
        """Return the ranks whose connection with rank 0 is broken."""
        closed = []
        for rank in range(1, self.launch.world_size if self.launch.rank == 0 else 1):
            try:
                dist.isend(torch.zeros(1), rank, group=self._group)
            except RuntimeError:
                closed.append(rank)
        return closed

    def _name(self, ranks: Sequence[int]) -> str:
        """Name ranks with their hosts, and a single one with its process."""
        hosts = ", ".join(sorted({self._places[rank][0] for rank in ranks}))
        process = f"process {self._places[ranks[0]][1]} " if len(ranks) == 1 else ""
        return f"{name_ranks(ranks)} ({process}on {hosts})"

    def _explain_hang(self) -> Failure:
        """Return the failure of ranks that wait in a collective until it times out: some rank did not call it."""
        self._store.set(f"waits/{self.launch.rank}", "")
        time.sleep(ANSWER_SECONDS)  # until all ranks that wait have noticed
        absent = [rank for rank in range(self.launch.world_size) if not self._store.check([f"waits/{rank}"])]
        reason = f"{self._name(absent)} did not call it" if absent else "the ranks called different ones"
        message = f"a collective has not ended within {self._timeout:g} s (rank_timeout_seconds): {reason}"
        return Failure(1, f"error: rank {self.launch.rank}: {message}, or the network is broken")

    def _claim(self, store: dist.Store, failure: Failure) -> Failure:
        """Make this the run's failure and print it; if another one was first, return that."""
        mine = f"{failure.status} {os.urandom(8).hex()}"  # unique, as two ranks or threads may fail alike
        if store.compare_set("failure", "", mine).decode() == mine and failure.message:
            print_error(failure.message)
        return self._read_failure(store)

    def _read_failure(self, store: dist.Store) -> Failure:
        """Return the run's failure, which has been printed."""
        return Failure(int(store.get("failure").split()[0]))

    def fail(self, error: BaseException) -> NoReturn:
        """End this process after an exception in the main thread, with the status of the run's first failure."""
        # torchrun and Slurm terminate the others as soon as one has failed: let this one finish its report
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise when a loader worker dies
        failure = _describe(error, self.launch)
        # PyTorch raises a ConnectionError where the store's connection is reset
        from_torch = isinstance(error, RuntimeError | ConnectionError) and "DataLoader worker" not in str(error)
        text = str(error) if from_torch else ""
        lost = LOST_RANK.search(text)
        try:
            with deadline(STORE_SECONDS, lambda: self._end(failure)):
                if self._places and re.search("Timed out waiting|wait timeout", text):
                    failure = self._explain_hang()
                elif lost and self._thread.is_alive():
                    with suppress(TimeoutError):  # the thread finds out which rank is lost
                        self._end(self._found.result(BARRIER_SECONDS + 3 * ANSWER_SECONDS))
                failure = self._claim(self._store, failure)
                for rank in range(self.launch.world_size if not self._places else 0):
                    self._store.compare_set(f"arrived/{rank}", "", "[]")  # end the wait of the others in `_meet`
        except (dist.DistError, ConnectionError):
            failure = self._unreachable() if lost else failure
        self._end(failure)

    def _end(self, failure: Failure) -> NoReturn:
        """Report the failure to the launcher and end this process, whatever hangs meanwhile: a disk, or the store."""
        self._ending.acquire()  # never released
        self._left.set()
        with deadline(2 * (GRACE_SECONDS + ANSWER_SECONDS), lambda: os._exit(failure.status)):
            if failure.message:
                print_error(failure.message)
            with suppress(OSError):
                sys.stdout.flush()
            _report_status(self.launch, failure.status)
            self._leave()
            for child in multiprocessing.active_children():  # loader workers, which os._exit would leave behind
                child.terminate()
            os._exit(failure.status)

    def _leave(self) -> None:
        """Note that this rank leaves. If it serves the store, first wait until the others have left or time is up."""
        with suppress(dist.DistError):  # the process that served the store may be gone already
            self._store.add("left", 1)
            if self.launch.hosts_store and self.launch.rank == 0:
                here = self.launch.world_size - self._num_lost
                wait_for(lambda: self._store.add("left", 0) >= here, GRACE_SECONDS + ANSWER_SECONDS)


def _describe(error: BaseException, launch: Launch) -> Failure:
    who = f"rank {launch.rank}: " if launch.world_size > 1 else ""
    if isinstance(error, Stopped):
        return Failure(error.exit_status, str(error))
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGPIPE:  # of `complete_output`, without a message
        return Failure(error.code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(130, f"{who}interrupted; earlier checkpoints are kept")
    from_torch = isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)
    if who and from_torch and (isinstance(error, dist.DistError) or LOST_RANK.search(str(error))):
        return Failure(1, f"error: {who}{' '.join(str(error).split())}")
    expected = explain(error) if isinstance(error, Exception) else None
    if expected is not None:
        if who and expected.rank is not None:  # raised on another rank, which may report it later than this one
            who = f"rank {expected.rank}: "
        return Failure(expected.exit_status, f"error: {who}{expected}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(1, f"{trace}\nerror: {who}{type(error).__name__}: {error}" if who else trace)


def _report_status(launch: Launch, status: int) -> None:
    """Write the exit status to the file TRAIN_EXIT_STATUS_FILE: torchrun exits with 1 for every failure."""
    if (path := os.environ.get("TRAIN_EXIT_STATUS_FILE")) and launch.rank == 0:
        with suppress(OSError):  # the launcher then reports 1
            Path(path).write_text(f"{status}\n", encoding="ascii")
