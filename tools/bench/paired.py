"""Paired comparisons: train a configuration without and with some settings on the same seeds; gains and their spread.

    python -m tools.bench paired --config=cifar100-cpu --with lr=0.05 --with cutout_size=8 \\
        --seeds 3 --out results/DATE-recipe

Each seed is trained first without and then with each --with, one run after the other, so that a machine that becomes
slower does not look like a gain. All runs have the configuration's epochs. A --with may also change `max_epochs`: the
table has the ratio of the times, so that runs of equal time can be compared. All logs are kept. The same command
resumes, and with more seeds or settings it adds runs.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.record import check_same_config, check_same_environment, read_json, run_seed, show_mean, spread
from tools.shared.command_line import add_count, path_argument
from tools.shared.output import make_folder, print_table, write_json
from utils.config import load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.world import choose_device
from utils.errors import ConfigError
from utils.run.logging.environment import describe_environment

WITHOUT = "without"
REPORT = "paired.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, config="cifar100-cpu")
    parser.add_argument(
        "--with", dest="others", action="append", required=True, metavar="KEY=VALUE,...",
        help="settings to add to the configuration; a comma joins settings of one comparison; repeatable",
    )  # fmt: skip
    add_count(parser, "--seeds", 3, "seeds, each a run without and one with each --with")
    parser.add_argument("--first_seed", type=int, default=0, metavar="K", help="the first seed (default: 0)")
    parser.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="folder of logs and report")


def run(options: argparse.Namespace) -> int:
    """Run the missing trainings and write the report."""
    common = [*options.set, "save_checkpoint=false", "log_to_tensorboard=false"]
    arms = {WITHOUT: common} | {text: common + split_settings(text) for text in options.others}
    folders = {text: options.out / folder_name(text) for text in arms}
    if len(set(folders.values())) < len(arms):
        raise ConfigError("--with: two have the same folder name; write the settings of one in another order")
    for text, settings in arms.items():
        config = load_config(options.yaml_config, options.config, settings)  # fails before the first run
        if text != WITHOUT and config == load_config(options.yaml_config, options.config, common):
            raise ConfigError(f"--with {text}: {options.config} has these values already; give others")
        make_folder(folders[text])
        check_same_config(folders[text], options.config, config)
    now = describe_environment(choose_device(config.device, 0), 1)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for text, settings in arms.items():
            if (folders[text] / f"seed-{seed}").exists():
                continue
            for folder in folders.values():
                check_same_environment(folder, now)
            trial = run_seed(options.yaml_config, options.config, settings, seed, folders[text])
            print(f"seed {seed}, {text}: {trial['last_acc1']:.2%}, {trial['seconds']['run']:.1f} s", flush=True)
    trials = {text: read_trials(folder) for text, folder in folders.items()}
    environment = read_json(next(folders[WITHOUT].glob("seed-*/environment.json")))
    report = {"config_name": options.config, "settings": common, "environment": environment} | compare(trials)
    write_json(options.out / REPORT, report)
    title = f"{options.config} on {environment['device']}: gain in points over the same seeds without"
    print_table(title, *table(report))
    return 0


def split_settings(text: str) -> list[str]:
    """Split KEY=VALUE,KEY=VALUE into settings, but not at a comma inside a value."""
    return re.split(r",(?=\w+=)", text)


def folder_name(text: str) -> str:
    """Return the name of a --with's folder."""
    return re.sub(r"[^\w.=-]+", "-", text)


def read_trials(folder: Path) -> dict[int, dict[str, Any]]:
    """Return {seed: its trial} of every seed in a folder."""
    found = [read_json(path) for path in folder.glob("seed-*/trial.json")]
    return {trial["seed"]: trial for trial in sorted(found, key=lambda trial: trial["seed"])}


def compare(trials: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return each arm's accuracy, gain over `WITHOUT` by seed, and ratio of times, with mean and deviation.

    Only seeds that both arms have count for a gain."""
    without = trials[WITHOUT]
    report: dict[str, Any] = {}
    for text, mine in trials.items():
        shared = [seed for seed in mine if seed in without]
        gains = {seed: 100 * (mine[seed]["last_acc1"] - without[seed]["last_acc1"]) for seed in shared}
        ratios = [mine[seed]["seconds"]["run"] / without[seed]["seconds"]["run"] for seed in shared]
        report[text] = {
            "seeds": shared,
            "acc1": spread([trial["last_acc1"] for trial in mine.values()]),
            "gains": gains,
            "gain": spread(list(gains.values())),
            "time_ratio": spread(ratios),
        }
    return {"arms": report, "trials": {text: list(mine.values()) for text, mine in trials.items()}}


def table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, the largest gain first."""
    arms = sorted(report["arms"].items(), key=lambda arm: -arm[1]["gain"]["mean"])
    rows = [
        [
            text,
            str(len(arm["seeds"])),
            show_mean(arm["acc1"], 100.0, ".2f"),
            show_mean(arm["gain"], 1.0, "+.2f"),
            " ".join(f"{gain:+.2f}" for gain in arm["gains"].values()),
            show_mean(arm["time_ratio"], 1.0, ".2f"),
        ]
        for text, arm in arms
    ]
    return ["settings", "seeds", "acc1, %", "gain, points", "by seed", "time, x without"], rows
