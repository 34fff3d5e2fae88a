"""Replaces Python in processes started by tests: forks a server that has imported torch, in 0.1 s instead of 5 s.

Tests and the tools that they call start it as sys.executable (conftest.py). It accepts Python's command line, passes it
to the server with the environment, working directory and standard streams, forwards signals, and exits with the forked
process's status. Where a fork could differ from a fresh interpreter (options other than -u and -m, another checkout,
variables that are read early, inherited files, other namespaces, limits or cores), it executes Python instead.

A signal to the process group does not reach the forked process, which also has another process id. Tests that need
either start `processes.PYTHON`.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

FOLDER = "TESTS_FORKED_PYTHON"  # the variable with the folder of the session's server
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
PRELOADED = (
    "pytest", "torch", "torchvision", "numpy", "PIL.Image", "train", "utils.distributed.ranks", "tests.processes",
)  # fmt: skip
# Variables that the interpreter or libraries read while loading.
READ_EARLY = (
    *("PYTHON", "LD_", "LANG", "LC_", "CUDA_", "ATEN_", "MKL_", "DNNL_", "ONEDNN_", "KMP_", "OMP_WAIT"),
    *("TORCH_LOGS", "TORCH_CPP", "TORCH_COMPILE"),
)
MOST_BYTES = 1 << 20  # of a request


def install(folder: str) -> None:
    """Write `folder`/python, for this process and its children."""
    os.environ[FOLDER] = folder
    with open(f"{folder}/environment", "w", encoding="utf-8") as file:
        json.dump([dict(os.environ), _surroundings()], file)
    with open(__file__, encoding="utf-8") as source, open(f"{folder}/python", "w", encoding="utf-8") as program:
        program.write(f"#!{sys.executable} -IS\nSOURCE = {os.path.realpath(__file__)!r}\n{source.read()}")
    os.chmod(f"{folder}/python", 0o755)


def _surroundings() -> list[Any]:
    """Return what a process inherits from its parent, but a fork of the server would not."""
    with open("/proc/self/limits", encoding="utf-8") as limits:
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
        return [limits.read(), spaces, sorted(os.sched_getaffinity(0)), os.getuid(), os.nice(0)]


# ---- the client, started instead of Python


def _run_as_python(arguments: list[str]) -> NoReturn:
    """Let the server run these arguments, and exit as its process does."""
    options = arguments[1:] if arguments[:1] == ["-u"] else arguments
    folder = os.environ.get(FOLDER, "")
    if not folder or not _can_fork(options, folder):
        os.execv(sys.executable, [sys.executable, *arguments])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to forward them to
    server = _connect(folder)
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    unbuffered = options != arguments or bool(os.environ.get("PYTHONUNBUFFERED"))
    request = json.dumps([options, unbuffered, os.getcwd(), ignored, dict(os.environ)]).encode()
    socket.send_fds(server, [request], [0, 1, 2])
    process = int(server.recv(20))

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _exit(int(server.recv(20)))


def _exit(status: int) -> NoReturn:
    """Exit with a status, or, if it is negative, by a signal."""
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _can_fork(options: list[str], folder: str) -> bool:
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    files = {int(name) for name in os.listdir(listing)} - {0, 1, 2, listing}
    os.close(listing)
    with open(f"{folder}/environment", encoding="utf-8") as file:
        server, surroundings = json.load(file)
    early = [name for name in {*server, *os.environ} if name.startswith(READ_EARLY)]
    return (
        _is_from_this_checkout(options)
        and not any(os.path.exists(f"/proc/self/fd/{file}") for file in files)
        and all(server.get(name) == os.environ.get(name) for name in early)
        and surroundings == _surroundings()
        and "PYTHONPATH" not in os.environ
    )


def _is_from_this_checkout(options: list[str]) -> bool:
    """Whether `options` name a module of this project, or a script that does not import another checkout's `utils`."""
    ours = os.path.join(os.path.dirname(os.path.dirname(SOURCE)), "utils")  # noqa: F821
    if options[:1] == ["-m"]:
        return options[1].startswith(("tools.", "torch.distributed.")) and os.path.realpath("utils") == ours
    if not options or not os.path.isfile(options[0]):
        return False
    nearby = os.path.join(os.path.dirname(os.path.realpath(options[0])), "utils")
    return os.path.realpath(nearby) == ours or not os.path.exists(nearby)


