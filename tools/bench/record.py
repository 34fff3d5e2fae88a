"""Time to an accuracy, or the accuracy at the end, over several seeds: raw logs, mean and deviation.

Each seed is one train.py, one after the other, without checkpoints and TensorBoard files. It has three times:

- command: from the start of the process to its end: Python, imports, data, and everything below;
- run: from the first batch to the end of the validation that reached the target, with compilation and validations;
- training: only the training steps, at the throughput of all log points but the first. Compare this one with results
  that exclude start-up, compilation and validation.

Later commands can add seeds to a folder of results, if configuration, code, versions and device are the same. The code
is identified by the newest commit that changed anything outside results/.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tools.bench.reports import VERSIONS
from tools.shared.command_line import add_count, as_settings, path_argument
from tools.shared.followed_run import FollowedRun
from tools.shared.output import make_folder, print_table, write_file, write_json
from tools.shared.read_runs import read_records
from utils.config import Config, list_blocks, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.world import choose_device
from utils.errors import ConfigError
from utils.run.logging.environment import describe_environment

RESULTS = Path("results")
TIMES = ("command", "run", "training")
SAME = ("commit", *VERSIONS)
BEGIN, END = "<!-- records -->", "<!-- end of records -->"

Trial = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, config="record-75")
    add_count(parser, "--seeds", 5, "seeds, each a run")
    parser.add_argument("--first_seed", type=int, default=0, metavar="K", help="the first seed (default: 0)")
    parser.add_argument(
        "--target", type=float, metavar="ACCURACY",
        help="end each run at this validation accuracy, in [0, 1] (default: the configuration's stop_at_accuracy)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path_argument, metavar="DIR", help="folder for results (default: results/<date>-<config>)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the missing seeds, summarise, update the table."""
    settings = [*options.set, "save_checkpoint=false", "log_to_tensorboard=false"]
    if options.target is not None:
        settings.append(f"stop_at_accuracy={options.target}")
    config = load_config(options.yaml_config, options.config, settings)
    out = options.out or RESULTS / f"{date.today().isoformat()}-{options.config}"
    make_folder(out)
    check_same_config(out, options.config, config)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        if (out / f"seed-{seed}").exists():
            print(f"seed {seed}: already in {out}")
            continue
        check_same_environment(out, describe_environment(choose_device(config.device, 0), 1))
        trial = run_seed(options.yaml_config, options.config, settings, seed, out)
        print(_describe(trial, config.stop_at_accuracy), flush=True)
    summary = summarise(out, options.config, config)
    write_json(out / "summary.json", summary)
    print_table(f"{out}", *table([(out, summary)]))
    update_readme(out.parent)
    return 0


def run_seed(yaml_config: Path, name: str, settings: Sequence[str], seed: int, out: Path) -> Trial:
    """Run one seed to its end; then its folder becomes out/seed-N."""
    partial, final = out / f".seed-{seed}.partial", out / f"seed-{seed}"
    shutil.rmtree(partial, ignore_errors=True)  # from an interrupted run
    with FollowedRun(yaml_config, name, [*settings, *as_settings({"seed": seed})], partial) as training:
        for record in (record for record in training if "acc1/valid" in record):
            print(f"seed {seed}, epoch {record['epoch']}: {record['acc1/valid']:.2%}", end="\r", flush=True)
        command_seconds = training.wait()
    config = load_config(partial / "config.yaml", name)
    *epochs, end = read_records(partial / "metrics.jsonl", "epoch", "end")
    trial = measure(epochs, end["images_per_sec"], config, command_seconds)
    write_json(partial / "trial.json", trial)
    (partial / ".lock").unlink()
    (partial / "checkpoints").rmdir()  # empty
    partial.rename(final)
    return trial


def measure(
    epochs: Sequence[Mapping[str, Any]], images_per_sec: float, config: Config, command_seconds: float
) -> Trial:
    """Return the results of one seed, from the records of its epochs and the rate of the whole run."""
    last, best = epochs[-1], max(epochs, key=lambda record: record.get("acc1/valid", -1.0))
    target = config.stop_at_accuracy
    return {
        "seed": config.seed,
        "epochs": last["epoch"],
        "reached": None if target is None else last["acc1/valid"] >= target,
        "last_acc1": last["acc1/valid"],
        "best_acc1": best["acc1/valid"],
        "best_epoch": best["epoch"],
        "seconds": {
            "command": command_seconds,
            "run": last["seconds"],
            "training": last["step"] * config.batch_size / images_per_sec,
        },
        "images_per_sec": images_per_sec,
    }


