"""Search hyper-parameters by successive halving with Optuna (extra `search`), and keep a log.

    python -m tools.search --config=cifar100-cpu --space lr=log:0.01..0.1 --space batch_size=64,128,256 \\
        --set max_epochs=4 --trials 20 --out results/search-cifar100-cpu

Each trial is one train.py. After epochs 1, 2, 4, 8 and so on, a trial is stopped unless it is in the better half of
the trials so far (Li et al. 2018, arXiv:1810.05934, asynchronous). DIR/trials.jsonl holds a line for each trial:
settings, accuracy of every epoch, seconds, and how it ended. The same command continues until there are --trials in
total. A trial fails, without an accuracy, if its training breaks down, for example by a loss that is not finite. A
trial with exit status 2 or 3 (configuration, data) ends the search, because the others would fail too.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.shared.command_line import add_count, as_settings, new_parser, path_argument
from tools.shared.followed_run import FollowedRun
from tools.shared.output import make_folder
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.global_batch import divide_batch
from utils.errors import ConfigError, DataError, ExpectedError, exit_in_a_line

LOG = "trials.jsonl"
BROKE_DOWN = "broke down"  # marks a failed trial, which is not repeated as an interrupted one is
FATAL = (ConfigError.exit_status, DataError.exit_status)  # no other settings would avoid these


class TrialFailed(Exception):
    """Tells Optuna that a trial has no result."""


@dataclass(frozen=True)
class Dimension:
    """One setting and its values to try: `KEY=LOW..HIGH`, `KEY=log:LOW..HIGH`, or `KEY=A,B,C`."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        """Return a value from Optuna's trial."""
        if self.choices:
            return trial.suggest_categorical(self.key, list(self.choices))
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    @property
    def examples(self) -> tuple[Any, ...]:
        """All choices, or the ends and the middle of the range."""
        return self.choices or (self.low, (self.low + self.high) / 2, self.high)


def parse_dimension(text: str) -> Dimension:
    """Parse one --space. Raises `ConfigError` if it is invalid."""
    key, equals, values = text.partition("=")
    if not equals or key not in Config.model_fields:
        forms = "KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=A,B,C"
        raise ConfigError(f"--space {text}: expected {forms} with a key of the configuration")
    try:
        if ".." in values:
            low, _, high = values.removeprefix("log:").partition("..")
            dimension = Dimension(key, float(low), float(high), log=values.startswith("log:"))
            if not -math.inf < dimension.low < dimension.high < math.inf or (dimension.log and dimension.low <= 0):
                raise ValueError
            return dimension
        return Dimension(key, choices=tuple(json.loads(value) for value in values.split(",")))
    except ValueError:
        raise ConfigError(
            f"--space {text}: expected LOW..HIGH rising, above 0 with log:, or JSON values with commas between"
        ) from None


