"""Images per second of the loop over training batches."""

from utils.timing.clock import LOOP, Clock


class Throughput:
    """Images per second over all ranks, between log points, in the loop over training batches.

    The first window of a process holds the start of workers, cuDNN's choice of algorithms and compilation, so `overall`
    leaves it out wherever there is another.
    """

    def __init__(self, world_size: int, clock: Clock) -> None:
        self.world_size, self.clock = world_size, clock
        self.windows: list[tuple[int, float]] = []  # images, seconds
        self.start()

    def start(self) -> None:
        """Begin a window now; the time since the last one does not count."""
        self.images, self.since = 0, self.clock.seconds(*LOOP)

    def add(self, images: int) -> None:
        """Count one more batch of this rank."""
        self.images += images * self.world_size

    def close_window(self) -> float:
        """Images per second since the window began, 0 for an empty one; begins the next. Call when the device has
        caught up."""
        if not self.images:
            return 0.0
        seconds = self.clock.seconds(*LOOP) - self.since
        window = (self.images, seconds)
        self.windows.append(window)
        self.start()
        return window[0] / seconds

    def images_in_all(self) -> int:
        """Images of all closed windows, over all ranks."""
        return sum(images for images, _ in self.windows)

    def overall(self) -> float:
        """Images per second over all windows but the first."""
        counted = self.windows[1:] or self.windows
        seconds = sum(window[1] for window in counted)
        return sum(window[0] for window in counted) / seconds if seconds else 0.0