def summarise(out: Path, name: str, config: Config) -> dict[str, Any]:
    """Summarise all seeds in a folder. Raises `ConfigError` if they were run differently."""
    folders = _seed_folders(out)
    environment = read_json(folders[0] / "environment.json")
    check_same_environment(out, environment)
    trials = [read_json(folder / "trial.json") for folder in folders]
    # a mean over only the seeds that reached the target would be too good
    missed = any(trial["reached"] is False for trial in trials)
    return {
        "config_name": name,
        "target": config.stop_at_accuracy,
        "seeds": [trial["seed"] for trial in trials],
        "reached": None if config.stop_at_accuracy is None else sum(trial["reached"] for trial in trials),
        "seconds": {time: None if missed else spread([trial["seconds"][time] for trial in trials]) for time in TIMES},
        **{key: spread([trial[key] for trial in trials]) for key in ("epochs", "last_acc1", "best_acc1")},
        "environment": {key: environment.get(key) for key in SAME},
        "config": config.model_dump(mode="json"),
        "trials": trials,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and sample standard deviation, which is None for one value."""
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def _seed_folders(out: Path) -> list[Path]:
    return sorted(out.glob("seed-*"), key=lambda folder: int(folder.name.removeprefix("seed-")))


def check_same_environment(out: Path, expected: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the folder holds seeds of other code, versions or devices than `expected`."""
    for folder in _seed_folders(out):
        there = read_json(folder / "environment.json")
        if key := next((key for key in SAME if there.get(key) != expected.get(key)), None):
            found = f"{folder} cannot be averaged with the others: {key} {there.get(key)} and {expected.get(key)}"
            raise ConfigError(f"{found}\nmove it away and run its seed again, or give another --out")


def check_same_config(out: Path, name: str, config: Config) -> None:
    """Raise `ConfigError` if the folder holds seeds of another configuration."""
    for folder in _seed_folders(out):
        path = folder / "config.yaml"
        there = load_config(path, next(iter(list_blocks(path))))
        for key, value in config.model_dump().items():
            if key != "seed" and getattr(there, key) != value:
                found = f"{folder} was run with {key} {getattr(there, key)}, {name} now has {value}"
                raise ConfigError(f"{found}; give another --out")


def _describe(trial: Trial, target: float | None) -> str:
    seconds = ", ".join(f"{time} {trial['seconds'][time]:.1f} s" for time in TIMES)
    missed = "" if trial["reached"] in (None, True) else f", target {target:.2%} MISSED"
    return f"seed {trial['seed']}: {trial['last_acc1']:.2%} after {trial['epochs']} epochs, {seconds}{missed}"


# ---- the table in results/README.md


def table(measured: Sequence[tuple[Path, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows; the first column is the configuration."""
    columns = ["configuration", "target", "seeds", "reached", "epochs", "best acc1, %"]
    columns += [*(f"{time}, s" for time in TIMES), "device", "commit", "logs"]
    return columns, [_row(folder, summary) for folder, summary in measured]


def _row(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    target, reached, seeds = summary["target"], summary["reached"], len(summary["seeds"])
    environment = summary["environment"]
    return [
        summary["config_name"],
        "-" if target is None else f"{target:.0%}",
        str(seeds),
        "-" if reached is None else f"{reached} of {seeds}",
        show_mean(summary["epochs"], 1.0, ".1f"),
        show_mean(summary["best_acc1"], 100.0, ".2f"),
        *(show_mean(summary["seconds"][time], 1.0, ".1f") for time in TIMES),
        str(environment["device"]),
        str(environment["commit"])[:8] + (" with changes" if "changes" in str(environment["commit"]) else ""),
        folder.name,
    ]


def show_mean(values: Mapping[str, float | None] | None, factor: float, form: str) -> str:
    """Return a `spread` times a factor as "mean ± deviation"."""
    if values is None or values["mean"] is None:
        return "target missed"
    deviation = "" if values["sd"] is None else f" ± {factor * values['sd']:{form.removeprefix('+')}}"
    return f"{factor * values['mean']:{form}}{deviation}"


def render_table(root: Path) -> str:
    """Return the table of results/README.md: every folder of results, newest first."""
    folders = sorted((path.parent for path in root.glob("*/summary.json")), reverse=True)
    measured = [(folder, read_json(folder / "summary.json")) for folder in folders]
    columns, rows = table(measured)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))


def update_readme(root: Path) -> None:
    """Write the table between its marks, if there is a README.md with the marks."""
    path = root / "README.md"
    text = path.read_text("utf-8") if path.exists() else ""
    if BEGIN in text and END in text:
        head, _, rest = text.partition(BEGIN)
        write_file(path, f"{head}{BEGIN}\n{render_table(root)}\n{END}{rest.partition(END)[2]}".encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote."""
    return json.loads(path.read_text("utf-8"))
