"""Draw nodes by checks from the doctor's records, as `python -m tools.doctor --compare` reads them.

PYTHONPATH=. python docs/figures/doctor_nodes.py --examine DATA  # examine this machine four times (a minute), then draw
PYTHONPATH=. python docs/figures/doctor_nodes.py                 # draw from results/2026-11-25-doctor-nodes

DATA holds CIFAR-100. The records are of one machine under four names. Two other processes compute during the
examination of node-3, and node-4 gets an empty data folder.
"""

import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from tools.doctor.findings import SLOW, Document, read_document
from tools.shared.pages.png_plots import new_figure, save

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results/2026-11-25-doctor-nodes"
COLOURS = {"ok": "#d9ecd5", "warn": "#ffe3a3", "fail": "#e8887c"}  # as on the doctor's page
BUSY, WITHOUT_DATA = "node-3", "node-4"


def examine(data: Path) -> None:
    """Write a record for each node."""
    RECORDS.mkdir(exist_ok=True)
    for name in ("node-1", "node-2", BUSY, WITHOUT_DATA):
        with tempfile.TemporaryDirectory() as empty:
            others = [multiprocessing.Process(target=compute, daemon=True) for _ in range(2 * (name == BUSY))]
            for other in others:
                other.start()
            place = empty if name == WITHOUT_DATA else data
            settings = ["--set", f"data_path={place}", "--run-dir", f"{empty}/run"]
            command = [sys.executable, "-m", "tools.doctor", "--config=cifar100-cpu", *settings, "--json"]
            printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
            for other in others:
                other.terminate()
        printed = printed.replace(str(place), "DATA").replace(empty, "RUNS")
        document = Document.model_validate_json(printed)
        (host,) = {finding.where for finding in document.findings}
        printed = printed.replace(f'"{host}', f'"{name}')
        (RECORDS / f"{name}.json").write_text(printed, encoding="utf-8")


def compute() -> None:
    """Keep a core busy."""
    while True:
        sum(range(1_000_000))


def draw(path: Path) -> None:
    """Draw a cell for each node and check, and for each node and measured rate."""
    documents = {file.stem: read_document(file) for file in sorted(RECORDS.glob("*.json"))}
    checks = list(dict.fromkeys(finding.check for one in documents.values() for finding in one.findings))
    rates = {node: {name: value for name, ((_, value),) in one.figures().items()} for node, one in documents.items()}
    names = list(next(iter(rates.values())))
    figure, axes = new_figure(size=(11.5, 3.6))
    for row, (node, document) in enumerate(documents.items()):
        levels = {finding.check: finding.level for finding in document.findings}
        for column, check in enumerate(checks):
            draw_cell(axes, row, column, levels[check], levels[check])
        for column, name in enumerate(names, start=len(checks)):
            others = statistics.median(rates[other][name] for other in rates if other != node)
            fraction = rates[node][name] / others
            draw_cell(axes, row, column, "ok" if fraction * SLOW >= 1 else "fail", f"{fraction:.2f}")
    axes.axvline(len(checks) - 0.5, color="white", linewidth=6)
    labels = [*checks, *(f"{name.partition(', ')[2].rpartition(' ')[0]} / others' median" for name in names)]
    axes.set_xticks(range(len(labels)), labels, rotation=35, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(documents)), list(documents))
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.set(xlim=(-0.5, len(labels) - 0.5), ylim=(len(documents) - 0.5, -0.5))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    save(figure, path)


def draw_cell(axes: Any, row: int, column: int, level: str, text: str) -> None:
    """Draw one coloured cell with its text."""
    axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, color=COLOURS[level], linewidth=0))
    axes.text(column, row, text, ha="center", va="center", weight="bold" if level == "fail" else "normal")


if __name__ == "__main__":
    if "--examine" in sys.argv[1:]:
        examine(Path(sys.argv[-1]).resolve())
    draw(Path(__file__).with_suffix(".png"))
