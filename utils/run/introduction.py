"""What a start of a run says about itself, before it trains: in the log, in the folder, and in TensorBoard."""

from pathlib import Path

import torch

from utils.run.environment import describe_environment
from utils.run.folder import write_description
from utils.run.logger import RunLogger
from utils.run.state import RunState
from utils.user_code import own_files


def introduce(
    state: RunState, log: RunLogger, folder: Path, resumed_from: Path | None, notes: list[str], *, go_on: bool
) -> None:
    """On the main process, which holds `folder`. A run that does not `go_on`, because it is finished, keeps the
    description of what trained it."""
    config, learner, world, progress = state.config, state.learner, state.world, state.progress
    named = config.model_dump()
    environment = describe_environment(world.device, world.world_size)
    environment["own_code"] = own_files(named["model"], named["dataset"])
    if go_on:
        write_description(folder, config, state.config_name, environment)
        log.describe(config, state.config_name, environment)
        log.log_start(vars(progress), learner.steps, resumed_from, world.world_size)
        notes = notes + progress.clock.keep(folder, learner.steps)
    for note in notes:
        log.say(note)
    log.say(f"{named['model']} on {environment['device']}, torch {torch.__version__}, {learner.precision}")
    log.say(f"batch {learner.batch}; writes to {folder}")
    if go_on:
        log.say("Starting Training Loop...")
