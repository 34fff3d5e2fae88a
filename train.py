"""Train a CIFAR-adapted ResNet from a named configuration block.

    python train.py --config=bs256-amp-nhwc
    torchrun --nproc_per_node=8 train.py --config=bs2048-warmup-opt
    sbatch submit_multinode.slr

The loop is `Trainer.train` -> `train_one_epoch` -> `Verifier.train_step` (`verify_every_steps`) -> `Learner.train_step`
-> `TrainStep` in utils/training/step.py. Each speed-up is tagged where it acts: `grep -rn "DDP:" train.py utils`; the
other tags are AMP, NHWC, EXTRA, STEM, FUSE, CONV, COMPILE, GRAPHS, PREFETCH, ALLOC and PROF.
"""

import os
import signal

from utils.errors import occupy_streams
from utils.program import end_with_parent

if __name__ == "__main__":
    occupy_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # torchrun; if it is killed, nothing else tells its ranks to stop

from utils.config.command_line import Arguments, parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments()  # answers --help and --list-configs before the slow import of torch

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import build_model
from utils.config import Config
from utils.data.augment import BatchMix
from utils.data.build import build_loaders, open_dataset
from utils.data.datasets.dataset import STATISTICS
from utils.data.loader import Loader, report_unreadable
from utils.distributed.ddp import WARNINGS
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World, pin_near_gpu
from utils.errors import ExpectedError, Stopped, exit_in_a_line
from utils.run.checkpoint.io import save_checkpoint
from utils.run.checkpoint.pretrained import Pretrained, read_pretrained
from utils.run.checkpoint.state import Progress, RunState
from utils.run.folder import OpenedRun, open_run, write_description
from utils.run.logging.environment import describe_environment
from utils.run.logging.logger import RunLogger
from utils.run.meters import Meters
from utils.run.preemption import StopRequests, ignore_signals, listen
from utils.timing.clock import Clock, process_age
from utils.training.batches import TrainingBatches
from utils.training.checks.dry_run import describe
from utils.training.checks.start import check_network
from utils.training.checks.stragglers import StepWatch
from utils.training.checks.verify_steps import Verifier
from utils.training.learner import Learner, check_settings
from utils.training.metrics.confusion import Confusion
from utils.training.metrics.throughput import Throughput
from utils.training.validation import Collector, compile_validation, validate
from utils.user_code import user_file_digests

Metrics = dict[str, float]


