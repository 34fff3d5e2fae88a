"""A run's folder: expts/<config>/ with one run in it, never two, and never an old one overwritten.

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

from torch import Tensor

from utils.base_config import BaseConfig, KeyFlag, render
from utils.distributed.launch import job_name, was_restarted
from utils.errors import CheckpointError, ExpectedError
from utils.files import FolderHeldError, lock_folder, remove_leftovers, sign_lock, write_atomically
from utils.run.checkpoint import io as checkpoint
from utils.run.checkpoint.pretrained import Pretrained
from utils.run.identity import check_same_run

POLL_SECONDS = 1.0  # how often a folder's lock is tried that an earlier start holds
STARTS = ("start", "resume")  # kinds of records in metrics.jsonl that begin those of a start
ALWAYS_KEPT = (*STARTS, "stop", "lost")  # kinds that a run keeps where it goes back; "lost": how far a start came


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process holds."""

    lock: IO[str]  # held as long as it is open
    state: dict[str, Any] | None  # the checkpoint to go on from
    resumed_from: Path | None
    pretrained: Pretrained | None  # what a new run begins with
    notes: list[str]  # what the reader should know
    reached: int  # the last step that an earlier start has recorded


def open_run(
    folder: Path,
    resume: str,
    config: BaseConfig,
    weights: dict[str, Tensor],
    data: dict[str, Any],
    begin: Callable[[], Pretrained | None] = lambda: None,
    patience: float = 0.0,
) -> OpenedRun:
    """Take `folder` for a run: resume what is there, or move it aside; `resume` is auto, never, or a path.

    A job that Slurm or torchrun starts again goes on with what its earlier start wrote here, whatever `resume` says.
    Raises `ExpectedError`, with the folder as it was, where another run holds it, where auto finds a run of another
    configuration (utils/run/identity.py), or where the checkpoint does not fit the configuration, the names and shapes
    of the network's `weights`, or the `data` (see utils/run/checkpoint/io.py).
    `begin` is called where there is nothing to resume, and reads what a new run begins with. A job that is started
    again waits up to `patience` seconds for an earlier start of its own that still holds the folder.
    """
    own = folder / "checkpoints"
    job = job_name(os.environ)
    restarted = bool(job) and was_restarted(os.environ)
    with (
        _naming_what_cannot_be_used(folder),
        _held(folder, job, patience if restarted else 0.0) as (taken, waited),
    ):
        lock = taken
        lock.seek(0)
        earlier = lock.read().partition("\n")[0]
        again = restarted and earlier == job
        sign_lock(lock, earlier)
        source = _find_source(own, "auto" if again else resume)
        pretrained = begin() if source is None else None
        notes = [*waited, pretrained.note] if pretrained else waited
        if source is not None:
            notes += source.notes
            # a key that is younger than the checkpoint had its default
            saved = type(config)().model_dump(mode="json") | source.state["config"]
            if resume == "auto" and not again:
                nothing_left = source.state["epoch"] >= config.model_dump()["max_epochs"]
                check_same_run(folder, saved, config, nothing_left=nothing_left)
            changed = checkpoint.check_fit(
                source.path, saved, config.model_dump(mode="json"), config.keys_with(KeyFlag.FIXED_ON_RESUME)
            )
            checkpoint.check_weights_fit(source.path, source.state["model"], weights)
            checkpoint.check_data_fits(source.path, source.state["data"], data)
            notes += [f"Resuming with another {key}: {saved.get(key)} -> {getattr(config, key)}" for key in changed]
        if source is not None and source.path.parent.resolve() == own.resolve():
            remove_leftovers(own)
        else:
            if own.exists() or (folder / "metrics.jsonl").exists():
                really = folder.resolve() if folder.is_symlink() else folder  # the link stays, as the new run's too
                earlier_run = _move_aside(really)
                notes.append(f"The earlier run in {folder} is now in {earlier_run}")
                lock.close()
                lock = lock_folder(really)
                if source is None and (resume == "auto" or again) and _describes(earlier_run / "config.yaml", config):
                    # lost before its first checkpoint, it is the same run begun again: its ledger has that time too
                    _cut_records(earlier_run / "metrics.jsonl", folder / "metrics.jsonl", 0, 0)
            own.mkdir(exist_ok=True)
        if source is not None:
            _adopt(folder, source)
        sign_lock(lock, job)
        state, path = (source.state, source.path) if source else (None, None)
        return OpenedRun(lock, state, path, pretrained, notes, _last_step(folder / "metrics.jsonl"))


def _lock_in_time(folder: Path, job: str, patience: float) -> tuple[IO[str], list[str]]:
    """The folder's lock, and a note where it was waited for: an earlier start of this job may be cut off from the other
    ranks and from the scheduler, which has started the job again; it then ends by itself some time later."""
    began, holder = time.monotonic(), ""
    while True:
        try:
            lock = lock_folder(folder)
        except FolderHeldError as held:
            if held.job != job or time.monotonic() - began >= patience:
                raise
            if not holder:
                holder = held.holder or "which has not said who it is"
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
def _naming_what_cannot_be_used(folder: Path) -> Iterator[None]:
    """An `OSError` of the block becomes an `ExpectedError` with the file's name."""
    try:
        yield
    except OSError as error:
        raise ExpectedError(f"{error.filename or folder}: cannot be used: {error.strerror or error}") from None


@contextmanager
def _held(folder: Path, job: str, patience: float) -> Iterator[tuple[IO[str], list[str]]]:
    """Take a run's folder; see `_lock_in_time`. Where the block fails, a folder that was not there goes again, unless
    something is in it."""
    was_there = os.path.exists(folder)
    lock, waited = _lock_in_time(folder, job, patience)
    try:
        yield lock, waited
    except BaseException:
        if not was_there:
            with suppress(OSError):
                (folder / ".lock").unlink()
                folder.rmdir()
        lock.close()
        raise


