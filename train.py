"""Train a CIFAR-adapted ResNet from a named configuration block.

    python train.py --config=bs256-amp-nhwc
    torchrun --nproc_per_node=8 train.py --config=bs2048-warmup-opt
    sbatch submit_multinode.slr

Read train_simple.py first: the same training without switches. Here the loop is `main` -> `run_ranks` ->
`Trainer.train` -> `train_one_epoch` -> `Verifier.train_step` (`verify_every_steps`) -> `Learner.train_step`, which sets
the learning rate, -> `Update` in utils/training/step.py. Batches come from a `Loader`, which augments, through
`training_batches`. Each speed-up is tagged where it acts: `grep -rn "DDP:" train.py utils`; the other tags are AMP,
NHWC, EXTRA, STEM, FUSE, CONV, COMPILE, GRAPHS, PREFETCH, ALLOC and PROF.
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

import torch
from torch import Tensor

from models import build_model
from utils.config import Config
from utils.data.augment import BatchMix
from utils.data.build import build_loaders, open_dataset
from utils.data.loader import Loader, report_unreadable
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.environment import describe_environment
from utils.errors import ExpectedError, Stopped, exit_in_a_line
from utils.run.clock import Clock, process_age
from utils.run.folder import open_run, write_description
from utils.run.meters import Meters, StepWatch
from utils.run.preemption import StopRequests, ignore_signals
from utils.run.profile import capture
from utils.run.run import Run
from utils.training.batches import training_batches
from utils.training.checks.dry_run import describe as describe_run
from utils.training.checks.start import check_network
from utils.training.learner import Learner
from utils.training.metrics.confusion import Confusion
from utils.training.plan import check_ranks_agree, make_plan
from utils.training.step import mark
from utils.training.validation import Collector, compile_validation, validate
from utils.user_code import user_file_digests
from utils.verify.verifier import Verifier

Metrics = dict[str, float]


class Trainer:
    """Builds the parts of a run from its configuration, and trains, validates and saves in order."""

    def __init__(
        self, config: Config, world: World, folder: Path = Path("expts/default"), config_name: str = "default",
        resume: str = "auto", clock: Clock | None = None, fetch: bool = True,
    ) -> None:  # fmt: skip
        self.config, self.world, self.resume = config, world, resume
        clock = clock or Clock()
        plan = make_plan(config, world)
        check_ranks_agree(config, plan, world)

        dataset = open_dataset(config, world, fetch=fetch)
        self.loaders = build_loaders(config, dataset, world)
        data = dataset.describe() | {"steps_per_epoch": len(self.loaders.train)}

        build = partial(build_model, image_side=data["shape"][-1])
        learner = Learner(config, plan, build, world, len(self.loaders.train))
        learner.compile_timer = partial(clock.during, "compile")
        valid = self.loaders.valid.sampler
        compile_validation(learner, valid)
        self.learner = learner
        self.verifier = Verifier(learner, world) if config.verify_every_steps else None
        check_network(learner, config.model, data["shape"], map(len, valid.batches(0)))
        self.watch = StepWatch(learner.model, world, clock)
        self.mix = BatchMix(config, self.loaders.train.sampler)

        self.run = Run(config, config_name, folder, world, learner, data, valid.num_samples, clock)
        self.requests = StopRequests(world)
        for note in [*self.loaders.notes, *learner.plan.notes]:
            self.run.log.say(note)
        self.meters = Meters(self.run)

    def describe(self) -> str:
        """Describe what this run would do and the memory it would take, for --dry-run."""
        config, shape = self.config, self.run.data["shape"]
        text = describe_run(self.learner, shape, network=config.model, dataset=config.dataset)
        pretrained = self.world.main_only(self.run.read_pretrained)
        return f"{text}\npretrained       {pretrained[1]}" if pretrained else text

    # ---- the order of events

    def train(self) -> None:
        """Train, or resume training, to the end. Raises `Stopped` after a signal asked to stop and all is saved."""
        run, clock = self.run, self.run.clock
        lock = open_run(run, self.resume)  # on every rank: also restores the checkpoint, or loads `pretrained`
        for loader in self.loaders.every():
            loader.normalise.set_statistics(run.data["mean"], run.data["std"])  # the checkpoint's, if there is one
        with self.requests.listen(), lock, run.log.open() as log:
            finished_before = run.finished
            self.world.main_only(self._log_start)
            self._report_unreadable()  # a loader may have decoded all images by now
            clock.switch("train")
            while not run.finished:
                # PROF: the range that nsys captures
                with self._profile(), mark(f"epoch {run.epoch + 1}"):
                    self.train_one_epoch()
                    train_metrics = run.check_finite(self.learner.sums.average(self.world))
                    clock.close_window()  # before a profile writes its trace, which is no training time
                valid_metrics, confusion = self.validate_one_epoch()
                self._finish_epoch(train_metrics, valid_metrics, confusion)
            if self.config.log_to_tensorboard:
                log.say(f"Show the curves with: tensorboard --logdir {shlex.quote(str(run.folder.parent))}")
            log.say(run.summarise(finished_before))

    def _log_start(self) -> None:
        """Describe this launch in the log, the run folder and TensorBoard. Launching a finished run trains nothing, so
        the description of the run stays as it is."""
        config, run, log, world = self.config, self.run, self.run.log, self.world
        environment = describe_environment(world.device, world.world_size)
        environment["plan"] = self.learner.plan.describe()
        environment["own_code"] = user_file_digests(config.model, config.dataset, config.optimizer)
        if not run.finished:
            write_description(run.folder, config, run.name, environment)
            position = {"epoch": run.epoch, "batch": run.batch, "step": self.learner.steps}
            log.log_start(config, run.name, environment, run.resumed_from, **position)
        log.say(f"{config.model} on {environment['device']}, torch {torch.__version__}, {self.learner.plan.precision}")
        log.say(f"{self.learner.plan}; writes to {run.folder}")
        if not run.finished:
            log.say("Starting Training Loop...")

    def train_one_epoch(self) -> None:
        """Train the rest of the current epoch, from batch `run.batch` on."""
        run, learner, loader = self.run, self.learner, self.loaders.train
        learner.model.train()
        run.log.start_bar(f"epoch {run.epoch + 1}/{self.config.max_epochs}", len(loader), run.batch)
        self.requests.start_loop()
        if not run.batch:  # otherwise an earlier start began this epoch
            run.epoch_began = run.seconds
        train_step = (self.verifier or learner).train_step
        batches = training_batches(learner, loader, self.mix, self.watch.batches, run.epoch, run.batch)
        for number, (images, labels) in batches:
            train_step(images, labels)
            run.clock.count_step(learner.steps, len(labels) * self.world.world_size)
            run.batch = number + 1
            run.log.advance_bar(run.batch)
            if run.batch == len(loader):
                # before a checkpoint can be written: a checkpoint saved from here on resumes at the validation
                learner.average_buffers(self.world)
            if number % self.config.log_freq == 0:
                self._log_point(number, images)
            self._stop_or_save()

    def _log_point(self, iteration: int, images: Tensor) -> None:
        run, learner = self.run, self.learner
        window = run.check_finite(learner.sums.average_since_last(self.world))
        values = {
            "loss": window["loss"],
            "learning_rate": learner.learning_rate,
            **learner.loss_scaler.metrics(),
            **self.meters.at_log_point(run.clock.close_window(), run.epoch),
        }
        epoch, left = run.epoch + 1, run.time_left()
        self.world.main_only(lambda: run.log.log_step(epoch, iteration, learner.steps, values, left, images))

    def validate_one_epoch(self) -> tuple[Metrics, Confusion]:
        """Return loss and accuracy over all validation images, each counted once over all ranks ({} in an epoch without
        validation), and this rank's confusion matrix."""
        epoch, confusion = self.run.epoch + 1, Confusion(self.config.num_classes, self.world.device)
        if epoch % self.config.validate_every_epochs and epoch < self.config.max_epochs:
            return {}, confusion
        return self._evaluate("validation", self.loaders.valid, confusion.add), confusion

    def _evaluate(self, name: str, loader: Loader, *collectors: Collector) -> Metrics:
        """Return loss and accuracy of one pass over `loader`; `name` is validation or test."""
        loader.set_epoch(self.run.epoch)
        self.run.log.start_bar(name, len(loader))
        self.requests.start_loop()

        def after_batch(number: int) -> None:
            self.run.log.advance_bar(number)
            if number <= loader.sampler.shared_batches:  # later ones are not on every rank
                self._stop_or_save()

        with self.run.clock.during(name):
            return validate(self.learner, loader, self.world, collectors, after_batch).average(self.world)

    def _finish_epoch(self, train: Metrics, valid: Metrics, confusion: Confusion) -> None:
        """End of epoch: tell the plateau the loss, log, checkpoint. If training is done, first evaluate the test images
        (with `holdout_images`).

        `valid` is {} in an epoch without validation."""
        run, learner, test = self.run, self.learner, dict[str, float]()
        best = run.best_with(valid)
        if valid:
            if self.loaders.test is not None and run.is_finished_with(run.epoch + 1, best):
                test = self._evaluate("test", self.loaders.test)
            learner.schedule.observe(valid["loss"], learner.steps)
        is_best = best is not run.best  # the same object: no new best
        run.epoch, run.batch, run.best = run.epoch + 1, 0, best
        learner.sums.reset()
        values = {
            "loss/train": train["loss"],
            "acc1/train": train["acc1"],
            **{f"{name}/valid": value for name, value in valid.items()},
            "learning_rate": learner.learning_rate,
            "images_per_sec": run.clock.images_per_sec(),
            "epoch_seconds": run.seconds - run.epoch_began,
            "seconds": run.seconds,
            **learner.loss_scaler.metrics(),
        }
        left = run.time_left()
        self.world.main_only(lambda: run.log.log_epoch(run.epoch, learner.steps, values, left))
        self._report_unreadable()
        for remark in self.watch.remarks() + (self.verifier.remarks() if self.verifier else []):
            run.log.say(remark)
        # before `save`: a run killed after its last checkpoint does nothing more
        counts = self._log_end(valid, test, confusion) if run.finished else None
        run.save(is_best=is_best)
        if counts is not None:  # after it: a picture is no reason to lose the run
            names = run.data["class_names"]
            self.world.main_only(lambda: run.log.show(lambda board: board.add_classes(counts, names, run.epoch)))

    def _log_end(self, valid: Metrics, test: Metrics, confusion: Confusion) -> Tensor:
        """Record the results; return the confusion matrix of all ranks, [true, predicted]."""
        run, steps, names = self.run, self.learner.steps, self.run.data["class_names"]
        results = {f"best_{name}": run.best[name] for name in ("acc1", "epoch")}
        results |= {"last_acc1": valid["acc1"], "last_loss": valid["loss"]}
        results |= {"seconds": run.seconds, "images_per_sec": run.clock.whole.images_per_sec}
        results |= self.meters.totals(run.clock.images)
        results |= {f"test_{name}": value for name, value in test.items()}
        counts = confusion.collect(self.world)
        self.world.main_only(lambda: run.log.log_end(run.epoch, steps, results, counts, names))
        return counts

    # ---- stop, save, resume

    def _stop_or_save(self) -> None:
        """Collective: between two batches, stop if a signal asked for it, or save for checkpoint_every_steps."""
        every, steps = self.config.checkpoint_every_steps, self.learner.steps
        if self.requests.poll():
            self._save_and_stop()
        elif self.config.save_checkpoint and every and steps % every == 0 and steps > self.run.saved_step:
            self.run.check_finite(self.learner.sums.average(self.world))
            self.run.save(is_best=False)

    def _save_and_stop(self) -> None:
        run = self.run
        position = "after its last batch" if run.batch == len(self.loaders.train) else f"after {run.batch} batches"
        where = f"{self.requests.name()} in epoch {run.epoch + 1} {position}"
        if not self.config.save_checkpoint:
            raise ExpectedError(f"stopped on {where}; save_checkpoint is false, so this run cannot be resumed")
        run.check_finite(self.learner.sums.average(self.world))
        self._report_unreadable()  # the next start does not read the images of these batches again
        run.save(is_best=False)
        option = "" if self.resume == "auto" else " with --resume auto"
        raise Stopped(f"stopped on {where} with everything saved; run the same command again{option} to resume")

    def _report_unreadable(self) -> None:
        for line in report_unreadable(self.world, self.loaders.every(), self.run.folder):
            self.run.log.say(line)

    def _profile(self) -> AbstractContextManager[None]:
        """PROF: every rank marks its ranges; the main process records them and reports."""
        if not self.config.enable_profiling or self.run.epoch + 1 != self.config.profiling_epoch_start:
            return nullcontext()
        folder = self.run.folder if self.world.is_main else None
        return capture(folder, self.world.device.type == "cuda", self.run.log.say)


@exit_in_a_line
def main(arguments: Arguments, when_saved: Callable[[], None] = lambda: None, clock: Clock | None = None) -> int:
    """Train, or with --dry-run only describe, as one of the ranks; returns the exit status.

    `when_saved` is called when training has finished, or has stopped on request, and everything is saved.
    `clock` is the clock of this process."""
    config = arguments.config

    def train_as_rank(world: World) -> None:
        fetch = not arguments.dry_run
        trainer = Trainer(config, world, arguments.run_dir, arguments.config_name, arguments.resume, clock, fetch)
        if arguments.dry_run:
            description = trainer.describe()  # on every rank, since a forward pass may contain collectives
            world.main_only(lambda: print(description))
            return
        try:
            trainer.train()
        except Stopped:
            when_saved()
            raise
        when_saved()

    return run_ranks(train_as_rank, config.device, config.rank_timeout_seconds)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(ARGUMENTS, when_saved=ignore_signals, clock=Clock(process_age())))
