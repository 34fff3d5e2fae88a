"""The interactive figure of tools.report, with plotly from the extra ".[report]"."""

import html
import math
from collections.abc import Sequence

from plotly.subplots import make_subplots

from tools.shared.pages.png_plots import COLOURS
from tools.shared.read_runs import Run

DASHES = ("solid", "dash", "dot", "dashdot")
LOSS_OUTLIER = 1.5  # times the 95th percentile: the first view cuts off losses above it
PANELS = (  # title, key in an epoch's record, alone or with /valid and /train, horizontal axis
    ("Accuracy, %", "acc1", "epoch"),
    ("Accuracy, %", "acc1", "seconds"),
    ("Loss", "loss", "epoch"),
    ("Loss", "loss", "seconds"),
    ("Training images/s", "images_per_sec", "epoch"),
    ("Learning rate", "learning_rate", "epoch"),
)


def draw_curves(runs: Sequence[Run]) -> str:
    """Plot what the runs recorded for each epoch; return the element `curves`, without the library. A click in the
    legend hides a run in all panels."""
    recorded = {key for run in runs for row in run.epochs for key in row}
    panels = [panel for panel in PANELS if recorded & {panel[1], f"{panel[1]}/valid", f"{panel[1]}/train"}]
    longest = max(row["seconds"] for run in runs for row in run.epochs)
    unit, seconds = ("seconds", 1) if longest < 120 else ("minutes", 60) if longest < 7200 else ("hours", 3600)
    height, named = math.ceil(len(panels) / 2), set[int]()  # runs that are in the legend
    figure = make_subplots(height, 2, subplot_titles=[title for title, _, _ in panels], vertical_spacing=0.25 / height)
    for place, (_, kind, axis) in enumerate(panels):
        where = {"row": place // 2 + 1, "col": place % 2 + 1}
        scale, digits = (100, "%{y:.2f} %") if kind == "acc1" else (1, "%{y:.5g}")
        values = []
        for number, run in enumerate(runs):
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
            for key, word in ((f"{kind}/valid", "validation "), (f"{kind}/train", "training "), (kind, "")):
                rows = [row for row in run.epochs if key in row]
                if not rows:
                    continue
                values += [row[key] for row in rows if math.isfinite(row[key])]
                pale = word == "training "
                figure.add_scatter(
                    x=[row[axis] / (1 if axis == "epoch" else seconds) for row in rows],
                    y=[scale * row[key] for row in rows],
                    mode="lines" if len(rows) > 1 else "markers",
                    name=html.escape(run.name),  # plotly interprets <b> and the like as markup
                    legendgroup=str(number), showlegend=number not in named,
                    line={"color": colour, "dash": dash, "width": 1.2 if pale else 2}, opacity=0.45 if pale else 1.0,
                    customdata=[int(row["epoch"]) for row in rows],
                    hovertemplate=f"%{{fullData.name}}<br>{word}{kind} {digits}, epoch %{{customdata}}<extra></extra>",
                    **where,
                )  # fmt: skip
                named.add(number)
        figure.update_xaxes(title_text="epoch" if axis == "epoch" else unit, **where)
        figure.update_yaxes(rangemode="normal" if kind == "acc1" else "tozero", **where)
        if kind == "loss" and values:  # one spike must not flatten all curves
            values.sort()
            highest = min(LOSS_OUTLIER * values[int(0.95 * (len(values) - 1))], 1.05 * values[-1])
            figure.update_yaxes(range=[0, highest], **where)
    figure.update_layout(
        height=330 * height, template="plotly_white", margin={"l": 50, "r": 40, "t": 40, "b": 40},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0 + 0.1 / height},
        modebar_orientation="v",  # in the right margin: else the buttons would cover the legend
    )  # fmt: skip
    options = {"responsive": True, "displaylogo": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id="curves", config=options))
