"""Input: `build_loaders()` turns a dataset on disk into batches on the device.

The loader contract, the same for every backend:
- iterating yields `(images, labels)` on the device: float32 [N, 3, H, W], normalised, in the chosen memory format, and
  int64 [N]; N is this rank's part of a global batch (training) or at most the validation batch size;
- `len(loader)` is the number of batches in a whole epoch on this rank;
- `set_epoch(epoch, first_batch=0)` sets the first batch, and order and augmentation, which are pure functions of
  (seed, epoch, sample index);
- training drops the last images if they do not fill a global batch; validation yields each image once over all ranks.
"""
