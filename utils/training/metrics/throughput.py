"""Images per second of the loop over training batches."""

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
        self._start()

    def _start(self) -> None:
        self.images, self.since = 0, self.clock.seconds(*LOOP)

    def add(self, images: int) -> None:
        self.images += images * self.world_size

    def close_window(self) -> float:
        """Return images per second of the window, 0 if it is empty, and start the next one. Call when the device has
        finished its work."""
        if not self.images:
            return 0.0
        seconds = self.clock.seconds(*LOOP) - self.since
        self.windows.append((self.images, seconds))
        images_per_sec = self.images / seconds
        self._start()
        return images_per_sec

    def total_images(self) -> int:
        """Return the images of all closed windows of this process, over all ranks."""
        return sum(images for images, _ in self.windows)

    def counted(self) -> tuple[int, float]:
        """Return images and seconds over all starts of the run."""
        windows = [self.earlier, *self.windows[self._skipped() :]]
        return sum(images for images, _ in windows), sum(seconds for _, seconds in windows)

    def of_epoch(self) -> float:
        """Return images per second of the epoch's closed windows; of the run if there is none."""
        windows = self.windows[self._first or self._skipped() :]
        seconds = sum(seconds for _, seconds in windows)
        return sum(images for images, _ in windows) / seconds if seconds else self.overall()

    def _skipped(self) -> int:
        """Return how many of the process's first windows do not count."""
        return 1 if self.earlier[0] or len(self.windows) > 1 else 0

    def overall(self) -> float:
        """Return images per second over all starts of the run; 0 if no step was timed."""
        images, seconds = self.counted()
        return images / seconds if seconds else 0.0