@dataclass(frozen=True)
class _Source:
    """A checkpoint to go on from, and the best one beside it: all is read before anything is moved."""

    path: Path
    state: dict[str, Any]
    content: bytes
    best: bytes | None
    notes: list[str]


def _find_source(own: Path, resume: str) -> _Source | None:
    if resume == "never":
        return None
    if resume == "auto":
        return _find_newest(own)
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
            remedy = f"--resume {shlex.quote(str(best))} goes on from the best one, {remedy}"
        raise CheckpointError(f"{complaints[0]}\nno step's checkpoint in {folder} is good; {remedy}")
    return None


def _read_source(path: Path, state: dict[str, Any], complaints: list[str]) -> _Source:
    """The best checkpoint counts where it is the best so far of the run that wrote `path`. Where it is damaged, of a
    later step, or gone, the best is still to come."""
    best, best_path = None, path.with_name("best.pt")
    try:
        if best_path.exists() and checkpoint.read_checkpoint(best_path)["best"] == state["best"]:
            best = best_path.read_bytes()
    except CheckpointError as error:
        complaints = [*complaints, str(error)]
    notes = [f"Passed over: {complaint}" for complaint in complaints]
    notes.append(f"Resuming from {path}: epoch {state['epoch'] + 1}, batch {state['batch']}, step {state['step']}")
    if best is None:
        if epoch := state["best"]["epoch"]:
            notes.append(f"The best weights so far, of epoch {epoch}, are gone: the best is still to come")
        state = state | {"best": checkpoint.NO_BEST}
    return _Source(path, state, path.read_bytes(), best, notes)


def _adopt(folder: Path, source: _Source) -> None:
    """The run's last checkpoint becomes the one it goes on from, and its best one the best so far.

    In this order: after a kill in between, the next start finds the records of a checkpoint that is there.
    """
    own, step = folder / "checkpoints", source.state["step"]
    last, own_best = checkpoint.step_path(own, step), own / "best.pt"
    _put(last, source.content)
    for newer in checkpoint.list_checkpoints(own):
        if newer > last:  # damaged, not wanted, or under another's name
            _set_aside(newer)
    if source.best is not None:
        _put(own_best, source.best)
    elif own_best.exists():  # of a later step, or damaged
        _set_aside(own_best)
    metrics = folder / "metrics.jsonl"
    _cut_records(metrics, metrics, step, source.state["epoch"])


def _put(path: Path, content: bytes) -> None:
    """Write a checkpoint unless it is there already; another one in its place is set aside."""
    if path.is_file() and path.read_bytes() == content:
        return
    if path.exists():
        _set_aside(path)
    write_atomically(path, content)


def _set_aside(path: Path) -> None:
    """Keep a checkpoint that the run goes back behind, as NAME.superseded, NAME.superseded.1 ..."""
    target = path.with_name(f"{path.name}.superseded")
    path.rename(_free_name(target) if target.exists() else target)


def _move_aside(folder: Path) -> Path:
    """Rename a run's folder to the first free NAME.1, NAME.2 ...; returns the new path."""
    try:
        return folder.rename(_free_name(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be moved aside: {error.strerror}; choose another --run-dir") from None


def _describes(path: Path, config: BaseConfig) -> bool:
    """Whether a config.yaml holds this configuration, under whatever name."""
    return path.is_file() and path.read_bytes().endswith(f"\n{_description(config)}".encode())


def _free_name(path: Path) -> Path:
    """The first of PATH.1, PATH.2 ... that is not taken."""
    names = (Path(f"{path}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _description(config: BaseConfig) -> str:
    return textwrap.indent(render(config), "  ")


def write_description(folder: Path, config: BaseConfig, config_name: str, environment: dict[str, Any]) -> None:
    """config.yaml, a block that can be run again, and environment.json. The configuration of an earlier start stays,
    where it was another one, as config.yaml.1, config.yaml.2 ..."""
    path, content = folder / "config.yaml", f"{config_name}:\n{_description(config)}".encode()
    if path.exists() and (earlier := path.read_bytes()) != content:
        write_atomically(_free_name(path), earlier)
    write_atomically(path, content)
    write_atomically(folder / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def _cut_records(path: Path, target: Path, step: int, epoch: int) -> None:
    """Write to `target` the lines of a metrics.jsonl up to `step` and the finished `epoch`, since what came after is
    done again, and those of ALWAYS_KEPT. An epoch's and the run's last line have the step of the last log point, but
    come after a validation: their epoch counts too. Of the lines that go, the last of each start is kept as "lost",
    with its position and times alone."""
    if not path.exists():
        return
    kept: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None  # of the present start, one that goes
    for record in _records(path):
        if record["kind"] in STARTS and last is not None:
            kept.append(last)
        if record["kind"] in ALWAYS_KEPT or (
            record["step"] <= step and (record["kind"] == "step" or record["epoch"] <= epoch)
        ):
            kept.append(record)
            last = None
        else:
            last = {"kind": "lost", "epoch": record["epoch"], "step": record["step"]}
            last |= {"clock_seconds": record["clock_seconds"]} if "clock_seconds" in record else {}
    kept += [last] if last is not None else []
    write_atomically(target, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _last_step(path: Path) -> int:
    """The highest step in a metrics.jsonl; 0 where there is none."""
    steps = [record.get("step") for record in _records(path)] if path.exists() else []
    return max((step for step in steps if isinstance(step, int)), default=0)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; other lines, which a kill cut short or which are damaged, are passed over."""
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            known = record["kind"] in ALWAYS_KEPT or isinstance(record["epoch"] + record["step"], int)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if known:
            yield record
