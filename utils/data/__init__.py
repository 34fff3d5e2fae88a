"""Input: `build_loaders()` turns a dataset on disk into batches on the device.

The loader contract, the same for every backend:
- iterating yields `(images, labels)` already on the device: float32 [N, 3, H, W], normalised, in the chosen memory
  format, and int64 [N]; N is this rank's share of a global batch (training) or at most the validation batch size;
- `len(loader)` is the number of batches that one whole epoch has on this rank;
- `set_epoch(epoch, first_batch=0)` chooses order and augmentation, pure functions of (seed, epoch, sample index),
  and where to begin;
- training drops the tail that fills no global batch; validation yields every image exactly once over all ranks.
"""
