"""Open a run's folder: it holds one run, and an earlier run is moved aside, never overwritten.

config.yaml[.N]  environment.json  train.log  metrics.jsonl  tb_logs/  checkpoints/{step-*.pt,best.pt}
"""

import filecmp
import itertools
import os
import textwrap
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from utils.base_config import BaseConfig, render
from utils.data.datasets.dataset import unicode_remark
from utils.distributed.launch import job_name, was_restarted
from utils.environment import describe_arithmetic
from utils.errors import CheckpointError
from utils.files import lock_folder, name_file_in_error, sign_lock, strict_json, write_atomically
from utils.run import checkpoint
from utils.run.logger import METRICS, read_records
from utils.run.run import Run

PATIENCE = 0.9  # of the other ranks' timeout
STARTS = ("start", "resume")  # kinds of the first record of a start in metrics.jsonl
ALWAYS_KEPT = (*STARTS, "stop", "lost")  # kinds kept when a run goes back to an earlier step

State = dict[str, Any]  # of a checkpoint
Source = tuple[Path, State, State | None]  # a checkpoint to resume from, its state, and the best one's if it is known


def open_run(run: Run, resume: str) -> AbstractContextManager[Any]:
    """Collective: open the folder in the main process, and continue on every rank from its checkpoint, or start from
    the weights of `pretrained`. Return the folder's lock."""
    opened = run.world.main_only(lambda: open_folder(run, resume))
    lock, state, pretrained = opened or (nullcontext(), None, None)
    state, pretrained = run.world.broadcast((state, pretrained))
    if pretrained is not None:
        run.learner.load_network({"model": pretrained, "average": None})
    if state is not None:
        run.restore(state)
    return lock


def open_folder(run: Run, resume: str) -> tuple[IO[str], State | None, dict[str, Tensor] | None]:
    """Lock the folder of `run`, and resume the run in it or move that run aside; `resume` is auto, never, or a path.
    Return the lock, held while this file is open, the checkpoint to resume from, and the weights of a new run.

    A job that Slurm or torchrun restarts resumes what its earlier start wrote here, whatever `resume` says. It waits
    for an earlier start that still holds the folder, such as one that is cut off from the other ranks and from the
    scheduler: less long than the other ranks wait for this one.
    Raises `ExpectedError` and leaves the folder unchanged if another run holds it or the checkpoint does not fit `run`.
    """
    folder, checkpoints, say = run.folder, run.folder / "checkpoints", run.log.say
    job = job_name(os.environ)
    restarted = bool(job) and was_restarted(os.environ)
    with name_file_in_error(folder), ExitStack() as undo:
        patience = PATIENCE * run.config.rank_timeout_seconds if restarted else 0.0
        lock = undo.enter_context(lock_folder(folder, patience))
        lock.seek(0)
        earlier_job = lock.read().partition("\n")[0]
        again = restarted and earlier_job == job
        sign_lock(lock, earlier_job)
        source = _find_source(run, "auto" if again else resume, must_equal=resume == "auto" and not again)
        pretrained = None if source else run.read_pretrained()
        if pretrained is not None:
            say(pretrained[1])
        if source and source[0].parent.resolve() == checkpoints.resolve():
            for temporary in (*folder.glob(".*.tmp"), *checkpoints.glob(".*.tmp")):  # of killed writers
                temporary.unlink(missing_ok=True)
        elif checkpoints.exists() or (folder / METRICS).exists():
            target = folder.resolve() if folder.is_symlink() else folder  # the link stays and leads to the new run
            say(f"The earlier run in {folder} is now in {target.rename(_free_name(target))}")
            lock.close()
            lock = undo.enter_context(lock_folder(target))
        checkpoints.mkdir(exist_ok=True)
        if source:
            run.resumed_from = source[0]
            _adopt(folder, *source)
        sign_lock(lock, job)
        run.clock.reached = max((record["step"] for record in read_records(folder)), default=0)
        undo.pop_all()
    return lock, source[1] if source else None, pretrained[0] if pretrained else None


def _find_source(run: Run, resume: str, *, must_equal: bool) -> Source | None:
    """Return what to resume from, read and checked before anything is moved; None to start a new run. `must_equal`:
    with the same training settings only."""
    if resume == "never":
        return None
    named = run.folder / "checkpoints" if resume == "auto" else Path(resume)
    path, state, complaints = checkpoint.newest_good(named)
    if path is None and complaints:
        best_too = "resume from its best.pt with --resume, or " if any(named.rglob("best.pt")) else ""
        remedy = f"{best_too}start a new run with --resume never"
        raise CheckpointError(f"{complaints[0]}\nno step's checkpoint in {named} is intact; {remedy}")
    if path is None or state is None:
        if resume != "auto":
            raise CheckpointError(f"--resume {named}: no checkpoint there; give a checkpoint, a run folder or never")
        return None
    best, best_path = None, path.with_name("best.pt")
    try:
        best = checkpoint.read_checkpoint(best_path) if best_path.exists() else None
    except CheckpointError as error:
        complaints.append(str(error))
    for complaint in complaints:
        run.log.say(f"Skipped: {complaint}")
    run.log.say(f"Resuming from {path}: epoch {state['epoch'] + 1}, batch {state['batch']}, step {state['step']}")
    _check_fit(run, path, state, must_equal=must_equal)
    if _is_best(best, state, run):
        return path, state, best
    return path, state | {"best": checkpoint.NO_BEST}, None


