"""How the ranks of a run find each other, and report a failure to each other, through rank 0's store."""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from utils.distributed.health.hangs import Record, take_record
from utils.distributed.launch import Launch, name_ranks
from utils.errors import ConfigError, ExpectedError

POLL_SECONDS = 0.2  # how often a rank looks whether another has failed
ROLL_CALL_SECONDS = 3.0  # to answer, once contact with some rank is lost
GRACE_SECONDS = 5.0  # after another rank's failure, to leave before being ended in mid-collective
STORE_SECONDS = 30.0  # for one answer of the store
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Failure:
    """How a run ended: its exit status and what is printed."""

    status: int
    message: str


class Meeting:
    """The ranks of one start, in rank 0's store, which is opened here; errors name its address.

    Under torchrun the store outlives a start, and keys of the one before are still in it: rank 0 gives each meeting a
    new name, and lists the ranks that came, so that no rank mistakes an old meeting for its own.
    """

    def __init__(self, launch: Launch, start_timeout: float) -> None:
        self.launch, self.start_timeout = launch, start_timeout
        self._deadline = time.monotonic() + start_timeout
        self._is_host = launch.hosts_store and launch.rank == 0
        self._owner = "rank 0" if launch.hosts_store else "torchrun"
        # with all ranks on one node, rank 0 serves the store to that node alone
        on_one_node = launch.hosts_store and launch.local_world_size == launch.world_size
        self._address = LOOPBACK if on_one_node else launch.address
        self._where = f"{self._address}:{launch.port}"
        self._lobby = dist.PrefixStore(f"train/{launch.job}/{launch.world_size}", self._open_store())
        self._set_name("nobody")
        self._num_here = launch.world_size  # ranks that can still answer, as far as this one knows
        self._stop = threading.Event()
        self.ending = threading.Lock()  # held by the thread that ends the process: nobody may cut its message off

    def _set_name(self, name: str) -> None:
        self._name, self.store = name, dist.PrefixStore(name, self._lobby)

    # ---- start

    def _open_store(self) -> dist.TCPStore:
        port, here = self.launch.port, socket.gethostname()
        try:
            socket.getaddrinfo(self._address, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR {self.launch.address!r} does not resolve on {here}: {error.strerror}; "
                "set it to a name or address of the host of rank 0"
            ) from None
        if not self._is_host:
            self._wait_for_listener()
            return self._connect()
        try:
            return dist.TCPStore(
                "localhost",
                port,
                is_master=True,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
                master_listen_fd=_listen_on_loopback(port) if self._address == LOOPBACK else None,
            )
        except (dist.DistNetworkError, OSError) as error:
            if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
            remedy = "set MASTER_PORT to a free one in every process, or start with torchrun --standalone"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                remedy = "torchrun chose it when it was free: start again"
            raise ConfigError(f"port {port} on {here} is in use, by another job perhaps; {remedy}") from None

    def _connect(self) -> dist.TCPStore:
        """The store as its client. In a thread, since PyTorch waits without end for one who listens and never answers,
        as another program at this port may do."""
        found: list[dist.TCPStore | Exception] = []

        def connect() -> None:
            try:
                seconds = timedelta(seconds=STORE_SECONDS)
                found.append(dist.TCPStore(self._address, self.launch.port, timeout=seconds, wait_for_workers=False))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=connect, name="connect to the store", daemon=True)
        thread.start()
        thread.join(2 * STORE_SECONDS)
        result = found[0] if found else None
        if isinstance(result, dist.TCPStore):
            return result
        if result is not None and not isinstance(result, dist.DistError):
            raise result
        raise ExpectedError(
            f"{self._where} is open, but it is not {self._owner} of this run that answers there; another job or "
            f"program holds the port perhaps ({self._owner} then says so)\n"
            "set MASTER_PORT to a free one in every process"
        )

    def _wait_for_listener(self) -> None:
        """PyTorch's own attempts to connect print a stack trace for each that fails."""
        while time.monotonic() < self._deadline:
            try:
                with socket.create_connection((self._address, self.launch.port), timeout=5):
                    return
            except OSError:
                time.sleep(POLL_SECONDS)
        raise ExpectedError(
            f"no answer from {self._where}, where {self._owner} should be, within {self.start_timeout:g} s "
            f"(start_timeout_seconds); tried from {socket.gethostname()}\n"
            "see whether rank 0 has started, and whether MASTER_ADDR and MASTER_PORT are right and pass the firewall"
        )

    def assemble(self) -> None:
        """Wait until every rank is here; `ExpectedError` that names the missing ones."""
        if self.launch.rank == 0:
            self._receive()
        else:
            self._arrive()

    def _receive(self) -> None:
        self._set_name(uuid.uuid4().hex)
        self._lobby.set("meeting", self._name)
        absent = others = list(range(1, self.launch.world_size))
        while absent and time.monotonic() < self._deadline:
            absent = self._without(absent, "arrived")
            time.sleep(0.02)
        if absent:
            self._num_here -= len(absent)
            message = (
                f"{name_ranks(absent)} of {self.launch.world_size} did not arrive at {self._where} within "
                f"{self.start_timeout:g} s (start_timeout_seconds)\n"
                "see what became of these processes and their nodes, or allow more time"
            )
            self.store.set("absent", message)
            raise ExpectedError(message)
        self.store.set("complete", " ".join(self.store.get(f"arrived/{rank}").decode() for rank in others))

    def _arrive(self) -> None:
        """Another rank: say that it is here, and wait until all are."""
        token, key = uuid.uuid4().hex, f"arrived/{self.launch.rank}"
        seen, pause = "", 0.02
        # longer than rank 0, whose message names the missing ranks
        while time.monotonic() < self._deadline + ROLL_CALL_SECONDS:
            if self._lobby.check(["meeting"]):
                name = self._lobby.get("meeting").decode()
                if name != self._name:
                    self._set_name(name)
                    seen = self.store.compare_set(key, "", token).decode()
                if self.store.check(["complete"]) and token in self.store.get("complete").decode().split():
                    return
                if seen == token and self.store.check(["absent"]):
                    raise ExpectedError(self.store.get("absent").decode())
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        if seen not in ("", token):
            raise ConfigError(f"another process is already rank {self.launch.rank} at {self._where}")
        raise ExpectedError(
            f"rank 0 did not arrive at {self._where} within {self.start_timeout:g} s; see its own message: if "
            "another job holds that port, set MASTER_PORT to a free one in every process"
        )

    def _without(self, ranks: Iterable[int], sign: str) -> list[int]:
        """The ranks that have not put this sign into the store."""
        return [rank for rank in ranks if not self.store.check([f"{sign}/{rank}"])]

    # ---- failure

    def watch(self, leave: Callable[[Failure], None]) -> None:
        """Look for other ranks' failures from now on, in a thread; `leave` is called with the first one if this rank
        is still here some seconds later."""
        threading.Thread(target=self._watch, args=(leave,), daemon=True).start()

    def stop_watching(self) -> None:
        """This rank leaves by itself, whatever becomes of the others."""
        self._stop.set()

    def _watch(self, leave: Callable[[Failure], None]) -> None:
        failure = None
        try:
            store = self.store.clone()  # a connection of this thread's own
            while not store.check(["alarm"]):
                if self._stop.wait(POLL_SECONDS):
                    return
            answer(store, self.launch.rank)
            failure = wait_for_failure(store, 2 * ROLL_CALL_SECONDS)
        except dist.DistError:
            pass  # the store is gone, and with it the process that served it: the main thread says so, if it can
        if not self._stop.wait(GRACE_SECONDS):
            leave(failure or Failure(1, self.lost_store()))

    def lost_store(self) -> str:
        """The message for a store that does not answer, on one rank of each node; empty on the others."""
        if not self.launch.tells_for_its_node:
            return ""
        return f"error: rank {self.launch.rank}: lost contact with {self._owner} at {self._where}"

    def raise_alarm(self) -> None:
        """Ask every other rank to show that it is there, and to leave."""
        self.store.set("alarm", "")

    def call_the_roll(self) -> tuple[Failure | None, dict[int, Record]]:
        """What failed first, where a rank has said so; else the records of the ranks that still answer."""
        answer(self.store, self.launch.rank)
        self.raise_alarm()
        until = time.monotonic() + ROLL_CALL_SECONDS
        while time.monotonic() < until:
            failure = wait_for_failure(self.store, POLL_SECONDS)
            if failure is not None:
                return failure, {}
        records = gather_answers(self.store, range(self.launch.world_size), 0)
        self._num_here = len(records)
        return None, records

    def leave_last(self) -> None:
        """Rank 0, where it serves the store, waits until the others have left or are given up."""
        left = self.store.add("left", 1)
        until = time.monotonic() + GRACE_SECONDS + ROLL_CALL_SECONDS
        while self._is_host and left < self._num_here and time.monotonic() < until:
            time.sleep(0.02)
            left = self.store.add("left", 0)


