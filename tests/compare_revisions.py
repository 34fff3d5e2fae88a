"""Compare whole runs of two revisions bit for bit: weights, optimizer state, and all recorded values except times.

    python tests/compare_revisions.py                  # the working tree against its parent commit
    python tests/compare_revisions.py v0.1 --runs muon # against a named revision, one run only

Rounding differs between processors and versions of PyTorch, so both revisions train here instead of being compared with
recorded numbers. Exit status, as for `git bisect run`: 0 equal, 1 different, 125 if a revision cannot be compared. The
file imports nothing of the project, so a copy outside the checkout can compare any two revisions:

    cp tests/compare_revisions.py /tmp && git bisect run python /tmp/compare_revisions.py GOOD

With CIFAR_DATA=DIR the runs on real images are compared too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

EQUAL, DIFFERENT, NOT_COMPARED = 0, 1, 125  # 125: git bisect skips the revision
TIMEOUT_SECONDS = 500
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI")
# values of metrics.jsonl that differ from run to run
MEASURED = ("seconds", "images_per_sec", "data_wait", "memory_gb", "model_tflops", "mfu", "joules", "joules_per_image")
COMPARED = ("model", "average", "optimizer", "plateau", "best", "step")  # parts of a checkpoint

SHAPES = {"dataset": "shapes", "num_classes": 10, "data_loader": "device", "model": "resnet8"}
SHORT = {"limit_train_batches": 10, "limit_valid_batches": 4, "max_epochs": 3, "log_freq": 4, "enable_amp": False}
ONEDNN = {"fuse_norm_relu": False, "cpu_kernels": False}
SMALL_IMAGES = {"progressive_image_sizes": [[16, 0.35], [24, 0.7]]}
SMALL_IMAGES |= {"optimizer": "muon", "lr": 0.03, "momentum": 0.95, "nesterov": True, "weight_decay": 0.05}
SMALL_IMAGES |= {"label_smoothing": 0.1, "rnd_horizontal_flip": "alternating", "test_time_views": 6}
SMALL_IMAGES |= {"validate_every_epochs": 7, "lr_schedule": "onecycle", "lr_warmup_epochs": 3}
# small, since slow on processors without bf16 instructions
BF16 = {"amp_dtype": "bf16", "batch_size": 16, "valid_batch_size_per_gpu": 20, "limit_valid_batches": 1}
BF16 |= {"limit_train_batches": 4, "max_epochs": 3, "log_freq": 2}
RESUMED = SHAPES | SHORT | {"checkpoint_every_steps": 1, "keep_checkpoints": 100, "limit_train_batches": 20}

# {name: (block, overrides)}; two-ranks... have two ranks; ...resumed are stopped in mid-epoch and resumed
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "quickstart": ("quickstart", {"limit_train_batches": 20, "enable_amp": False}),
    "bf16": ("quickstart", SHORT | BF16 | {"enable_amp": True}),
    "bs128": ("bs128", SHORT | {"model": "resnet8"}),
    "small-images": ("cifar100-cpu-plain", SHORT | ONEDNN | SMALL_IMAGES | {"max_epochs": 5}),
    "accumulation": ("bs2048-opt", SHORT | {"model": "resnet8", "limit_train_batches": 2}),
    "two-ranks": ("bs128-opt", SHAPES | SHORT),
    "average": ("quickstart", SHORT | {"ema_decay": 0.9}),
    "mixed": ("quickstart", SHORT | {"cutmix_alpha": 1.0, "mixup_alpha": 0.2, "cutout_size": 8}),
    "half-weights": ("bs128", SHAPES | SHORT | BF16 | {"opt_level": "O2", "clip_grad_norm": 1.0}),
    "muon": ("bs128", SHAPES | SHORT | {"optimizer": "muon", "lr": 0.01, "weight_decay_bn_bias": False}),
    "plateau": ("bs128", SHAPES | SHORT | {"lr_schedule": "plateau/0", "max_epochs": 5, "lr": 1e-4}),
    "resumed": ("bs128-opt", RESUMED),
    "two-ranks-resumed": ("bs128-opt", RESUMED | {"ema_decay": 0.9}),
}
NEEDS_CIFAR = ("bs128", "small-images", "accumulation")


class RunFailed(Exception):
    """A revision could not finish a run."""


def start(name, tree, folder):
    """Start a run in processes of one thread each, in the checkout `tree`."""
    launcher = [sys.executable]
    if name.startswith("two-ranks"):
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        launcher += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    block, overrides = RUNS[name]
    data = {"data_path": os.environ.get("CIFAR_DATA", "nowhere"), "log_to_tensorboard": False, "device": "cpu"}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in (overrides | data).items()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*launcher, "train.py", f"--config={block}", f"--run-dir={folder}", *sets]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=tree, env=environment, **streams)


def checkpoints(folder):
    return list(folder.glob("checkpoints/step-*.pt"))


def stop_in_mid_epoch(runs):
    """Send SIGUSR1 to each process of [(process, folder)] after a few steps, then wait for their ends."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for process, folder in runs:
        while len(checkpoints(folder)) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
    for process, folder in runs:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        if process.returncode == 0 or not checkpoints(folder):
            raise RunFailed(f"the run was not stopped in mid-epoch\n{errors}")


