"""The ranks of a run meet, and report failures to each other, through rank 0's store."""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from utils.distributed.health.hangs import Record, take_record
from utils.distributed.launch import Launch, name_ranks
from utils.errors import ConfigError, ExpectedError

RESOLVE_SECONDS = 2.0  # between two requests for a name
POLL_SECONDS = 0.2  # between two checks whether another rank has failed
ANSWER_SECONDS = 3.0  # time to answer after contact with some rank is lost
GRACE_SECONDS = 5.0  # time to leave after another rank's failure; then the process is ended in mid-collective
STORE_SECONDS = 30.0  # time for one answer of the store
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Failure:
    """How a run ended: its exit status and message, empty if another rank prints it."""

    status: int
    message: str


def resolve(address: str, port: int, start_timeout: float, *, say: bool) -> None:
    """Return when MASTER_ADDR resolves; raise `ConfigError` if it does not.

    Kubernetes adds a pod's name only when the pod has an address: there a pod that started earlier waits up to
    `start_timeout` seconds, and says so."""
    until = time.monotonic() + (start_timeout if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0)
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise ConfigError(
                    f"MASTER_ADDR {address!r} does not resolve on {socket.gethostname()}: {error.strerror}; "
                    "set it to a name or address of the host of rank 0"
                ) from None
        if say:
            print(f"{address} does not resolve yet; waiting up to {start_timeout:g} s for its pod", flush=True)
            say = False
        time.sleep(RESOLVE_SECONDS)


class Rendezvous:
    """Opens rank 0's store, through which the ranks of one start meet; errors name its address.

    Under torchrun the store outlives a start, so it still has keys of the previous one. Rank 0 therefore gives each
    meeting a new name and lists the ranks that arrived, so that no rank joins an old meeting.
    """

    def __init__(self, launch: Launch, start_timeout: float) -> None:
        self.launch, self.start_timeout = launch, start_timeout
        self._deadline = time.monotonic() + start_timeout
        self._is_host = launch.hosts_store and launch.rank == 0
        self._owner = "rank 0" if launch.hosts_store else "torchrun"
        # with all ranks on one node, rank 0 serves the store on the loopback only
        on_one_node = launch.hosts_store and launch.local_world_size == launch.world_size
        self._address = LOOPBACK if on_one_node else launch.address
        self._where = f"{self._address}:{launch.port}"
        self._lobby = dist.PrefixStore(f"train/{launch.job}/{launch.world_size}", self._open_store())
        self._set_name("nobody")
        self._num_here = launch.world_size  # ranks that can still answer, as far as this rank knows
        self._stop = threading.Event()
        self.ending = threading.Lock()  # held by the thread that ends the process, so that it can print its message

    def _set_name(self, name: str) -> None:
        self._name, self.store = name, dist.PrefixStore(name, self._lobby)

    # ---- start

    def _open_store(self) -> dist.TCPStore:
        port, here = self.launch.port, socket.gethostname()
        resolve(self._address, port, self.start_timeout, say=self.launch.reports_for_its_node)
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
            raise ConfigError(f"port {port} on {here} is in use, perhaps by another job; {remedy}") from None

    def _connect(self) -> dist.TCPStore:
        """Connect to the store. In a thread, as PyTorch waits forever for another program that listens at this port and
        never answers."""
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
            f"{self._where} is open, but {self._owner} of this run does not answer there; perhaps another job or "
            f"program uses the port ({self._owner} then reports it)\n"
            "set MASTER_PORT to a free one in every process"
        )

    def _wait_for_listener(self) -> None:
        """Wait until the port is open; PyTorch's own attempts would each print a stack trace."""
        # torchrun's store is open before the ranks start, so a closed one means that torchrun is gone
        limit = self.start_timeout if self.launch.hosts_store else min(self.start_timeout, STORE_SECONDS)
        until = time.monotonic() + limit
        while time.monotonic() < until:
            try:
                with socket.create_connection((self._address, self.launch.port), timeout=5):
                    return
            except OSError:
                time.sleep(POLL_SECONDS)
        setting = " (rank_timeout_seconds)" if limit == self.start_timeout else ""
        raise ExpectedError(
            f"no answer from {self._where}, where {self._owner} should be, within {limit:g} s{setting}; "
            f"tried from {socket.gethostname()}\n"
            f"check that {self._owner} has started, and that MASTER_ADDR and MASTER_PORT are right and pass the "
            "firewall"
        )

    def wait_for_ranks(self) -> None:
        """Wait until every rank has arrived; raise `ExpectedError` naming the missing ones."""
        if self.launch.rank == 0:
            self._wait_for_others()
        else:
            self._announce()

    def _wait_for_others(self) -> None:
        self._set_name(uuid.uuid4().hex)
        self._lobby.set("meeting", self._name)
        absent = others = list(range(1, self.launch.world_size))
        while absent and time.monotonic() < self._deadline:
            absent = [rank for rank in absent if not self.store.check([f"arrived/{rank}"])]
            time.sleep(0.02)
        if absent:
            self._num_here -= len(absent)
            message = (
                f"{name_ranks(absent)} of {self.launch.world_size} did not arrive at {self._where} within "
                f"{self.start_timeout:g} s (rank_timeout_seconds)\n"
                "check these processes and their nodes, or allow more time"
            )
            self.store.set("absent", message)
            raise ExpectedError(message)
        self.store.set("complete", " ".join(self.store.get(f"arrived/{rank}").decode() for rank in others))

    def _announce(self) -> None:
        """Announce this rank, other than rank 0, and wait until all have arrived."""
        token, key = uuid.uuid4().hex, f"arrived/{self.launch.rank}"
        seen, pause = "", 0.02
        # wait longer than rank 0, whose message names the missing ranks
        while time.monotonic() < self._deadline + ANSWER_SECONDS:
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
            raise ConfigError(
                f"another process is already rank {self.launch.rank} at {self._where}; start each rank once"
            )
        raise ExpectedError(
            f"rank 0 did not arrive at {self._where} within {self.start_timeout:g} s; see its own message: if "
            "another job holds that port, set MASTER_PORT to a free one in every process"
        )

    # ---- failure

    def watch(self, leave: Callable[[Failure], None]) -> None:
        """Watch for other ranks' failures in a thread; it calls `leave` with the first one if this rank has not left
        GRACE_SECONDS later."""
        threading.Thread(target=self._watch, args=(leave,), daemon=True).start()

    def stop_watching(self) -> None:
        """Stop the watching thread: this rank leaves on its own."""
        self._stop.set()

    def _watch(self, leave: Callable[[Failure], None]) -> None:
        failure = None
        try:
            store = self.store.clone()  # a separate connection for this thread
            while not store.check(["alarm"]):
                if self._stop.wait(POLL_SECONDS):
                    return
            answer_alarm(store, self.launch.rank)
            failure = wait_for_failure(store, 2 * ANSWER_SECONDS)
        except dist.DistError:
            pass  # the process that served the store is gone: the main thread reports it, if it can
        if not self._stop.wait(GRACE_SECONDS):
            leave(failure or Failure(1, self.lost_store()))

    def lost_store(self) -> str:
        """Return the message for a store that does not answer, on one rank of each node; empty on the others."""
        if not self.launch.reports_for_its_node:
            return ""
        return f"error: rank {self.launch.rank}: lost contact with {self._owner} at {self._where}"

    def raise_alarm(self) -> None:
        """Ask every other rank to answer and to leave."""
        self.store.set("alarm", "")

    def collect_answers(self) -> tuple[Failure | None, dict[int, Record]]:
        """Return (first failure, {}) if a rank has reported one, otherwise (None, records of the ranks that answer)."""
        answer_alarm(self.store, self.launch.rank)
        self.raise_alarm()
        failure = wait_for_failure(self.store, ANSWER_SECONDS)
        if failure is not None:
            return failure, {}
        records = gather_answers(self.store, range(self.launch.world_size), 0)
        self._num_here = len(records)
        return None, records

    def leave_last(self) -> None:
        """Note that this rank leaves. If it serves the store, first wait until the others have left or time is up."""
        left = self.store.add("left", 1)
        until = time.monotonic() + GRACE_SECONDS + ANSWER_SECONDS
        while self._is_host and left < self._num_here and time.monotonic() < until:
            time.sleep(0.02)
            left = self.store.add("left", 0)


