"""Paired comparisons: a configuration without and with some settings, on the same seeds, with gains and their spread.

    python -m tools.bench paired --config=cifar100-cpu --with lr=0.05 --with cutout_size=8 \\
        --seeds 3 --out results/DATE-recipe

Each seed is trained without any of them and then with each --with, one run after the other, so that a machine that
grows slower is not taken for a gain. All have the configuration's epochs; a --with may name other settings too, such as
`max_epochs`, and the table has the ratio of the times, so that equal time can be set up. Each run's logs are kept; the
same command goes on where it was stopped, and with more seeds or settings it adds to what is there.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.record import check_same_config, check_same_environment, read_json, run_seed, show_mean, spread
from tools.shared.command_line import add_config_arguments, add_count
from tools.shared.output import make_folder, print_table, write_json
from utils.config import load_config
from utils.distributed.world import choose_device
from utils.errors import ConfigError
from utils.run.logging.environment import describe_environment

WITHOUT = "without"
REPORT = "paired.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tools.bench paired`."""
    add_config_arguments(parser, config="cifar100-cpu")
    parser.add_argument(
        "--with", dest="others", action="append", required=True, metavar="KEY=VALUE,...",
        help="settings to compare with the configuration without them; those after a comma belong together; repeatable",
    )  # fmt: skip
    add_count(parser, "--seeds", 3, "seeds, each a run without and one with each of the settings")
    parser.add_argument("--first_seed", type=int, default=0, metavar="K", help="the first of them (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the logs and the report")


def run(options: argparse.Namespace) -> int:
    """Train what is not there yet, and report."""
    common = [*options.set, "save_checkpoint=false", "log_to_tensorboard=false"]
    arms = {WITHOUT: common} | {text: common + split_settings(text) for text in options.others}
    folders = {text: options.out / folder_name(text) for text in arms}
    if len(set(folders.values())) < len(arms):
        raise ConfigError("--with: two of them have the same name for a folder; write one of them in another order")
    for text, settings in arms.items():
        config = load_config(options.yaml_config, options.config, settings)  # a mistake ends it before the first run
        make_folder(folders[text])
        check_same_config(folders[text], options.config, config)
    now = describe_environment(choose_device(config.device, 0), 1)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for text, settings in arms.items():
            if (folders[text] / f"seed-{seed}" / "trial.json").exists():
                continue
            for folder in folders.values():
                check_same_environment(folder, now)
            trial = run_seed(options.yaml_config, options.config, settings, seed, folders[text])
            print(f"seed {seed}, {text}: {trial['last_acc1']:.2%}, {trial['seconds']['run']:.1f} s", flush=True)
    trials = {text: read_trials(folder) for text, folder in folders.items()}
    environment = read_json(next(folders[WITHOUT].glob("seed-*/environment.json")))
    report = {"config_name": options.config, "settings": common, "environment": environment} | compare(trials)
    write_json(options.out / REPORT, report)
    print_table(f"{options.config}: gain in points over the same seeds without", *table(report))
    return 0


def split_settings(text: str) -> list[str]:
    """KEY=VALUE,KEY=VALUE as settings; a comma inside of brackets divides nothing."""
    return re.split(r",(?=\w+=)", text)


def folder_name(text: str) -> str:
    """What a --with is called among the logs."""
    return re.sub(r"[^\w.=-]+", "-", text)


def read_trials(folder: Path) -> dict[int, dict[str, Any]]:
    """{seed: what it gave} of every seed in a folder."""
    found = [read_json(path) for path in folder.glob("seed-*/trial.json")]
    return {trial["seed"]: trial for trial in sorted(found, key=lambda trial: trial["seed"])}


def compare(trials: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Of each settings: accuracy, gain by seed over `WITHOUT`, both with mean and deviation, and the ratio of times.

    Only seeds that both sides have count for a gain."""
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
    """Columns and rows, the largest gain first."""
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
