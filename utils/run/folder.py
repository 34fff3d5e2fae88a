"""A run's folder: expts/<config>/ with one run in it, never two, and never an old one overwritten.

config.yaml  environment.json  train.log  metrics.jsonl  tb_logs/  checkpoints/{step-*.pt,best.pt}
"""

import fcntl
import json
import multiprocessing.util
import os
import shlex
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from utils.config import Config, render_config
from utils.distributed.launch import job_name, was_restarted
from utils.errors import CheckpointError, ConfigError, ExpectedError
from utils.files import remove_leftovers, write_atomically
from utils.run import checkpoint


def lock_folder(folder: Path) -> IO[str]:
    """Create `folder` and hold it for this process; `ConfigError` where another run holds it."""
    path = folder / ".lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot hold a run: {error.strerror}; choose another with --run-dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another run is writing here; wait for it or choose another --run-dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder}: its file system cannot lock a file ({error.strerror}), so two runs could share the folder; "
                "choose another --run-dir, or have the file system mounted with locks (Lustre: -o flock)"
            ) from None
        # another run may have moved the folder aside since the lock was opened, which then is that of the old folder
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                # else loader workers that outlive a killed run for some seconds would hold its folder
                multiprocessing.util.register_after_fork(lock, lambda file: file.close())
                return lock
        lock.close()


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process holds."""

    lock: IO[str]  # held as long as it is open
    state: dict[str, Any] | None  # the checkpoint to go on from
    notes: list[str]  # what the reader should know


def open_run(folder: Path, resume: str, config: Config, weights: dict[str, Tensor], data: dict[str, Any]) -> OpenedRun:
    """Take `folder` for a run: resume what is there, or move it aside; `resume` is auto, never, or a path.

    A job that Slurm or torchrun starts again goes on with what its earlier start wrote here, whatever `resume` says.
    Raises `ExpectedError`, with the folder as it was, where another run holds it or the checkpoint does not fit the
    configuration, the names and shapes of the network's `weights`, or the `data` (as in utils/checkpoint.py's table).
    """
    try:
        return _open_run(folder, resume, config, weights, data)
    except OSError as error:
        raise ExpectedError(f"{error.filename or folder}: cannot be used: {error.strerror or error}") from None


def _open_run(folder: Path, resume: str, config: Config, weights: dict[str, Tensor], data: dict[str, Any]) -> OpenedRun:
    lock = lock_folder(folder)
    job = job_name(os.environ)
    if job and was_restarted(os.environ) and _written_by(lock) == job:
        resume = "auto"
    own = folder / "checkpoints"
    notes: list[str] = []
    path, state, content, best = None, None, None, None
    if resume == "auto":
        path, state = _newest(own, notes)
    elif resume != "never":
        path, state = _demanded(Path(resume), notes)
    here = path is not None and path.parent.resolve() == own.resolve()
    if path is not None and state is not None:
        changed = checkpoint.check_fit(path, state["config"], config.model_dump(mode="json"))
        checkpoint.check_weights_fit(path, state["model"], weights)
        checkpoint.check_data_fits(path, state["data"], data)
        notes.append(f"Resuming from {path}: epoch {state['epoch'] + 1}, batch {state['batch']}, step {state['step']}")
        notes += [
            f"Resuming with another {key}: {state['config'].get(key)} -> {getattr(config, key)}" for key in changed
        ]
        # what is not in its place yet, read before anything is moved
        if not here or path.resolve() != checkpoint.step_path(own, state["step"]).resolve():
            content = path.read_bytes()
        if _has_best_beside(path, state, notes) and not here:
            best = path.with_name("best.pt").read_bytes()
    if here:
        remove_leftovers(own)
    else:
        if holds_run(folder):
            really = folder.resolve() if folder.is_symlink() else folder  # the link stays, as the new run's too
            notes.append(f"The earlier run in {folder} is now in {_move_aside(really)}")
            lock.close()
            lock = lock_folder(really)
        own.mkdir(exist_ok=True)
    if state is not None:
        _adopt(folder, state, content, best)
    lock.truncate(0)
    print(job, end="", file=lock, flush=True)
    return OpenedRun(lock, state, notes)


def _has_best_beside(path: Path, state: dict[str, Any], notes: list[str]) -> bool:
    """Whether the best checkpoint so far of the run whose `state` is in `path` is beside it; where that one is damaged,
    of a later step, or gone, the best is still to come."""
    best = path.with_name("best.pt")
    try:
        if best.exists() and checkpoint.read_checkpoint(best)["best"] == state["best"]:
            return True
    except CheckpointError as error:
        notes.append(f"Passed over: {error}")
    if state["best"]["epoch"]:
        notes.append(f"The best weights so far, of epoch {state['best']['epoch']}, are gone: the best is still to come")
    state["best"] = {"acc1": -1.0, "epoch": 0}
    return False


def _adopt(folder: Path, state: dict[str, Any], content: bytes | None, best: bytes | None) -> None:
    """What a run goes on from becomes its own last checkpoint, and the best one so far its own best; None stands for
    one that is in its place already.

    In this order: killed in between, the next start finds the records of a checkpoint that is there.
    """
    own = folder / "checkpoints"
    last, own_best = checkpoint.step_path(own, state["step"]), own / "best.pt"
    if content is not None and not (last.is_file() and last.read_bytes() == content):
        if last.exists():
            _set_aside(last)
        write_atomically(last, content)
    for newer in checkpoint.list_checkpoints(own):
        if newer > last:  # damaged, not wanted, or under another's name
            _set_aside(newer)
    if best is not None:
        write_atomically(own_best, best)
    elif own_best.exists() and not state["best"]["epoch"]:  # of a later step, or damaged
        _set_aside(own_best)
    _drop_after(folder / "metrics.jsonl", state["step"], state["epoch"])


def _set_aside(path: Path) -> None:
    """Keep a checkpoint that the run goes back behind, as NAME.superseded, NAME.superseded.1 ..."""
    target, number = path.with_name(f"{path.name}.superseded"), 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.superseded.{number}")
    path.rename(target)


def _written_by(lock: IO[str]) -> str:
    """The job that was the last to open a run's folder."""
    lock.seek(0)
    return lock.read()


