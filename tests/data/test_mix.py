"""utils.data.augment: cutout, mixup and cutmix, compared with references that work image by image."""

import numpy as np
import pytest
import torch

from train import Trainer
from utils.data.augment import STREAM_CUTMIX, BatchMix, beta_quantile, sample_mixing
from utils.data.config import AugmentationConfig
from utils.data.sampling import Sampler, epoch_order, uniform
from utils.errors import ConfigError
from utils.training.batches import resize, training_batches

NUM_IMAGES, BATCH, CLASSES, SIZE = 60, 24, 7, (16, 20)
CONFIGS = {
    "cutout": AugmentationConfig(num_classes=CLASSES, cutout_size=6),
    "mixup": AugmentationConfig(num_classes=CLASSES, mixup_alpha=0.4),
    "cutmix": AugmentationConfig(num_classes=CLASSES, cutmix_alpha=1.0),
    "all": AugmentationConfig(num_classes=CLASSES, cutout_size=5, mixup_alpha=0.4, cutmix_alpha=1.0),
}

_noise = torch.Generator().manual_seed(0)
IMAGES = torch.randn(NUM_IMAGES, 3, *SIZE, generator=_noise)
LABELS = torch.randint(0, CLASSES, (NUM_IMAGES,), generator=_noise)


def plan(rank=0, world_size=1):
    return Sampler(NUM_IMAGES, BATCH // world_size, rank, world_size, training=True, seed=9)


def reference(config, epoch, index):
    """Return the mixed image and target of sample `index`, from (seed, epoch, index) only."""
    order = epoch_order(9, epoch, NUM_IMAGES).tolist()
    partner = order[order.index(index) ^ 1]

    def with_hole(number):
        top, left, bottom, right = sample_mixing(config, 9, epoch, np.array([number]), *SIZE).hole[0]
        image = IMAGES[number].clone()
        image[:, top:bottom, left:right] = 0
        return image

    mixing = sample_mixing(config, 9, epoch, np.array([index]), *SIZE)
    own, other = with_hole(index), with_hole(partner)
    mixed = mixing.weight[0] * own + (1 - mixing.weight[0]) * other
    top, left, bottom, right = mixing.patch[0]
    mixed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    target = torch.zeros(CLASSES)
    target[LABELS[index]] += mixing.label_weight[0]
    target[LABELS[partner]] += 1 - mixing.label_weight[0]
    return mixed, target


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mixing_equals_a_pure_function_of_seed_epoch_and_index(name, world_size):
    for rank in range(world_size):
        mix = BatchMix(CONFIGS[name], plan(rank, world_size))
        for epoch, batch in ((3, 1), (0, 0), (3, 0)):
            indices = plan(rank, world_size).batches(epoch)[batch]
            given = IMAGES[indices].contiguous(memory_format=torch.channels_last)
            mixed, targets = mix(given, LABELS[indices], epoch, batch)
            assert mixed.is_contiguous(memory_format=torch.channels_last) and torch.equal(given, IMAGES[indices])
            for row, index in enumerate(indices.tolist()):
                expected, target = reference(CONFIGS[name], epoch, index)
                torch.testing.assert_close(mixed[row], expected, rtol=1e-5, atol=1e-6)
                if name == "cutout":
                    assert targets[row] == LABELS[index]
                else:
                    torch.testing.assert_close(targets[row], target)


def test_the_label_weight_is_the_fraction_of_the_pixels():
    """The patch is clipped at the border; before, its sides are the square root of its fraction of the image."""
    height, width, indices = 20, 40, np.arange(2000)
    cutmix = sample_mixing(CONFIGS["cutmix"], 9, 0, indices, height, width)
    top, left, bottom, right = cutmix.patch.T
    np.testing.assert_allclose(cutmix.label_weight, 1 - (bottom - top) * (right - left) / (height * width), atol=1e-6)
    sides = np.sqrt(1 - beta_quantile(uniform(9, 0, indices, STREAM_CUTMIX), 1.0))
    whole = (top > 0) & (left > 0) & (bottom < height) & (right < width)
    assert 200 < whole.sum() < 1800 and (np.abs(bottom - top - sides * height)[whole] <= 2).all()
    assert (np.abs(right - left - sides * width)[whole] <= 2).all()
    mixup = sample_mixing(CONFIGS["mixup"], 9, 0, indices, height, width)
    assert np.array_equal(mixup.label_weight, mixup.weight) and not mixup.patch.any()
    holes = sample_mixing(CONFIGS["cutout"], 9, 0, indices, height, width).hole  # 6 x 6 around any pixel, clipped
    inside = (holes[:, :2] > 0).all(1) & (holes[:, 2:] < (height, width)).all(1)
    assert inside.sum() > 200 and (holes[inside, 2:] - holes[inside, :2] == 6).all()
    assert (holes.min(0).tolist(), holes.max(0).tolist()) == ([0, 0, 3, 3], [16, 36, 20, 40])
    both = sample_mixing(CONFIGS["all"], 9, 0, indices, height, width)
    assert not ((both.weight < 1) & both.patch.any(1)).any() and 900 < (both.weight < 1).sum() < 1100


def test_weights_follow_the_beta_distribution():
    """alpha 1 is uniform, alpha 1/2 the arcsine distribution; others are compared with NumPy's generator."""
    probability = (np.arange(10_000) + 0.5) / 10_000
    np.testing.assert_allclose(beta_quantile(probability, 1.0), probability, atol=1e-6)
    np.testing.assert_allclose(beta_quantile(probability, 0.5), np.sin(np.pi * probability / 2) ** 2, atol=1e-6)
    rng = np.random.default_rng(0)
    for alpha in (0.2, 2.0, 16.0, 1e4):
        sample = np.sort(rng.beta(alpha, alpha, len(probability)))
        assert np.abs(beta_quantile(probability, alpha) - sample).max() < 0.05
    assert np.isfinite(beta_quantile(np.array([0.0, 1 - 2.0**-53]), 0.2)).all()


def test_an_odd_batch_cannot_be_paired(tiny):
    with pytest.raises(ConfigError, match="3 images; use an even number"):
        BatchMix(tiny(mixup_alpha=0.2), plan(0, 8))
    BatchMix(tiny(cutout_size=4), plan(0, 8))


def test_batches_of_a_training_are_mixed(tiny, one_rank):
    sizes = [[16, 1.0]]  # of all epochs
    trainer = Trainer(tiny(cutout_size=8, mixup_alpha=0.2, cutmix_alpha=1.0, progressive_image_sizes=sizes), one_rank)
    learner, loader = trainer.learner, trainer.loaders.train
    mixed = list(training_batches(learner, loader, trainer.mix, trainer.watch.batches, epoch=1, first_batch=2))
    loader.set_epoch(1, 2)
    for (number, batch), plain in zip(mixed, loader, strict=True):
        images, targets = trainer.mix(*plain, 1, number)
        torch.testing.assert_close(batch, (resize(images, 16), targets), rtol=0, atol=0)
        assert not torch.equal(images, plain[0])
