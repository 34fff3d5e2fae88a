"""Images per second of the loop over training batches."""

from collections.abc import Sequence

from utils.timing.clock import LOOP, Clock


class Throughput:
    """Images per second over all ranks between log points, in the loop over training batches.

    The first window of a process includes the start of workers, cuDNN's choice of algorithms and compilation, so
    `counted` skips it unless it is the only one of the run.
    """

    def __init__(self, world_size: int, clock: Clock) -> None:
        self.world_size, self.clock = world_size, clock
        self.windows: list[tuple[int, float]] = []  # images, seconds
        self.earlier = (0, 0.0)  # what earlier starts of the run counted
        self.start_epoch()

    def start_epoch(self) -> None:
        """Start a window now, the epoch's first; the time since the last one does not count."""
        self._first = len(self.windows)
        self.images, self.since = 0, self.clock.seconds(*LOOP)

    def add(self, images: int) -> None:
        self.images += images * self.world_size

    def close_window(self) -> float:
        """Return images per second of the window, 0 if it is empty, and start the next one. Call when the device has
        finished its work."""
        if not self.images:
            return 0.0
        now = self.clock.seconds(*LOOP)
        images, seconds = self.images, now - self.since
        self.windows.append((images, seconds))
        self.images, self.since = 0, now
        return images / seconds

    def total_images(self) -> int:
        """Return the images of all closed windows of this process, over all ranks."""
        return _total(self.windows)[0]

    def counted(self) -> tuple[int, float]:
        """Return images and seconds over all starts of the run."""
        return _total([self.earlier, *self.windows[self._skipped() :]])

    def of_epoch(self) -> float:
        """Return images per second of the epoch's closed windows; of the run if there is none."""
        images, seconds = _total(self.windows[self._first or self._skipped() :])
        return images / seconds if seconds else self.overall()

    def overall(self) -> float:
        """Return images per second over all starts of the run; 0 if no step was timed."""
        images, seconds = self.counted()
        return images / seconds if seconds else 0.0

    def _skipped(self) -> int:  # of the process's first windows
        return 1 if self.earlier[0] or len(self.windows) > 1 else 0


def _total(windows: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return sum(images for images, _ in windows), sum(seconds for _, seconds in windows)
