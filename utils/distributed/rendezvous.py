"""How the ranks of a run find each other, and tell each other of a failure, through rank 0's store."""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from utils.distributed.launch import Launch, name_ranks
from utils.errors import ConfigError, ExpectedError

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


def open_store(launch: Launch, deadline: float, start_timeout: float) -> dist.TCPStore:
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

    def watch(self, leave: Callable[[Failure], None]) -> None:
        """Look for other ranks' failures from now on, in a thread with a connection of its own; `leave` is called
        with the first one if this rank is still here some seconds later."""
        self._watcher = threading.Thread(target=self._watch, args=(leave,), daemon=True)
        self._watcher.start()

    def stop_watching(self) -> None:
        """This rank leaves by itself, whatever becomes of the others."""
        self._stop.set()

    def _watch(self, leave: Callable[[Failure], None]) -> None:
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
            leave(failure or Failure(1, self.lost_store()))

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