def _check_fit(run: Run, path: Path, state: State, *, must_equal: bool) -> None:
    """Raise an `ExpectedError` if the checkpoint `state` does not fit `run`; log what differs otherwise."""
    for text in checkpoint.check_settings(path, state["config"], run.config, must_equal=must_equal):
        run.log.say(f"Resuming with another {text}")
    computed = () if getattr(run.config, "dataset", "") == "cifar100" else ("mean", "std")  # saved ones stay
    if other := checkpoint.changed(state["data"], {key: run.data[key] for key in run.data if key not in computed}):
        found = f"was trained on other data, or with epochs of another length: {checkpoint.shorten([*other.values()])}"
        found += unicode_remark(*(data.get("class_names", []) for data in (run.data, state["data"])))
        raise CheckpointError(f"{path}: {found}\nresume with the same data and limits, or {checkpoint.NEW_RUN}")
    checkpoint.check_tensors_fit(path, state, run.learner.model.state_dict(), run.learner.optimizer)
    if differing := checkpoint.changed(state["versions"], describe_arithmetic(run.world.device)):
        what = checkpoint.shorten([*differing.values()])
        run.log.say(f"Resuming with another {what}: the last bits may differ from those of an uninterrupted run")


def _is_best(best: State | None, state: State, run: Run) -> bool:
    """Whether `best`, of best.pt, has the best weights of the checkpoint `state`, and this `run` validates as that did.
    If not, the best accuracy starts again from nothing."""
    found = state["best"]
    if not found["epoch"]:
        return False  # no validation yet
    if best is None or best["best"] != found:  # damaged, missing, or of a later step
        run.log.say(f"The best weights so far, of epoch {found['epoch']}, are lost: only later epochs count as best")
        return False
    differing = checkpoint.changed(found.get("measures", {}), run.measures)
    if not differing or state["epoch"] >= run.config.max_epochs:
        return True
    changed, earlier = checkpoint.shorten([*differing.values()]), f"{found['acc1']:.2%} of epoch {found['epoch']}"
    effect = f"{earlier} cannot be compared, so only later epochs count as best"
    run.log.say(f"Validation has changed ({changed}): {effect}")
    return False


def _adopt(folder: Path, path: Path, state: State, best: State | None) -> None:
    """Make `state`, read from `path`, the newest checkpoint of the run in `folder`, and `best` the run's best.

    The records are cut last: if a kill comes in between, the next start has the records of the checkpoint it finds.
    """
    checkpoints = folder / "checkpoints"
    last, own_best = checkpoint.step_path(checkpoints, state["step"]), checkpoints / "best.pt"
    if last.exists() and not filecmp.cmp(last, path, shallow=False):
        _set_aside(last)
    if not last.exists():
        write_atomically(last, checkpoint.encode(state))
    for newer in checkpoint.list_checkpoints(checkpoints):
        if newer > last:  # damaged, abandoned, or wrongly named
            _set_aside(newer)
    if own_best.exists() and best is None:
        _set_aside(own_best)
    if not own_best.exists() and best is not None:
        write_atomically(own_best, checkpoint.encode(best))
    _cut_records(folder, state["step"], state["epoch"])


def _set_aside(path: Path) -> None:
    """Rename a checkpoint to NAME.1, instead of an earlier one: only the last one that was set aside is kept."""
    path.replace(f"{path}.1")


def _free_name(path: Path) -> Path:
    """Return the first of NAME.1, NAME.2 ... that does not exist."""
    names = (Path(f"{path}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def write_description(folder: Path, config: BaseConfig, config_name: str, environment: dict[str, Any]) -> None:
    """Write environment.json and config.yaml, a block that can be run again. If an earlier start had another
    configuration, it is kept as config.yaml.1, config.yaml.2 ..."""
    path, content = folder / "config.yaml", f"{config_name}:\n{textwrap.indent(render(config), '  ')}".encode()
    if path.exists() and (earlier := path.read_bytes()) != content:
        write_atomically(_free_name(path), earlier)
    write_atomically(path, content)
    write_atomically(folder / "environment.json", (strict_json(environment, indent=1) + "\n").encode())


def _cut_records(folder: Path, step: int, epoch: int) -> None:
    """Keep the records of metrics.jsonl up to `step` and the finished `epoch`, as all after it is trained again, and
    the kinds of ALWAYS_KEPT. The last dropped record of each start is kept as "lost", with its position and times only.

    The record of an epoch, or of the run's end, has the step of the epoch's last batch, as has a checkpoint written
    before or during the epoch's validation: the epoch counts, too."""
    kept, lost = list[dict[str, Any]](), list[dict[str, Any]]()  # lost: the last dropped record of the current start
    for record in read_records(folder):
        if record["kind"] in STARTS:
            kept += lost
        if record["kind"] in ALWAYS_KEPT or (
            record["step"] <= step and (record["kind"] == "step" or record["epoch"] <= epoch)
        ):
            kept.append(record)
            lost = []
        else:
            lost = [{"kind": "lost"} | {key: record[key] for key in ("epoch", "step", "clock_seconds")}]
    if kept or lost:
        write_atomically(folder / METRICS, "".join(strict_json(record) + "\n" for record in kept + lost).encode())
