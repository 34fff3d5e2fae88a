"""Draw the pictures of stored measurements: PYTHONPATH=. python docs/figures/measured.py"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.common import COLOURS, new_figure, save

FIGURES = Path(__file__).resolve().parent
RESULTS = FIGURES.parents[1] / "results"
LADDERS = {  # {device: folder of results}
    "two CPU cores (Zen 5), batch 128": "2026-11-28-step-zen5",
    "one H100, batch 256": "2026-11-27-h100",
}
RESNET50_RUNS = {  # {device and recipe: folder of results}
    "two CPU cores, 16 epochs": "2026-11-25-resnet50-cpu",
    "two CPU cores, 18 epochs": "2026-11-25-resnet50-cpu-18-epochs",
}
Curve = Sequence[tuple[float, float]]  # (epoch or minutes, accuracy in %)


def draw_ladder(path: Path) -> None:
    """Speed of ResNet50's training step, without loading, relative to `bs256` of the same device; each block adds
    switches to the block above."""
    figure, axes = new_figure(size=(8.4, 4.2))
    height, names = 0.8 / len(LADDERS), list[str]()
    for number, (device, folder) in enumerate(reversed(LADDERS.items())):
        rungs = json.loads((RESULTS / folder / "ladder.json").read_text("utf-8"))["results"]["rungs"]
        samples = {name.partition("+")[0]: rung["compute"] for name, rung in rungs.items()}
        names = names or list(samples)  # the H100 comes first here and has one rung more
        first = samples["bs256"]["median"]
        places = [names.index(name) + (0.5 - number) * height for name in samples]
        medians = [sample["median"] for sample in samples.values()]
        speeds = [median / first for median in medians]
        ends = [[sample[end] / first for sample in samples.values()] for end in ("min", "max")]
        spread = [[abs(end - speed) for end, speed in zip(side, speeds, strict=True)] for side in ends]
        bars = axes.barh(places, speeds, height, xerr=spread, color=COLOURS[number], capsize=2, label=device)
        rates = [f"{median / first:.1f}x, {median:,.0f} images/s" for median in medians]
        axes.bar_label(bars, rates, padding=4, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right")
    axes.set(xlabel="speed relative to bs256 (float32)", title="ResNet50's training step", xlim=(0, 10))
    save(figure, path)


def draw_features(path: Path) -> None:
    """Accuracy against minutes with and without the recipe's features."""
    curves = {
        "with the recipe's features": measured("2026-11-21-cifar100-cpu"),
        "without": measured("2026-11-21-cifar100-cpu-plain"),
    }
    figure, axes = new_figure(size=(7, 4))
    draw_curves(axes, curves)
    axes.set(xlabel="minutes", title="resnet9 on two CPU cores", xlim=(0, 12.5), ylim=(0, 80))
    save(figure, path)


def draw_published(path: Path) -> None:
    """Accuracy against epochs of the SC20 tutorial's six runs."""
    runs = json.loads((RESULTS / "reference/sc20_curves.json").read_text("utf-8"))["runs"]
    figure, axes = new_figure(size=(8.4, 4.8))
    points = {name: zip(run["epoch"], run["acc1/valid"], strict=True) for name, run in runs.items()}
    draw_curves(axes, {name: [(epoch, 100 * accuracy) for epoch, accuracy in run] for name, run in points.items()})
    axes.set(xlabel="epoch", title="The SC20 tutorial's runs of ResNet50 on V100 GPUs", xlim=(0, 170), ylim=(0, 90))
    axes.set_xticks(range(0, 121, 20))
    save(figure, path)


def draw_resnet50(path: Path) -> None:
    """Accuracy against minutes of the tutorial's ResNet50: the published run on a V100, and the only validation of each
    run of this project."""
    published = json.loads((RESULTS / "reference/sc20_curves.json").read_text("utf-8"))["runs"]["bs128-opt"]
    points = zip(published["wall_s_since_first_event"], published["acc1/valid"], strict=True)
    curves: dict[str, Curve] = {"one V100, bs128-opt": [(seconds / 60, 100 * accuracy) for seconds, accuracy in points]}
    for name, folder in RESNET50_RUNS.items():
        curves[name] = measured(folder)
    figure, axes = new_figure(size=(8.4, 4.2))
    draw_curves(axes, curves, labels_at=1.25)
    ((minutes, accuracy),) = measured("2026-11-27-record-75-strict")
    axes.plot(minutes, accuracy, "o", color=COLOURS[len(curves)])
    label = f"one H100, 18 epochs: {accuracy:.1f} %"
    axes.annotate(label, (1.1 * minutes, accuracy), color=COLOURS[len(curves)], va="center")
    title = "The tutorial's ResNet50 on CIFAR-100"
    axes.set(xlabel="minutes (logarithmic)", title=title, xscale="log", xlim=(0.6, 2200), ylim=(0, 85))
    axes.set_xticks(ticks := (1, 3, 10, 30, 100), [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    save(figure, path)


def measured(folder: str) -> Curve:
    """(minutes, validation accuracy in %) after each validated epoch of seed 0 of a folder of results."""
    lines = (RESULTS / folder / "seed-0/metrics.jsonl").read_text("utf-8").splitlines()
    epochs = [record for record in map(json.loads, lines) if record["kind"] == "epoch"]
    return [(record["seconds"] / 60, 100 * record["acc1/valid"]) for record in epochs if "acc1/valid" in record]


def draw_curves(axes: Any, curves: Mapping[str, Curve], gap: float = 4.5, labels_at: float = 1.06) -> None:
    """Draw each curve with its name and its last accuracy at its end; labels are at least `gap` apart, and begin at
    `labels_at` times the last x."""
    right = max(x for curve in curves.values() for x, _ in curve)
    ends = {name: curve[-1][1] for name, curve in curves.items()}
    top = max(*ends.values(), sum(ends.values()) / len(ends) + gap * (len(ends) - 1) / 2)
    below = top + gap
    for name in sorted(curves, key=lambda name: -ends[name]):
        curve = curves[name]
        marker = "o" if len(curve) == 1 else None
        (line,) = axes.plot(
            *zip(*curve, strict=True), color=COLOURS[list(curves).index(name)], linewidth=1.6, marker=marker
        )
        x, y = curve[-1]
        below = below - gap if len(ends) > 2 else y
        axes.annotate(
            f"{name}: {y:.1f} %",
            (x, y),
            (labels_at * right, below),
            color=line.get_color(),
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 1,
            },
        )
    axes.set_ylabel("validation accuracy, %")


if __name__ == "__main__":
    draw_ladder(FIGURES / "ladder.png")
    draw_features(FIGURES / "cifar100_cpu.png")
    draw_published(FIGURES / "sc20_accuracy.png")
    draw_resnet50(FIGURES / "resnet50_two_cores.png")
