"""Figures in one style, with matplotlib, which is an optional extra: pip install ".[report]"."""

import io
from pathlib import Path
from typing import Any

from tools.output import write_file
from utils.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.6, 3.8)) -> tuple[Any, Any]:
    """A figure of `rows` x `columns` axes, each of `size` inches; needs no display."""
    try:
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('matplotlib is missing; install it with: pip install ".[report]"') from None
    style: Any = {
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    with rc_context(style):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        return figure, figure.subplots(rows, columns)


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file."""
    write_file(path, as_png(figure))


def as_png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def colour(number: int) -> str:
    """The colour of the run with this number."""
    return COLOURS[number % len(COLOURS)]


def legend_below(figure: Any, axes: Any) -> None:
    """One legend for all axes of the figure, of the curves in `axes`, where it hides none of them."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=8)


def whole_numbers(axes: Any) -> None:
    """Only whole numbers along the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
