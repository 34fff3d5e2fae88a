"""Time to an accuracy, or the accuracy at the end, over several seeds: raw logs, mean and deviation.

    python -m tools.bench record --config=record-75 --seeds 5
    python -m tools.bench record --config=cifar100-cpu --against cifar100-cpu+lr=0.05+cutout_size=8 --out DIR

Each seed is one train.py, without checkpoints and TensorBoard files. Its seconds are of the command, from start to end;
of the run, from the first batch to the end of the validation that reached the target; and of training, only the steps,
at the throughput of all log points but the first. `--against` also trains each seed with other settings, one run after
the other, and compares seed by seed. The same command resumes, and adds seeds or configurations, if settings, code (the
newest commit outside results/), versions and device are the same.
"""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tools.common import VERSIONS, add_count, make_folder, path_argument, print_table, write_json
from utils.config import Config, find_file, list_blocks, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.world import choose_device
from utils.environment import describe_environment
from utils.errors import ConfigError
from utils.program import TRAIN, end_with_parent
from utils.run.logger import read_records

TIMES = ("command", "run", "training")
SAME = ("commit", *VERSIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, config="record-75")
    compared = "compare with this block and settings on the same seeds; repeatable"
    parser.add_argument("--against", action="append", default=[], metavar="BLOCK+KEY=VALUE", help=compared)
    add_count(parser, "--seeds", 5, "seeds, each a run of each configuration")
    add_count(parser, "--first_seed", 0, "the first seed", least=0)
    parser.add_argument("--out", type=path_argument, metavar="DIR", help="default: results/<date>-<config>")


def run(options: argparse.Namespace) -> int:
    out = options.out or Path("results") / f"{date.today().isoformat()}-{options.config}"
    settings, folders, configs = dict[str, list[str]](), dict[str, Path](), dict[str, Config]()
    for name in (options.config, *options.against):
        block, *own = name.split("+")
        settings[name] = [*options.set, *own, "save_checkpoint=false", "log_to_tensorboard=false"]
        folders[name] = out / re.sub(r"[^\w.=-]+", "-", name) if options.against else out
        configs[name] = load_config(options.yaml_config, block, settings[name])
    for seed, name in product(range(options.first_seed, options.first_seed + options.seeds), configs):
        if not (folders[name] / f"seed-{seed}").exists():
            make_folder(folders[name])
            now = describe_environment(choose_device(configs[name].device, 0), 1)
            for other, folder in folders.items():
                check_same(folder, other, configs[other], now)
            trial = run_seed(options.yaml_config, name.split("+")[0], [*settings[name], f"seed={seed}"], folders[name])
            print(f"seed {seed}, {name}: {trial['last_acc1']:.2%}, {trial['seconds']['run']:.1f} s", flush=True)
    summaries = {name: summarise(folders[name], name, config) for name, config in configs.items()}
    for name, summary in summaries.items():
        if name != options.config:
            summary["against"] = against = compare(summary["trials"], summaries[options.config]["trials"])
            gains = " ".join(f"{gain:+.2f}" for gain in against["gains"])
            gain, ratio = (show_mean(against[key], 1.0, ".2f") for key in ("gain", "time_ratio"))
            print(f"{name}: {gain} points of last acc1 over {options.config}, by seed {gains}; {ratio} x its time")
        write_json(folders[name] / "summary.json", summary)
    times = [f"{time}, s" for time in TIMES]
    columns = ["configuration", "target", "seeds", "reached", "epochs", "best acc1, %", *times]
    print_table(f"{out}", columns, [row_of(summary) for summary in summaries.values()])
    return 0


def run_seed(yaml_config: Path, block: str, settings: Sequence[str], out: Path) -> dict[str, Any]:
    """Run one seed to its end; then its folder becomes out/seed-N. A failed run ends this command with its status."""
    config = load_config(yaml_config, block, settings)
    unfinished = out / f".seed-{config.seed}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)  # from an interrupted run
    command = [sys.executable, str(TRAIN), f"--yaml_config={find_file(yaml_config)}", f"--config={block}"]
    command += [f"--run-dir={unfinished}", "--resume=never", *(f"--set={setting}" for setting in settings)]
    started, end_too = time.perf_counter(), partial(end_with_parent, signal.SIGTERM)
    if status := subprocess.run(command, preexec_fn=end_too, check=False).returncode:
        sys.exit(max(1, status))  # its message is above
    seconds = time.perf_counter() - started
    *epochs, end = read_records(unfinished, "epoch", "end")
    trial = measure(epochs, end["images_per_sec"], config, seconds)
    write_json(unfinished / "trial.json", trial)
    (unfinished / ".lock").unlink()
    (unfinished / "checkpoints").rmdir()  # empty
    unfinished.rename(out / f"seed-{config.seed}")
    return trial


