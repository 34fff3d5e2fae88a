"""Open a run's folder: it holds one run, and an earlier run is moved aside, never overwritten.

config.yaml[.N]  environment.json  train.log  metrics.jsonl  tb_logs/  checkpoints/{step-*.pt,best.pt}
"""

import itertools
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from utils.base_config import BaseConfig, render
from utils.distributed.launch import job_name, was_restarted
from utils.errors import CheckpointError
from utils.files import FolderHeldError, lock_folder, name_file_in_error, remove_leftovers, sign_lock, write_atomically
from utils.run.checkpoint import fit
from utils.run.checkpoint import io as checkpoint
from utils.run.checkpoint.pretrained import Pretrained
from utils.training.learner import Learner

POLL_SECONDS = 1.0  # between two attempts to lock a folder that an earlier start holds
STARTS = ("start", "resume")  # kinds of the first record of a start in metrics.jsonl
ALWAYS_KEPT = (*STARTS, "stop", "lost")  # kinds kept when a run goes back to an earlier step
RECORD_KEYS = {"kind", "step", "clock_seconds"}  # in every record


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process has locked."""

    lock: IO[str]  # held while this file is open
    state: dict[str, Any] | None  # the checkpoint to resume from
    resumed_from: Path | None
    pretrained: Pretrained | None  # the weights that a new run starts with
    notes: list[str]  # lines for the log
    reached: int  # the last step recorded by an earlier start


def open_run(
    folder: Path,
    resume: str,
    config: BaseConfig,
    learner: Learner,
    data: dict[str, Any],
    read_pretrained: Callable[[], Pretrained | None] = lambda: None,
    patience: float = 0.0,
) -> OpenedRun:
    """Lock `folder`, and resume the run in it or move that run aside; `resume` is auto, never, or a path.

    A job that Slurm or torchrun restarts resumes what its earlier start wrote here, whatever `resume` says. It waits up
    to `patience` seconds for an earlier start that still holds the folder. `read_pretrained` is called if there is
    nothing to resume.
    Raises `ExpectedError` and leaves the folder unchanged if another run holds it, or if the checkpoint does not fit
    the configuration, the `learner` or the `data` (utils/run/checkpoint/fit.py).
    """
    checkpoints = folder / "checkpoints"
    job = job_name(os.environ)
    restarted = bool(job) and was_restarted(os.environ)
    with name_file_in_error(folder), _locked(folder, job, patience if restarted else 0.0) as (locks, waited):
        [lock] = locks
        lock.seek(0)
        earlier = lock.read().partition("\n")[0]
        again = restarted and earlier == job
        sign_lock(lock, earlier)
        source = _find_source(checkpoints, "auto" if again else resume)
        pretrained = read_pretrained() if source is None else None
        notes = [*waited, pretrained.note] if pretrained else waited
        if source is not None:
            notes += source.notes
            if resume == "auto" and not again:
                epochs_left = source.state["epoch"] < learner.config.max_epochs
                fit.check_same_run(folder, source.state["config"], config, epochs_left=epochs_left)
            notes += fit.check_config_fits(source.path, source.state["config"], config)
            fit.check_tensors_fit(source.path, source.state, learner.model.state_dict(), learner.optimizer)
            fit.check_data_fits(source.path, source.state["data"], data)
        if source is not None and source.path.parent.resolve() == checkpoints.resolve():
            remove_leftovers(checkpoints)
        else:
            if checkpoints.exists() or (folder / "metrics.jsonl").exists():
                target = folder.resolve() if folder.is_symlink() else folder  # the link stays and leads to the new run
                earlier_run = _move_aside(target)
                notes.append(f"The earlier run in {folder} is now in {earlier_run}")
                lock.close()
                lock = lock_folder(target)
                locks.append(lock)
                earlier_records = earlier_run / "metrics.jsonl"
                ended = any(record["kind"] == "end" for record in _records(earlier_records))
                new = source is None and not ended and (resume == "auto" or again)
                if new and _has_config(earlier_run / "config.yaml", config):
                    # the same run, lost before its first checkpoint: its ledger includes the lost time
                    _cut_records(earlier_records, folder / "metrics.jsonl", 0, 0)
            checkpoints.mkdir(exist_ok=True)
        if source is not None:
            _adopt(folder, source)
        sign_lock(lock, job)
        state, path = (source.state, source.path) if source else (None, None)
        reached = max((record["step"] for record in _records(folder / "metrics.jsonl")), default=0)
        return OpenedRun(lock, state, path, pretrained, notes, reached)


def _lock_in_time(folder: Path, job: str, patience: float) -> tuple[IO[str], list[str]]:
    """Lock the folder; return the lock and, if it had to wait, a note.

    An earlier start may still hold it: one that is cut off from the other ranks and from the scheduler, which has
    restarted the job. It ends some time later."""
    began, holder = time.monotonic(), ""
    while True:
        try:
            lock = lock_folder(folder)
        except FolderHeldError as held:
            if held.job != job or time.monotonic() - began >= patience:
                raise
            if not holder:
                holder = held.holder or "host and process unknown"
                print(
                    f"{folder}: held by an earlier start of this job, {holder}; waiting up to {patience:g} s for it",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(POLL_SECONDS)
        else:
            waited = f"Waited {time.monotonic() - began:.0f} s for an earlier start of this job, {holder}"
            return lock, [waited] if holder else []


@contextmanager
def _locked(folder: Path, job: str, patience: float) -> Iterator[tuple[list[IO[str]], list[str]]]:
    """Lock a run's folder (see `_lock_in_time`). If the block fails, release it and the locks that the block has added,
    and remove a new, empty folder."""
    existed = os.path.exists(folder)
    lock, waited = _lock_in_time(folder, job, patience)
    locks = [lock]
    try:
        yield locks, waited
    except BaseException:
        if not existed:
            with suppress(OSError):
                (folder / ".lock").unlink()
                folder.rmdir()
        for lock in locks:
            lock.close()
        raise


@dataclass(frozen=True)
class _Source:
    """A checkpoint to resume from and the best one next to it, both read before anything is moved."""

    path: Path
    state: dict[str, Any]
    content: bytes
    best: bytes | None
    notes: list[str]


def _find_source(checkpoints: Path, resume: str) -> _Source | None:
    if resume == "never":
        return None
    if resume == "auto":
        return _find_newest(checkpoints)
    path = Path(resume)
    if path.is_file():
        return _read_source(path, checkpoint.read_checkpoint(path), [])
    source = _find_newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if source is None:
        raise CheckpointError(f"--resume {path}: no checkpoint there; give a checkpoint, a run folder, auto or never")
    return source


def _find_newest(folder: Path) -> _Source | None:
    path, state, complaints = checkpoint.newest_good(folder)
    if path is not None and state is not None:
        return _read_source(path, state, complaints)
    if complaints:
        best, remedy = folder / "best.pt", "--resume never starts a new run"
        with suppress(CheckpointError):
            checkpoint.read_checkpoint(best)
            remedy = f"--resume {shlex.quote(str(best))} resumes from the best one, {remedy}"
        raise CheckpointError(f"{complaints[0]}\nno step's checkpoint in {folder} is intact; {remedy}")
    return None


def _read_source(path: Path, state: dict[str, Any], complaints: list[str]) -> _Source:
    """Use best.pt only if it was the best when the run wrote `path`. If it is damaged, missing or of a later step, the
    best accuracy starts again from nothing."""
    best, best_path = None, path.with_name("best.pt")
    try:
        if best_path.exists() and checkpoint.read_checkpoint(best_path)["best"] == state["best"]:
            best = best_path.read_bytes()
    except CheckpointError as error:
        complaints = [*complaints, str(error)]
    notes = [f"Skipped: {complaint}" for complaint in complaints]
    notes.append(f"Resuming from {path}: epoch {state['epoch'] + 1}, batch {state['batch']}, step {state['step']}")
    if best is None:
        if epoch := state["best"]["epoch"]:
            notes.append(f"The best weights so far, of epoch {epoch}, are lost: only later epochs count as best")
        state = state | {"best": checkpoint.NO_BEST}
    return _Source(path, state, path.read_bytes(), best, notes)


def _adopt(folder: Path, source: _Source) -> None:
    """Make `source` the newest checkpoint of the run in `folder`, and its best one the run's best.

    The records are cut last: if a kill comes in between, the next start has the records of the checkpoint it finds.
    """
    checkpoints, step = folder / "checkpoints", source.state["step"]
    last, best = checkpoint.step_path(checkpoints, step), checkpoints / "best.pt"
    _write_if_different(last, source.content)
    for newer in checkpoint.list_checkpoints(checkpoints):
        if newer > last:  # damaged, abandoned, or wrongly named
            _set_aside(newer)
    if source.best is not None:
        _write_if_different(best, source.best)
    elif best.exists():  # of a later step, or damaged
        _set_aside(best)
    metrics = folder / "metrics.jsonl"
    _cut_records(metrics, metrics, step, source.state["epoch"])


def _write_if_different(path: Path, content: bytes) -> None:
    """Write a checkpoint unless it exists; set aside another one of the same name."""
    if path.is_file() and path.read_bytes() == content:
        return
    if path.exists():
        _set_aside(path)
    write_atomically(path, content)


def _set_aside(path: Path) -> None:
    """Keep an abandoned checkpoint as NAME.superseded, NAME.superseded.1 ..."""
    target = path.with_name(f"{path.name}.superseded")
    path.rename(_free_name(target) if target.exists() else target)


def _move_aside(folder: Path) -> Path:
    """Rename a run's folder to the first free NAME.1, NAME.2 ... and return the new path."""
    with name_file_in_error(folder, "cannot be moved aside", "; choose another --run-dir", CheckpointError):
        return folder.rename(_free_name(folder))


