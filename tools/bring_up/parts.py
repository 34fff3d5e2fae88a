"""The parts of a bring-up, the most valuable first. To add a part, add a line to the table PARTS. No torch.

The order suits a machine that one has for three calls of ten minutes, the data perhaps in the last: whether the rest
can be trusted (tests), how it runs (compiled or eager), what answers the questions of docs/benchmarking.md, then
claims.

`build_command` replaces these words: {folder} by the part's folder, {settings} by the command line's --set,
{checkpoints} by whether the run writes checkpoints, {compile} by the result of the part `compile`, {tests} by the files
with tests for a GPU, {passed} by options that deselect the tests that passed in an earlier call.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from utils.program import CODE

# A rehearsal trains two epochs of four steps of the smallest network. Its figures measure nothing.
SMALL_SETTINGS = (
    "dataset=shapes", "num_classes=10", "model=resnet8", "zero_init_residual=false", "batch_size=32",
    "micro_batch_size=null", "valid_batch_size_per_gpu=100", "limit_train_batches=4", "limit_valid_batches=2",
    "max_epochs=2", "lr_warmup_epochs=1", "log_freq=2", "num_data_workers=0", "stop_at_accuracy=null",
)  # fmt: skip
EAGER = "--set=enable_compile=false"
SMALL_SECONDS = 20.0  # estimate for each part of a rehearsal
TRIALS = "--trials 2 --iters 2 --warmup 1"
PYTEST = "-m pytest -n auto --maxprocesses 8 -o addopts=--strict-markers -p no:cacheprovider -v --tb=short -m"
RECORD = "train.py --run-dir {folder}/run {checkpoints} --set log_to_tensorboard=false"
REPORT = "--json {folder}/report.json {settings}"
RUNGS = f"-m tools.bench ladder --yaml_config=tools/bring_up/rungs.yaml --config=eager {REPORT}"


@dataclass(frozen=True)
class Part:
    """One line of the table."""

    name: str
    what: str
    command: str  # after `python`
    # Estimate until something was measured. On an H100 the doctor, the tests and a training took about as long, and a
    # rung about 20 s to its first trial (results/2026-11-27-h100). The compilation of ResNet50 is taken as a minute.
    seconds: float
    needs: tuple[str, ...] = ()  # packages, `cuda`, and `data`, for which a part waits
    small: str = ""  # added for a rehearsal
    resumable: bool = False  # a later call resumes it; otherwise it starts again
    epochs: int = 0  # of a training: at most
    rung: str = ""  # of a training: the rung of the ladder that is about as fast
    warned: str = ""  # in the log if status 1 means only a warning


def training(
    config: str, what: str, seconds: float, epochs: int, more: str = "", *, rung: str = "fastest", seed: int = 0
) -> Part:
    """A part that runs train.py and resumes from its checkpoints. `more`: further words of the command."""
    name, command = f"{config}-seed-{seed}" if seed else config, f"{RECORD} --config={config} --set seed={seed} {more}"
    return Part(name, what, f"{command} {{settings}}", seconds, ("data",), resumable=True, epochs=epochs, rung=rung)


TUTORIAL = "bs256-amp-nhwc-extra-opts"  # the rung of the tutorial's own runs
FAST = "--set data_loader=device --set enable_cuda_graphs=auto"  # the same images and steps in less time

PARTS = (
    Part("doctor", "check the machine",
         "-m tools.doctor --config=quickstart --run-dir {folder} --json --dcgm 1 {settings} --set dataset=shapes "
         "--set num_classes=10", 25, warned='"worst": "warn"'),  # the parts that read data check them
    Part("gpu-tests", "tests that need a GPU",
         f"{PYTEST} 'gpu and not slow and not dali' -k 'not trains_like_float32' {{passed}} {{tests}}", 120,
         ("cuda", "pytest", "xdist"), resumable=True, small="-k no_epoch_waits"),
    Part("compile", "compiled against eager, with and without CUDA graphs",
         f"{RUNGS} --configs=eager,compiled,eager-graphs,compiled-graphs --budget-minutes 4.8", 300, small=TRIALS),
    Part("half-precision", "fp16 against bf16, each with cuDNN's or PyTorch's BatchNorm and with fuse_norm_relu",
         f"{RUNGS} --configs=bf16,bf16-fused,fp16,fp16-fused --budget-minutes 2.7", 170, ("cuda",), small=TRIALS),
    Part("limits", "limits of the hardware", f"-m tools.bench limits {REPORT}", 30, small="--trials 2"),
    Part("layers", "where a step's time goes, by kind of operation", f"-m tools.bench layers --config=fastest {REPORT}",
         240, small="--trials 2"),
    training("record-75", "75 % as early as possible", 90, 18),
    Part("ladder", "every rung of the ladder",
         f"-m tools.bench ladder --budget-minutes 6.7 {{compile}} {REPORT}", 420, ("data",),
         small=f"{TRIALS} --configs=bs256,bs256-amp,fastest"),
    Part("loaders", "each loader by itself and feeding a step",
         f"-m tools.bench loaders --loaders torchvision,device,dali,synthetic {REPORT}", 120, ("data",),
         small="--trials 2 --batches 2 --steps 2"),
    Part("switches", "tests that each switch trains like float32",
         f"{PYTEST} gpu -k trains_like_float32 {{passed}} tests/test_gpu.py", 60,
         ("cuda", "pytest", "xdist"), resumable=True),
    training("bs128-opt", "the tutorial's 75 %", 540, 100, "--set stop_at_accuracy=0.75", rung=TUTORIAL),
    training("accuracy", "the highest accuracy", 420, 90, "{compile}"),
    Part("peers", "this project's step against timm's, Lightning's and plain PyTorch's",
         f"-m tools.bench peers --config=fastest {{compile}} {REPORT}", 300, ("data", "timm", "lightning"),
         small=TRIALS),
    training("record-75-bs2048", "75 % with 2,048 images per step", 120, 26),
    training("bs2048-opt", "the generalisation gap of large batches", 600, 120, FAST, rung=TUTORIAL),
    training("bs2048-warmup-opt", "the gap closed by a warm-up", 600, 120, FAST, rung=TUTORIAL),
    *(training("record-75", "another seed of record-75", 90, 18, seed=seed) for seed in (1, 2, 3, 4)),
    replace(training("bs128-opt", "the tutorial's accuracy after all its epochs", 700, 100, rung=TUTORIAL),
            name="bs128-opt-all-epochs"),
)  # fmt: skip


@dataclass(frozen=True)
class CallSettings:
    """Settings of one call, for all of its parts."""

    out: Path
    settings: tuple[str, ...] = ()  # KEY=VALUE
    small: bool = False
    eager_is_faster: bool = False  # by the part `compile`
    checkpoints: bool = False  # the current part may take longer than a call
    earlier: Mapping[str, float] = field(default_factory=dict)  # seconds of each part in the baseline

    def folder(self, part: Part) -> Path:
        return self.out / "parts" / part.name


def build_command(part: Part, call: CallSettings) -> list[str]:
    """Return the command of a part, for subprocess."""
    folder, test_files = call.folder(part), sorted((CODE / "tests").glob("test_*.py"))
    chosen = [*(SMALL_SETTINGS if call.small else ()), *call.settings]
    expanded = {
        "{settings}": [f"--set={text}" for text in chosen],
        "{checkpoints}": [f"--set=save_checkpoint={str(call.checkpoints).lower()}"],
        "{compile}": [EAGER] if call.eager_is_faster else [],
        "{tests}": [f"tests/{path.name}" for path in test_files if "mark.gpu" in path.read_text("utf-8")],
        "{passed}": [f"--deselect={test}" for test in passed_tests(folder)],
    }
    command = [sys.executable]
    for word in shlex.split(f"{part.command} {part.small if call.small else ''}"):
        command += expanded.get(word, [word.replace("{folder}", str(folder.resolve()))])
    return command


def passed_tests(folder: Path) -> list[str]:
    """Return the tests that passed in earlier calls, from pytest-xdist's own lines."""
    text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("log-*.txt")))
    return re.findall(r"^\[gw\d+\] \[ *\d+%\] PASSED (tests/\S+::.*?) *$", text, re.MULTILINE)