def measure(epochs: Sequence[Mapping[str, Any]], rate: float, config: Config, command: float) -> dict[str, Any]:
    """Return the results of one seed, from the records of its epochs, the images/s of the run, and its seconds."""
    last, best = epochs[-1], max(epochs, key=lambda record: record.get("acc1/valid", -1.0))
    target = config.stop_at_accuracy
    return {
        "seed": config.seed, "epochs": last["epoch"],
        "reached": None if target is None else last["acc1/valid"] >= target,
        "last_acc1": last["acc1/valid"], "best_acc1": best["acc1/valid"], "best_epoch": best["epoch"],
        "seconds": {"command": command, "run": last["seconds"], "training": last["step"] * config.batch_size / rate},
        "images_per_sec": rate,
    }  # fmt: skip


def summarise(out: Path, name: str, config: Config) -> dict[str, Any]:
    """Summarise all seeds in a folder. Raises `ConfigError` if they were run differently."""
    folders = _seed_folders(out)
    environment = json.loads((folders[0] / "environment.json").read_text())
    check_same(out, name, config, environment)
    trials = [json.loads((folder / "trial.json").read_text()) for folder in folders]
    missed = any(trial["reached"] is False for trial in trials)  # a mean over only the others would be too good
    return {
        "config_name": name, "target": config.stop_at_accuracy, "seeds": [trial["seed"] for trial in trials],
        "reached": None if config.stop_at_accuracy is None else sum(trial["reached"] for trial in trials),
        "seconds": {time: None if missed else spread([trial["seconds"][time] for trial in trials]) for time in TIMES},
        **{key: spread([trial[key] for trial in trials]) for key in ("epochs", "last_acc1", "best_acc1")},
        "environment": {key: environment.get(key) for key in SAME},
        "config": config.model_dump(mode="json"), "trials": trials,
    }  # fmt: skip


def compare(mine: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the gains in points over the trials of the first configuration, and ratios of times, by common seeds."""
    theirs = {trial["seed"]: trial for trial in first}
    pairs = [(trial, theirs[trial["seed"]]) for trial in mine if trial["seed"] in theirs]
    gains = [100 * (trial["last_acc1"] - other["last_acc1"]) for trial, other in pairs]
    ratios = [trial["seconds"]["run"] / other["seconds"]["run"] for trial, other in pairs]
    return {"gains": gains, "gain": spread(gains), "time_ratio": spread(ratios)}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and sample standard deviation, which is None for one value."""
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def _seed_folders(out: Path) -> list[Path]:
    return sorted(out.glob("seed-*"), key=lambda folder: int(folder.name.removeprefix("seed-")))


def check_same(out: Path, name: str, config: Config, environment: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the folder holds seeds of other settings, code, versions or devices."""
    expected = config.model_dump(exclude={"seed"})
    for folder in _seed_folders(out):
        path, where = folder / "config.yaml", json.loads((folder / "environment.json").read_text())
        there = load_config(path, next(iter(list_blocks(path)))).model_dump()
        changed = [f"{key} {there[key]}" for key, value in expected.items() if there[key] != value]
        changed += [f"{key} {where.get(key)}" for key in SAME if where.get(key) != environment.get(key)]
        if changed:
            remedy = "give another --out, or move it away and run its seed again"
            raise ConfigError(f"{folder} was run with {', '.join(changed)}, unlike {name} now; {remedy}")


def row_of(summary: Mapping[str, Any]) -> list[str]:
    target, reached, seeds = summary["target"], summary["reached"], len(summary["seeds"])
    times = (show_mean(summary["seconds"][time], 1.0, ".1f") for time in TIMES)
    return [
        summary["config_name"], "-" if target is None else f"{target:.0%}", str(seeds),
        "-" if reached is None else f"{reached} of {seeds}", show_mean(summary["epochs"], 1.0, ".1f"),
        show_mean(summary["best_acc1"], 100.0, ".2f"), *times,
    ]  # fmt: skip


def show_mean(values: Mapping[str, Any] | None, factor: float, form: str) -> str:
    """Return a `spread` times a factor as "mean ± deviation"."""
    if values is None:
        return "target missed"
    deviation = "" if values["sd"] is None else f" ± {factor * values['sd']:{form}}"
    return f"{factor * values['mean']:{form}}{deviation}"