def _listen_on_loopback(port: int) -> int:
    """Return a listening socket for the store, which closes it. PyTorch's own would listen on every interface."""
    with socket.create_server((LOOPBACK, port)) as server:
        return server.detach()


def answer_alarm(store: dist.Store, rank: int) -> None:
    """Answer an alarm: this rank is alive, and these were its last collectives."""
    try:
        record = take_record()
    except Exception:  # another version of PyTorch may have another format; the answer itself matters more
        record = Record("unknown", 0)
    store.set(f"present/{rank}", record.encode())


def gather_answers(store: dist.Store, ranks: Sequence[int], seconds: float) -> dict[int, Record]:
    """Return the answers of these ranks to an alarm that arrive in time."""
    until = time.monotonic() + seconds
    while True:
        here = [rank for rank in ranks if store.check([f"present/{rank}"])]
        if len(here) == len(ranks) or time.monotonic() >= until:
            return {rank: Record.decode(store.get(f"present/{rank}")) for rank in here}
        time.sleep(0.05)


def claim_failure(store: dist.Store, failure: Failure) -> Failure:
    """Make this the run's failure; if another one was first, return that without its message."""
    mine = json.dumps(asdict(failure) | {"by": uuid.uuid4().hex})  # unique, as two ranks may fail alike
    first = store.compare_set("failure", "", mine).decode()
    return failure if first == mine else Failure(json.loads(first)["status"], "")


def wait_for_failure(store: dist.Store, seconds: float) -> Failure | None:
    """Return the run's failure without its message, which has been printed; None if there is none in time."""
    until = time.monotonic() + seconds
    while not store.check(["failure"]):
        if time.monotonic() > until:
            return None
        time.sleep(0.05)
    return Failure(json.loads(store.get("failure"))["status"], "")
