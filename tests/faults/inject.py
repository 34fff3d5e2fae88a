"""Flip single bits, and count how many of them the checked steps (`verify_every_steps`) find.

    python -m tests.faults.inject --flips 1000 --clean 10000                     # a campaign, on this process's device
    torchrun --nproc_per_node=4 -m tests.faults.inject --flips 1000 --clean 10000         # the same, over ranks
    python -m tests.faults.inject --strike weight --step 5 --set verify_every_steps=1     # a run with one flip

A campaign trains a tiny network with every step checked: first --clean steps without flips, then --flips flips, each in
a separate step that is undone. Kinds, ranks, tensors, elements and bits are sampled from --seed. To decide whether a
flip changed its step, all tensors of the result are compared with the same step without the flip; fingerprints are not
used. --strike trains the block like train.py, in a separate folder, with one flip.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from tests.faults.flip_campaign import Outcome, build_tiny, random_batches, run_campaign
from tests.faults.flips import KINDS, Flip, Flipper
from tools.shared.command_line import add_count, as_settings, at_least_one, new_parser
from tools.shared.followed_run import TRAIN
from tools.shared.output import print_table, say
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.launch import find_launch
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import ConfigError, exit_in_a_line
from utils.training.checks.verify_steps import Verifier

EXIT_STATUS = "0 no flip missed or misnamed and no false alarm, 1 otherwise; with --strike the status of training: 5"
CAMPAIGN = {
    "batch_size": 16, "verify_every_steps": 1, "deterministic": True, "lr_schedule": "constant",
    "lr": 0.01, "lr_warmup_epochs": 0, "enable_amp": False, "log_to_screen": False, "log_to_tensorboard": False,
}  # fmt: skip


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign, or train one run with a flip; return the exit status."""
    options = parser().parse_args(argv)
    if (options.strike is None) != (options.step is None):
        raise ConfigError("--strike KIND and --step N belong together; a campaign strikes in every step")
    settings = [] if options.strike else as_settings(CAMPAIGN)
    config = load_config(options.yaml_config, options.config, settings + options.set)
    if options.strike:
        if config.verify_every_steps is None:
            say("verify_every_steps is null: no step is checked, so nothing finds the flip; --set verify_every_steps=1")
        return strike(options, config)
    if config.verify_every_steps != 1:
        raise ConfigError(f"verify_every_steps {config.verify_every_steps}: a campaign checks every step; use 1")
    status = 0

    def act(world: World) -> None:
        nonlocal status
        status = campaign(options, config, world)

    return run_ranks(act, config.device, config.rank_timeout_seconds) or status


def parser() -> argparse.ArgumentParser:
    parser = new_parser("inject", __doc__, EXIT_STATUS)
    parser.prog = "python -m tests.faults.inject"
    add_config_arguments(parser, config="quickstart")
    add_count(parser, "--flips", 1000, "flips of a campaign")
    add_count(parser, "--clean", 1000, "checked steps of a campaign without flips")
    parser.add_argument("--seed", type=int, default=0, help="seed of the flips (default: 0)")
    parser.add_argument("--strike", choices=KINDS, metavar="KIND", help=f"train with one flip: {', '.join(KINDS)}")
    parser.add_argument("--step", type=at_least_one, metavar="N", help="--strike: in this step, counted from 1")
    parser.add_argument("--rank", type=int, default=0, metavar="RANK", help="--strike: on this rank (default: 0)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("expts/inject"), metavar="DIR", help="--strike: the run's folder"
    )
    return parser


def strike(options: argparse.Namespace, config: Config) -> int:
    """Run train.py in this process, as one of the ranks, with one flip; return its exit status."""
    launch = find_launch(os.environ)
    rank, ranks = launch.rank, launch.world_size
    if not 0 <= options.rank < ranks:
        raise ConfigError(f"--rank {options.rank}: this run has ranks 0 to {ranks - 1}")
    flip = Flip(options.strike, options.rank, options.step - 1, str(options.seed))
    train_step, flippers = Verifier.train_step, list[Flipper]()

    def install_flipper(verifier: Verifier, images: Tensor, labels: Tensor) -> None:
        Verifier.train_step = train_step  # type: ignore[method-assign]
        flippers.append(Flipper(verifier, flip, rank, report=print).__enter__())
        verifier.train_step(images, labels)

    Verifier.train_step = install_flipper  # type: ignore[method-assign]
    choice = [f"--config={options.config}", f"--yaml_config={options.yaml_config}", f"--run-dir={options.run_dir}"]
    sys.argv = [str(TRAIN), *choice, "--resume=never", *(f"--set={setting}" for setting in options.set)]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    if status == 0 and not any(flipper.struck for flipper in flippers) and options.rank == flippers[0].rank:
        raise ConfigError(f"nothing was flipped: --step {options.step} never came")
    return status


def campaign(options: argparse.Namespace, config: Config, world: World) -> int:
    """Collective: run a campaign and return the exit status."""
    learner, verifier = build_tiny(config, world)
    batches = random_batches(learner, world)
    outcome = run_campaign(learner, verifier, batches, flips=options.flips, clean=options.clean, seed=options.seed)
    if world.is_main:
        show(outcome, world.world_size)
    return int(bool(outcome.missed or outcome.misnamed or outcome.alarms))


def show(outcome: Outcome, ranks: int) -> None:
    """Print the table by kind of tensor, and the verdict."""
    columns = ("kind of tensor", "flips", "changed the step", "caught", "rank named", "changed nothing", "yet detected")
    rows = [(kind, *map(str, asdict(tally).values())) for kind, tally in outcome.flips.items()]
    print_table(f"single bit flips in checked steps, {ranks} rank(s)", columns, rows)
    for title, lines in (("missed", outcome.missed), ("misnamed", outcome.misnamed), ("false alarm", outcome.alarms)):
        for line in lines:
            say(f"{title}: {line}")
    say(
        f"{len(outcome.missed)} missed, {len(outcome.misnamed)} misnamed; {len(outcome.alarms)} alarms in "
        f"{outcome.clean_steps} clean checked steps; {outcome.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
