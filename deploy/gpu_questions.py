#!/usr/bin/env python
"""Ask one GPU which switches make ResNet50's step faster, and how few epochs reach 75 % of CIFAR-100.

    python deploy/gpu_questions.py step OUT --seconds 280     # needs no data
    python deploy/gpu_questions.py train OUT --seconds 400 --pack cifar-1.pack cifar-2.pack

Each command asks the most valuable questions first. A part ends at its own limit, and the command after `--seconds`.
OUT/answers.jsonl gets a line for each answer, as soon as it is known; OUT/files.tar.gz, rewritten after each part, the
reports, logs and profiles. Nothing else is in OUT, so both files fit through a narrow way back.

The commands are made for a machine that is reached only in calls of ten minutes with at most 64 MiB each, and that has
PyTorch but not this project's other packages. Before, where there is a network:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 -d wheels -c constraints.txt \
        pydantic pydantic-core annotated-types typing-inspection ruamel.yaml   # 3 MB
    python deploy/gpu_questions.py pack data/cifar-100-binary   # cifar-1.pack and cifar-2.pack, 51 MB each

The first call takes the repository (5 MB), `wheels` and cifar-1.pack, and runs `step`; the second takes the repository,
`wheels` and cifar-2.pack, and runs `train`, which restores the same bytes as in data/cifar-100-binary from both packs.
Each call begins with

    python -m pip install -q --no-index --no-deps --target /tmp/site wheels/*.whl; export PYTHONPATH=/tmp/site

`step` builds each variant in a process of its own, forked after the imports: cuDNN keeps the plans that it has chosen
for a shape, so that in one process only the first variant would search. They stay in memory and take turns.
"""

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WARM_UP, STEPS, TRIALS, PROFILED = 5, 30, 3, 5  # steps before a trial, of a trial; trials; steps in the profile
RECIPES = ("record-75-strict-12", "record-75-strict-14-muon3", "record-75-strict-14", "record-75-strict-16")
HELD_OUT = 0.755  # accuracy that the shortest recipe must have on held-out images

# A variant is a block with settings.
BASE = "record-75-strict"
SWITCHES = {"STEM": "+stem_channels=4", "muon/3": "+optimizer=muon/3", "FUSE": "+fuse_norm_relu=true"}
SGD = "+optimizer=sgd+enable_extra_opts=true"  # for fp16: a graph cannot scale the loss of Muon
SEARCHES = {
    "cudnn_benchmark/1": "+enable_extra_opts=[zero_grad_set_to_none, cudnn_benchmark/1]",
    "cudnn_benchmark/3": "+enable_extra_opts=[zero_grad_set_to_none, cudnn_benchmark/3]",
    "none": "+enable_extra_opts=[zero_grad_set_to_none]",
}
GOAL = "fastest+enable_compile=false"  # its batch has 256 images
FORCED = "+force_layout"  # Inductor's TORCHINDUCTOR_FORCE_LAYOUT_OPT


