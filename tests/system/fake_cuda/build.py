"""Build the fake CUDA runtime with the machine's C++ compiler and the headers in PyTorch's packages (README.md).

python tests/system/fake_cuda/build.py DIR     # writes DIR/libfake_cuda.so and DIR/libcuda.so.1

Exit status: 77 without a compiler or a CUDA build of PyTorch, 1 if the two cannot build it.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = ("ledger", "memory", "streams", "blas", "dnn", "nccl")
# Functions of CUDA's libraries that PyTorch uses. Those not written here become stubs that return success.
USED = re.compile(r"^(cuda[A-Z]|__cuda|cublas|cudnn|nccl)")
# Their stubs return ncclInvalidUsage, since the fake NCCL cannot do them.
REFUSED = ("ncclBroadcast", "ncclReduceScatter", "ncclSend", "ncclRecv", "ncclCommSplit")
# Replacements for headers that PyTorch's wheels lack.
EMPTY_MARKS = """
__host__ __device__ __global__ __shared__ __constant__ __device_builtin__ __cudart_builtin__ __specialization_static
__device_builtin_texture_type__ __device_builtin_surface_type__ CUDARTAPI
"""
HOST_DEFINES = r"""#pragma once
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ inline
#define __cluster_dims__(...)
"""
SMALL_HEADERS = {
    "cuda_runtime.h": "#pragma once\n#include <cuda_runtime_api.h>\n",
    "crt/host_defines.h": HOST_DEFINES + "".join(f"#define {mark}\n" for mark in EMPTY_MARKS.split()),
    **{f"cuda_{name}.h": "#pragma once\n" for name in ("fp16", "bf16", "fp8")},
}


class Unavailable(Exception):
    """There is no compiler or no CUDA build of PyTorch; the message says which."""


def build(folder):
    """Build both libraries in `folder`; raise `Unavailable`, or `CalledProcessError` if the compiler fails."""
    for name in ("g++", "nm"):
        if shutil.which(name) is None:
            raise Unavailable(f"no {name}")
    torch, nvidia = _package("torch"), _package("nvidia")
    libraries = [*torch.glob("lib/libc10_cuda.so"), *torch.glob("lib/libtorch*.so")]
    if len(libraries) < 2 or not any(torch.glob("lib/libc10_cuda.so")):
        raise Unavailable("torch is not a CUDA build")
    (include,) = list(nvidia.glob("cu[0-9]*/include"))[:1] or [nvidia / "cuda_runtime/include"]
    needed = [include / "cuda_runtime_api.h", nvidia / "cudnn/include/cudnn.h", nvidia / "nccl/include/nccl.h"]
    for name, text in SMALL_HEADERS.items():
        (folder / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / name).write_text(text, encoding="utf-8")
    options = [f"-I{folder}/include", *(f"-I{header.parent}" for header in needed), "-std=c++17", "-O1", "-w", "-fPIC"]

    def compile_to(target, *more):
        subprocess.run(["g++", *options, "-o", str(target), *more], check=True)

    for name in (*RUNTIME, "driver"):
        compile_to(folder / f"{name}.o", "-c", str(HERE / f"{name}.cpp"))
    runtime = [folder / f"{name}.o" for name in RUNTIME]
    used = {name for name in _symbols("--undefined-only", *libraries) if USED.match(name)}
    _write_stubs(folder / "runtime_stubs.c", used - _symbols("--defined-only", *runtime))
    declared = re.findall(r"\bCUDAAPI (cu[A-Z]\w+)|\b(cu[A-Z][A-Za-z0-9]+_v\d)\b", (include / "cuda.h").read_text())
    driver = {name for pair in declared for name in pair if name}
    _write_stubs(folder / "driver_stubs.c", driver - _symbols("--defined-only", folder / "driver.o"))
    compile_to(folder / "libfake_cuda.so", "-shared", *map(str, runtime), "-xc", str(folder / "runtime_stubs.c"))
    driver_files = [str(folder / "driver.o"), "-xc", str(folder / "driver_stubs.c")]
    compile_to(folder / "libcuda.so.1", "-shared", "-Wl,-soname,libcuda.so.1", *driver_files)
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def variables(folder):
    """Return environment variables that make a process load the fake runtime instead of CUDA."""
    preload = {"LD_PRELOAD": str(folder / "libfake_cuda.so")}
    return preload | dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(folder))


def _package(name):
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"no package {name}")
    return Path(next(iter(found.submodule_search_locations)))


def _symbols(which, *files):
    dynamic = ["-D"] if which == "--undefined-only" else []
    command = ["nm", *dynamic, which, *map(str, files)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line and not line.endswith(":")}


def _write_stubs(path, names):
    lines = [f"int {name}(void) {{ return {5 if name in REFUSED else 0}; }}\n" for name in sorted(names)]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    try:
        build(target)
    except Unavailable as reason:
        print(f"error: the fake CUDA runtime cannot be built: {reason}", file=sys.stderr)
        sys.exit(77)
    print("".join(f"export {name}={value}\n" for name, value in variables(target).items()), end="")
