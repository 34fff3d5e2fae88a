"""What the fake CUDA runtime saw, for Python: work on streams, waits of the host, and what a GPU would have refused."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WAIT = "WAIT "


@dataclass(frozen=True)
class Work:
    """A kernel, a copy or a graph on a stream; or a wait of the host, whose name begins with `WAIT`."""

    name: str
    captured: bool  # into a graph, and not done
    amount: int  # threads of a kernel, bytes of a copy, nodes of a graph


@dataclass
class Ledger:
    """All that happened in a `with record()` block; filled at its end."""

    work: list[Work] = field(default_factory=list)

    @property
    def kernels(self) -> list[Work]:
        """All but waits and copies."""
        return [entry for entry in self.work if not entry.name.startswith((WAIT, "copy "))]

    @property
    def waits(self) -> list[str]:
        return [entry.name.removeprefix(WAIT) for entry in self.work if entry.name.startswith(WAIT)]

    def bytes_copied(self, direction: str) -> int:
        """Bytes "to device" or "to host"."""
        return sum(entry.amount for entry in self.work if entry.name.startswith(f"copy {direction}"))


def is_active() -> bool:
    """Whether this process runs on the fake runtime."""
    return "libfake_cuda" in os.environ.get("LD_PRELOAD", "")


def load_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)  # it is preloaded
    library.stand_in_name.restype = library.stand_in_trouble.restype = ctypes.c_char_p
    for name in ("entries", "amount", "troubles"):
        getattr(library, f"stand_in_{name}").restype = ctypes.c_size_t
    for name in ("name", "captured", "amount", "trouble"):
        getattr(library, f"stand_in_{name}").argtypes = [ctypes.c_size_t]
    return library


def position() -> int:
    """How many entries the ledger of the `record()` block under way has."""
    return load_library().stand_in_entries()


@contextmanager
def record() -> Iterator[Ledger]:
    """The work of the block, of all threads of this process."""
    library, ledger = load_library(), Ledger()
    library.stand_in_record(1)
    try:
        yield ledger
    finally:
        library.stand_in_record(0)
        ledger.work += [
            Work(library.stand_in_name(i).decode(), bool(library.stand_in_captured(i)), library.stand_in_amount(i))
            for i in range(library.stand_in_entries())
        ]


def take_troubles() -> list[str]:
    """What a GPU would have refused, or what would have gone wrong on one, since the last call."""
    library = load_library()
    troubles = [library.stand_in_trouble(i).decode() for i in range(library.stand_in_troubles())]
    library.stand_in_forget_troubles()
    return troubles