class Answers:
    """Lines of OUT/answers.jsonl, and the end of the command and of its parts."""

    def __init__(self, out: Path, work: Path, seconds: float) -> None:
        self.out, self.work, self.end, self.limit = out, work, time.monotonic() + seconds, 0.0
        self.started, self.name = time.monotonic(), ""

    @property
    def left(self) -> float:
        """Seconds left for this part."""
        return max(0.0, self.limit - time.monotonic())

    def add(self, **values: Any) -> None:
        line = json.dumps({"part": self.name, "at": round(time.monotonic() - self.started, 1), **values})
        with (self.out / "answers.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)

    @contextmanager
    def part(self, name: str, seconds: float) -> Iterator[None]:
        """Run a part until its limit; an exception becomes its answer."""
        self.name, begun = name, time.monotonic()
        self.limit = min(self.end, begun + seconds)
        try:
            yield
        except Exception as error:
            self.add(error=f"{type(error).__name__}: {error}"[:500])
        self.add(seconds=round(time.monotonic() - begun, 1))
        with tarfile.open(self.out / "files.tar.gz", "w:gz") as archive:
            archive.add(self.work, arcname="files")


# ---- step


def serve(pipe: Connection, variant: str, side: int, settings: list[str], work: Path) -> None:
    """In a forked process: build a variant, send what it is and its first seconds, then the rate of each trial, until
    there is no more request. The request 0 is for a profile."""
    import torch

    from tools.bench.common import alone, build_measured, images_per_sec, time_action
    from tools.bench.ladder import read_rung

    try:
        begun = time.monotonic()
        torch._inductor.config.force_layout_optimization = variant.endswith(FORCED)
        config = read_rung(ROOT / "config/cifar100.yaml", variant.removesuffix(FORCED), settings)
        world = alone(config)
        learner = build_measured(config, world, image_side=32)
        images = torch.randn(config.batch_size, 3, side, side, device=world.device)
        images = images.contiguous(memory_format=learner.plan.memory_format)
        labels = torch.randint(config.num_classes, (config.batch_size,), device=world.device)
        built = time.monotonic() - begun
        first = time_action(world.device, lambda: learner.train_step(images, labels))
        warm_up = range(learner.plan.capture_steps)
        captured = time_action(world.device, lambda: [learner.train_step(images, labels) for _ in warm_up])
        torch.cuda.empty_cache()
        seconds = {"build": built, "first_step": first, "until_captured": captured}
        pipe.send({"plan": learner.plan.describe(), "batch": config.batch_size, "first_seconds": seconds})
        while (steps := pipe.recv()) is not None:
            if steps:
                batches = itertools.repeat((images, labels))
                pipe.send(images_per_sec(config, world.device, WARM_UP, steps, batches, learner.train_step))
                continue
            with torch.profiler.profile() as profile:
                time_action(world.device, lambda: [learner.train_step(images, labels) for _ in range(PROFILED)])
            key = "self_cuda_time_total" if world.device.type == "cuda" else "self_cpu_time_total"
            table = profile.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=120)
            (work / "profile.txt").write_text(table, encoding="utf-8")
            pipe.send(table)
    except Exception as error:  # out of memory, or a switch that this device does not have
        pipe.send({"error": f"{type(error).__name__}: {error}"[:500]})