def _connect(folder: str) -> socket.socket:
    """Connect to the server, which the first client starts."""
    import subprocess

    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    with open(f"{folder}/lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{folder}/socket"):
            with open(f"{folder}/environment", encoding="utf-8") as file:
                environment, _ = json.load(file)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(f"{folder}/socket")
            listener.listen(128)
            command = [sys.executable, SOURCE, str(listener.fileno())]  # noqa: F821
            with listener, open(f"{folder}/log", "w", encoding="utf-8") as log:
                subprocess.Popen(
                    command, pass_fds=[listener.fileno()], env=environment, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
    server.connect(f"{folder}/socket")
    return server


# ---- the server


def _serve(listener: socket.socket) -> None:
    """Import what most processes need, then fork one for each request until the test session has ended."""
    import functools
    import importlib

    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # of the client that has started it
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:1] = [root, os.path.join(root, "tests")]
    for name in PRELOADED:
        importlib.import_module(name)
    from utils.data.datasets import dataset as datasets

    datasets._generate_shapes_dataset = functools.cache(datasets._generate_shapes_dataset)
    datasets._generate_shapes_dataset()  # the shapes of most runs, in half a second
    sys.path[:2] = []
    owner = os.environ[FOLDER].rpartition("-")[2]
    listener.settimeout(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.path.exists(f"/proc/{owner}"):
        with contextlib.suppress(TimeoutError):
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _guard(client)
            client.close()


def _guard(client: socket.socket) -> NoReturn:
    """Run one request in its own process; send its number and later its exit status, or kill it with its client."""
    from utils.program import end_with_parent

    client.setblocking(True)
    request, streams, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
    process = os.fork()
    if process == 0:
        end_with_parent(signal.SIGKILL)  # a test may kill its parent, this guard
        client.close()
        _run(*json.loads(request), streams)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ends = os.pidfd_open(process)
    with contextlib.suppress(OSError):
        client.send(str(process).encode())
        if ends not in select.select([client, ends], [], [])[0]:  # the client was killed: it sends nothing more
            os.kill(process, signal.SIGKILL)
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
    os._exit(0)


def _run(
    options: list[str], unbuffered: bool, cwd: str, ignored: list[int], environment: dict[str, str], streams: list[int]
) -> NoReturn:
    """Turn this process into Python with these options."""
    import torch

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number in FORWARDED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    sys.executable = f"{os.environ[FOLDER]}/python"
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = [
        open(0, closefd=False),  # noqa: SIM115
        open(1, "w", 1 if unbuffered or os.isatty(1) else -1, closefd=False),  # noqa: SIM115
        open(2, "w", 1, errors="backslashreplace", closefd=False),  # noqa: SIM115
    ]
    status = _interpret(options)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _exit(status)


def _interpret(options: list[str]) -> int:
    """Run the program and Python's exit handlers; return the exit status, negative for a signal to die by."""
    import atexit
    import runpy
    import threading

    status = 0
    sys.orig_argv = [sys.executable, *options]
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        if options[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = ["-m", *options[2:]]
            runpy._run_module_as_main(options[1])
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(options[0])))
            sys.argv, main.__file__ = options, options[0]
            with open(options[0], "rb") as source:
                exec(compile(source.read(), options[0], "exec"), main.__dict__)
    except SystemExit as leaving:
        status = (leaving.code or 0) & 0xFF if isinstance(leaving.code, int | None) else 1
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    if __file__.endswith(".py"):
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        _run_as_python(sys.argv[1:])