def _newest(folder: Path, notes: list[str]) -> tuple[Path | None, dict[str, Any] | None]:
    path, state, complaints = checkpoint.newest_good(folder)
    if complaints and state is None:
        best, remedy = folder / "best.pt", "--resume never starts anew"
        with suppress(CheckpointError):
            checkpoint.read_checkpoint(best)
            remedy = f"--resume {shlex.quote(str(best))} goes on from the best one, {remedy}"
        raise CheckpointError(f"{complaints[0]}\nno step's checkpoint in {folder} is good; {remedy}")
    notes += [f"Passed over: {complaint}" for complaint in complaints]
    return path, state


def _demanded(path: Path, notes: list[str]) -> tuple[Path, dict[str, Any]]:
    if path.is_file():
        return path, checkpoint.read_checkpoint(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest, state = _newest(folder, notes)
    if newest is None or state is None:
        raise CheckpointError(
            f"--resume {path}: no checkpoint there; give a checkpoint file, a run folder, auto or never"
        )
    return newest, state


def write_description(folder: Path, config: Config, config_name: str, environment: dict[str, Any]) -> None:
    """config.yaml, a block that can be run again, and environment.json."""
    body = textwrap.indent(render_config(config), "  ")
    write_atomically(folder / "config.yaml", f"{config_name}:\n{body}".encode())
    write_atomically(folder / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def holds_run(folder: Path) -> bool:
    """Whether a run has written into this folder."""
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


def _move_aside(folder: Path) -> Path:
    """Rename a run's folder to the first free NAME.1, NAME.2 ...; returns the new path."""
    number = 1
    while (target := Path(f"{folder}.{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be moved aside: {error.strerror}; choose another --run-dir") from None
    return target


def _drop_after(path: Path, step: int, epoch: int) -> None:
    """Keep the lines of metrics.jsonl up to `step` and the finished `epoch`: what came after is about to be done again.

    The lines of an epoch's and of the run's end have the step of the last log line, but come after a validation."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            if record["step"] <= step and (record["kind"] == "step" or record["epoch"] <= epoch):
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):  # a line that a kill cut short, or that is damaged
            continue
    write_atomically(path, b"".join(kept))