class Trainer:
    """Builds the parts of a run from its configuration, and trains, validates and saves in order."""

    def __init__(
        self,
        config: Config,
        world: World,
        folder: Path = Path("expts/default"),
        config_name: str = "default",
        resume: str = "auto",
        clock: Clock | None = None,
        fetch: bool = True,
    ) -> None:
        self.config, self.world, self.folder, self.config_name, self.resume = config, world, folder, config_name, resume
        self.clock = clock or Clock()
        check_settings(config, world)
        notes = [WARNINGS[config.parallel]] if config.parallel in WARNINGS else []
        notes += pin_near_gpu(world)

        dataset = open_dataset(config, world, fetch=fetch)
        self.loaders = build_loaders(config, dataset, world)
        self.data = dataset.describe() | {"steps_per_epoch": len(self.loaders.train)}

        build = partial(build_model, image_side=self.data["shape"][-1])
        compile_timer = partial(self.clock.during, "compile")
        self.learner = Learner(config, build, world, len(self.loaders.train), compile_timer=compile_timer)
        compile_validation(self.learner, self.loaders.valid.plan, world.device)
        self.verifier = Verifier(self.learner, world) if config.verify_every_steps is not None else None
        valid_batches = map(len, self.loaders.valid.plan.batches(0))
        check_network(self.learner, config.model, self.data["shape"], valid_batches)
        self.watch = StepWatch(self.learner.model, world, self.clock)
        mix = BatchMix(config, self.loaders.train.plan)
        profiler = self.learner.profiler
        self.batches = TrainingBatches(config, self.loaders.train, mix, self.watch, profiler, world.device)

        self.throughput = Throughput(world.world_size, self.clock)
        images = self.loaders.valid.plan.num_samples
        measures = {"images": images, "test_time_views": config.test_time_views, "ema_decay": config.ema_decay}
        self.progress = Progress(self.clock, self.throughput, measures)
        self.state = RunState(config, config_name, self.data, self.learner, self.progress, world)
        screen, board = config.log_to_screen, config.log_to_tensorboard
        self.log = RunLogger(folder, enabled=world.is_main, to_screen=screen, to_tensorboard=board, to=config.log_to)
        self.saved_step = 0
        self.notes = notes + self.loaders.notes + self.learner.notes
        self.requests = StopRequests(world)
        self.meters = Meters(config, self.learner, world, self.data["shape"])

    def describe(self) -> str:
        """Describe what this run would do and the memory it would take, for --dry-run."""
        text = describe(self.learner, self.data["shape"], network=self.config.model, dataset=self.config.dataset)
        pretrained = self.world.main_only(self._read_pretrained)
        return f"{text}\npretrained       {pretrained[1]}" if pretrained else text

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self._is_finished_with(self.progress.epoch, self.progress.best["acc1"])

    def _is_finished_with(self, epochs: int, best_accuracy: float) -> bool:
        target = self.config.stop_at_accuracy
        return epochs >= self.config.max_epochs or (target is not None and best_accuracy >= target)

    # ---- the order of events

    def train(self) -> None:
        """Train, or resume training, to the end. Raises `Stopped` after a signal asked to stop and all is saved."""
        opened = self._open_folder()
        lock = opened.lock if opened else nullcontext()
        with listen(self.requests), lock, self._open_log() as log:
            will_train = not self.finished
            if opened:
                self.clock.step, self.clock.reached = self.learner.steps, opened.reached
            self.world.main_only(lambda: self._log_start(opened, will_train=will_train))
            self._report_unreadable()  # a loader may have decoded all images by now
            self.clock.switch("train")
            while not self.finished:
                # PROF: the range that nsys captures
                with self._profile(), self.learner.profiler.range(f"epoch {self.progress.epoch + 1}"):
                    self.train_one_epoch()
                    train_metrics = self.state.check_finite(self.learner.sums.average(self.world))
                    self.throughput.close_window()  # here, as a profile that ends writes its trace
                valid_metrics, confusion = self.validate_one_epoch()
                self._finish_epoch(train_metrics, valid_metrics, confusion)
            if self.config.log_to_tensorboard:
                log.say(f"Show the curves with: tensorboard --logdir {shlex.quote(str(self.folder.parent))}")
            log.say(self.progress.summarise(not will_train))

    def _log_start(self, opened: OpenedRun | None, *, will_train: bool) -> None:
        """Describe this launch in the log, the run folder and TensorBoard. Launching a finished run trains nothing, so
        the description of the run stays as it is."""
        config, log, steps, world = self.config, self.log, self.learner.steps, self.world
        environment = describe_environment(world.device, world.world_size)
        environment["own_code"] = user_file_digests(config.model, config.dataset, config.optimizer)
        if will_train:
            write_description(self.folder, self.config, self.config_name, environment)
            log.describe(self.config, self.config_name, environment)
            source = opened.resumed_from if opened else None
            log.log_start(self.progress.epoch, self.progress.batch, steps, source, world.world_size)
        for note in self.notes + self.meters.notes + (opened.notes if opened else []):
            log.say(note)
        log.say(f"{config.model} on {environment['device']}, torch {torch.__version__}, {self.learner.precision}")
        log.say(f"batch {self.learner.batch}; writes to {self.folder}")
        if will_train:
            log.say("Starting Training Loop...")

    def train_one_epoch(self) -> None:
        """Train the rest of the current epoch, from batch `progress.batch` on."""
        self._start_epoch()
        train_step = (self.verifier or self.learner).train_step
        for number, (images, labels) in self.batches.rest_of_epoch(self.progress.epoch, self.progress.batch):
            train_step(images, labels)
            self.clock.count_step(self.learner.steps)
            self.progress.batch = number + 1
            self.throughput.add(len(labels))
            self.log.advance_bar(self.progress.batch)
            if self.progress.batch == len(self.batches):
                # before a checkpoint can be written: a checkpoint saved from here on resumes at the validation
                self.learner.average_buffers(self.world)
            if number % self.config.log_freq == 0:
                self._log_point(number, images)
            self._handle_requests(stop=self.requests.poll())

    def validate_one_epoch(self) -> tuple[Metrics, Confusion]:
        """Return loss and accuracy over all validation images, each counted once over all ranks ({} in an epoch without
        validation), and this rank's confusion matrix."""
        epoch, confusion = self.progress.epoch + 1, Confusion(self.config.num_classes, self.world.device)
        if epoch % self.config.validate_every_epochs and epoch < self.config.max_epochs:
            return {}, confusion
        return self._evaluate("validation", self.loaders.valid, confusion.add), confusion

    def _evaluate(self, name: str, loader: Loader, *collectors: Collector) -> Metrics:
        """Return loss and accuracy of one pass over `loader`; `name` is validation or test."""
        loader.set_epoch(self.progress.epoch)
        self.log.start_bar(name, len(loader))
        self.requests.start_loop()
        shared_batches = loader.plan.shared_batches

        def after_batch(number: int) -> None:
            self.log.advance_bar(number)
            if number <= shared_batches:
                self._handle_requests(stop=self.requests.poll())

        with self.clock.during(name):
            return validate(self.learner, loader, self.world, collectors, after_batch).average(self.world)

    def _start_epoch(self) -> None:
        self.learner.model.train()
        name = f"epoch {self.progress.epoch + 1}/{self.config.max_epochs}"
        self.log.start_bar(name, len(self.batches), self.progress.batch)
        self.requests.start_loop()
        if not self.progress.batch:  # otherwise an earlier start began this epoch
            self.progress.epoch_began = self.progress.seconds
        self.throughput.start_epoch()

    def _finish_epoch(self, train: Metrics, valid: Metrics, confusion: Confusion) -> None:
        """End of epoch: step the schedule, log, checkpoint. If training is done, first evaluate the test images (with
        `holdout_images`).

        `valid` is {} in an epoch without validation."""
        progress, test = self.progress, dict[str, float]()
        best = progress.best_with(valid)
        if valid:
            if self.loaders.test is not None and self._is_finished_with(progress.epoch + 1, best["acc1"]):
                test = self._evaluate("test", self.loaders.test)
            self.learner.observe_validation(valid["loss"])
            if not progress.is_complete(valid):
                self.log.say(f"Only {valid['images']:.0f} images were validated: such an epoch is never the best one")
        is_best = best is not progress.best
        progress.finish_epoch(best)
        self.learner.sums.reset()
        values = {
            "loss/train": train["loss"],
            "acc1/train": train["acc1"],
            **{f"{name}/valid": value for name, value in valid.items()},
            "learning_rate": self.learner.learning_rate,
            "images_per_sec": self.throughput.of_epoch(),
            "epoch_seconds": self.progress.seconds - self.progress.epoch_began,
            "seconds": self.progress.seconds,
            **self.learner.loss_scaler.metrics(),
        }
        left = self._time_left()
        self.world.main_only(lambda: self.log.log_epoch(self.progress.epoch, self.learner.steps, values, left))
        self._report_unreadable()
        for remark in self.watch.remarks() + (self.verifier.remarks() if self.verifier else []):
            self.log.say(remark)
        # before the last checkpoint, after which a killed run has nothing left to do
        counts = self._log_end(valid, test, confusion) if self.finished else None
        self._save(is_best)
        if counts is not None:  # after it: a picture is no reason to lose the run
            epoch, names = self.progress.epoch, self.data["class_names"]
            self.world.main_only(lambda: self.log.show(lambda board: board.add_classes(counts, names, epoch)))

    def _log_end(self, valid: Metrics, test: Metrics, confusion: Confusion) -> Tensor:
        """Record the results; return the confusion matrix of all ranks, [true, predicted]."""
        results = {f"best_{name}": self.progress.best[name] for name in ("acc1", "epoch")}
        results |= {"last_acc1": valid["acc1"], "last_loss": valid["loss"]}
        results |= {"seconds": self.progress.seconds, "images_per_sec": self.throughput.overall()}
        results |= self.meters.totals(self.throughput.total_images())
        results |= {f"test_{name}": value for name, value in test.items()}
        counts, names = confusion.collect(self.world), self.data["class_names"]
        epoch, steps = self.progress.epoch, self.learner.steps
        self.world.main_only(lambda: self.log.log_end(epoch, steps, results, counts, names))
        return counts

    def _log_point(self, iteration: int, images: Tensor) -> None:
        window = self.state.check_finite(self.learner.sums.average_since_last(self.world))
        images_per_sec = self.throughput.close_window()
        values = {
            "loss": window["loss"],
            "learning_rate": self.learner.learning_rate,
            "images_per_sec": images_per_sec,
            **self.learner.loss_scaler.metrics(),
            **self.watch.close_window(),
            **self.meters.window(images_per_sec, self.progress.epoch),
        }
        epoch, steps = self.progress.epoch + 1, self.learner.steps
        left = self._time_left()
        self.world.main_only(lambda: self.log.log_step(epoch, iteration, steps, values, left, images))

    def _time_left(self) -> float | None:
        position = self.progress.epoch + self.progress.batch / len(self.batches)
        return self.clock.time_left(position, self.config.max_epochs)

    # ---- stop, save, resume

    def _handle_requests(self, *, stop: bool) -> None:
        """Collective: between two batches, stop if a signal asked for it, or save for checkpoint_every_steps."""
        every, steps = self.config.save_checkpoint and self.config.checkpoint_every_steps, self.learner.steps
        if stop:
            self._save_and_stop()
        elif every and steps % every == 0 and steps > self.saved_step:
            self.state.check_finite(self.learner.sums.average(self.world))
            self._save(is_best=False)

    def _save_and_stop(self) -> None:
        batch = self.progress.batch
        position = "after its last batch" if batch == len(self.batches) else f"after {batch} batches"
        where = f"{self.requests.name()} in epoch {self.progress.epoch + 1} {position}"
        if not self.config.save_checkpoint:
            raise ExpectedError(f"stopped on {where}; save_checkpoint is false, so this run cannot be resumed")
        self.state.check_finite(self.learner.sums.average(self.world))
        self._report_unreadable()  # the next start does not read the images of these batches again
        self._save(is_best=False)
        option = "" if self.resume == "auto" else " with --resume auto"
        raise Stopped(f"stopped on {where} with everything saved; run the same command again{option} to resume")

    def _save(self, is_best: bool) -> None:
        """Collective: write the last checkpoint, and also the best one if `is_best`."""
        if not self.config.save_checkpoint:
            return
        with self.clock.during("checkpoint"):
            state = self.state.gather()
            self.world.main_only(lambda: self._write(state, is_best))
        self.saved_step = self.learner.steps

    def _write(self, state: dict[str, Any], is_best: bool) -> None:
        self.log.sync()  # after a power cut, the records must reach to the checkpoint
        save_checkpoint(self.folder / "checkpoints", state, self.config.keep_checkpoints, is_best=is_best)

    def _open_folder(self) -> OpenedRun | None:
        """Collective: lock the run's folder in the main process, and restore the checkpoint to resume from."""
        # for the folder's lock: less than the other ranks' timeout, but enough for an isolated rank of an earlier
        # launch to exit
        patience = 0.9 * self.config.rank_timeout_seconds
        opened = self.world.main_only(
            lambda: open_run(self.folder, self.resume, self.state, self._read_pretrained, patience)
        )
        state, pretrained = self.world.broadcast((opened.state, opened.pretrained) if opened else (None, None))
        if pretrained is not None:
            self.learner.load_network({"model": pretrained, "average": None})
        if state is not None:
            self.state.restore(state)
            saved = {name: state["data"][name] for name in STATISTICS}
            if any(tuple(self.data[name]) != tuple(value) for name, value in saved.items()):
                self.notes.append(f"Normalising with the checkpoint's {saved}; the data now give other values")
            self.data.update(saved)
            for loader in self.loaders.every():
                loader.normalise.set_statistics(self.data["mean"], self.data["std"])
            self.saved_step = self.learner.steps
        return opened

    def _read_pretrained(self) -> Pretrained | None:
        return read_pretrained(self.config.pretrained, self.learner.weights.state_dict(), self.data["class_names"])

    def _open_log(self) -> RunLogger:
        return self.log.open(epoch=self.progress.epoch, step=self.learner.steps, clock=self.clock)

    def _report_unreadable(self) -> None:
        for line in report_unreadable(self.world, self.loaders.every(), self.folder):
            self.log.say(line)

    def _profile(self) -> AbstractContextManager[None]:
        """PROF: every rank marks its ranges; the main process records them and reports."""
        if not self.config.enable_profiling or self.progress.epoch + 1 != self.config.profiling_epoch_start:
            return nullcontext()
        return self.learner.profiler.capture(self.folder if self.world.is_main else None, self.log.say)


@exit_in_a_line
def main(arguments: Arguments, when_saved: Callable[[], None] = lambda: None, clock: Clock | None = None) -> int:
    """Train, or with --dry-run only describe, as one of the ranks; returns the exit status.

    `when_saved` is called when training has finished, or has stopped on request, and everything is saved.
    `clock` is the clock of this process."""
    config, descriptions = arguments.config, list[str]()

    def run(world: World) -> None:
        fetch = not arguments.dry_run
        trainer = Trainer(config, world, arguments.run_dir, arguments.config_name, arguments.resume, clock, fetch)
        if arguments.dry_run:
            description = trainer.describe()  # on every rank, since a forward pass may contain collectives
            descriptions.extend([description] if world.is_main else [])
            return
        try:
            trainer.train()
        except Stopped:
            when_saved()
            raise
        when_saved()

    status = run_ranks(run, config.device, config.rank_timeout_seconds, folder=arguments.run_dir)
    for description in descriptions:
        print(description)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(ARGUMENTS, when_saved=ignore_signals, clock=Clock(process_age())))
