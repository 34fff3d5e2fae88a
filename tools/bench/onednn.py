"""Which of oneDNN's kernels a call on a CPU runs, read from what oneDNN prints about it (ONEDNN_VERBOSE)."""

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

VERBOSE = ("onednn_verbose", "dnnl_verbose")
# ref:any, ref_int8:any, simple:any; one of several words with + between
REFERENCE = re.compile(r"(^|\+)(ref|simple)\b|(^|\+)ref_")


@dataclass(frozen=True)
class Kernel:
    """One primitive that oneDNN ran: what for, such as convolution or reorder, and its implementation."""

    purpose: str
    implementation: str

    @property
    def is_reference(self) -> bool:
        """Whether it is oneDNN's plain fallback, which no processor's instructions were written for."""
        return bool(REFERENCE.search(self.implementation))


def read_verbose(text: str) -> list[Kernel]:
    """The kernels that ran, in their order, by lines such as
    `onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,...`; other lines do not count."""
    kernels = []
    for line in text.splitlines():
        fields = line.split(",")
        if fields[0] in VERBOSE and "exec" in fields[:4] and "graph" not in fields[:4]:
            purpose, implementation = fields[fields.index("exec") + 2 :][:2]
            kernels.append(Kernel(purpose, implementation))
    return kernels


def kernels_of(action: Callable[[], object]) -> list[Kernel]:
    """Run `action` once; the kernels of oneDNN that it ran. Takes standard output to itself meanwhile."""
    if not torch.backends.mkldnn.is_available():
        return []
    with _standard_output_in_a_file() as lines, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        action()
    return read_verbose(lines[0])


@contextmanager
def _standard_output_in_a_file() -> Iterator[list[str]]:
    """oneDNN prints past Python's sys.stdout. The list holds the text when the block is left."""
    text: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            ctypes.CDLL(None).fflush(None)  # C's buffer of standard output
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def name_kernels(kernels: list[Kernel]) -> str:
    """Each implementation once, and how many reorders, which change layouts, there were. A single one is the weights',
    which are small."""
    working = dict.fromkeys(kernel.implementation for kernel in kernels if kernel.purpose != "reorder")
    reorders = sum(kernel.purpose == "reorder" for kernel in kernels)
    return ", ".join([*working, *([f"{reorders} reorders"] if reorders > 1 else [])])
