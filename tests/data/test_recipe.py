"""Parts of a recipe beyond plain SGD: each against a reference, and in whole runs."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from models import build_model
from tests.conftest import plan_on, read_records, run
from train import Trainer
from utils.config import Config
from utils.training.averages import Ema
from utils.training.batches import resize
from utils.training.learner import Classifier


@pytest.mark.parametrize("changes", [{}, {"loss_scale": 1024.0}, {"opt_level": "O2", "amp_dtype": "bf16"}], ids=str)
def test_clipping_acts_on_the_gradient_of_the_optimizer(tiny, one_rank, changes):
    """The gradient of the master weights, without the loss scale."""
    learner = Trainer(tiny(clip_grad_norm=0.5, batch_size=8, micro_batch_size=4, **changes), one_rank).learner
    learner.train_step(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    gradients = [parameter.grad.flatten() for parameter in learner.weights.parameters()]
    assert torch.cat(gradients).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_average_weighs_steps_by_powers_of_the_decay_and_is_validated(tiny, one_rank, tmp_path):
    """The factors 0.7**k / (1 + 0.7 + ...) sum to 1 after each step: the random first weights are not among them."""

    def average(averages, values, updates):
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, values, 1 / sum(0.7**k for k in range(updates + 1)))

    trainer, seen = Trainer(tiny(ema_decay=0.7, max_epochs=1), one_rank, tmp_path), []
    model, ema = trainer.learner.model, trainer.learner.ema
    reference, update = AveragedModel(model, multi_avg_fn=average, use_buffers=True), ema.update
    ema.update = lambda: (reference.update_parameters(model), update())
    ema.network.fc.register_forward_hook(lambda *_: seen.append("average"))
    model.fc.register_forward_hook(lambda module, *_: seen.append("training" if module.training else "raw"))
    trainer.train()
    assert set(seen) == {"training", "average"}
    raw, expected = model.state_dict(), reference.module.state_dict()
    for name, value in ema.network.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)  # another rounding of the factor
        assert torch.equal(value, raw[name]) is not value.is_floating_point()


def test_average_counts_a_shared_tensor_once_and_finds_it_by_name():
    """By `self.mean = 0.9 * self.mean + ...` the network replaces the buffer's tensor in each step."""
    layer = nn.BatchNorm1d(1)
    ema = Ema(nn.Sequential(layer, layer), 0.5)
    for value in (0.0, 1.0):
        nn.init.constant_(layer.weight, value)
        layer.running_mean = torch.tensor([value])
        ema.update()
    for average in (ema.network[0].weight, ema.network[0].running_mean):
        assert average.item() == pytest.approx(2 / 3)


def test_average_can_be_switched_on_and_off_in_a_resumed_run(tiny, one_rank):
    """It starts from the loaded weights, and the first step replaces them. With it, a loss scale."""
    without, averaging = (Trainer(tiny(ema_decay=on, loss_scale=on), one_rank).learner for on in (None, 0.5))
    batch = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    without.train_step(*batch)
    averaging.load_state_dict(copy.deepcopy(without.state_dict()))
    assert all(map(torch.equal, averaging.validated.parameters(), without.model.parameters()))
    for _ in range(2):
        averaging.train_step(*batch)
    saved = averaging.state_dict()
    assert saved["average"]["updates"] == 2
    assert not torch.equal(averaging.validated.fc.weight, averaging.model.fc.weight)
    without.load_state_dict(saved)
    assert without.validated is without.model and torch.equal(without.model.fc.weight, averaging.model.fc.weight)


@pytest.mark.parametrize("views", [1, 2, 6])
def test_validation_averages_mirrored_and_shifted_images(tiny, one_rank, views):
    config = tiny(test_time_views=views)
    classifier = Classifier(config, plan_on(config), build_model, one_rank)
    model, images = classifier.model.eval(), torch.randn(4, 3, 32, 24).contiguous(memory_format=torch.channels_last)
    places = [(torch.arange(32) + shifted).clamp(0, 31) for shifted in ((0, -1, 1) if views == 6 else (0,))]
    seen = [images[:, :, rows][..., rows[:24].clamp(max=23)] for rows in places]
    seen += [image.flip(3) for image in seen] if views > 1 else []
    assert len(seen) == views
    with torch.no_grad():
        torch.testing.assert_close(classifier.predict(images), sum(map(model, seen)) / views)


