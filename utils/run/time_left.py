"""How long a run still needs, from the pace of this process."""

from utils.clock import Clock


class TimeLeft:
    """Told where epochs begin and end; a forecast at any log point, where the host has waited for the device."""

    def __init__(self, epochs: int, batches: int, clock: Clock) -> None:
        self.epochs, self.batches = epochs, batches  # of the whole run; of one epoch
        self.clock = clock
        self._epoch_seconds: float | None = None  # of the last whole epoch, with its validation
        self.start_epoch(0)

    def start_epoch(self, first_batch: int) -> None:
        """An epoch begins, or goes on with `first_batch` after a resume."""
        self._started, self._whole = self.clock.elapsed(), first_batch == 0
        self._first_point: tuple[float, int] | None = None

    def end_epoch(self) -> None:
        """Its validation is done."""
        if self._whole:
            self._epoch_seconds = self.clock.elapsed() - self._started

    def seconds(self, epoch: int, batch: int) -> float | None:
        """What `epoch` finished epochs and `batch` batches of the next leave to do; None where nothing tells the pace.

        Until an epoch is over it is that of the batches since the first log point: without the start of workers and
        compilation, and without validation.
        """
        epoch_seconds = self._epoch_seconds
        if epoch_seconds is None:
            now = self.clock.elapsed()
            since, first = self._first_point = self._first_point or (now, batch)
            if batch <= first:
                return None
            epoch_seconds = (now - since) / (batch - first) * self.batches
        return (self.epochs - epoch - batch / self.batches) * epoch_seconds
