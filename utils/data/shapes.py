"""`shapes`: ten kinds of figure drawn by a seed, a dataset that needs no file and still has to be learned.

Position, size, rotation, both colours, background and noise vary; the class survives a horizontal flip, a shift of
4 pixels and a rotation by 15 degrees, that is, the augmentations of CIFAR. Only additions, products, quotients and
square roots are used, which IEEE 754 rounds alike everywhere: the same seed gives the same bytes on every machine.
"""

import numpy as np

CLASS_NAMES = (
    "disc", "ring", "square", "frame", "triangle", "plus", "star", "stripes", "checkerboard", "hourglass",
)  # fmt: skip
SIZE = 32  # pixels
RADIUS = (6.0, 9.0)  # pixels
OFFSET = 3.0  # pixels from the middle, at most
HALF_TILT = 0.0875  # tangent of half the largest rotation: 10 degrees
CONTRAST = (0.22, 0.55)  # of figure against background, in [0, 1], each channel on its own
GRADIENT = 0.15  # of the background from the middle to the border, at most
NOISE = 16  # of 255, at most: the sum of two even draws


def draw_shapes(num_images: int, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [N, 3, 32, 32], and their labels, int64 [N]: every class equally often, in a random order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_images, dtype=np.int64) % len(CLASS_NAMES))
    images = np.empty((num_images, 3, SIZE, SIZE), np.uint8)
    for label in range(len(CLASS_NAMES)):
        chosen = np.flatnonzero(labels == label)
        images[chosen] = _draw_class(label, len(chosen), rng)
    return images, labels


def _draw_class(label: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` images of one class, uint8 [count, 3, 32, 32]."""

    def draw(low: float, high: float, *shape: int) -> np.ndarray:
        return (low + (high - low) * rng.random((count, *shape), np.float32)).astype(np.float32)

    # Coordinates of every pixel in units of the figure's radius, turned by an angle whose half has tangent t.
    grid = np.arange(SIZE, dtype=np.float32) - np.float32((SIZE - 1) / 2)
    radius = draw(*RADIUS, 1, 1)
    x = (grid[None, None, :] - draw(-OFFSET, OFFSET, 1, 1)) / radius  # [count, 1, 32]
    y = (grid[None, :, None] - draw(-OFFSET, OFFSET, 1, 1)) / radius  # [count, 32, 1]
    t = draw(-HALF_TILT, HALF_TILT, 1, 1)
    cosine, sine = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    distance = _signed_distance(label, cosine * x + sine * y, cosine * y - sine * x)
    coverage = np.clip(np.float32(0.5) - distance * radius, 0, 1)[:, None]  # [count, 1, 32, 32], soft at the edge

    background = draw(0.25, 0.75, 3, 1, 1)
    contrast = draw(*CONTRAST, 3, 1, 1) * np.where(rng.random((count, 3, 1, 1)) < 0.5, np.float32(-1), np.float32(1))
    # Away from the nearer end of the range, where the figure would be clipped to the background's colour.
    contrast = np.where((background + contrast < 0) | (background + contrast > 1), -contrast, contrast)
    slope = draw(-GRADIENT, GRADIENT, 2, 1, 1) / np.float32(SIZE / 2)
    shade = slope[:, :1] * grid[None, None, None, :] + slope[:, 1:] * grid[None, None, :, None]  # [count, 1, 32, 32]
    image = np.float32(255) * (background + shade + coverage * contrast) + np.float32(0.5)
    image += rng.integers(-NOISE // 2, NOISE // 2, image.shape, np.int8, endpoint=True)
    image += rng.integers(-NOISE // 2, NOISE // 2, image.shape, np.int8, endpoint=True)
    return np.clip(image, 0, 255).astype(np.uint8)


def _signed_distance(label: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distance from the figure's outline, negative inside, in radii; y points down. All arrays: [count, 32, 32]."""
    abs_x, abs_y = np.abs(x), np.abs(y)
    match CLASS_NAMES[label]:
        case "disc":
            distance = np.sqrt(x * x + y * y) - np.float32(0.95)
        case "ring":
            distance = np.abs(np.sqrt(x * x + y * y) - np.float32(0.75)) - np.float32(0.2)
        case "square":
            distance = np.maximum(abs_x, abs_y) - np.float32(0.85)
        case "frame":
            distance = np.abs(np.maximum(abs_x, abs_y) - np.float32(0.7)) - np.float32(0.18)
        case "triangle":  # upright: two sides of slope sqrt(3), and the base
            distance = np.maximum(
                np.float32(0.866) * abs_x - np.float32(0.5) * y - np.float32(0.5), y - np.float32(0.6)
            )
        case "plus":
            long, short = np.float32(1.0), np.float32(0.28)
            distance = np.minimum(np.maximum(abs_x - long, abs_y - short), np.maximum(abs_x - short, abs_y - long))
        case "star":
            distance = _star_distance(abs_x, -y)
        case "stripes":  # three level bars in a square
            bars = np.minimum(np.abs(abs_y - np.float32(0.72)), abs_y) - np.float32(0.18)
            distance = np.maximum(bars, abs_x - np.float32(0.9))
        case "checkerboard":  # the middle and the corners of a square of 3 x 3 cells
            across, down = abs_x - np.float32(0.32), abs_y - np.float32(0.32)
            cells = np.where(across * down > 0, np.float32(-1), np.float32(1)) * np.minimum(
                np.abs(across), np.abs(down)
            )
            distance = np.maximum(cells, np.maximum(abs_x, abs_y) - np.float32(0.96))
        case _:  # hourglass: two triangles, tip to tip
            distance = np.maximum(np.float32(0.866) * abs_x - np.float32(0.5) * abs_y, abs_y - np.float32(0.9))
    return distance


def _star_distance(abs_x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points, one of them up (y points up): folded into one half of one point by mirroring, then one edge.

    The construction is Inigo Quilez's sdStar5 (https://iquilezles.org/articles/distfunctions2d/).
    """
    cos36, sin36 = np.float32(0.809017), np.float32(0.587785)
    outer, inner = np.float32(1.1), np.float32(0.42)
    for side in (np.float32(1), np.float32(-1)):
        along = 2 * np.maximum(side * cos36 * abs_x - sin36 * y, 0)
        abs_x, y = abs_x - along * side * cos36, y + along * sin36
    abs_x, y = np.abs(abs_x), y - outer
    edge_x, edge_y = inner * sin36, inner * cos36 - 1
    length = np.clip((abs_x * edge_x + y * edge_y) / (edge_x * edge_x + edge_y * edge_y), 0, outer)
    rest_x, rest_y = abs_x - edge_x * length, y - edge_y * length
    sign = np.where(y * edge_x > abs_x * edge_y, np.float32(1), np.float32(-1))
    return sign * np.sqrt(rest_x * rest_x + rest_y * rest_y)
