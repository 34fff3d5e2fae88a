"""Whole runs give the bits that tests/golden_runs.json was recorded with: weights, optimizer state, and
every value of metrics.jsonl but times. A checkpoint written then resumes now, and ends in the same bits too.

Rounding differs between processors and versions of PyTorch, so on another pair the tests skip and say so. After a
change that is meant to alter results: python tests/test_golden_runs.py --record
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, free_port, without_launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).with_name("golden_runs.json")
OLD_CHECKPOINT = Path(__file__).with_name("golden_checkpoint.pt")
# differ from run to run
MEASURED = ("seconds", "images_per_sec", "data_wait", "memory_gb", "model_tflops", "mfu", "joules", "joules_per_image")

SHAPES = {"dataset": "shapes", "num_classes": 10, "data_loader": "device", "model": "resnet8"}
SHORT = {"limit_train_batches": 10, "limit_valid_batches": 4, "max_epochs": 3, "log_freq": 4, "enable_amp": False}
ONEDNN = {"fuse_norm_relu": False, "conv_weight_products": False, "conv_winograd": False}
SMALL_IMAGES = {"progressive_image_sizes": [16, 24], "progressive_image_shares": [0.35, 0.7]}
SMALL_IMAGES |= {"optimizer": "muon", "lr": 0.03, "momentum": 0.95, "nesterov": True, "weight_decay": 0.05}
SMALL_IMAGES |= {"label_smoothing": 0.1, "enable_alternating_flip": True, "test_time_flip": True, "test_time_shift": 1}
SMALL_IMAGES |= {"validate_every_epochs": 7, "lr_schedule": "onecycle", "lr_warmup_epochs": 3}
# slow on processors without such numbers
BF16 = {"amp_dtype": "bf16", "batch_size": 16, "valid_batch_size_per_gpu": 20, "limit_valid_batches": 1}
BF16 |= {"limit_train_batches": 4, "max_epochs": 3, "log_freq": 2}
RESUMED = SHAPES | SHORT | {"checkpoint_every_steps": 1, "keep_checkpoints": 100, "limit_train_batches": 20}

# name: (block, overrides, ranks, whether it is stopped in mid-epoch and goes on)
RUNS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "quickstart": ("quickstart", {"limit_train_batches": 20, "enable_amp": False}, 1, False),
    "bf16": ("quickstart", SHORT | BF16 | {"enable_amp": True}, 1, False),
    "bs128": ("bs128", SHORT | {"model": "resnet8"}, 1, False),
    "small images": ("cifar100-cpu-plain", SHORT | ONEDNN | SMALL_IMAGES | {"max_epochs": 5}, 1, False),
    "accumulation": ("bs2048-opt", SHORT | {"model": "resnet8", "limit_train_batches": 2}, 1, False),
    "two ranks": ("bs128-opt", SHAPES | SHORT, 2, False),
    "average of weights": ("quickstart", SHORT | {"ema_decay": 0.9}, 1, False),
    "mixed images": ("quickstart", SHORT | {"cutmix_alpha": 1.0, "mixup_alpha": 0.2, "cutout_size": 8}, 1, False),
    "half weights": ("bs128", SHAPES | SHORT | BF16 | {"opt_level": "O2", "clip_grad_norm": 1.0}, 1, False),
    "lars": ("bs128", SHAPES | SHORT | {"optimizer": "lars", "lr": 5.0, "weight_decay_bn_bias": False}, 1, False),
    "lamb": ("bs128", SHAPES | SHORT | {"optimizer": "lamb", "lr": 0.01, "lr_schedule": "cosine"}, 1, False),
    "plateau": ("bs128", SHAPES | SHORT | {"lr_plateau_patience": 0, "max_epochs": 5, "lr": 1e-4}, 1, False),
    "stop and resume": ("bs128-opt", RESUMED, 1, True),
    "two ranks, stop and resume": ("bs128-opt", RESUMED | {"ema_decay": 0.9}, 2, True),
}
NEEDS_CIFAR = ("bs128", "small images", "accumulation")


def machine() -> dict[str, str]:
    """What the bits of a result depend on, beside the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind = [line.split(":")[1].strip() for line in lines if line.startswith(("model name", "cpu family", "model\t"))]
    return {"torch": str(torch.__version__), "processor": ", ".join(kind[:3])}