def _listen_on_loopback(port: int) -> int:
    """A socket for the store to serve and to close, where PyTorch's own would listen on every interface."""
    with socket.create_server((LOOPBACK, port)) as server:
        return server.detach()


def answer(store: dist.Store, rank: int) -> None:
    """To an alarm: this rank is there, and these were its last collectives."""
    try:
        record = take_record()
    except Exception:  # another version of PyTorch may tell otherwise; to be there is what counts
        record = Record("unknown", 0)
    store.set(f"present/{rank}", record.encode())


def gather_answers(store: dist.Store, ranks: Sequence[int], seconds: float) -> dict[int, Record]:
    """The answers of these ranks to an alarm, as far as they come within that time."""
    until = time.monotonic() + seconds
    while True:
        here = [rank for rank in ranks if store.check([f"present/{rank}"])]
        if len(here) == len(ranks) or time.monotonic() >= until:
            return {rank: Record.decode(store.get(f"present/{rank}")) for rank in here}
        time.sleep(0.05)


def claim(store: dist.Store, failure: Failure) -> Failure:
    """Make this the failure of the run, or return the one that was first, without its message."""
    mine = json.dumps(asdict(failure) | {"by": uuid.uuid4().hex})  # two ranks may have the same to say
    first = store.compare_set("failure", "", mine).decode()
    return failure if first == mine else Failure(json.loads(first)["status"], "")


def wait_for_failure(store: dist.Store, seconds: float) -> Failure | None:
    """The run's failure without its message, which has been printed; None if there is none within that time."""
    until = time.monotonic() + seconds
    while not store.check(["failure"]):
        if time.monotonic() > until:
            return None
        time.sleep(0.05)
    return Failure(json.loads(store.get("failure"))["status"], "")