def finish(process, folder):
    """Wait for the end; return the last checkpoint, and the records of metrics.jsonl without measured values."""
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if process.returncode != 0:
        raise RunFailed(f"{' '.join(map(str, process.args))} ended with status {process.returncode}\n{errors}")
    state = torch.load(max(checkpoints(folder)), weights_only=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [record for record in records if record["kind"] in ("step", "epoch", "end")]
    metrics = [{key: value for key, value in record.items() if not key.endswith(MEASURED)} for record in kept]
    return {name: state[name] for name in COMPARED} | {"metrics": metrics}


def differences(first, second, place):
    """Yield the names of values that differ between two nested states; tensors are compared bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        if not same or not torch.equal(*(value.flatten().view(torch.uint8) for value in (first, second))):
            yield place
    elif isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            yield from differences(first.get(key), second.get(key), f"{place}.{key}")
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            yield f"{place}: {len(first)} and {len(second)} entries"
        for number, pair in enumerate(zip(first, second, strict=False)):
            yield from differences(*pair, f"{place}[{number}]")
    elif repr(first) != repr(second):
        yield f"{place}: {first!r} and {second!r}"


def compare(name, trees, work):
    """Train one run in both checkouts at the same time and return their differences."""
    places = [(tree, work / str(number)) for number, tree in enumerate(trees)]
    processes = [start(name, *place) for place in places]
    try:
        if name.endswith("resumed"):
            stop_in_mid_epoch([(process, folder) for process, (_, folder) in zip(processes, places, strict=True)])
            processes = [start(name, *place) for place in places]
        reference, here = (finish(process, folder) for process, (_, folder) in zip(processes, places, strict=True))
    finally:
        for process in processes:
            process.kill()
    return list(differences(reference, here, ""))


def main():
    parser = argparse.ArgumentParser(description="Compare runs of the working tree with runs of another revision.")
    parser.add_argument("revision", nargs="?", default="HEAD^", help="default: the parent commit")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    arguments = parser.parse_args()
    status = EQUAL
    try:
        with tempfile.TemporaryDirectory() as reference, tempfile.TemporaryDirectory() as work:
            archive = subprocess.run(["git", "archive", arguments.revision], capture_output=True, check=False)
            if archive.returncode:
                raise RunFailed(archive.stderr.decode().strip())
            subprocess.run(["tar", "-x", "-C", reference], input=archive.stdout, check=True)
            for name in arguments.runs:
                if name in NEEDS_CIFAR and not os.environ.get("CIFAR_DATA"):
                    print(f"{name}: skipped, CIFAR_DATA is not set", flush=True)
                    continue
                found = compare(name, [Path(reference), Path.cwd()], Path(work, name))
                print(f"{name}: {'equal' if not found else f'{len(found)} differences, {found[:3]}'}", flush=True)
                status = DIFFERENT if found else status
    except (RunFailed, subprocess.TimeoutExpired) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return NOT_COMPARED
    return status


if __name__ == "__main__":
    sys.exit(main())