def parse_space(texts: Sequence[str], options: argparse.Namespace, settings: Sequence[str]) -> list[Dimension]:
    """Parse all --space. Raises `ConfigError` if one is invalid, or if the configuration refuses one of its examples: a
    trial would only find that out after hours."""
    space = [parse_dimension(text) for text in texts]
    first = {dimension.key: dimension.examples[0] for dimension in space}
    if len(first) < len(space):
        raise ConfigError(f"--space: a setting is given twice in {', '.join(texts)}; give each once")
    for dimension in space:
        for value in dimension.examples:
            try:
                tried = as_settings(first | {dimension.key: value})
                config = load_config(options.yaml_config, options.config, [*settings, *tried])
                divide_batch(config.batch_size, 1, config.micro_batch_size)
            except ConfigError as error:
                raise ConfigError(f"{error}\nfrom --space {', '.join(texts)}; train.py must take all values") from None
    return space


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing trials and print the best; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        raise ConfigError('tools.search needs Optuna; install it with: pip install ".[search]"') from None
    # successive halving needs the accuracies of early epochs
    settings = ["validate_every_epochs=1", *options.set, "save_checkpoint=false", "log_to_tensorboard=false"]
    load_config(options.yaml_config, options.config, settings)
    space = parse_space(options.space, options, settings)
    make_folder(options.out)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # this command prints a line for a failed trial itself
    database = options.out / "study.sqlite"
    try:
        study = optuna.create_study(
            study_name="search",
            direction="maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            storage=f"sqlite:///{database}",
            load_if_exists=True,
        )
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--out {options.out}: {database.name} cannot be used: {reason}; give another --out"
        ) from None
    # the state of the random generator is not stored: with the same seed a continued search would repeat its trials
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    states = optuna.trial.TrialState
    done = sum(
        trial.state in (states.COMPLETE, states.PRUNED) or BROKE_DOWN in trial.user_attrs for trial in study.trials
    )
    now = {
        "--yaml_config": str(options.yaml_config),
        "--config": options.config,
        "--set": options.set,
        "--space": options.space,
    }
    if done and (before := study.user_attrs.get("options", now)) != now:
        raise ConfigError(f"--out {options.out}: its trials had {before}; repeat these options, or give another --out")
    study.set_user_attr("options", now)
    objective = _objective(options, settings, space, optuna.TrialPruned)
    study.optimize(objective, n_trials=max(0, options.trials - done), catch=TrialFailed)
    _print_best(study, study.get_trials(states=[states.COMPLETE]))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = new_parser("search", __doc__)
    add_config_arguments(parser, config="cifar100-cpu")
    parser.add_argument("--space", action="append", required=True, metavar="KEY=VALUES", help="what to try; repeatable")
    add_count(parser, "--trials", 20, "trials in total")
    parser.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="folder of the log")
    return parser


def _print_best(study: Any, finished: Sequence[Any]) -> None:
    """Print the result. Raises `ExpectedError` if no trial has one."""
    messages = [trial.user_attrs[BROKE_DOWN] for trial in study.trials if BROKE_DOWN in trial.user_attrs]
    failed = f" ({len(messages)} failed)" if messages else ""
    if not finished:
        reason = f"; the last failure: {messages[-1]}" if messages else "; give more --trials"
        raise ExpectedError(f"none of {len(study.trials)} trials has a result{failed}{reason}")
    best = study.best_trial
    shown = " ".join(f"--set {setting}" for setting in as_settings(best.user_attrs["settings"]))
    print(f"best of {len(study.trials)} trials{failed}: number {best.number}, {best.value:.2%}: {shown}")


def _objective(
    options: argparse.Namespace, settings: Sequence[str], space: Sequence[Dimension], pruned: type[Exception]
) -> Callable[[Any], float]:
    def objective(trial: Any) -> float:
        tried = {dimension.key: dimension.suggest(trial) for dimension in space}
        trial.set_user_attr("settings", tried)
        folder = options.out / f".trial-{trial.number}"
        accuracies: list[float] = []
        record: dict[str, Any] = {"trial": trial.number, "settings": tried, "end": "interrupted"}
        try:
            with FollowedRun(options.yaml_config, options.config, [*settings, *as_settings(tried)], folder) as training:
                for epoch in (epoch for epoch in training if "acc1/valid" in epoch):
                    accuracies.append(epoch["acc1/valid"])
                    record["seconds"] = epoch["seconds"]
                    trial.report(accuracies[-1], step=epoch["epoch"])
                    if trial.should_prune():
                        record["end"] = "pruned"
                        raise pruned
                training.wait()
                record["end"] = "finished"
        except ExpectedError as error:
            record["end"] = f"failed: {str(error).splitlines()[0]}"
            if error.exit_status in FATAL:
                raise
            trial.set_user_attr(BROKE_DOWN, str(error))
            raise TrialFailed from None
        finally:
            with (options.out / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(record | {"acc1/valid": accuracies}) + "\n")
            reached = f", {max(accuracies):.2%}" if accuracies else ""
            print(f"trial {trial.number}: {record['end']}{reached}, {tried}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        return accuracies[-1]

    return objective


if __name__ == "__main__":
    sys.exit(main())
