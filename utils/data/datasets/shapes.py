"""`shapes`: ten kinds of figures generated from a seed; a dataset that needs no file and is not trivial to learn.

Position, size, rotation, colours, background and noise vary; CIFAR's augmentation does not change the class. Only
additions, products, quotients and square roots are used, which IEEE 754 rounds alike: the same bytes on every machine.
"""

from collections.abc import Callable

import numpy as np

Outline = Callable[[np.ndarray, np.ndarray], np.ndarray]
SIZE = 32  # pixels
RADIUS = (6.0, 9.0)  # pixels
OFFSET = 3.0  # at most, in pixels from the middle
HALF_TILT = 0.0875  # tangent of half the largest rotation: 10 degrees
CONTRAST = (0.22, 0.55)  # between figure and background, in [0, 1], for each channel
GRADIENT = 0.15  # at most, of the background from the middle to the border
NOISE = 16  # at most, of 255 levels: the sum of two uniform numbers


def _round(x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    return np.sqrt(x * x + y * y) - radius


def _box(x: np.ndarray, y: np.ndarray, half_width: float, half_height: float) -> np.ndarray:
    return np.maximum(abs(x) - half_width, abs(y) - half_height)


def _quarters(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The first and third quadrant of the plane."""
    return np.copysign(np.minimum(abs(x), abs(y)), -x * y)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A star with five points, one of them up, mirrored to half a point, which has one edge: Inigo Quilez's sdStar5
    (https://iquilezles.org/articles/distfunctions2d/)."""
    cos36, sin36, outer, inner = np.float32(0.809017), np.float32(0.587785), np.float32(1.1), np.float32(0.42)
    x, y = abs(x), -y
    for side in (1, -1):
        along = 2 * np.maximum(side * cos36 * x - sin36 * y, 0)
        x, y = x - along * side * cos36, y + along * sin36
    x, y = abs(x), y - outer
    edge_x, edge_y = inner * sin36, inner * cos36 - 1
    length = np.clip((x * edge_x + y * edge_y) / (edge_x * edge_x + edge_y * edge_y), 0, outer)
    return -np.copysign(_round(x - edge_x * length, y - edge_y * length, 0), x * edge_y - y * edge_x)


# Distance from each figure's outline, negative inside, in radii; y points down. All arrays: float32 [count, 32, 32].
FIGURES: dict[str, Outline] = {
    "disc": lambda x, y: _round(x, y, 0.95),
    "ring": lambda x, y: abs(_round(x, y, 0.75)) - 0.2,
    "square": lambda x, y: _box(x, y, 0.85, 0.85),
    "frame": lambda x, y: abs(_box(x, y, 0.7, 0.7)) - 0.18,
    "triangle": lambda x, y: np.maximum(0.866 * abs(x) - 0.5 * y - 0.5, y - 0.6),  # two sides, the base
    "plus": lambda x, y: np.minimum(_box(x, y, 1.0, 0.28), _box(x, y, 0.28, 1.0)),
    "star": _star,
    "stripes": lambda x, y: np.maximum(np.minimum(abs(abs(y) - 0.72), abs(y)) - 0.18, abs(x) - 0.9),  # three bars
    # the middle and the corners of a square of 3 x 3 cells
    "checkerboard": lambda x, y: np.maximum(_quarters(abs(x) - 0.32, abs(y) - 0.32), _box(x, y, 0.96, 0.96)),
    "hourglass": lambda x, y: np.maximum(0.866 * abs(x) - 0.5 * abs(y), abs(y) - 0.9),
}
CLASS_NAMES = tuple(FIGURES)


def generate_shapes(num_images: int, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 [N, 3, 32, 32], and labels, int64 [N]: every class equally often, in random order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_images, dtype=np.int64) % len(CLASS_NAMES))
    images = np.empty((num_images, 3, SIZE, SIZE), np.uint8)
    for label, outline in enumerate(FIGURES.values()):
        chosen = np.flatnonzero(labels == label)
        images[chosen] = _render_class(outline, len(chosen), rng)
    return images, labels


def _render_class(outline: Outline, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` images of one class, uint8 [count, 3, 32, 32]."""

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return low + (high - low) * rng.random((count, *shape), np.float32)

    # Coordinates of every pixel in units of the figure's radius, rotated; t is the tangent of half the angle.
    grid = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    radius = uniform(*RADIUS, 1, 1)
    x = (grid - uniform(-OFFSET, OFFSET, 1, 1)) / radius  # [count, 1, 32]
    y = (grid[:, None] - uniform(-OFFSET, OFFSET, 1, 1)) / radius  # [count, 32, 1]
    t = uniform(-HALF_TILT, HALF_TILT, 1, 1)
    cosine, sine = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    distance = outline(cosine * x + sine * y, cosine * y - sine * x)
    coverage = np.clip(0.5 - distance * radius, 0, 1)[:, None]  # [count, 1, 32, 32], soft at the edge

    background = uniform(0.25, 0.75, 3, 1, 1)
    contrast = uniform(*CONTRAST, 3, 1, 1)
    contrast = np.where(rng.random(contrast.shape) < 0.5, -contrast, contrast)
    # Change the sign if the figure would be clipped at an end of the range.
    contrast = np.where((background + contrast < 0) | (background + contrast > 1), -contrast, contrast)
    slope = uniform(-GRADIENT, GRADIENT, 2, 1, 1) / (SIZE / 2)
    shade = slope[:, :1] * grid + slope[:, 1:] * grid[:, None]  # [count, 1, 32, 32]
    image = 255 * (background + shade + coverage * contrast) + 0.5
    for _ in range(2):
        image += rng.integers(-NOISE // 2, NOISE // 2, image.shape, np.int8, endpoint=True)
    return np.clip(image, 0, 255).astype(np.uint8)
