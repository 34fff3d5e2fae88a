"""Images per second of the loop over training batches."""

from utils.timing.clock import LOOP, Clock


class Throughput:
    """Images per second over all ranks between log points, in the loop over training batches.

    The first window of a process includes the start of workers, cuDNN's choice of algorithms and compilation: it counts
    only if it is the only one of the run.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.images = clock, 0  # of all closed windows of this process
        self._first = self._rest = (0, 0.0)  # images and seconds; `_rest` includes earlier starts of the run
        self.start_epoch()

    def start_epoch(self) -> None:
        """Start a window now, the epoch's first; the time since the last one does not count."""
        self._epoch, self._window, self._since = self._rest, 0, self.clock.seconds(*LOOP)

    def add(self, images: int) -> None:
        """Count images of all ranks."""
        self._window += images

    def close_window(self) -> float:
        """Return images per second of the window, 0 if it is empty, and start the next one. Call when the device has
        finished its work."""
        if not self._window:
            return 0.0
        images, seconds = self._window, self.clock.seconds(*LOOP) - self._since
        if self.images:
            self._rest = self._rest[0] + images, self._rest[1] + seconds
        else:
            self._first = images, seconds
        self.images += images
        self._window, self._since = 0, self._since + seconds
        return images / seconds

    def resume(self, counted: tuple[int, float]) -> None:
        """Add to what earlier starts `counted`."""
        self._rest = counted

    def counted(self) -> tuple[int, float]:
        """Return images and seconds over all starts of the run."""
        return self._rest if self._rest[0] else self._first

    def of_epoch(self) -> float:
        """Return images per second of the epoch's closed windows; of the run if there is none."""
        images, seconds = (now - then for now, then in zip(self._rest, self._epoch, strict=True))
        return images / seconds if images else self.overall()

    def overall(self) -> float:
        """Return images per second over all starts of the run; 0 if no step was timed."""
        images, seconds = self.counted()
        return images / seconds if seconds else 0.0
