"""The parts of a bring-up, in order of worth. A part enters by a line of the table PARTS. No torch.

Words of a command in braces are filled in when it starts (`words`): {folder} is the part's own, {settings} are the
--set of the command line, {checkpoints} says whether the run writes some, {compile} is what `compile` found out,
{tests} are the files with tests for a GPU, and {passed} leaves out those that have passed in an earlier call.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.program import CODE

# Two epochs of four steps of the smallest network: what a rehearsal trains. Its figures measure nothing.
SMALL_SETTINGS = (
    "dataset=shapes", "num_classes=10", "model=resnet8", "batch_size=32", "micro_batch_size=null",
    "valid_batch_size_per_gpu=100", "limit_train_batches=4", "limit_valid_batches=2", "max_epochs=2",
    "lr_warmup_epochs=1", "log_freq=2", "num_data_workers=0", "stop_at_accuracy=null", "log_to_tensorboard=false",
)  # fmt: skip
EAGER = "--set=enable_compile=false"  # {compile}, where that was found out
SMALL_SECONDS = 20.0  # the estimate of every part of a rehearsal
TRIALS = "--trials 2 --iters 2 --warmup 1"
PYTEST = "-m pytest -o addopts=--strict-markers -p no:cacheprovider -v --tb=short -m"
RECORD = "train.py --run-dir {folder}/run {checkpoints} --set log_to_tensorboard=false"


@dataclass(frozen=True)
class Part:
    """One line of the table."""

    name: str
    what: str
    command: str  # after `python`
    seconds: float  # a guess for a GPU like an H200, until something was measured
    needs: tuple[str, ...] = ()  # packages, and `cuda`
    small: str = ""  # added for a rehearsal
    goes_on: bool = False  # a later call goes on where this one was cut off; else it begins again
    epochs: int = 0  # of a training: at most
    rung: str = ""  # of a training: the rung of the ladder that is about as fast


def training(
    config: str, what: str, seconds: float, epochs: int, more: str = "", *, rung: str = "fastest", seed: int = 0,
    name: str = "",
) -> Part:  # fmt: skip
    """A line for a run of train.py, which goes on by its checkpoints. `more`: further words of its command."""
    command = f"{RECORD} --config={config} --set seed={seed} {more} {{settings}}"
    name = name or (f"{config}-seed-{seed}" if seed else config)
    return Part(name, what, command, seconds, goes_on=True, epochs=epochs, rung=rung)


TUTORIAL = "bs256-amp-nhwc-extra-opts"  # the rung of the tutorial's own runs
FAST = "--set data_loader=device --set enable_cuda_graphs=auto"  # the same images and steps in less time

PARTS = (
    Part("doctor", "is the machine fit", "-m tools.doctor --config=fastest --run-dir {folder} --json {settings}", 45),
    Part("gpu-tests", "everything that only a GPU can show",
         f"{PYTEST} 'gpu and not slow and not dali' -k 'not trains_like_float32' {{passed}} {{tests}}", 300,
         ("cuda", "pytest"), goes_on=True, small="-k no_epoch_waits"),
    Part("switches", "each switch trains like float32",
         f"{PYTEST} gpu -k trains_like_float32 {{passed}} tests/test_gpu.py", 240, ("cuda", "pytest"), goes_on=True),
    Part("compile", "compiled against eager, with and without CUDA graphs",
         "-m tools.bench ladder --yaml_config=tools/bring_up/compile.yaml --config=eager "
         "--configs=eager,compiled,eager-graphs,compiled-graphs --budget-minutes 2.8 --json {folder}/report.json "
         "{settings}", 180, small=TRIALS),
    Part("limits", "what the machine can do", "-m tools.bench limits --json {folder}/report.json {settings}", 30,
         small="--trials 2"),
    Part("layers", "where a step's time goes, by kind of operation",
         "-m tools.bench layers --config=fastest --json {folder}/report.json {settings}", 240, small="--trials 2"),
    Part("loaders", "each loader alone and feeding a step",
         "-m tools.bench loaders --loaders torchvision,device,dali,synthetic --json {folder}/report.json {settings}",
         120, small="--trials 2 --batches 2 --steps 2"),
    Part("ladder", "every rung of speed",
         "-m tools.bench ladder --budget-minutes 7.5 --json {folder}/report.json {compile} {settings}", 480,
         small=f"{TRIALS} --configs=bs256,bs256-amp,fastest"),
    training("record-75", "75 % as early as possible", 90, 18),
    training("bs128-opt", "the tutorial's 75 %", 540, 100, "--set stop_at_accuracy=0.75", rung=TUTORIAL),
    training("accuracy", "the highest accuracy", 420, 90, "{compile}"),
    Part("peers", "this project's step against timm's and Lightning's",
         "-m tools.bench peers --config=fastest --json {folder}/report.json {compile} {settings}", 300,
         ("timm", "lightning"), small=TRIALS),
    training("record-75-bs2048", "75 % with 2,048 images a step", 120, 26),
    training("bs2048-opt", "the generalisation gap of large batches", 600, 120, FAST, rung=TUTORIAL),
    training("bs2048-warmup-opt", "the gap closed by a warm-up", 600, 120, FAST, rung=TUTORIAL),
    *(training("record-75", "another seed of record-75", 90, 18, seed=seed) for seed in (1, 2, 3, 4)),
    training("bs128-opt", "the tutorial's accuracy after all its epochs", 700, 100, rung=TUTORIAL,
             name="bs128-opt-all-epochs"),
)  # fmt: skip


@dataclass(frozen=True)
class CallSettings:
    """What all parts of a call share."""

    out: Path
    settings: tuple[str, ...] = ()  # KEY=VALUE
    small: bool = False
    eager_wins: bool = False  # in the part `compile`
    checkpoints: bool = False  # of the part at hand: it may take longer than a call

    def folder(self, part: Part) -> Path:
        return self.out / "parts" / part.name


def words(part: Part, call: CallSettings) -> list[str]:
    """The command of a part, for subprocess."""
    folder = call.folder(part)
    chosen = [*(SMALL_SETTINGS if call.small else ()), *call.settings]
    expanded = {
        "{settings}": [f"--set={text}" for text in chosen],
        "{checkpoints}": [f"--set=save_checkpoint={str(call.checkpoints).lower()}"],
        "{compile}": [EAGER] if call.eager_wins else [],
        "{tests}": gpu_test_files(CODE / "tests"),
        "{passed}": [f"--deselect={test}" for test in passed_tests(folder)],
    }
    found = [sys.executable]
    for word in shlex.split(f"{part.command} {part.small if call.small else ''}"):
        found += expanded.get(word, [word.replace("{folder}", str(folder.resolve()))])
    return found


def gpu_test_files(folder: Path) -> list[str]:
    """The files with tests for a GPU; the others may need packages that are not there."""
    marked = [path for path in sorted(folder.glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return [f"tests/{path.name}" for path in marked]


def passed_tests(folder: Path) -> list[str]:
    """The tests that have passed in earlier calls, from pytest's own lines."""
    text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("log-*.txt")))
    return re.findall(r"^(tests/\S+::.*?) PASSED", text, re.MULTILINE)


def absent(needs: Sequence[str], machine: Mapping[str, Any]) -> list[str]:
    """Those of `needs` that this machine lacks."""
    return [name for name in needs if not (machine.get("cuda") if name == "cuda" else importlib.util.find_spec(name))]


def select(names: Sequence[str] | None) -> list[Part]:
    """The parts of these names in the table's order; all of them for None. `ConfigError` with what is unknown."""
    known = [part.name for part in PARTS]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"there is no part {name}; expected one of: {', '.join(known)}")
    return [part for part in PARTS if names is None or part.name in names]
