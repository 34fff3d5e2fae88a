"""Draw architecture.svg from the table of imports in docs/architecture.md: python docs/figures/architecture.py

The small modules that everything uses share one box without arrows. A test compares the picture with the table.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROW = re.compile(r"^\| `utils/(\w+)(/|\.py)` \|.*\|([^|]*)\|$", re.MULTILINE)
WIDTH, HEIGHT, HALF_WIDTH, HALF_HEIGHT = 980, 570, 95, 27
# Each package's centre, and what it does in few words
PACKAGES = {
    "config": (440, 140, "YAML blocks, command line"),
    "run": (690, 220, "folder, checkpoints, log"),
    "training": (690, 310, "step, precision, schedule"),
    "data": (190, 390, "datasets, order, loaders"),
    "distributed": (440, 470, "launchers, collectives"),
    "timing": (790, 470, "clock, ranges, traces"),
}
# Where arrows leave the lower edge of a package and reach the upper edge of another, from their centres
OFFSETS = {
    ("config", "data"): (-60, 0),
    ("config", "run"): (70, -75),
    ("config", "training"): (30, -70),
    ("run", "distributed"): (-92, 40),
    ("run", "timing"): (92, 60),
    ("training", "data"): (-70, 70),
    ("training", "distributed"): (-40, 70),
    ("training", "timing"): (40, -30),
    ("data", "distributed"): (50, -60),
}


def draw(page: str) -> str:
    """Return the picture of the table in `page`, as SVG; raise a `KeyError` for a package that has no place yet."""
    rows = {name: (kind, set(re.findall(r"`(\w+)`", imports))) for name, kind, imports in ROW.findall(page)}
    packages = [name for name, (kind, _) in rows.items() if kind == "/"]
    small = ", ".join(name for name, (kind, _) in rows.items() if kind == ".py")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *box(490, 42, 435, "train.py, train_simple.py, tools/", "put the packages together; import all of them"),
        *box(120, 220, 65, "models/", "networks"),
        *box(490, 533, 435, f"utils/: {small}", "small modules that the packages above import"),
    ]
    for name in packages:
        x, y, words = PACKAGES[name]
        lines += box(x, y, HALF_WIDTH, f"utils/{name}/", words)
        lines += [arrow(name, imported) for imported in sorted(rows[name][1] & set(packages))]
    lines.append('<text x="55" y="98" font-size="13" fill="#555">an arrow: imports</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def box(x: int, y: int, half_width: int, title: str, words: str) -> list[str]:
    """Return a box around (x, y) with two lines of text."""
    return [
        f'<rect x="{x - half_width}" y="{y - HALF_HEIGHT}" width="{2 * half_width}" height="{2 * HALF_HEIGHT}" rx="4" '
        'fill="#eef4fa" stroke="#0072B2"/>',
        f'<text x="{x}" y="{y - 4}" font-size="15" text-anchor="middle">{title}</text>',
        f'<text x="{x}" y="{y + 15}" font-size="13" text-anchor="middle" fill="#444">{words}</text>',
    ]


def arrow(importer: str, imported: str) -> str:
    """Return an arrow from the lower edge of one package to the upper edge of another."""
    start, end = OFFSETS.get((importer, imported), (0, 0))
    (x1, y1, _), (x2, y2, _) = PACKAGES[importer], PACKAGES[imported]
    return (
        f'<line x1="{x1 + start}" y1="{y1 + HALF_HEIGHT}" x2="{x2 + end}" y2="{y2 - HALF_HEIGHT}" stroke="#555" '
        'stroke-width="1.5" marker-end="url(#head)"/>'
    )


if __name__ == "__main__":
    drawing = draw((FOLDER.parent / "architecture.md").read_text(encoding="utf-8"))
    (FOLDER / "architecture.svg").write_text(drawing, encoding="utf-8")