def test_resizing_antialiases_and_keeps_the_memory_format():
    stripes = torch.full((2, 3, 32, 32), 0.25).to(memory_format=torch.channels_last)
    stripes[0, ..., 16:] = 0.75  # an edge
    stripes[1, ..., ::2] = 0.75  # finer than the small grid: must become grey
    small = resize(stripes, 16)
    assert small.shape == (2, 3, 16, 16) and small.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(small[0, ..., [0, -1]], torch.tensor([0.25, 0.75]).expand(3, 16, 2))
    assert small[0].min() > 0.2499 and small[0].max() < 0.7501, "cubic interpolation would overshoot"
    assert (small[1, ..., 2:-2] - 0.5).abs().max() < 0.05
    assert resize(stripes, None) is stripes


def test_network_trains_on_small_images_and_validates_at_full_size(tiny, one_rank, tmp_path):
    config = tiny(progressive_image_sizes=((16, 0.2), (24, 0.5)), limit_train_batches=2, max_epochs=4)
    trainer, sizes = Trainer(config, one_rank, tmp_path), []
    first = trainer.learner.model.conv1
    first.register_forward_hook(lambda _, inputs, __: sizes.append((first.training, inputs[0].shape[-1])))
    trainer.train()
    assert sizes == [pair for size in (16, 24, 32, 32) for pair in [(True, size)] * 2 + [(False, 32)] * 2]


def test_epochs_that_are_not_validated_train_the_same(tiny, one_rank, tmp_path):
    keys = {"max_epochs": 5, "lr_schedule": "cosine"}
    runs = [run(tiny(validate_every_epochs=every, **keys), one_rank, tmp_path / str(every)) for every in (1, 2)]
    assert all(map(torch.equal, *(trainer.learner.model.state_dict().values() for trainer in runs)))
    always, rarely = (read_records(tmp_path / str(every), "epoch") for every in (1, 2))
    for there, here in zip(always, rarely, strict=True):
        validated = here["epoch"] in (2, 4, 5)  # and the last one
        for tag in ("loss/valid", "acc1/valid", "images/valid"):
            assert here.get(tag) == (there[tag] if validated else None)
        assert here["loss/train"] == there["loss/train"]
    best = max((row["acc1/valid"], -row["epoch"]) for row in rarely if "acc1/valid" in row)
    assert (runs[1].run.best["acc1"], runs[1].run.best["epoch"]) == (best[0], -best[1])
    assert (tmp_path / "2/train.log").read_text().count(", valid acc1=") == 3


def test_a_run_ends_at_its_target_and_stays_finished(tiny, one_rank, tmp_path):
    accuracy = run(tiny(max_epochs=1), one_rank, tmp_path / "one").run.best["acc1"]
    folder = tmp_path / "three"
    for target, resume, trained in ((accuracy, "auto", 1), (accuracy, "auto", 1), (0.999, str(folder), 3)):
        run(tiny(max_epochs=3, stop_at_accuracy=target), one_rank, folder, resume=resume)  # equal is enough
        assert len(read_records(folder, "epoch")) == trained
    assert "Already finished" in (folder / "train.log").read_text()


def test_of_equal_accuracies_the_first_is_the_best_and_an_incomplete_validation_never(tiny, one_rank):
    """Complete: at least 99 % of 200 images, and no fewer than the best's."""
    state, found = Trainer(tiny(), one_rank).run, []
    pairs = [(1.0, 197), (0.4, 198), (0.5, 199), (0.5, 199), (1.0, 198), (0.6, 200), (0.9, 199), (0, 0)]
    for accuracy, images in pairs:
        state.best = state.best_with({"acc1": accuracy, "images": images} if images else {})
        state.epoch += 1
        found.append(state.best["epoch"])
    assert found == [0, 2, 3, 3, 3, 6, 6, 6] and state.best["measures"] == state.measures