def train(block: str, overrides: dict[str, Any], ranks: int, folder: Path, *options: str) -> subprocess.Popen[str]:
    """A run in processes of one thread each."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master-port={free_port()}"]
        launcher += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    data = {"data_path": os.environ.get("CIFAR_DATA", "nowhere"), "log_to_tensorboard": False, "device": "cpu"}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in (overrides | data).items()]
    command = [*launcher, "train.py", f"--config={block}", f"--run-dir={folder}", *sets, *options]
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], *, status: int = 0) -> None:
    """Wait for its end."""
    _, errors = process.communicate(timeout=500)
    assert process.returncode == status, errors


def stop_in_mid_epoch(process: subprocess.Popen[str], folder: Path) -> None:
    """SIGUSR1 once a few steps are done; under torchrun, which makes 1 of every status."""
    until = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/step-*.pt"))) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=120)
    assert process.returncode != 0
    newest = max(folder.glob("checkpoints/step-*.pt"))
    assert torch.load(newest, weights_only=True)["step"] < 60, "it was stopped too late to show anything"


def digest(value: Any) -> str:
    """SHA-256 of nested plain values and tensors, memory formats aside."""
    hasher = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            hasher.update(f"{part.dtype} {tuple(part.shape)}".encode())
            hasher.update(repr(part.flatten().tolist()).encode())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                hasher.update(f"{key}:".encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            hasher.update(repr(part).encode())

    add(value)
    return hasher.hexdigest()


def outcome(folder: Path) -> dict[str, Any]:
    """What a run ended with."""
    newest = max(folder.glob("checkpoints/step-*.pt"))
    state = torch.load(newest, weights_only=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [record for record in records if record["kind"] in ("step", "epoch", "end")]
    rows = [{key: value for key, value in row.items() if not key.endswith(MEASURED)} for row in kept]
    parts = {name: digest(state[name]) for name in ("model", "average", "optimizer", "plateau", "best")}
    last = rows[-2]
    return {
        **parts,
        "metrics": digest(rows),
        "records": len(rows),
        "step": state["step"],
        "loss": [last["loss/train"], last["loss/valid"]],
    }


def run(name: str, folder: Path) -> dict[str, Any]:
    """The outcome of one of RUNS."""
    block, overrides, ranks, stopped = RUNS[name]
    process = train(block, overrides, ranks, folder)
    if stopped:
        stop_in_mid_epoch(process, folder)
        process = train(block, overrides, ranks, folder)
    finish(process)
    return outcome(folder)


def resume_old_checkpoint(folder: Path) -> dict[str, Any]:
    """The outcome of a run that goes on from the checkpoint of mid-epoch that the recorded commit wrote."""
    block, overrides, _, _ = RUNS["stop and resume"]
    finish(train(block, overrides, 1, folder, f"--resume={OLD_CHECKPOINT}"))
    return outcome(folder)


def golden(name: str) -> dict[str, Any]:
    """What was recorded; skips on another machine."""
    recorded = json.loads(GOLDEN.read_text())
    if machine() != recorded["machine"]:
        pytest.skip(f"recorded on {recorded['machine']}, this is {machine()}")
    return recorded["runs"][name]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_recorded_bits(name: str, tmp_path: Path) -> None:
    if name in NEEDS_CIFAR and not os.environ.get("CIFAR_DATA"):
        pytest.skip("CIFAR_DATA is not set: the folder that holds cifar-100-binary/")
    expected = golden(name)
    assert run(name, tmp_path / "run") == expected


def test_an_old_checkpoint_resumes_to_the_recorded_bits(tmp_path: Path) -> None:
    expected = golden("old checkpoint")
    assert resume_old_checkpoint(tmp_path / "run") == expected


def record() -> None:
    """Write tests/golden_runs.json anew, with this commit's results."""
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            runs[name] = run(name, Path(folder, name.replace(" ", "-").replace(",", "")))
            print(name, runs[name]["loss"], flush=True)
        middle = Path(folder, "stop-and-resume/checkpoints/step-000000027.pt")
        if not OLD_CHECKPOINT.exists():
            shutil.copy(middle, OLD_CHECKPOINT)
        runs["old checkpoint"] = resume_old_checkpoint(Path(folder, "old"))
    GOLDEN.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python tests/test_golden_runs.py --record")
    record()