class Variants:
    """Variants of the step that stay in memory and take turns: {name: pipe to the process}, while they answer in time.
    Leaving it ends the processes, which frees the GPU's memory."""

    def __init__(self, answers: Answers, settings: list[str]) -> None:
        self.answers, self.settings, self.processes = answers, settings, list[Any]()
        self.pipes, self.facts = dict[str, Connection](), dict[str, dict[str, Any]]()

    def __enter__(self) -> "Variants":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def start(self, asked: dict[str, tuple[str, int]], *, wait: bool = True) -> None:
        """Start {name: (variant, image side)}, with `wait` each after the first steps of the one before."""
        for name, (variant, side) in asked.items():
            self.pipes[name], theirs = get_context("fork").Pipe()
            arguments = theirs, variant, side, self.settings, self.answers.work
            self.processes.append(get_context("fork").Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.facts[name] = {"variant": variant, "side": side}
            if wait:
                self.wait(name)

    def wait(self, name: str) -> None:
        self.facts[name] |= self.receive(name) or {}

    def receive(self, name: str) -> Any:
        """Return the next message of a variant; without one, it is dropped and None returned."""
        message: Any = {"error": "not measured: the part's limit"}
        try:
            if self.pipes[name].poll(self.answers.left):
                message = self.pipes[name].recv()
        except (EOFError, OSError):
            message = {"error": "its process ended"}
        if isinstance(message, dict) and "error" in message:
            self.answers.add(name=name, **self.facts[name], **message)
            del self.pipes[name]
            return None
        return message

    def measure(self, steps: int) -> dict[str, list[float]]:
        """Let all variants take turns; return {name: images/s of each trial}. `ratio`: to the first variant."""
        rates: dict[str, list[float]] = {name: [] for name in self.pipes}
        for name in list(rates) * TRIALS:
            if name in self.pipes:
                self.pipes[name].send(steps)
                if (rate := self.receive(name)) is not None:
                    rates[name].append(rate)
        medians = {name: statistics.median(values) for name, values in rates.items() if values}
        for name, median in medians.items():
            ratio = median / next(iter(medians.values()))
            self.answers.add(name=name, images_per_sec=median, values=rates[name], ratio=ratio, **self.facts[name])
        return rates


def ask_step(answers: Answers, settings: list[str], steps: int) -> None:
    """Compare the switches, cuDNN's search, compilation, image sizes and the goal's batch; profile the winner."""
    from tools.bench import ladder  # noqa: F401  here, so that the forked processes need not import torch again

    answers.name, won = "imports", ""
    answers.add(seconds=round(time.monotonic() - answers.started, 1))
    with answers.part("switches, batch 512, 32 pixels", 110), Variants(answers, settings) as group:
        switched = {name: (BASE + switch, 32) for name, switch in SWITCHES.items()}
        precisions = {"sgd bf16": (BASE + SGD, 32), "sgd fp16": (f"{BASE}{SGD}+amp_dtype=fp16", 32)}
        group.start({"base": (BASE, 32)} | precisions | switched)  # FUSE last: it compiles for up to half a minute
        rates = group.measure(steps)
        slowest = {name: min(values, default=0.0) for name, values in rates.items()}
        won = "".join(switch for name, switch in SWITCHES.items() if slowest.get(name, 0) > max(rates["base"]))
        answers.add(winner=BASE + won)
    with Variants(answers, settings) as compiled:  # on other cores, during the next part
        plain = BASE + won.replace(SWITCHES["FUSE"], "") + "+enable_compile=true"
        both = {"compiled": (plain, 32), "compiled, forced layout": (plain + FORCED, 32)}
        compiled.start(both, wait=False)
        with answers.part("cuDNN's search, batch 512, 32 pixels", 60), Variants(answers, settings) as group:
            group.start({"base": (BASE, 32)} | {name: (BASE + search, 32) for name, search in SEARCHES.items()})
            group.measure(steps)
        with answers.part("compiled, batch 512, 32 pixels", 80):
            for name in both:
                compiled.wait(name)
            compiled.start({"winner": (BASE + won, 32)})
            compiled.measure(steps)
    with answers.part("image sizes, batch 256, profile", 90), Variants(answers, settings) as group:
        goal = GOAL + won.replace(SWITCHES["muon/3"], "")  # its optimizer is SGD
        group.start({"winner, 32 pixels": (BASE + won, 32), "goal": (GOAL, 32), "goal with switches": (goal, 32)})
        group.start({f"{name}, {side} pixels": (variant, side) for side in (16, 24)
                     for name, variant in (("base", BASE), ("winner", BASE + won))})  # fmt: skip
        group.measure(steps)
        group.pipes["winner, 32 pixels"].send(0)
        if table := group.receive("winner, 32 pixels"):
            answers.add(profile=table.splitlines()[3:15])


# ---- train


def call(answers: Answers, arguments: Iterable[str], log: str) -> subprocess.Popen[bytes]:
    """Start one of the project's programs; its output goes to a file."""
    with (answers.work / f"{log}.log").open("wb") as file:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def finish(answers: Answers, process: subprocess.Popen[bytes]) -> bool:
    """Wait for a program until the part's limit, then end it with all that it started; whether it succeeded."""
    try:
        return process.wait(answers.left) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return False


def read(path: Path) -> Any:
    """Return a report, or of a run's metrics the accuracy of each validation; None without the file."""
    if not path.exists():
        return None
    if path.suffix == ".jsonl":
        records = map(json.loads, path.read_text("utf-8").splitlines())
        return [record["acc1/valid"] for record in records if "acc1/valid" in record]
    report = json.loads(path.read_text("utf-8"))
    return report.get("results", report)


def ask_train(answers: Answers, settings: list[str]) -> None:
    """Choose the epochs on held-out images, then measure the time to 75 % of the test images; then compare with other
    trainers, and three epochs of bs128-opt with the published curve."""
    work, options, chosen = answers.work, [f"--set={setting}" for setting in settings], BASE
    with answers.part("epochs, 5,000 held-out images, four at once", 240):
        train = {name: ["train.py", f"--config={name}", f"--run-dir={work}/{name}"] for name in RECIPES}
        held_out = [*options, "--set=holdout_images=5000"]
        runs = {name: call(answers, [*arguments, *held_out], name) for name, arguments in train.items()}
        accuracies = {}
        for name, process in runs.items():
            ended = finish(answers, process)
            found = read(work / name / "metrics.jsonl") if ended else None
            accuracies[name] = found[-1] if found else 0
            answers.add(name=name, ended=ended, accuracy=accuracies[name])
        chosen = next((name for name in RECIPES if accuracies[name] >= HELD_OUT), BASE)
        answers.add(chosen=chosen)
    record = ["-m", "tools.bench", "record", f"--config={chosen}", "--seeds=1", f"--out={work}/record"]
    programs = {f"record/seed-{n}/trial.json": [*record, f"--first_seed={n}"] for n in range(5)}
    peers = ["-m", "tools.bench", "peers", "--config=fastest", "--iters=30", "--trials=3"]
    for on in ("false", "true"):
        programs[f"peers-{on}.json"] = [*peers, f"--json={work}/peers-{on}.json", f"--set=enable_compile={on}"]
    three_epochs = ["train.py", "--config=bs128-opt", "--set=max_epochs=3", f"--run-dir={work}/bs128-opt"]
    for report, arguments in (programs | {"bs128-opt/metrics.jsonl": three_epochs}).items():
        with answers.part(report, 100):
            ended = finish(answers, call(answers, [*arguments, *options], report.replace("/", "-")))
            answers.add(command=" ".join(arguments), ended=ended, report=read(work / report))


# ---- data

ROW, MOSAIC = 3074, 500  # bytes of an image in CIFAR-100's files: two labels, 3 x 32 x 32; images of a mosaic
FILES = ("train.bin", "test.bin")


def pack(folder: Path, parts: list[Path]) -> None:
    """Write CIFAR-100's images as mosaics in lossless WebP, half of them to each part."""
    entries = dict[str, np.ndarray]()
    for name in FILES:
        rows = np.fromfile(folder / name, np.uint8).reshape(-1, ROW)
        entries[f"labels of {name}"] = rows[:, :2]
        for first in range(0, len(rows), MOSAIC):
            pixels = rows[first : first + MOSAIC, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(-1, 32, 3)
            mosaic = io.BytesIO()
            Image.fromarray(pixels).save(mosaic, "WEBP", lossless=True, method=2, quality=50)
            entries[f"{name} {first:05}"] = np.frombuffer(mosaic.getvalue(), np.uint8)
    for number, part in enumerate(parts):
        with part.open("wb") as file:
            np.savez(file, **{name: entries[name] for name in list(entries)[number :: len(parts)]})


def unpack(parts: list[Path], folder: Path) -> None:
    """Restore the files from all parts."""
    entries = dict[str, np.ndarray]()
    for part in parts:
        with np.load(part) as content:
            entries |= dict(content)
    folder.mkdir(parents=True)
    for name in FILES:
        mosaics = [Image.open(io.BytesIO(entries[key])) for key in sorted(entries) if key.startswith(name)]
        pixels = np.concatenate([np.asarray(mosaic.convert("RGB")) for mosaic in mosaics]).reshape(-1, 32, 32, 3)
        images = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        np.hstack([entries[f"labels of {name}"], images]).tofile(folder / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "step", "train"))
    parser.add_argument("folder", type=Path, help="OUT; of pack: the folder with train.bin and test.bin")
    parser.add_argument("--seconds", type=float, default=280, help="the command ends after this time")
    parser.add_argument("--pack", type=Path, nargs=2, default=[Path("cifar-1.pack"), Path("cifar-2.pack")])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for each variant and training")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a trial")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.folder, options.pack)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-questions-"))
    answers = Answers(options.folder, work, options.seconds)
    if options.command == "step":
        ask_step(answers, options.set, options.steps)
    else:
        with answers.part("data", 60):
            if all(part.exists() for part in options.pack):  # otherwise data_path's default is read
                unpack(options.pack, work.parent / f"{work.name}-data/cifar-100-binary")
                options.set.append(f"data_path={work}-data")
        ask_train(answers, options.set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
