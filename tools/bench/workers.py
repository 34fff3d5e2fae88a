"""Runs each case in its own process, so that its switches, caches and memory cannot affect another."""

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from utils.errors import ExpectedError

Trial = Callable[..., Mapping[str, float]]


class Worker:
    """A process that builds one case with `build(*arguments)` and runs its trials on request."""

    def __init__(self, build: Callable[..., Trial], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        # not a daemon, because it may start a loader's workers; it ends when this end of the pipe closes
        self.process = context.Process(target=_serve, args=(other, build, arguments))
        self.process.start()
        other.close()

    def receive(self) -> Any:
        """Return the answer to the last request, or to the build. Raises the worker's `ExpectedError`."""
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise ExpectedError(f"a measuring process ended with status {self.process.exitcode}") from None
        if isinstance(answer, ExpectedError):
            raise answer
        return answer

    def run(self, *arguments: Any) -> Mapping[str, float]:
        """Run one trial."""
        self.pipe.send(arguments)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """Also after an error: at its end Python waits for every such process."""
        self.close()


def _serve(pipe: Connection, build: Callable[..., Trial], arguments: tuple[Any, ...]) -> None:
    try:
        trial = build(*arguments)
        pipe.send(None)
        while True:
            pipe.send(trial(*pipe.recv()))
    except ExpectedError as error:
        pipe.send(error)
    except (EOFError, KeyboardInterrupt):  # the parent has closed the pipe, or reports the interruption itself
        pass
