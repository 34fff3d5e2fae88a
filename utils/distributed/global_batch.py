"""Split a global batch over ranks and micro-batches."""

from dataclasses import dataclass

from utils.errors import ConfigError


@dataclass(frozen=True)
class GlobalBatch:
    """batch_size = world_size x accumulation x micro_batch_size."""

    batch_size: int
    world_size: int
    accumulation: int
    micro_batch_size: int

    @property
    def rank_batch_size(self) -> int:
        """Images per rank and optimizer step."""
        return self.accumulation * self.micro_batch_size

    def __str__(self) -> str:
        parts = f"{self.world_size} rank(s) x {self.accumulation} accumulated x {self.micro_batch_size} images"
        return f"{self.batch_size} = {parts}"


def divide_batch(batch_size: int, world_size: int, micro_batch_size: int | None) -> GlobalBatch:
    """Split the global batch exactly; raise `ConfigError` if there is a remainder."""
    rank_batch_size, remainder = divmod(batch_size, world_size)
    if remainder or not rank_batch_size:
        raise ConfigError(
            f"batch_size {batch_size} cannot be split evenly over {world_size} ranks; "
            f"use a multiple of {world_size}, for example {max(1, round(batch_size / world_size)) * world_size}"
        )
    micro = rank_batch_size if micro_batch_size is None else min(micro_batch_size, rank_batch_size)
    if rank_batch_size % micro:
        raise ConfigError(
            f"micro_batch_size {micro} does not divide the {rank_batch_size} images of each of {world_size} ranks "
            f"(batch_size {batch_size}); use a divisor of {rank_batch_size}"
        )
    return GlobalBatch(batch_size, world_size, rank_batch_size // micro, micro)
