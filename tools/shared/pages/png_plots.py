"""The plots of tools.bench ladder (--plot) and of tools.timeline, with matplotlib from the extra ".[plot]"."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.shared.output import write_file
from utils.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")


def new_figure(size: tuple[float, float] = (5.6, 3.8)) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its axes; needs no display."""
    try:
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('matplotlib is missing; install it with: pip install ".[plot]"') from None
    style: Any = {
        "axes.prop_cycle": cycler(color=COLOURS), "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
        "axes.spines.right": False, "axes.titlesize": 11, "font.size": 9,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Write the figure, as SVG if the file's name ends in .svg, else as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path.suffix == ".svg" else "png", dpi=110)
    write_file(path, buffer.getvalue())


def draw_bars(axes: Any, rates: Mapping[str, float], title: str, spread: Any = None) -> None:
    """Draw a bar for each name, the first on top, with its images/s and its speed relative to the first."""
    first = next(iter(rates.values()))
    bars = axes.barh(list(rates), list(rates.values()), xerr=spread, color=COLOURS[0], height=0.65, capsize=3)
    labels = [f"{rate:,.0f}  ({rate / first:.2f}x)" for rate in rates.values()]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="images/s", title=title, xlim=(0, 1.25 * max(rates.values())))