EAGER = {"enable_nhwc": True, "enable_compile": True}
PARALLEL = {"parallel": "dataparallel"}
BF16 = PARALLEL | {"amp_dtype": "bf16"}
AUTOCAST = {"enable_amp": True}, {"opt_level": "O1"}
NOT_PARALLEL = {"enable_cuda_graphs": True, "enable_compile": True, "fuse_norm_relu": True, "verify_every_steps": 1}


@pytest.mark.parametrize(("changes", "message"), [
    ({"optimizer": "timm:lamb", "enable_cuda_graphs": "auto"}, "auto is for sgd, adamw and muon; optimizer timm"),
    ({"optimizer": "adamw", "nesterov": True}, "nesterov is true, which optimizer adamw does not have"),
    ({"optimizer": "muon", "enable_extra_opts": ["fused_optimizer"]}, "which optimizer muon does not have"),
    *(({"progressive_image_sizes": ((16, 0.5), (24, end))}, "pairs with rising fractions") for end in (0.2, 0.5)),
    ({"optimizer": "adamw", "enable_cuda_graphs": "auto"}, "without it PyTorch's adamw reads the learning rate"),
    ({"enable_cuda_graphs": True}, "enable_cuda_graphs true needs enable_extra_opts true"),
    ({"fuse_norm_relu": True}, "fuse_norm_relu.* reads NHWC memory; it needs enable_nhwc true"),
    ({"fuse_norm_relu": True} | EAGER, "fuse_norm_relu.* is for eager steps; set it or enable_compile to false"),
    ({"cpu_kernels": ["winograd"]}, "winograd.* reads NHWC memory; it needs enable_nhwc true"),
    ({"cpu_kernels": ["keep_memory", "weight_products"]} | EAGER, "weight_products.* is for eager steps"),
    ({"fuse_norm_relu": True, "enable_nhwc": True, "enable_sync_bn": True}, "no BatchNorm over all ranks"),
    ({"width": 2, "model": "resnet18"}, "width 2 is for resnet8, .*; model resnet18 needs 1"),
    ({"zero_init_residual": True}, "zero_init_residual is for resnet18, .*; model resnet8 needs false"),
    *(({"image_size": 16, "dataset": name}, f"{name} have 32 pixels, so use null") for name in ("shapes", "cifar10")),
    ({"lr_schedule": "onecycle"}, "lr_warmup_epochs is 0; lr_schedule onecycle rises over it"),
    ({"lr_warmup_by": "epoch", "lr_warmup_epochs": 0.5}, "lr_warmup_by epoch needs whole lr_warmup_epochs, not 0.5"),
    ({"lr_warmup_by": "epoch", "lr_warmup_epochs": 1, "lr_schedule": "onecycle"}, "not 1, and no onecycle"),
    ({"model": "alexnet"}, "stem 7x7 is not for model alexnet; expected imagenet"),
    *(({"model": name, "stem": "3x3"}, f"3x3 is not for model {name}; expected 7x7") for name in ("vgg16", "resnet8")),
    ({"dataset": "cifar10", "data_loader": "synthetic", "holdout_images": 10}, "synthetic reads no images"),
    *(({"ema_decay": 0.9, "opt_level": level}, "ema_decay needs float32 weights") for level in ("O2", "O3")),
    ({"lr_schedule": "plateau", "validate_every_epochs": 2}, "plateau follows the validation loss of every epoch"),
    *((PARALLEL | {"enable_extra_opts": True, "enable_nhwc": True, key: value},
       f"{key} is set, but .* dataparallel, which cannot; use parallel ddp") for key, value in NOT_PARALLEL.items()),
    *((BF16 | autocast, "bf16 with autocast needs parallel ddp or opt_level O2") for autocast in AUTOCAST),
])  # fmt: skip
def test_contradictory_settings_are_refused(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**tiny().model_dump() | changes)
