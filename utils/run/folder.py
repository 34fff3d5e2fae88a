"""A run's folder: expts/<config>/ with one run in it, never two, and never an old one overwritten.

config.yaml  environment.json  train.log  metrics.jsonl  tb_logs/  checkpoints/{step-*.pt,best.pt}
"""

import json
import os
import shlex
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from utils.distributed.launch import job_name, was_restarted
from utils.errors import CheckpointError, ExpectedError
from utils.files import lock_folder, remove_leftovers, write_atomically
from utils.keys import Fact, Keys, render
from utils.run import checkpoint

STARTS_AND_STOPS = ("start", "resume", "stop")  # kinds of records in metrics.jsonl


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process holds."""

    lock: IO[str]  # held as long as it is open
    state: dict[str, Any] | None  # the checkpoint to go on from
    resumed_from: Path | None
    notes: list[str]  # what the reader should know


def open_run(folder: Path, resume: str, keys: Keys, weights: dict[str, Tensor], data: dict[str, Any]) -> OpenedRun:
    """Take `folder` for a run: resume what is there, or move it aside; `resume` is auto, never, or a path.

    A job that Slurm or torchrun starts again goes on with what its earlier start wrote here, whatever `resume` says.
    Raises `ExpectedError`, with the folder as it was, where another run holds it or the checkpoint does not fit the
    configuration, the names and shapes of the network's `weights`, or the `data` (see utils/run/checkpoint.py).
    """
    try:
        return _open_run(folder, resume, keys, weights, data)
    except OSError as error:
        raise ExpectedError(f"{error.filename or folder}: cannot be used: {error.strerror or error}") from None


def _open_run(folder: Path, resume: str, keys: Keys, weights: dict[str, Tensor], data: dict[str, Any]) -> OpenedRun:
    lock = lock_folder(folder)
    job = job_name(os.environ)
    if job and was_restarted(os.environ) and _written_by(lock) == job:
        resume = "auto"
    found = _find(folder / "checkpoints", resume)
    notes = [f"Passed over: {complaint}" for complaint in found.complaints] if found else []
    plan = None
    if found is not None:
        changed = checkpoint.check_fit(
            found.path, found.state["config"], keys.model_dump(mode="json"), keys.with_fact(Fact.FIXED)
        )
        checkpoint.check_weights_fit(found.path, found.state["model"], weights)
        checkpoint.check_data_fits(found.path, found.state["data"], data)
        plan, remarks = _plan_adoption(folder / "checkpoints", found)
        notes += [_describe_position(found), *(_describe_change(found, keys, key) for key in changed), *remarks]
    if found is not None and found.path.parent.resolve() == (folder / "checkpoints").resolve():
        remove_leftovers(folder / "checkpoints")
    else:
        if holds_run(folder):
            really = folder.resolve() if folder.is_symlink() else folder  # the link stays, as the new run's too
            notes.append(f"The earlier run in {folder} is now in {_move_aside(really)}")
            lock.close()
            lock = lock_folder(really)
        (folder / "checkpoints").mkdir(exist_ok=True)
    if plan is not None:
        _adopt(folder, plan)
    lock.truncate(0)
    print(job, end="", file=lock, flush=True)
    return OpenedRun(lock, plan.state if plan else None, found.path if found else None, notes)


@dataclass(frozen=True)
class _Found:
    """A checkpoint to go on from, and what was wrong with newer ones."""

    path: Path
    state: dict[str, Any]
    complaints: list[str]


@dataclass(frozen=True)
class _Adoption:
    """What a run takes over; all of it is read before anything is moved. None: it is in its place already."""

    state: dict[str, Any]
    last: bytes | None
    best: bytes | None


def _find(own: Path, resume: str) -> _Found | None:
    if resume == "never":
        return None
    return _newest(own) if resume == "auto" else _demanded(Path(resume))


def _describe_position(found: _Found) -> str:
    state = found.state
    return f"Resuming from {found.path}: epoch {state['epoch'] + 1}, batch {state['batch']}, step {state['step']}"


def _describe_change(found: _Found, keys: Keys, key: str) -> str:
    return f"Resuming with another {key}: {found.state['config'].get(key)} -> {getattr(keys, key)}"


def _plan_adoption(own: Path, found: _Found) -> tuple[_Adoption, list[str]]:
    """What the run whose checkpoints are in `own` takes over, and remarks for the log. Without its best checkpoint
    beside it, the best is still to come."""
    here = found.path.parent.resolve() == own.resolve()
    in_place = here and found.path.resolve() == checkpoint.step_path(own, found.state["step"]).resolve()
    last = None if in_place else found.path.read_bytes()
    best, remarks = _best_beside(found)
    if best is None:
        return _Adoption(found.state | {"best": checkpoint.NO_BEST}, last, None), remarks
    return _Adoption(found.state, last, None if here else best.read_bytes()), remarks


def _best_beside(found: _Found) -> tuple[Path | None, list[str]]:
    """The best checkpoint so far of the run that wrote `found`; None and why where it is damaged, of a later step, or
    gone."""
    best, remarks = found.path.with_name("best.pt"), []
    try:
        if best.exists() and checkpoint.read_checkpoint(best)["best"] == found.state["best"]:
            return best, []
    except CheckpointError as error:
        remarks.append(f"Passed over: {error}")
    if epoch := found.state["best"]["epoch"]:
        remarks.append(f"The best weights so far, of epoch {epoch}, are gone: the best is still to come")
    return None, remarks


def _adopt(folder: Path, plan: _Adoption) -> None:
    """What a run goes on from becomes its own last checkpoint, and the best one so far its own best.

    In this order: killed in between, the next start finds the records of a checkpoint that is there.
    """
    own = folder / "checkpoints"
    last, own_best = checkpoint.step_path(own, plan.state["step"]), own / "best.pt"
    if plan.last is not None and not (last.is_file() and last.read_bytes() == plan.last):
        if last.exists():
            _set_aside(last)
        write_atomically(last, plan.last)
    for newer in checkpoint.list_checkpoints(own):
        if newer > last:  # damaged, not wanted, or under another's name
            _set_aside(newer)
    if plan.best is not None:
        write_atomically(own_best, plan.best)
    elif own_best.exists() and not plan.state["best"]["epoch"]:  # of a later step, or damaged
        _set_aside(own_best)
    _drop_after(folder / "metrics.jsonl", plan.state["step"], plan.state["epoch"])


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


def _newest(folder: Path) -> _Found | None:
    path, state, complaints = checkpoint.newest_good(folder)
    if path is not None and state is not None:
        return _Found(path, state, complaints)
    if complaints:
        best, remedy = folder / "best.pt", "--resume never starts anew"
        with suppress(CheckpointError):
            checkpoint.read_checkpoint(best)
            remedy = f"--resume {shlex.quote(str(best))} goes on from the best one, {remedy}"
        raise CheckpointError(f"{complaints[0]}\nno step's checkpoint in {folder} is good; {remedy}")
    return None


def _demanded(path: Path) -> _Found:
    if path.is_file():
        return _Found(path, checkpoint.read_checkpoint(path), [])
    found = _newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if found is None:
        raise CheckpointError(
            f"--resume {path}: no checkpoint there; give a checkpoint file, a run folder, auto or never"
        )
    return found


def write_description(folder: Path, keys: Keys, config_name: str, environment: dict[str, Any]) -> None:
    """config.yaml, a block that can be run again, and environment.json."""
    body = textwrap.indent(render(keys), "  ")
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
    Those of starts and stops stay: they tell what happened.

    The lines of an epoch's and of the run's end have the step of the last log line, but come after a validation."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            if record["kind"] in STARTS_AND_STOPS or (
                record["step"] <= step and (record["kind"] == "step" or record["epoch"] <= epoch)
            ):
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):  # a line that a kill cut short, or that is damaged
            continue
    write_atomically(path, b"".join(kept))
