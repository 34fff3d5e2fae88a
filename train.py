"""Train a CIFAR-adapted ResNet from a named configuration block.

    python train.py --config=bs256-amp-nhwc
    torchrun --nproc_per_node=8 train.py --config=bs2048-warmup-opt
    sbatch submit_multinode.slr

The loop is `Trainer.train` -> `train_one_epoch` -> `utils/training/step.py`. Every speed-up is tagged where it acts:
`grep -rn "DDP:" train.py utils`; the other tags are AMP, NHWC, EXTRA, COMPILE, GRAPHS, PREFETCH, ALLOC and PROF.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: just the end, and no traceback

from utils.cli import Arguments, parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments()  # answers --help and --list-configs before the import of torch takes its seconds

import math
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from models import build_model
from utils import seeds
from utils.config import Config
from utils.data.build import build_loaders, open_dataset, report_unreadable
from utils.data.mix import build_mix
from utils.distributed.affinity import pin_near_gpu
from utils.distributed.batch_split import split_batch
from utils.distributed.ddp import describe_parallel, synchronise_batch_norm
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import ExpectedError, Stopped
from utils.profiling.profiler import Profiler
from utils.run import checkpoint
from utils.run import folder as run_folder
from utils.run.board import Board
from utils.run.environment import describe_environment
from utils.run.logger import RunLogger
from utils.run.preemption import Asked, Requests, ignore_signals, listen
from utils.training.backends import prepare_backends
from utils.training.batches import prefetch
from utils.training.dry_run import describe
from utils.training.metrics import Confusion, MetricSums, Throughput
from utils.training.optimizer import build_optimizer, learning_rate, load_optimizer, set_learning_rate
from utils.training.precision import MasterWeights, choose_precision
from utils.training.recipe import build_average, predict, resize, training_size
from utils.training.schedule import Plateau, build_schedule
from utils.training.step import build_step, wants_graphs
from utils.training.watch import StepWatch, input_remedy


class Trainer:
    """Builds everything a run needs from its configuration, and holds the order of events.

    Position: `epoch` finished epochs, `batch` batches trained in the next one, `step` optimizer steps in all.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.split = split_batch(config.batch_size, world.world_size, config.micro_batch_size)
        self.precision = choose_precision(config, world.device)
        self.notes = describe_parallel(config) + prepare_backends(config, world.device) + pin_near_gpu(config, world)

        dataset = open_dataset(config, world)
        self.loaders = build_loaders(config, dataset, world)
        self.train_loader, self.valid_loader = self.loaders.train, self.loaders.valid
        self.notes += self.loaders.notes
        self.mix = build_mix(config, self.loaders.plan)
        self.steps_per_epoch = len(self.train_loader)
        self.data = dataset.describe() | {"steps_per_epoch": self.steps_per_epoch}
        self.shared_valid_batches = min(world.gather(len(self.valid_loader)))  # some ranks may have one more

        seeds.seed_random_state(config.seed)
        self.model = synchronise_batch_norm(config, build_model(config), world).to(world.device)
        if config.enable_nhwc:
            # NHWC: weights in the channels_last memory format; the loaders bring the images in the same one
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        seeds.seed_random_state(seeds.seed_of(config.seed, world.rank, step=0))
        self.weights = MasterWeights(self.model, self.precision)
        self.average = build_average(config, self.model)

        self.optimizer = build_optimizer(config, self.weights.parameters(), graphed=wants_graphs(config, world.device))
        self.loss_scaler = self.precision.loss_scaler()
        self.schedule = build_schedule(config, self.steps_per_epoch)
        self.plateau = Plateau(config.lr_plateau_patience)
        self.profiler = Profiler(world.device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.train_step, step_notes = build_step(
            config,
            world,
            weights=self.weights,
            optimizer=self.optimizer,
            criterion=self.criterion,
            precision=self.precision,
            loss_scaler=self.loss_scaler,
            profiler=self.profiler,
        )
        self.notes += step_notes

        self.epoch = self.batch = self.step = self.saved_step = 0
        self.sums = MetricSums(world.device)
        self.best: dict[str, float] = {"acc1": -1.0, "epoch": 0}
        self.seconds = 0.0
        self.throughput = Throughput(world.world_size)
        self.requests = Requests(world, config.checkpoint_every_minutes)
        self.watch = StepWatch(self.model, world)

    def describe(self) -> str:
        """What this run would do and need."""
        return describe(
            self.config, self.split, self.schedule, self.precision, self.weights, self.criterion, self.data["shape"]
        )

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        enough = self.config.stop_at_accuracy
        return self.epoch >= self.config.max_epochs or (enough is not None and self.best["acc1"] >= enough)

    # ---- the order of events

    def train(self, folder: Path, config_name: str, resume: str) -> None:
        """Train to the end, or go on to it; `Stopped` when a signal asked to stop and everything is saved."""
        self.folder, self.config_name, self.resume = folder, config_name, resume
        lock, notes = self._open_folder(resume)
        board = Board(folder / "tb_logs", epoch=self.epoch, step=self.step, seconds=self.seconds)
        logger = RunLogger(
            folder,
            enabled=self.world.is_main,
            to_screen=self.config.log_to_screen,
            board=board if self.config.log_to_tensorboard else None,
        )
        writer = checkpoint.Writer(
            folder / "checkpoints", self.config.keep_checkpoints, self.config.checkpoint_async, before=logger.sync
        )
        with listen(self.requests), lock or nullcontext(), logger as self.log, writer as self.writer:
            self.world.main_only(lambda: self._introduce(notes))
            self.since = time.perf_counter()
            finished_before = self.finished
            while not self.finished:
                started = time.perf_counter()
                # PROF: the range that nsys captures
                with self._profile(self.epoch + 1), self.profiler.range(f"epoch {self.epoch + 1}"):
                    self.train_one_epoch()
                train_metrics = self._check_finite(self.sums.average(self.world))
                self.throughput.close_window()
                valid_metrics = self.validate_one_epoch()
                self._finish_epoch(train_metrics, valid_metrics, started)
            self.world.main_only(self.writer.wait)
            self.log.say(f"Look at the curves with: tensorboard --logdir {shlex.quote(str(folder.parent))}")
            self.log.say(self._summary(finished_before))

    def train_one_epoch(self) -> None:
        """The rest of the current epoch, from batch `self.batch` on."""
        self.model.train()
        self.train_loader.set_epoch(self.epoch, first_batch=self.batch)
        self.log.start_bar(f"epoch {self.epoch + 1}/{self.config.max_epochs}", self.steps_per_epoch, self.batch)
        self.throughput.start()
        size = training_size(self.config, self.epoch)
        batches = self.watch.batches(prefetch(self.config, iter(self.train_loader), self.world.device))
        while self.batch < self.steps_per_epoch:
            with self.profiler.range(f"iteration {self.batch}"):
                with self.profiler.range("data"):
                    images, labels = next(batches)
                    if self.mix is not None:
                        images, labels = self.mix(images, labels, self.epoch, self.batch)
                set_learning_rate(self.optimizer, self.schedule.factor(self.step, self.plateau.cuts))
                self.train_step(resize(images, size), labels, self.sums)
                if self.average is not None:
                    self.average.update()
            self.batch += 1
            self.step += 1
            self.throughput.add(len(labels))
            self.log.advance_bar(self.batch)
            if self.batch == self.steps_per_epoch:
                # DDP: for validation; before a checkpoint can be taken, since one taken here resumes with validation
                self.world.average_buffers(self.model)
                if self.average is not None:
                    self.world.average_buffers(self.average.module)
            if (self.batch - 1) % self.config.log_freq == 0:
                self._log_point()
            self._obey(self.requests.poll())

    @torch.no_grad()
    def validate_one_epoch(self) -> dict[str, float]:
        """Loss and accuracy over every validation image, each counted once over all ranks."""
        model = self.model if self.average is None else self.average.module
        model.eval()
        self.valid_loader.set_epoch(self.epoch)
        self.log.start_bar("validation", len(self.valid_loader))
        sums = MetricSums(self.world.device)
        self.confusion = Confusion(self.config.num_classes, self.world.device)
        for number, (images, labels) in enumerate(self.valid_loader, start=1):
            # AMP: validation runs in the precision of training
            outputs = predict(self.precision, model, images, mirrored=self.config.test_time_flip)
            sums.add(nn.functional.cross_entropy(outputs, labels), outputs, labels)
            self.confusion.add(outputs, labels)
            self.log.advance_bar(number)
            if number <= self.shared_valid_batches:
                self._obey(self.requests.poll())
        return sums.average(self.world)

    def _finish_epoch(self, train: dict[str, float], valid: dict[str, float], started: float) -> None:
        """Schedule, record, save."""
        self._count_seconds()
        if self.step > self.schedule.warmup_steps:  # as the tutorial: not in the epochs of the warm-up
            self.plateau.observe(valid["loss"])
        self.epoch, self.batch = self.epoch + 1, 0
        self.sums.reset()
        is_best = valid["acc1"] > self.best["acc1"]
        if is_best:
            self.best = {"acc1": valid["acc1"], "epoch": self.epoch}
        values = {
            "loss/train": train["loss"],
            "loss/valid": valid["loss"],
            "acc1/train": train["acc1"],
            "acc1/valid": valid["acc1"],
            "learning_rate": learning_rate(self.optimizer),
            "images/valid": valid["images"],
            "images_per_sec": self.throughput.overall(),
            "epoch_seconds": time.perf_counter() - started,
            "seconds": self.seconds,
            **self.loss_scaler.metrics(),
        }
        self.world.main_only(lambda: self.log.log_epoch(self.epoch, self.step, values))
        for line in report_unreadable(self.world, self.loaders):
            self.log.say(line)
        for remark in self.watch.judge(input_remedy(self.config.data_loader, self.config.num_data_workers)):
            self.log.say(remark)
        if self.finished:
            self._log_end(valid)  # before the last checkpoint: a run that is killed behind it has nothing left to do
        self._save(is_best)

    def _log_end(self, valid: dict[str, float]) -> None:
        results = {f"best_{name}": value for name, value in self.best.items()}
        results |= {"last_acc1": valid["acc1"], "last_loss": valid["loss"]}
        results |= {"seconds": self.seconds, "images_per_sec": self.throughput.overall()}
        counts = self.confusion.collect(self.world)
        self.world.main_only(
            lambda: self.log.log_end(self.config, self.epoch, self.step, results, counts, self.data["class_names"])
        )

    def _log_point(self) -> None:
        window = self._check_finite(self.sums.average_since_last(self.world))
        values = {
            "loss": window["loss"],
            "learning_rate": learning_rate(self.optimizer),
            "images_per_sec": self.throughput.close_window(),
            **self.loss_scaler.metrics(),
            **self.watch.close_window(),
        }
        sample = self.watch.take_sample()
        self.world.main_only(lambda: self.log.log_step(self.epoch + 1, self.batch - 1, self.step, values, sample))
        self.log.advance_bar(self.batch, f"loss {values['loss']:.3f}  {values['images_per_sec']:.0f} images/s")

    def _check_finite(self, metrics: dict[str, float]) -> dict[str, float]:
        """Passes metrics on; they are over all ranks, so that all of them stop together when the loss is not finite."""
        if math.isfinite(metrics["loss"]):
            return metrics
        first_bad = min(self.world.gather(self.sums.finite_batches())) // self.split.accumulation
        raise ExpectedError(
            f"the loss stopped being a finite number in epoch {self.epoch + 1}, iteration {first_bad}, learning rate "
            f"{learning_rate(self.optimizer):.4g}; nothing was saved since the last checkpoint\n"
            "a lower lr, a warm-up (lr_warmup_epochs) or amp_dtype=bf16 are the usual remedies"
        )

    # ---- stop, save, go on

    def _obey(self, asked: Asked) -> None:
        """Collective: what is asked for between two batches, by a signal or by the checkpoint intervals."""
        every = self.config.checkpoint_every_steps
        if asked == "stop":
            self._save_and_leave()
        elif (asked == "save" or (every and self.step % every == 0)) and self.step > self.saved_step:
            self._check_finite(self.sums.average(self.world))
            self._save(is_best=False)

    def _save_and_leave(self) -> None:
        in_validation = self.batch == self.steps_per_epoch
        position = "in validation" if in_validation else f"after iteration {self.batch - 1}"
        where = f"{self.requests.name()} in epoch {self.epoch + 1} {position}"
        if not self.config.save_checkpoint:
            raise ExpectedError(f"stopped on {where}; save_checkpoint is false, so this run cannot be continued")
        self._check_finite(self.sums.average(self.world))
        self._save(is_best=False)
        self.world.main_only(self.writer.wait)
        but = "" if self.resume == "auto" else " with --resume auto"
        raise Stopped(f"stopped on {where} with everything saved; run the same command again{but} to go on")

    def _save(self, is_best: bool) -> None:
        """Collective: write the last checkpoint, and the best one where it is new."""
        if not self.config.save_checkpoint:
            return
        self._count_seconds()
        ranks = self.world.gather(self._rank_state())
        self.world.main_only(lambda: self.writer.save(self._state(ranks), is_best))
        self.saved_step = self.step

    def _count_seconds(self) -> None:
        """Adds the time since the last call to the training time."""
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now

    def _state(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything that training goes on from; the table is in utils/checkpoint.py."""
        return {
            "format": checkpoint.FORMAT,
            "config": self.config.model_dump(mode="json"),
            "config_name": self.config_name,
            "config_digest": checkpoint.config_digest(self.config.model_dump(mode="json")),
            "data": self.data,
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "model": self.weights.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.loss_scaler.state_dict(),
            "plateau": asdict(self.plateau),
            "logged_sums": self.sums.logged,
            "best": self.best,
            "seconds": self.seconds,
            "ranks": ranks,
            "versions": checkpoint.versions(),
        }

    def _rank_state(self) -> dict[str, Any]:
        """What differs between ranks. The buffers only in mid-epoch: they are averaged before validation."""
        buffers = self._buffers() if self.world.world_size > 1 and self.batch else {}
        return {
            "random": seeds.random_state(),
            "metric_sums": self.sums.sums.cpu(),
            "buffers": {name: buffer.cpu() for name, buffer in buffers.items()},
        }

    def _buffers(self) -> dict[str, torch.Tensor]:
        """BatchNorm's buffers of the network and of its average."""
        average = () if self.average is None else self.average.module.named_buffers(prefix="average")
        return {**dict(self.model.named_buffers()), **dict(average)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state, at the same or another world size."""
        self.weights.load_state_dict(state["model"])
        self.average = build_average(self.config, self.model)  # where none was saved, it begins with these weights
        if self.average is not None and state["average"] is not None:
            self.average.load_state_dict(state["average"])
        load_optimizer(self.optimizer, state["optimizer"])
        if state["grad_scaler"]:
            self.loss_scaler.load_state_dict(state["grad_scaler"])
        self.plateau = Plateau(**state["plateau"] | {"patience": self.config.lr_plateau_patience})
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self.best, self.seconds, self.saved_step = state["best"], state["seconds"], state["step"]
        if self.step:  # what the epoch's record tells when there is only its validation left
            set_learning_rate(self.optimizer, self.schedule.factor(self.step - 1, self.plateau.cuts))
        ranks = state["ranks"]
        if len(ranks) == self.world.world_size:
            mine = ranks[self.world.rank]
            seeds.restore_random_state(mine["random"])
            for name, buffer in self._buffers().items():
                if name in mine["buffers"]:
                    buffer.copy_(mine["buffers"][name])
            self.sums.load(mine["metric_sums"], state["logged_sums"])
        else:
            # another world size: other draws, and BatchNorm goes on from the mean of what the ranks had seen
            seeds.seed_random_state(seeds.seed_of(self.config.seed, self.world.rank, self.step))
            for name, buffer in self._buffers().items():
                if name in ranks[0]["buffers"] and buffer.is_floating_point():
                    buffer.copy_(torch.stack([rank["buffers"][name] for rank in ranks]).mean(0))
            total = sum(rank["metric_sums"] for rank in ranks)
            self.sums.load(total if self.world.is_main else torch.zeros_like(total), state["logged_sums"])
        self.sums.set_finite_batches(self.batch * self.split.accumulation)

    def _open_folder(self, resume: str) -> tuple[IO[str] | None, list[str]]:
        """Collective: take the run's folder and restore what is to be resumed; returns its lock and what to tell."""
        weights = self.model.state_dict()
        opened = self.world.main_only(lambda: run_folder.open_run(self.folder, resume, self.config, weights, self.data))
        state = self.world.broadcast(opened.state if opened else None)
        if state is not None:
            self.load_state(state)
        return (opened.lock, opened.notes) if opened else (None, [])

    def _introduce(self, notes: list[str]) -> None:
        environment = describe_environment(self.world.device, self.world.world_size)
        if not self.finished:  # else they would describe what did not train it
            run_folder.write_description(self.folder, self.config, self.config_name, environment)
            self.log.describe(self.config, self.config_name, environment)
        for note in [*self.notes, *notes]:
            self.log.say(note)
        self.log.say(f"{self.config.model} on {environment['device']}, torch {torch.__version__}, {self.precision}")
        self.log.say(f"batch {self.split}; writes to {self.folder}")
        if not self.finished:
            self.log.say("Starting Training Loop...")

    def _summary(self, finished_before: bool) -> str:
        best = f"best acc1 {100 * self.best['acc1']:.2f} % in epoch {self.best['epoch']:.0f} of {self.epoch}"
        if not self.best["epoch"]:  # a finished run from which best.pt was taken away
            best = f"its best weights are no longer there, the last ones are of epoch {self.epoch}"
        if finished_before:
            return f"Already finished: {best}; --resume never trains it again"
        rate = self.throughput.overall()
        per_image = f" ({1 / rate:.3g} seconds per image)" if rate else ""  # resumed at the very end: no step to time
        return f"Finished: {best}, {self.seconds:.1f} s, {rate:.1f} images/s{per_image}"

    def _profile(self, epoch: int) -> AbstractContextManager[None]:
        """PROF: every rank marks its ranges, the main process records and tells."""
        if not self.config.enable_profiling or epoch != self.config.profiling_epoch_start:
            return nullcontext()
        return self.profiler.capture(self.folder if self.world.is_main else None, self.log.say)


def main(arguments: Arguments, when_saved: Callable[[], None] = lambda: None) -> int:
    """Train, or only describe, as one of the ranks; returns the exit status.

    `when_saved` is called when training has ended in order, or stopped on request, and nothing is left to save."""
    config = arguments.config

    def run(world: World) -> None:
        trainer = Trainer(config, world)
        if not arguments.dry_run:
            try:
                trainer.train(arguments.run_dir, arguments.config_name, arguments.resume)
            except Stopped:
                when_saved()
                raise
            when_saved()
        else:
            description = trainer.describe()  # on every rank, since a forward pass may have to wait for the others'
            if world.is_main:
                print(description)

    return run_ranks(run, config.device, config.start_timeout_seconds, config.collective_timeout_seconds)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(ARGUMENTS, when_saved=ignore_signals))
