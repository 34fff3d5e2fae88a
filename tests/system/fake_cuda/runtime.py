"""Read the fake CUDA runtime's record: work on streams, host waits, and calls that a GPU would refuse."""

import ctypes
import os
from contextlib import contextmanager
from typing import NamedTuple

WAIT = "WAIT "


class Work(NamedTuple):
    """A kernel, copy or graph on a stream, or a host wait, whose name begins with `WAIT`."""

    name: str
    amount: int  # threads of a kernel, bytes of a copy, nodes of a graph


class Ledger(list[Work]):
    """The record of a `with record()` block, filled at its end."""

    @property
    def kernels(self):
        """All entries but waits and copies."""
        return [entry for entry in self if not entry.name.startswith((WAIT, "copy "))]

    @property
    def waits(self):
        return [entry.name.removeprefix(WAIT) for entry in self if entry.name.startswith(WAIT)]

    def bytes_copied(self, direction):
        """Bytes "to device" or "to host"."""
        return sum(entry.amount for entry in self if entry.name.startswith(f"copy {direction}"))


def is_active():
    """Whether this process runs on the fake runtime."""
    return "libfake_cuda" in os.environ.get("LD_PRELOAD", "")


def load_library():
    library = ctypes.CDLL(None)  # the fake runtime is preloaded
    library.fake_cuda_name.restype = library.fake_cuda_violation.restype = ctypes.c_char_p
    for name in ("entries", "amount", "violations"):
        getattr(library, f"fake_cuda_{name}").restype = ctypes.c_size_t
    for name in ("name", "amount", "violation"):
        getattr(library, f"fake_cuda_{name}").argtypes = [ctypes.c_size_t]
    return library


def position():
    """Return the number of entries so far in the current `record()` block."""
    return load_library().fake_cuda_entries()


@contextmanager
def record():
    """Record the work of all threads of this process."""
    library, ledger = load_library(), Ledger()
    library.fake_cuda_record(1)
    try:
        yield ledger
    finally:
        library.fake_cuda_record(0)
        for number in range(library.fake_cuda_entries()):
            ledger.append(Work(library.fake_cuda_name(number).decode(), library.fake_cuda_amount(number)))


def take_violations():
    """Return and clear the calls that a GPU would refuse or that would go wrong on one."""
    library = load_library()
    violations = [library.fake_cuda_violation(i).decode() for i in range(library.fake_cuda_violations())]
    library.fake_cuda_clear_violations()
    return violations