def _has_config(path: Path, config: BaseConfig) -> bool:
    """Return whether a config.yaml holds this configuration, under any name."""
    return path.is_file() and path.read_bytes().endswith(f"\n{_description(config)}".encode())


def _free_name(path: Path) -> Path:
    """Return the first of PATH.1, PATH.2 ... that does not exist."""
    names = (Path(f"{path}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _description(config: BaseConfig) -> str:
    return textwrap.indent(render(config), "  ")


def write_description(folder: Path, config: BaseConfig, config_name: str, environment: dict[str, Any]) -> None:
    """Write environment.json and config.yaml, a block that can be run again. If an earlier start had another
    configuration, it is kept as config.yaml.1, config.yaml.2 ..."""
    path, content = folder / "config.yaml", f"{config_name}:\n{_description(config)}".encode()
    if path.exists() and (earlier := path.read_bytes()) != content:
        write_atomically(_free_name(path), earlier)
    write_atomically(path, content)
    write_atomically(folder / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def _cut_records(path: Path, target: Path, step: int, epoch: int) -> None:
    """Write to `target` the records of a metrics.jsonl up to `step` and the finished `epoch`, as all after it is
    trained again, and the kinds of ALWAYS_KEPT.

    The record of an epoch, or of the run's end, has the step of the epoch's last batch, as has a checkpoint written
    before or during the epoch's validation: the epoch counts, too. The last dropped record of
    each start is kept as "lost", with its position and times only."""
    if not path.exists():
        return
    kept: list[dict[str, Any]] = []
    lost: dict[str, Any] | None = None  # the last dropped record of the current start
    for record in _records(path):
        if record["kind"] in STARTS and lost is not None:
            kept.append(lost)
        if record["kind"] in ALWAYS_KEPT or (
            record["step"] <= step and (record["kind"] == "step" or record["epoch"] <= epoch)
        ):
            kept.append(record)
            lost = None
        else:
            lost = {"kind": "lost"} | {key: record[key] for key in ("epoch", "step", "clock_seconds")}
    kept += [lost] if lost is not None else []
    write_atomically(target, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, if it exists; skip lines that a kill cut short or that are damaged."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            position = record["step"] if record["kind"] in ALWAYS_KEPT else record["step"] + record["epoch"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(position, int) and record.keys() >= RECORD_KEYS:
            yield record
